"""Forms of functions: which op a torch function is a form of, its rule, and what it writes.

One op has one rule, given for one of its functions. The others are found by their names:
`torch.add`, `Tensor.add`, `Tensor.__add__`, `Tensor.add_`, `torch._foreach_add_` and
`torch.ops.aten.add.Tensor` are forms of one op.

    form_of(torch.Tensor.add_)  ->  Form(name="add", rule=RULES[torch.add], inplace=True, ...)

A function in Python without a rule is entered, so that its ops are found (`enter_function`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# Not public, but where torch keeps what `torch.library.custom_op` has made, by name, and the types
# of what `torch.ops.a.b` and `.default` are.
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket

from partita.rules import RULES, Rule

from .dtensor import DTensor
from .op_facts import OF_ONE_OPERAND, facts_of, facts_of_function

_DUNDERS = dict(
    pair.split("=")
    for pair in """
    and=bitwise_and or=bitwise_or xor=bitwise_xor invert=bitwise_not lshift=bitwise_left_shift
    rshift=bitwise_right_shift truediv=div mod=remainder floordiv=floor_divide neg=neg pos=positive
    """.split()
)
_COMMUTING = {"add", "mul", "and", "or", "xor"}

_SYNONYMS = dict(
    pair.split("=")
    for pair in """
    multiply=mul subtract=sub divide=div true_divide=div greater=gt greater_equal=ge less=lt
    less_equal=le not_equal=ne negative=neg absolute=abs arccos=acos arccosh=acosh arcsin=asin
    arcsinh=asinh arctan=atan arctanh=atanh arctan2=atan2 clip=clamp fix=trunc swapdims=transpose
    swapaxes=transpose moveaxis=movedim concat=cat concatenate=cat
    """.split()
)

_BARE_CALLS: dict[Any, Callable[..., Any]] = {
    getattr(torch.nn.functional, op): getattr(torch._C._nn, op, None) or getattr(torch, op)
    for op in OF_ONE_OPERAND
} | {torch.nn.functional.embedding: lambda input, weight: torch.embedding(weight, input)}
"""What functions of torch.nn.functional call on their operands where each flag is None or False."""


@dataclass(frozen=True)
class Form:
    """A function as a form of an op.

    Attributes:
        func: the function.
        name: the op's name.
        rule: what is known of it, or None.
        inplace: the first operand is written and returned.
        reshapes: the first operand's shape is changed in place.
        foreach: it takes lists, and is one call of the op for each place in them.
        local: what runs on the pieces; the function itself where None.
        bare: what runs on the operands alone, where the other arguments ask for nothing.
        operator: what is known of an operator of torch.library; None of other functions.
        writes: operands that are written besides the first of one in place.
    """

    func: Callable[..., Any]
    name: str
    rule: Rule | None
    inplace: bool = False
    reshapes: bool = False
    foreach: bool = False
    local: Callable[..., Any] | None = None
    bare: Callable[..., Any] | None = None
    operator: Operator | None = None
    writes: tuple[Written, ...] = ()


@cache
def form_of(func: Callable[..., Any]) -> Form:
    """The form that a function is. Its rule is its own if it has one, else its op's by name.

    A function written in Python has only a rule of its own; without one it is entered.
    """
    operator = _operator_of(func)
    if operator is not None:
        return _form_of_operator(func, operator)
    name = getattr(func, "__name__", "")
    own = RULES.get(func)
    if name.startswith("_foreach_"):
        base = name.removeprefix("_foreach_")
        op = base.removesuffix("_")
        rule = _find_rule_named(op) or _find_rule_named(base)
        return Form(func, op, rule, inplace=base.endswith("_"), foreach=True)
    inplace = name.endswith("_") and not name.endswith("__")
    op = name.rstrip("_") if inplace else name
    if name.startswith("__") and name.endswith("__"):
        op = name[2:-2]
        bare = op[1:]
        if op.startswith("i") and bare in (*_DUNDERS, "add", "sub", "mul", "pow", "matmul"):
            op, inplace = bare, True
        elif op.startswith("r") and bare in _COMMUTING:
            op = bare
        op = _DUNDERS.get(op, op)
    op = _SYNONYMS.get(op, op)
    reshapes, writes = facts_of_function(name).reshapes, written_by(func)
    if own is not None:
        name, bare = own.name.removeprefix("__").rstrip("_") or op, _BARE_CALLS.get(func)
        return Form(func, name, own, inplace, reshapes, bare=bare, writes=writes)
    if isinstance(func, types.FunctionType):
        if facts_of_function(op).is_twin and func is getattr(torch.nn.functional, op):
            bare = _BARE_CALLS.get(func)
            return Form(func, op, _find_rule_named(op), local=_builtin_twin(func), bare=bare)
        return Form(func, op, None, inplace)
    # Of zero_ there is only the form in place.
    rule = _find_rule_named(op) or _find_rule_named(name)
    return Form(func, op, rule, inplace, reshapes, writes=writes)


def _form_of_operator(func: Callable[..., Any], operator: Operator) -> Form:
    """One of torch's own is known as the torch function of its name; another by its own rule,
    which may have been given for its packet or for what `torch.library.custom_op` returned."""
    name = operator.name
    if operator.is_torchs:
        op = name.rstrip("_")
        rule = _find_rule_named(op) or _find_rule_named(name)
        reshapes, writes = facts_of_function(name).reshapes, written_by(func)
        return Form(func, op, rule, op != name, reshapes, operator=operator, writes=writes)
    same = [func, operator.packet]
    if func is operator.packet:
        same += overloads_of(func)
    rule = next((r for f, r in RULES.items() if getattr(f, "_opoverload", f) in same), None)
    local, writes = _wrap_with_plain_pieces(func), written_by(func)
    return Form(func, name, rule, local=local, operator=operator, writes=writes)


def _builtin_twin(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The builtin that a function of torch.nn.functional passes its arguments on to, if it takes
    them as they are; else None."""
    bare = _BARE_CALLS.get(func)
    if bare is not None:
        return lambda input, inplace=False: bare(input)
    norms = ("layer_norm", "rms_norm")
    return getattr(torch, func.__name__) if func.__name__ in norms else None


