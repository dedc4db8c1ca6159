"""Arguments of a call: the positions of its tensors, and arguments that are not DTensors.

A `Path` is the position of a tensor in a call, such as `(0,)` or `("weight",)`. With it, a cached
plan serves calls that pass by name what another call passes by position.

A number may be passed as a DTensor (`x.topk(k)`). Torch would read this rank's local value in C++,
so the global value is read first. A plain tensor among DTensors counts as a value that all ranks
have, and ranks compare it (`check_plain_tensor`). Under `check_ranks()` they compare numbers, too.
"""

from __future__ import annotations

import inspect
import operator
import re
import types
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._C import _is_torch_function_enabled as _global_view
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from partita.comm import (
    ON_CHECK,
    TraceWire,
    Wire,
    call_site,
    check_equal_on_ranks,
    is_agreed,
    is_alone,
    remember_agreed,
)
from partita.layout import Fix, Layout, LayoutError

from .dtensor import PLAIN, DTensor, as_dtensor, checksum, make_no_strides_error, move_local
from .op_facts import Form, facts_of_function, overloads_of
from .tensor_state import (
    Args,
    Function,
    Kwargs,
    Spec,
    in_backward,
    make_layout_error,
    make_two_meshes_error,
    spec_of,
)

Path = tuple[int | str, ...]
"""The position of a tensor in a call: `(1,)`, `("bias",)`, or `(0, 3)` for the item 3 of the list
that is argument 0. A plan has the paths of the call that it was made for. Other calls of the same
key may pass by name what that one passed by position (`locate_in_call`).
"""


def is_index_of_view(index: Any) -> bool:
    """True if `x[index]` is a view: the index has no bool, no list, and no mask or tensor of
    indices.

    A 0-d integer tensor counts as an int.
    """
    entries = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(e, (bool, list)) or _is_list_of_places(e) for e in entries)


def _is_list_of_places(entry: Any) -> bool:
    is_mask = (torch.bool, torch.uint8)
    return isinstance(entry, torch.Tensor) and (entry.ndim > 0 or entry.dtype in is_mask)


@dataclass(frozen=True)
class OpCall:
    """One call of an op: the function, its arguments, and properties by which it is planned.

    Attributes:
        form, func: the function, and its `Form` (the op to which it belongs).
        args, kwargs: the arguments, with the names of the rule's parameters.
    """

    form: Form
    func: Function
    args: Args
    kwargs: Kwargs

    def run(self) -> Any:
        """Call the function with the arguments, and return its result."""
        return self.func(*self.args, **self.kwargs)

    def with_values(self, new: dict[Path, Any]) -> OpCall:
        """Returns a copy of the call in which `new` replaces the arguments at its paths."""
        return OpCall(self.form, self.func, *replace_at_paths(self.args, self.kwargs, new))

    @cached_property
    def tensors(self) -> dict[Path, Any]:
        """All tensors among the arguments, by path (position in the call), also those in lists."""
        return _all_tensors(self.args, self.kwargs)

    @cached_property
    def wire(self) -> Wire:
        """The wire (connection to the ranks of a mesh) that the call's DTensors share.

        Raises:
            LayoutError: the DTensors are on two meshes.
        """
        return find_wire(self.form.name, self.tensors.values())

    @cached_property
    def written(self) -> set[Path]:
        """The positions or names (paths) of the tensors that the call writes in place."""
        places = {w.path(self.args, self.kwargs) for w in self.form.writes}
        places |= {(0,)} if self.form.inplace else set()
        return {path for path in self.tensors if path[:1] in places}

    @property
    def view_copies(self) -> tuple[Path, ...]:
        """The paths of the arguments that are view copies (see `aliasing`).

        The values of these arguments may be out of date.
        """
        found = self.tensors.items()
        return tuple(path for path, t in found if isinstance(t, DTensor) and t._spec.is_copy)

    @property
    def writes_view_copy(self) -> bool:
        """True if the call is an in-place op on a view copy, whose source must be written, too."""
        return self.form.inplace and (0,) in self.view_copies

    @property
    def gives_view(self) -> bool:
        """True if, in plain PyTorch, the result would share the memory of the first operand."""
        form, args = self.form, self.args
        is_view = facts_of_function(form.name).is_view and not form.inplace
        if not is_view or not args or not isinstance(args[0], DTensor):
            return False
        if form.func is torch.nn.functional.unfold:  # Tensor.unfold is a view, this one copies
            return False
        if form.name == "getitem":
            return is_index_of_view(args[1])
        return not (form.name.startswith("atleast") and len(args) > 1)

    @property
    def numbers_of_other_meshes(self) -> dict[Path, DTensor]:
        """The 0-d DTensors that are on another mesh than the other operands, by path.

        Their values, such as a norm, are equal on all ranks, so they may be used on any mesh. They
        must not require grad, because a gradient cannot be sent to another mesh. Empty if operands
        that are no such numbers are on several meshes.
        """
        spread = {path: t for path, t in self.tensors.items() if isinstance(t, DTensor)}
        if len({t._spec.wire for t in spread.values()}) < 2:
            return {}
        several = [t for t in spread.values() if not _is_number(t)]
        home = (several or list(spread.values()))[0]._spec.wire
        away = {path: t for path, t in spread.items() if t._spec.wire is not home}
        return away if all(map(_is_number, away.values())) else {}

    def read_numbers_of_other_meshes(self) -> OpCall:
        """Returns the call with plain tensors in place of the `numbers_of_other_meshes`.

        Partial ones are reduced first.
        """
        with torch.no_grad():
            plain: dict[Path, Any] = {
                path: move_local(t, t._spec, t._spec.reduced, self.form.name, "implicit")
                for path, t in self.numbers_of_other_meshes.items()
            }
        return self.with_values(plain)

    @cached_property
    def operands(self) -> list[tuple[Path, Any]]:
        """The operands of the op's sharding rule as (path, value), in the rule's order.

        The value is None for an optional operand that was not passed.
        """
        if self.form.rule is not None and self.form.rule.derive is not None:
            return self.declared[2]
        by_place: list[tuple[Path, Any]] = [((i,), value) for i, value in enumerate(self.args)]
        names = self.form.parameters
        by_place = by_place[: len(names)]
        return by_place + [((n,), self.kwargs.get(n)) for n in names[len(by_place) :]]

    @cached_property
    def declared(self) -> tuple[list[Any], Kwargs, list[tuple[Path, Any]]]:
        """The arguments that the op's sharding rule reads, if the rule is a function.

        A triple: positional arguments, keyword arguments, and a list with `(path, tensor)` for each
        tensor among these arguments.
        """
        assert self.form.rule is not None
        args, kwargs, i = self.args, self.kwargs, 0
        positional: list[Any] = []
        named: Kwargs = {}
        tensors: list[tuple[Path, Any]] = []
        for p in self.form.rule.params:
            if p.kind is p.VAR_POSITIONAL:
                rest = args[i:]
                flat = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
                # Variadic sizes may come by name: x.reshape(shape=(2, 3)).
                positional += kwargs["shape"] if not rest and "shape" in kwargs else flat
                tensors += _tensors_at(range(i, len(args)), rest)
                i = len(args)
            elif p.kind is not p.KEYWORD_ONLY and i < len(args):
                positional.append(args[i])
                tensors += _tensors_at((i,), (args[i],))
                i += 1
            elif p.name in kwargs:
                named[p.name] = kwargs[p.name]
                tensors += _tensors_at((p.name,), (kwargs[p.name],))
        return positional, named, tensors

    def make_changed_layout_error(self, x: DTensor) -> LayoutError:
        """Returns the error for an in-place op that would have to change the layout of `x`."""
        name = self.form.name
        why = "a tensor that is written in place keeps its layout, for its other owners"
        return make_layout_error(
            f"{name} in place: its operand would need another layout",
            Fix(f"x = x.{name}(...)", "not in place"),
            operands=(f"x  {x._spec.layout.brief()} on {x._spec.wire.mesh}",),
            reason=why,
        )