def _find_rule_named(name: str) -> Rule | None:
    """The rule that a torch function of this name has, in whichever namespace it was given."""
    for home in (torch, torch.Tensor, torch._C._nn, torch.nn.functional, torch.special):
        f = getattr(home, name, None)
        if f is not None and f in RULES and not isinstance(f, types.FunctionType):
            return RULES[f]
    return None


@cache
def parameter_names(func: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of a function's first `count` parameters, as torch's own table of overrides or an
    operator's schema has them; `operand0`, ... where neither does (then they can only be given by
    position)."""
    stand_in = torch.overrides.get_testing_overrides().get(func)
    names: list[str] = []
    overloads = overloads_of(func)
    if len(overloads) == 1 and overloads[0].namespace != "aten":
        names = [a.name for a in overloads[0]._schema.arguments]
    elif stand_in is not None:
        for p in inspect.signature(stand_in).parameters.values():
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY) and p.name != "out":
                names.append(p.name)
    names = names[:count]
    return tuple(names) + tuple(f"operand{i}" for i in range(len(names), count))


# -- operators of torch.library --------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """An operator, or one overload of it.

    Attributes:
        name: without namespace and overload.
        packet: all its overloads.
        is_torchs: it is one of torch's own, so that what is known of the torch function of its
            name holds for it too.
    """

    name: str
    packet: OpOverloadPacket
    is_torchs: bool


def overloads_of(func: Any) -> list[OpOverload]:
    """The overloads of an operator, or the one that `func` is; none of another function."""
    if isinstance(func, OpOverload):
        return [func]
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, name) for name in func.overloads()]
    return []


def is_collective(func: Any) -> bool:
    """Is it an operator of torch.distributed's, functional or not?"""
    return any("c10d" in overload.namespace for overload in overloads_of(func))