def normalize_call(
    form: Form, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs, torch.Tensor | None]:
    """Returns `args` and `kwargs` under the names that the op's rule has, and the `out=` tensor.

    Torch has other names for some parameters (`axis`, `input`, ...), which are replaced. The third
    value is None if the call has no `out=`.

    Args:
        form: the called function and its op.
    """
    if not kwargs:
        return args, kwargs, None
    kwargs = dict(kwargs)
    out, names = kwargs.pop("out", None), form.parameters
    for numpy_name, name in (("axis", "dim"), ("keepdims", "keepdim")):
        if numpy_name in kwargs and numpy_name not in names and name in names:
            kwargs[name] = kwargs.pop(numpy_name)
    for first in ("input", "self", "x", "a", "x1"):
        if first in kwargs and not args and names and (first == names[0] or first not in names):
            args = (kwargs.pop(first),)
    if "x2" in kwargs and len(args) == 1:
        args = (*args, kwargs.pop("x2"))
    return args, kwargs, out


def _all_tensors(args: Args, kwargs: Kwargs) -> dict[Path, Any]:
    named = _tensors_at(tuple(kwargs), tuple(kwargs.values()))
    return dict(_tensors_at(range(len(args)), args) + named)


def _tensors_at(places: Sequence[Any], values: Sequence[Any]) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    for place, value in zip(places, values, strict=True):
        if isinstance(value, torch.Tensor):
            found.append(((place,), value))
        elif isinstance(value, (tuple, list)):
            found += [((place, j), v) for j, v in enumerate(value) if isinstance(v, torch.Tensor)]
    return found


def _is_number(t: DTensor) -> bool:
    return not (t._spec.shape or (t.requires_grad and torch.is_grad_enabled()))


def find_wire(op: str, tensors: Iterable[Any]) -> Wire:
    """Returns the wire (connection to the ranks of a mesh) of all DTensors in `tensors`.

    Args:
        op: the name of the op, for the error.
        tensors: the operands; values that are not DTensors are skipped.

    Raises:
        LayoutError: the DTensors are on two meshes.
        TypeError: none is a DTensor.
    """
    wires = list(dict.fromkeys(t._spec.wire for t in tensors if isinstance(t, DTensor)))
    if not wires:
        raise TypeError(f"{op}: no DTensor among the operands")
    if len(wires) > 1:
        raise make_two_meshes_error(op, wires[0], wires[1])
    return wires[0]


def locate_in_call(path: Path, names: Sequence[str], args: Args, kwargs: Kwargs) -> Path:
    """Returns the path of an argument in the call `(args, kwargs)`, given its path in an earlier
    call.

    The paths may differ: one call may pass an argument by position that the other passes by name.

    Args:
        path: the path in the earlier call.
        names: the names of the function's parameters, in order.
    """
    head = path[0]
    if isinstance(head, str):
        return path if head in kwargs else (names.index(head), *path[1:])
    return path if head < len(args) else (names[head], *path[1:])


def get_at_path(args: Args, kwargs: Kwargs, path: Path) -> Any:
    """Returns the argument of `(args, kwargs)` at `path`, such as `(0,)` or `("dim",)`."""
    value = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
    return value if len(path) == 1 else value[path[1]]


def replace_at_paths(args: Args, kwargs: Kwargs, new: dict[Path, Any]) -> tuple[list[Any], Kwargs]:
    """Returns copies of `args` and `kwargs` with the values in `new` at their paths."""
    args, kwargs = list(args), dict(kwargs)
    for path, value in new.items():
        home: Any = kwargs if isinstance(path[0], str) else args
        if len(path) == 1:
            home[path[0]] = value
        else:
            inner = list(home[path[0]])
            inner[path[1]] = value  # type: ignore[index]
            home[path[0]] = inner
    return args, kwargs


def collect_tensors(out: Any) -> list[torch.Tensor]:
    """Returns all tensors in the result `out`, in order. `out` may be nested tuples and lists."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (tuple, list)):
        return [t for o in out for t in collect_tensors(o)]
    return []


# -- numbers given as DTensors ---------------------------------------------------------------------
# Torch accepts a 0-d tensor as a number (`x.topk(k)`, `x[:n]`, `x.view(n, -1)`) and reads it in
# C++, which would read this rank's local value. So it is read before a rule or a kernel gets the
# call, as by `int(k)`. Torch's schemas show which arguments are numbers.

Kinds = frozenset[str]
"""Types of an argument, as schemas write them."""
_INTEGERS = frozenset(("int", "List[int]", "Optional[int]", "Optional[List[int]]"))
_NUMBERS = _INTEGERS | frozenset(
    ("float", "number", "bool", "List[float]", "Optional[float]", "Optional[number]")
    + ("Optional[bool]", "Optional[List[float]]")
)


def may_have_numbers(args: Args, kwargs: Kwargs) -> bool:
    """True if `args` or `kwargs` have a DTensor with one element, which may be a number.

    Slices and lists are searched, too.
    """
    return any(map(_may_be_number, args)) or any(map(_may_be_number, kwargs.values()))


def _may_be_number(value: Any) -> bool:
    kind = type(value)
    if kind is DTensor:
        return value._spec.shape.numel() == 1
    if kind is slice:
        return any(type(v) is DTensor for v in (value.start, value.stop, value.step))
    return (kind is tuple or kind is list) and any(map(_may_be_number, value))


def read_numbers(func: Function, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns `args` and `kwargs` in which DTensors are replaced by numbers, where `func` requires
    them.

    For example, `k` of `topk` must be a number.
    """
    by_place, by_name = _kinds_of_arguments(func)
    new: list[Any] = []
    sizes: Kinds = frozenset()
    for i, value in enumerate(args):
        kinds = sizes or by_place.get(i, sizes)
        if _in_lists(kinds) and _are_numbers(kinds) and not isinstance(value, (tuple, list)):
            sizes = kinds  # sizes are passed one by one, up to the last argument
        new.append(_read_numbers_in(value, kinds))
    named = {key: _read_numbers_in(v, by_name.get(key, frozenset())) for key, v in kwargs.items()}
    return new, named


def _read_numbers_in(value: Any, kinds: Kinds) -> Any:
    """Returns an argument in which DTensors are replaced by numbers if torch expects numbers.

    Args:
        kinds: the types of the argument in all overloads of the op.
    """
    if type(value) is slice:
        return slice(
            *(_read_numbers_in(v, _INTEGERS) for v in (value.start, value.stop, value.step))
        )
    if type(value) is tuple or type(value) is list:
        return type(value)(_read_numbers_in(v, _in_lists(kinds) or kinds) for v in value)
    if type(value) is not DTensor or not _are_numbers(kinds) or value.requires_grad:
        return value
    # A whole float may be an input of a captured step, and must stay a tensor.
    return read_number(value) if kinds & _INTEGERS or not value._spec.is_whole else value


def _are_numbers(kinds: Kinds) -> bool:
    return not kinds.isdisjoint(_NUMBERS) and not any("Tensor" in kind for kind in kinds)


def _in_lists(kinds: Kinds) -> frozenset[str]:
    return frozenset(kind for kind in kinds if "List" in kind)


def takes_numbers(func: Function) -> bool:
    """True if a parameter of `func` must be a number (such as `k` of `topk`), in any overload.

    If a call passes a DTensor for this parameter, its value must be read before the call.
    """
    return any(map(_are_numbers, _kinds_of_arguments(func)[1].values()))


def read_number(x: DTensor) -> Any:
    """Returns the value of `x`, which has one element, as a Python int, float, complex or bool."""
    has_index = not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
    return operator.index(x) if has_index else x.item()  # type: ignore[arg-type]