def _operator_of(func: Callable[..., Any]) -> Operator | None:
    """What `func` is as an operator; None if it is another function."""
    overloads = overloads_of(func)
    if not overloads:
        return None
    packet = overloads[0].overloadpacket
    return Operator(packet.__name__, packet, overloads[0].namespace == "aten")


def find_unknown_effect(target: Any) -> str:
    """What an operator of a library of its own may do beside giving tensors that it makes of its
    arguments; empty where its schema, and who has made it, say that it does nothing else.

    That it draws no numbers without its tag and sends nothing is asked by `torch.library.custom_op`
    and by a rule, under which it runs on a rank's piece.
    """
    if not isinstance(target, OpOverload):
        return "no schema says what it does"
    facts = facts_of(target)
    if facts.writes:
        return f"it writes {' and '.join(w.name for w in facts.writes)}"
    if facts.is_view:
        return "what it gives shows memory of what it takes"
    if facts.draws:
        return "it draws random numbers, in a way that a graph does not know"
    if not target._schema.returns:
        return "it gives nothing, so that what it is for is an effect"
    if target._schema.name not in OPDEFS and form_of(target).rule is None:
        return "it is not made by torch.library.custom_op, and no rule says that it runs on pieces"
    return ""


def _wrap_with_plain_pieces(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `func` with plain aliases of its operands. It is itself called with
    torch-function disabled.

    The backward of a user's operator may be Python that reads what forward saved, and must find
    this rank's pieces there, not DTensors beside pieces of gradients.
    """

    def local_view_of(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.view_as(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, DTensor) for v in value):
            return [local_view_of(v) for v in value]
        return value

    def run_on_pieces(*args: Any, **kwargs: Any) -> Any:
        return func(*map(local_view_of, args), **{k: local_view_of(v) for k, v in kwargs.items()})

    return run_on_pieces


# -- what a function writes ------------------------------------------------------------------------

_STATISTICS = ("running_mean", "running_var")
_UPDATING = ("training", "use_input_stats")


@dataclass(frozen=True)
class Written:
    """An operand that a function writes.

    It must be the user's own tensor, not what that became when it was moved. Torch's schemas say it
    of operators, except the running statistics of the older normalisations.

    Attributes:
        place, name: of its parameter.
        flag: place and name of the parameter that must be true for it to be written, if there is
            one.
    """

    place: int
    name: str
    flag: tuple[int, str] | None = None

    def path(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int | str] | None:
        """Its path in a call; None if this call does not write it."""
        if self.flag is not None:
            i, name = self.flag
            if not (args[i] if i < len(args) else kwargs.get(name, i and name != "training")):
                return None
        return (self.place,) if self.place < len(args) else (self.name,)


def written_by(func: Callable[..., Any]) -> tuple[Written, ...]:
    """The operands that `func` writes, as far as can be known."""
    if isinstance(func, types.FunctionType):
        # As it is written: what it wraps, as Tensor.__pow__ does, may be a builtin without one.
        return _find_written_statistics(
            list(inspect.signature(func, follow_wrapped=False).parameters)
        )
    overloads = overloads_of(func)
    if not overloads:  # a builtin, or a method: known as the operator of its name
        packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
        overloads = overloads_of(packet) if packet is not None else []
    found: dict[Written, None] = {}
    for overload in overloads:
        arguments = overload._schema.arguments
        for i, a in enumerate(arguments):
            if a.is_write and not a.is_out and _holds_tensors(overload, a.type):
                found[Written(i, a.name)] = None
        if not found:
            found |= dict.fromkeys(_find_written_statistics([a.name for a in arguments]))
    return tuple(found)


def _holds_tensors(overload: OpOverload, type: torch.JitType) -> bool:
    # TorchScript has operators on Python's lists, `aten::sort` among them: no tensor is written.
    if isinstance(type, torch.ListType):
        return overload._opname.endswith("_")
    return "Tensor" in str(type)


def _find_written_statistics(names: list[str]) -> tuple[Written, ...]:
    flag = next(((i, n) for i, n in enumerate(names) if n in _UPDATING), None)
    return tuple(Written(i, n, flag) for i, n in enumerate(names) if n in _STATISTICS)


# -- Python functions that are entered -------------------------------------------------------------

# An init function hands itself over by its name in its module, where transformers puts functions of
# its own while it initialises a model; these call torch's. To enter one of them would not end.
_INITS = {
    name: func
    for name, func in vars(torch.nn.init).items()
    if isinstance(func, types.FunctionType) and name.endswith("_") and name[0] != "_"
}

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _answer_false(*_: object) -> bool:
    return False


_OVERRIDES = types.SimpleNamespace(
    **vars(torch.overrides) | dict.fromkeys(_QUESTIONS, _answer_false)
)


class _Torch(types.ModuleType):
    """Stands for torch where a function asks `torch.overrides.has_torch_function...`."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.overrides = _OVERRIDES

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_entered_globals: dict[tuple[int, bool], dict[str, Any]] = {}


def _make_globals_answering_no(space: dict[str, Any], through_torch: bool) -> dict[str, Any]:
    """A copy of a module's globals in which nothing has a torch function. One per module."""
    key = (id(space), through_torch)
    if key not in _entered_globals:
        changed = dict(space)
        changed.update((q, _answer_false) for q in _QUESTIONS if q in changed)
        if through_torch and changed.get("torch") is torch:
            changed["torch"] = _Torch()
        if through_torch and changed.get("overrides") is torch.overrides:  # in torch itself
            changed["overrides"] = _OVERRIDES
        _entered_globals[key] = changed
        for name, helper in space.items():
            # A module's private helper asks on behalf of the public function that calls it.
            if name.startswith("_") and _has_questions(helper) and helper.__globals__ is space:
                changed[name] = _copy_function(helper, changed)
    return _entered_globals[key]


def _has_questions(func: Any) -> bool:
    return isinstance(func, types.FunctionType) and any(
        q in func.__code__.co_names for q in _QUESTIONS
    )


def _copy_function(func: types.FunctionType, space: dict[str, Any], closure: Any = None) -> Any:
    copy = types.FunctionType(
        func.__code__, space, func.__name__, func.__defaults__, closure or func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _entered_cell(cell: types.CellType, func: types.FunctionType) -> types.CellType:
    """A cell of `func`'s closure; a function in it that asks is entered too.

    `boolean_dispatch` makes functions that hold two others, of which one may be such a one again.
    """
    try:
        held = cell.cell_contents
    except ValueError:  # nothing in it yet
        return cell
    again = isinstance(held, types.FunctionType) and held.__code__ is func.__code__
    if again and held is not func:
        return types.CellType(enter_function(held))
    return (
        types.CellType(_copy_function(held, _globals_to_enter(held)))
        if _has_questions(held)
        else cell
    )


def _globals_to_enter(func: types.FunctionType) -> dict[str, Any]:
    return _make_globals_answering_no(func.__globals__, "overrides" in func.__code__.co_names)


@cache
def enter_function(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a Python function that runs its body on DTensors; None if it is not Python.

    `torch.nn.functional` is full of functions that ask `has_torch_function(...)` and, if so, hand
    themselves over whole. To enter one is to run its body as if that question were answered no: a
    copy of the function whose globals say so. The ops inside ask again, and are dispatched one by
    one.
    """
    if not isinstance(func, types.FunctionType):
        return None
    if func.__module__ != torch.nn.init.__name__:
        func = _INITS.get(func.__name__, func)
    closure = func.__closure__ and tuple(_entered_cell(c, func) for c in func.__closure__)
    return _copy_function(func, _globals_to_enter(func), closure)