@cache
def _kinds_of_arguments(func: Function) -> tuple[dict[int, Kinds], dict[str, Kinds]]:
    """Returns the types of an op's arguments in all overloads, by position and by name."""
    by_place: dict[int, Kinds] = defaultdict(frozenset)
    by_name: dict[str, Kinds] = defaultdict(frozenset)
    for arguments in _forms_of(func):
        for place, (name, kind, has_place) in enumerate(arguments):
            by_name[name] |= {kind}
            if has_place:
                by_place[place] |= {kind}
    return by_place, by_name


Parameters = list[tuple[str, str, bool]]
"""For each argument: its name, its type as in a schema ("" if unknown), and True if it may be
passed by position.
"""


def _forms_of(func: Function) -> list[Parameters]:
    """Returns the parameters of an op's overloads: from schemas or from annotations."""
    forms = []
    for overload in overloads_of(getattr(torch.ops.aten, getattr(func, "__name__", ""), None)):
        arguments = [a for a in overload._schema.arguments if not a.is_out]
        if isinstance(func, types.MethodDescriptorType):  # x.polygamma(n)
            arguments.sort(key=lambda a: a.name != "self")
        # TorchScript has operators on Python lists and strings.
        if any("Tensor" in str(a.type) for a in arguments):
            forms.append([(a.name, str(a.type), not a.kwarg_only) for a in arguments])
    if not isinstance(func, types.FunctionType):
        return forms
    try:
        own = list(inspect.signature(func).parameters.values())
    except ValueError:  # a builtin has no signature
        return forms
    if all(p.annotation is p.empty for p in own):
        return forms
    hints = [{p.name: _hint_of(p) for p in own if p.annotation is not p.empty}]
    hints += [{name: kind for name, kind, _ in form if name not in hints[0]} for form in forms]
    return [
        [(p.name, hint.get(p.name, ""), p.kind is not p.KEYWORD_ONLY) for p in own]
        for hint in hints
    ]


def _hint_of(parameter: inspect.Parameter) -> str:
    """Returns the annotation of a parameter as a schema would write it."""
    if parameter.annotation in (None, type(None)):  # a BroadcastingList[int] of TorchScript
        return "List[int]"
    text = str(parameter.annotation)
    if "Tensor" in text or not re.search(r"\b(int|float|bool)\b", text):
        return text
    return "int" if re.search(r"\bint\b", text) else "number"


# -- plain tensors beside DTensors -----------------------------------------------------------------


def make_transform_error(name: str) -> LayoutError:
    """Returns the error for `torch.func.<name>`, a transform that cannot take DTensors."""
    return make_layout_error(
        f"torch.func: {name} cannot take a DTensor",
        Fix("torch.autograd.grad(f(x), x)", "for gradients: it supports DTensors"),
        Fix("x.full_tensor()", "to transform a function of the whole value"),
        Fix(f"pt.local_map(torch.func.{name}(f), placements)", "if f should run on the pieces"),
        reason="it would run the function on this rank's piece as if that were the whole tensor",
    )


def check_plain_tensor(
    value: torch.Tensor,
    wire: Wire,
    op: str,
    where: tuple[Any, ...] = (),
    with_gradient: bool = False,
) -> None:
    """Raises an error unless the plain tensor `value` may count as equal on all ranks.

    A tensor that needs no gradient, such as an `arange` or a mask, counts as equal. If each rank
    passed its own data instead, the result would be wrong without an error. So the ranks compare a
    checksum when a line of the program first does this. Under `check_ranks()` they compare it every
    time.

    Args:
        wire: the wire of the DTensors in the call.
        op: the name of the called op, for the error.
        where: identifies the argument, if an op takes several.
        with_gradient: True if the caller makes the tensor's gradient whole. It allows a tensor that
            requires grad, unless a parameter or a DTensor is in the tensor's autograd graph.

    Raises:
        LayoutError: the tensor is sparse, or differs between ranks, or requires grad (its gradient
            would have no layout). Or `strict()` is on, or a torch.func transform runs on the
            tensor.
    """
    if is_functorch_wrapped_tensor(value):
        raise make_transform_error("grad" if value.requires_grad else "vmap")
    graded = value.requires_grad and torch.is_grad_enabled()
    if graded and not (with_gradient and _is_made_of_leaves(value)):
        raise _make_plain_error(
            f"{op}: a plain tensor that requires grad stands next to a DTensor",
            value,
            wire,
            Fix("pt.distribute_tensor(t, mesh, placements)", "one copy from rank 0"),
            Fix("pt.DTensor.from_local(t, mesh, placements)", "each rank's own piece"),
            Fix("t.detach()", "if no gradient is wanted"),
            reason="its gradient would have no layout, and ranks would silently diverge",
        )
    if value.layout is not torch.strided:
        raise make_no_strides_error(op, value)
    scope = wire.scope
    if scope.strict:
        raise _make_plain_error(
            f"{op}: a plain tensor stands next to a DTensor, and strict() refuses this",
            value,
            wire,
            Fix("pt.distribute_tensor(t, mesh, placements)"),
            Fix("with pt.strict(False): ...", "around this line"),
            reason="under strict() no plain tensor is assumed to be equal on all ranks",
        )
    if wire.mesh.size() == 1:
        return
    if isinstance(wire, TraceWire):  # a fake tensor has no value to compare
        wire.admit(value)
        return
    site = (call_site(), "plain", op, *where)
    if is_agreed(wire, site):
        return
    checksums = wire.gather_ints(checksum(value), f"a plain tensor of {op}")
    for rank, theirs in enumerate(checksums):
        if theirs != checksums[0]:
            raise make_layout_error(
                f"{op}: a plain tensor next to a DTensor differs between ranks",
                Fix("pt.DTensor.from_local(t, mesh, placements)", "if it is this rank's piece"),
                Fix(
                    'pt.distribute_batch(..., each_rank_has="piece")',
                    "if it is this rank's rows of a batch",
                ),
                Fix("pt.distribute_tensor(t, mesh, placements)", "to use rank 0's value"),
                operands=(
                    f"rank 0  {checksums[0][0]} dimensions, checksum {checksums[0][-1]:x}",
                    f"rank {rank}  {theirs[0]} dimensions, checksum {theirs[-1]:x}",
                ),
                reason="a plain tensor counts as one whole value, equal on every rank",
            )
    remember_agreed(wire, site)


def _make_plain_error(
    fact: str, value: torch.Tensor, wire: Wire, *fixes: Fix, reason: str
) -> LayoutError:
    shown = (f"plain tensor of shape {tuple(value.shape)}", f"DTensor on mesh {wire.mesh}")
    return make_layout_error(fact, *fixes, operands=shown, reason=reason)


_MOST_NODES = 1000
WHOLE = "partita: a whole gradient"
"""A key in the metadata of an autograd node that takes a whole gradient, equal on all ranks."""


def _is_made_of_leaves(value: torch.Tensor) -> bool:
    """True if plain `value` depends only on plain leaves that are not parameters.

    A model makes such tensors in forward, equal on all ranks. False if a parameter is in the
    history, because the user forgot to distribute it. False also if a DTensor is.
    """
    if value.grad_fn is None:
        return not isinstance(value, torch.nn.Parameter)
    todo, seen = [value.grad_fn], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if WHOLE in node.metadata:  # type: ignore[operator]
            continue
        leaf = getattr(node, "variable", None)
        if len(seen) > _MOST_NODES or isinstance(node, BackwardCFunction):
            return False
        if leaf is not None and type(leaf) is not torch.Tensor:
            return False
        todo += [n for n, _ in node.next_functions if n is not None]
    return True


# -- plain tensors that are written ----------------------------------------------------------------
# A plain tensor that is written with DTensors, as in `torch.zeros(n).scatter_add_(0, index, x)`, is
# a whole value, too. It is written through an alias that is a DTensor, Invariant on every axis. So
# other aliases of its memory have the values that they have on one device. Without a gradient the
# user's tensor stays plain. With a gradient it becomes a DTensor, and so does its base if it is a
# view, because its gradient needs a layout. That does not change it for other users of the tensor:
# an Invariant value and its gradient are equal to those of one device on each rank.


def spec_of_plain(x: torch.Tensor, wire: Wire) -> Spec:
    """Returns the spec that the plain tensor `x` has as an Invariant DTensor on `wire`'s mesh."""
    return spec_of(Layout(tuple(x.shape), invariant=wire.mesh.names), wire)


def alias_as_invariant(x: torch.Tensor, wire: Wire) -> DTensor:
    """Returns an Invariant DTensor (equal on all ranks) on `wire`'s mesh, in the memory of `x`.

    A write to the result changes `x`.
    """
    with local_ops():
        return as_dtensor(x.view_as(x), spec_of_plain(x, wire))


def give_history(x: torch.Tensor, wire: Wire) -> None:
    """Turns the plain tensor `x` into a DTensor, after an in-place op wrote DTensor values to it.

    `x` stays plain if the write gave it no autograd history. If `x` is a view, its base becomes a
    DTensor, too.

    Args:
        wire: the wire of the DTensors in the call.
    """
    for t in (x, x._base if x._is_view() else None):
        if t is not None and type(t) in PLAIN and t.requires_grad and not t.is_leaf:
            t.grad_fn.metadata[WHOLE] = True  # type: ignore[union-attr, index]
            as_dtensor(t, spec_of_plain(t, wire))


def write_into_plain(call: OpCall, paths: Sequence[Path]) -> Any:
    """Runs an in-place op that writes plain tensors, although other operands are DTensors.

    Args:
        call: the call of the in-place op.
        paths: the paths of the plain tensors that the op writes.

    Raises:
        LayoutError: a written tensor is not equal on all ranks (see `check_plain_tensor`).
    """
    written = {path: get_at_path(call.args, call.kwargs, path) for path in paths}
    for path, x in written.items():
        check_plain_tensor(x, call.wire, call.form.name, path, with_gradient=True)
    aliases = {path: alias_as_invariant(x, call.wire) for path, x in written.items()}
    out = call.with_values(aliases).run()
    for path, x in written.items():
        give_history(x, call.wire)
        if out is aliases[path]:
            out = x
    return out


# -- numbers are compared between ranks ------------------------------------------------------------

_ATOMS = (int, float, complex, bool, str, slice, type(None))


class _NumberCheck(TorchFunctionMode):
    """A mode that compares, between ranks, the numbers that ops on DTensors take.

    Used at each call under `check_ranks()`. `D * (1 + rank)` makes no move, so nothing else would
    detect that the ranks differ.
    """

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Inside a local kernel a number may differ between ranks, so it is not compared.
        if _global_view() and not in_backward():
            given = _all_tensors(args, kwargs).values()
            found = dict.fromkeys(t._spec.wire for t in given if isinstance(t, DTensor))
            wires = [wire for wire in found if not is_alone(wire)]
            numbers = _format_numbers((*args, *sorted(kwargs.items()))) if wires else ""
            name = getattr(func, "__name__", "?")
            for wire in wires if numbers else ():
                check_equal_on_ranks(
                    name,
                    f"{name}({numbers})",
                    wire,
                    fact="the ranks pass different numbers",
                    reason="each rank computes its part of one value, or its copy of it",
                    fixes=(
                        Fix("the same number on every rank"),
                        Fix("pt.DTensor.from_local(t, mesh, [pt.Shard(0)])", "if it is data"),
                    ),
                )
        return func(*args, **kwargs)


def _format_numbers(values: Any) -> str:
    """Returns the arguments that are not tensors as text; "" if all are tensors."""
    parts = []
    for value in values:
        if isinstance(value, (tuple, list)):
            parts.append(f"({_format_numbers(value)})" if _format_numbers(value) else "")
        elif isinstance(value, _ATOMS):
            parts.append(repr(value))
    return ", ".join(p for p in parts if p)


ON_CHECK.append(_NumberCheck)
