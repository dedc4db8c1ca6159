"""Symbolic Python numbers: what stands for a float, int or bool that is known when the graph runs.

They are torch's `SymFloat` and its kin, subclassed so that the user's code takes them for numbers:
`isinstance(x, float)` holds, a comparison with a known hint gives True or False (and becomes a
condition), and arithmetic follows Python's where algebra would not (signed zeros, division by zero,
powers of negative numbers). `Substitutes` has `type`, `id` and `hash` see what they stand for.

A graph has tensors alone: in it each is a `Scalar`, a float64 tensor of no dimension, an int64 or a
bool. `call_with_scalars` makes a call that takes such a number again, `compute_scalar` does
arithmetic of Python on tensors.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils import _pytree as pytree

from partita.comm import user_line
from partita.comm.device import HOST, Device
from partita.layout import Fix
from partita.tensor.dtensor import DTensor
from partita.tensor.op_facts import facts_of

from ..errors import not_captured


def is_symbolic(value: Any) -> bool:
    """Does it stand for a Python number that is known when the graph runs?"""
    return isinstance(value, (torch.SymFloat, torch.SymInt, torch.SymBool))


class BlockNumberRead(Exception):
    """Torch reads a float that differs between the blocks of one structure."""


class NumberEnv(ShapeEnv):
    """A shape environment that notes what a step asks of its numbers, and at which user's line.

    Attributes:
        lines: by the index of a guard, the user's line.
        asked: the symbols of numbers that were compared or read, and the first line that did.
        of_blocks: the symbols of floats that differ between blocks, which must not be read.
        answer: gives an answer to a bool without a hint, by its node; None if there is none.

    Private torch: `ShapeEnv`, which is what can trace a Python number.
    """

    def __init__(self) -> None:
        # `.item()` gives one more number that is known when the graph runs.
        super().__init__(
            allow_scalar_outputs=True,
            allow_dynamic_output_shape_ops=False,
            specialize_zero_one=False,
        )
        self.lines: dict[int, str] = {}
        self.asked: dict[str, str] = {}
        self.of_blocks: set[str] = set()
        self.answer: Callable[[Any], bool | None] = lambda question: None
        self._made: list[Any] = []

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        if self.of_blocks and not self.of_blocks.isdisjoint(map(str, args[0].free_symbols)):
            raise BlockNumberRead
        before = len(self.guards)
        found = super().evaluate_expr(*args, **kwargs)
        for i in range(before, len(self.guards)):
            self.lines[i] = user_line()
        return found

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        if sym_node.pytype is bool and not sym_node.has_hint():
            found = self.answer(sym_node)
            if found is not None:
                return found
        return super().evaluate_sym_node(sym_node, *args, **kwargs)

    def forget(self) -> None:
        """Drop the symbols: the graph has tensors instead, and Inductor must not find any."""
        for symbol in self._made:
            self.backed_var_to_val.pop(symbol, None)
        self.pending_fresh_unbacked_symbols.clear()

    def stop_asking(self) -> None:
        """Drop the reference to what answers."""
        self.answer = lambda question: None

    def symbolic(self, name: str, value: float) -> SymbolicFloat:
        """A symbolic float with the hint `value`."""
        source = ConstantSource(name)
        symbol = self.create_unspecified_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        self._made.append(symbol)
        made: Any = self.create_symfloatnode(symbol, hint=value, source=source)
        return SymbolicFloat(made.node)


_class = property(lambda self: self.kind)


class SymbolicFloat(torch.SymFloat):
    """A float whose value is not in the graph; `isinstance(x, float)` holds, as of the float.

    Attributes:
        kind: the type of the number that it stands for: float, or NumPy's.
    """

    kind: type = float
    __class__ = _class  # type: ignore[assignment]


class SymbolicInt(torch.SymInt):
    """An int that is known when the graph runs."""

    kind: type = int
    __class__ = _class  # type: ignore[assignment]


class SymbolicBool(torch.SymBool):
    """A bool that is known when the graph runs."""

    kind: type = bool
    __class__ = _class  # type: ignore[assignment]


_OF_TORCH = {SymbolicFloat: torch.SymFloat, SymbolicInt: torch.SymInt, SymbolicBool: torch.SymBool}
_OURS = {torchs: ours for ours, torchs in _OF_TORCH.items()}


def as_number(value: Any) -> Any:
    """A symbolic number of torch's as one of these classes; other values as they are."""
    ours = _OURS.get(type(value))
    return value if ours is None else ours(value.node)


def _class_of(fake: FakeTensor) -> type:
    """The class of the tensor for which a fake stands."""
    if isinstance(fake, DTensor):
        return DTensor
    return torch.nn.Parameter if getattr(fake, "_is_param", False) else torch.Tensor


class _Type(type):
    """A stand-in for `type` whose `type(x)` is that of what x stands for."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        found = type(args[0])
        if found in _OF_TORCH:
            return args[0].kind
        if issubclass(found, FakeTensor):
            return _class_of(args[0])
        return cls if found is type else found  # so that `type(x) is type` holds

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, type)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is type

    def __hash__(cls) -> int:
        return hash(type)


def identity_of(x: Any) -> int:
    """`id(x)` while a step is captured; for the fake of an input the id of that input.

    The capture's torch-function mode answers, as for other facts of inputs (`inputs.TensorFacts`).
    """
    if isinstance(x, FakeTensor) and has_torch_function_unary(x):
        return int(handle_torch_function(identity_of, (x,), x))
    return id(x)


def _hash_of_tensor(x: Any, /) -> int:
    return identity_of(x) if isinstance(x, FakeTensor) else hash(x)


class Substitutes:
    """Replacements of `type`, `id` and `hash` in the globals of the user's code.

    An object cannot decide what `type`, `id` and `hash` say of it. So that the user's code sees the
    type of a float and the identity of a tensor, not those of stand-ins, its globals get functions
    of ours under these names, for as long as captures need them.
    """

    of_builtins: ClassVar[dict[str, Any]] = {
        "type": _Type("type", (type,), {}),
        "id": identity_of,
        "hash": _hash_of_tensor,
    }
    _lock = threading.Lock()
    _put: ClassVar[dict[tuple[int, str], list[Any]]] = {}
    """By id of globals and name, the globals and how many captures use the replacement."""

    def __init__(self) -> None:
        self._mine: dict[tuple[int, str], dict[str, Any]] = {}

    @classmethod
    def has(cls, value: Any) -> bool:
        """Is `value` one of them?"""
        return any(value is ours for ours in cls.of_builtins.values())

    def put(self, variables: dict[str, Any], name: str) -> None:
        """Put our `name` into the globals `variables`, unless these have a `name` of their own."""
        key = id(variables), name
        with self._lock:
            found = self._put.get(key)
            if key in self._mine or (found is None and name in variables):
                return
            self._mine[key] = variables
            if found is None:
                found = self._put[key] = [variables, 0]
                variables[name] = self.of_builtins[name]
            found[1] += 1

    def take_away(self) -> None:
        """Take back all that was put."""
        with self._lock:
            for key, variables in self._mine.items():
                found, name = self._put[key], key[1]
                found[1] -= 1
                if not found[1]:
                    del self._put[key]
                    if variables.get(name) is self.of_builtins[name]:
                        del variables[name]
            self._mine.clear()


def _to_torch_symbol(value: Any) -> Any:
    """The plain torch number: torch's methods take what is a `float` for a constant."""
    torchs = _OF_TORCH.get(type(value))
    return value if torchs is None else torchs(value.node)


_ASKS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__float__")
_DIVIDE = ("__truediv__", "__floordiv__", "__mod__")
_DIVIDE_BY_SELF = ("__rtruediv__", "__rfloordiv__", "__rmod__")
_ZERO_WITH_ZERO = ("__mul__", "__rmul__", "__rtruediv__")

_RECKONED: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "neg", "pos")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "abs")},
    "pow": torch.pow,
    "sym_sqrt": torch.sqrt,
    "sym_float": lambda one: one,
    "sym_not": torch.logical_not,
    "sym_max": torch.maximum,
    "sym_min": torch.minimum,
}
"""By the name of an operation on Python numbers, the same on zero-dimensional tensors."""


def _is_read_first(name: str) -> bool:
    """Is it a method of floats that is called of the value, since tensors do not compute it as
    Python does: rounding, remainders, `int(x)`?"""
    reckoned = {f"__{r}{done}__" for done in _RECKONED for r in ("", "r")}
    return name in vars(float) and name not in (*_ASKS, *reckoned)


def _has_value(number: Any) -> bool:
    """Is it a number whose value is known during capture, as `.item()` is not?"""
    return number.node.has_hint() if is_symbolic(number) else isinstance(number, (int, float))


def _raise_where_divided_by_zero(name: str, self: Any, others: tuple[Any, ...]) -> None:
    for divisor in (self,) if name in _DIVIDE_BY_SELF else others if name in _DIVIDE else ():
        if (
            is_symbolic(divisor)
            and _has_value(divisor)
            and not bool(_to_torch_symbol(divisor) != 0)
        ):
            raise ZeroDivisionError("float division by zero")


def _number_of(value: Any) -> Any:
    """The value of a symbolic float that is known, which becomes a condition."""
    return float(value) if type(value) is SymbolicFloat and _has_value(value) else value


def _signed_zero(name: str, self: Any, others: tuple[Any, ...]) -> Any:
    """The signed zero of `x * 0` or `0 / x`, by the sign of x; None for other operations."""
    if name not in _ZERO_WITH_ZERO or type(self) is not SymbolicFloat or not _has_value(self):
        return None
    if type(others[0]) not in (int, float) or others[0] != 0:
        return None
    return others[0] * (1.0 if self > 0 else -1.0 if self < 0 else float(self))


def _value_at_capture(number: Any) -> Any:
    """The value at capture, without a condition on it."""
    return number.node.hint if is_symbolic(number) else number


def _odd_power(name: str, self: Any, others: tuple[Any, ...]) -> Any:
    """The value of a power whose base is not positive, which may be complex; None of others."""
    if name not in ("__pow__", "__rpow__") or len(others) != 1:
        return None
    base, exponent = (self, others[0]) if name == "__pow__" else (others[0], self)
    if not (_has_value(base) and _has_value(exponent)):
        return None
    if not is_symbolic(exponent) and exponent >= 0 and exponent == int(exponent):
        return None
    if not bool(base > 0):
        return float(base) ** float(exponent)
    # Raises OverflowError as Python does.
    float(_value_at_capture(base)) ** float(_value_at_capture(exponent))
    return None


def _make_symbolic_method(name: str) -> Callable[..., Any]:
    is_read_first = _is_read_first(name)

    def method(self: Any, *others: Any) -> Any:
        if name in _ASKS:
            for symbol in self.node.expr.free_symbols:
                self.node.shape_env.asked.setdefault(str(symbol), user_line())
        _raise_where_divided_by_zero(name, self, others)
        of_float = is_read_first and type(self) is SymbolicFloat
        if of_float and all(map(_has_value, (self, *others))):
            return getattr(float(self), name)(*(_number_of(other) for other in others))
        for found in (_signed_zero(name, self, others), _odd_power(name, self, others)):
            if found is not None:
                return found
        found = getattr(_to_torch_symbol(self), name)(*map(_to_torch_symbol, others))
        # A comparison of known numbers is True or False itself, for `is` and for text.
        if type(found) is torch.SymBool and found.node.has_hint():
            return bool(found)
        return as_number(found)

    return method


def _return_self(self: Any, *_: Any) -> Any:
    return self  # a copied node would be of another graph


_UNKNOWN = "<known when the graph has run>"


def is_text_of_unknown(value: Any) -> bool:
    """Is it text into which a fake tensor, or an unknown number, was formatted?"""
    return isinstance(value, str) and ("FakeTensor(" in value or _UNKNOWN in value)


def _make_text_method(name: str) -> Callable[..., Any]:
    def method(self: Any, *spec: str) -> Any:
        if any(spec) or self.node.has_hint():  # its value becomes a condition
            return getattr(_BUILTIN[type(self)](_to_torch_symbol(self)), name)(*spec)
        return _UNKNOWN

    return method


def _is_true(self: Any) -> bool:
    """`bool(x)`; torch's own would read a float's value."""
    return bool(_to_torch_symbol(self) if type(self) is SymbolicBool else self != 0)


_BUILTIN = {SymbolicFloat: float, SymbolicInt: int, SymbolicBool: bool}
_OWN = ("__init__", "__new__", "__hash__", "__class__")
for _ours, _torchs in _OF_TORCH.items():
    for _name, _found in list(vars(_torchs).items()):
        if _name.startswith("__") and callable(_found) and _name not in _OWN:
            setattr(_ours, _name, _make_symbolic_method(_name))
    for _name in ("__str__", "__repr__", "__format__"):
        setattr(_ours, _name, _make_text_method(_name))
    _ours.__bool__ = _is_true  # type: ignore[attr-defined]
    _ours.__copy__ = _ours.__deepcopy__ = _return_self  # type: ignore[attr-defined]

# -- scalars in the graph --------------------------------------------------------------------------

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Scalar:
    """A number: a tensor of no dimensions, float64, int64 or bool."""

    tensor: torch.Tensor


# -- while a step is traced ------------------------------------------------------------------------


def taken_as_numbers(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, with values in place of symbolic numbers where `func` cannot take a tensor.

    To read a value makes a condition of the program; it raises where there is no value yet.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if not any(map(is_symbolic, leaves)) or _find_call(_base_op_name(func)):
        return args, kwargs
    found: tuple[Any, Any] = pytree.tree_unflatten(list(map(_value_of_number, leaves)), structure)
    return found


def with_exact_numbers(func: Any, args: Any, kwargs: Any, held: set[int]) -> tuple[Any, Any]:
    """The arguments of an optimizer's call, with scalar tensors as exact as eager's Python floats.

    A scalar tensor that the call makes is float64. One that the optimizer keeps as float32 is read
    as float64, as `.item()` gives it, and what is written into it is rounded to float32 before.

    Args:
        held: the ids of the scalar tensors that the optimizer keeps as float32.
    """
    if func is _aten.scalar_tensor.default and kwargs["dtype"].is_floating_point:
        return args, dict(kwargs, dtype=torch.float64)
    if not any(id(t) in held for t in pytree.tree_leaves(args)):
        return args, kwargs

    def widen_held(t: Any) -> Any:
        return t.double() if id(t) in held else t

    def narrow_number(t: Any) -> Any:
        number = isinstance(t, torch.Tensor) and t.ndim == 0 and t.dtype is torch.float64
        return t.float() if number else t

    return pytree.tree_map(narrow_number if func._schema.is_mutable else widen_held, args), kwargs


def _value_of_number(leaf: Any) -> Any:
    if isinstance(leaf, torch.SymFloat):
        return float(leaf)
    if isinstance(leaf, torch.SymInt):
        return int(leaf)
    return bool(leaf) if isinstance(leaf, torch.SymBool) else leaf


def _base_op_name(func: Any) -> str:
    name: str = func._opname
    return name.removeprefix("_foreach_").removesuffix("_")


# -- arithmetic of Python --------------------------------------------------------------------------


_NAMES = {"_operator_abs": "abs", "_sym_sqrt": "sym_sqrt", "and_": "and", "or_": "or"}


def _name_of(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    return _NAMES.get(name, name)


def compute_scalar(target: Any, args: Sequence[Any], like: Any) -> Scalar:
    """An operation on Python numbers, done with tensors; `like` is its value when it was traced.

    Raises:
        CaptureError: tensors cannot do it as Python does.
    """
    if _name_of(target) not in _RECKONED:
        raise not_captured(
            f"the step asks for {_name_of(target)}(x) of a number that .item() gave",
            "it is known when the graph has run, and tensors do not reckon this as Python does",
            Fix("return x.item()", f"and take {_name_of(target)}(x) outside of the step"),
            place="",
        )
    values = [*map(unwrap_scalar, args)]
    whole = all(isinstance(v, (int, torch.Tensor)) for v in values)
    exact = isinstance(like, (int, torch.SymInt)) or (whole and not any(map(_is_float, values)))
    dtype = torch.int64 if exact and _name_of(target) != "truediv" else torch.float64
    given = [_cast_to_tensor(a, dtype) for a in args]
    return Scalar(_RECKONED[_name_of(target)](*given))


def unwrap_scalar(value: Any) -> Any:
    """The tensor of a `Scalar`; other values as they are."""
    return value.tensor if isinstance(value, Scalar) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _cast_to_tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, Scalar):
        return value.tensor.to(dtype)
    return torch.full((), value, dtype=dtype)


def has_scalars(args: Any, kwargs: Any) -> bool:
    """Is one of the values, or of those in a list, a `Scalar`?"""
    return any(
        isinstance(a, Scalar)
        or (isinstance(a, (list, tuple)) and any(type(v) is Scalar for v in a))
        for a in (*args, *kwargs.values())
    )


# -- calls -----------------------------------------------------------------------------------------


_SUMS = ("add", "sub", "rsub")


def takes_number_exactly(node: fx.Node) -> bool:
    """Does a call give the same bits where a number among its operands is a tensor?"""
    if not isinstance(node.target, torch._ops.OpOverload):
        return _name_of(node.target) in ("add", "sub", "mul", "truediv", "neg", "pos")
    values: list[Any] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    if any(_is_reduced(v) and not v.dim() for v in values):  # the number is rounded to its dtype
        return False
    is_sum = _base_op_name(node.target) in _SUMS
    factor = (*node.args[2:3], node.kwargs.get("alpha", 1)) if is_sum else ()
    is_exact = facts_of(node.target).exact_in_numbers
    return is_exact and all(not isinstance(a, fx.Node) and a == 1 for a in factor)


def call_with_scalars(name: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    """Call torch.ops.aten `name` with arguments that contain `Scalar`s.

    Args:
        like: the value that the call had when it was traced.
    """
    base = name.removesuffix("_")
    run = _find_call(base)
    assert run is not None
    out = run(base, args, kwargs, like)
    if isinstance(out, Scalar):
        return out
    if name.endswith("_"):
        return args[0].copy_(out)
    if isinstance(like, torch.Tensor) and out.dtype != like.dtype:
        out = out.to(like.dtype)
    return out


def _promote_scalar(value: Any, *others: Any) -> Any:
    """A scalar as a tensor that promotes the dtypes of `others` no more than a number does."""
    if not isinstance(value, Scalar):
        return value
    t = value.tensor
    tensors = [x for x in others if isinstance(x, torch.Tensor)]
    wide = [x for x in tensors if x.dim()]
    if any(x.dtype.is_floating_point or x.dtype.is_complex for x in wide) or not tensors:
        return t  # a zero-dimensional float tensor does not promote them
    kinds = {torch.float64: 1.0, torch.int64: 1, torch.bool: True}
    found = tensors[0]
    for x in tensors[1:]:
        if torch.promote_types(found.dtype, x.dtype) != found.dtype:
            found = x
    return t.to(torch.result_type(found, kinds[t.dtype]))


def _run_elementwise(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    return getattr(_aten, base)(*[_promote_scalar(a, *args) for a in args], **kwargs)


_REDUCED = (torch.bfloat16, torch.float16)


def _as_kernels(*values: Any) -> tuple[Any, ...]:
    """Operands of reduced precision as float32: a kernel rounds once, at its end."""
    return tuple(v.float() if _is_reduced(v) else v for v in values)


def _is_reduced(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _REDUCED


def _run_add(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    x, y = args[:2]
    alpha = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
    x, y = _promote_scalar(x, y), _promote_scalar(y, x)
    if base == "rsub":
        x, y = y, x
    if isinstance(alpha, Scalar) or alpha != 1:
        if isinstance(y, torch.Tensor):  # alpha * y has the dtype of the sum
            y = y.to(torch.result_type(x, y))
        if _is_reduced(y) and Device(y.device.type).rounds_factors and isinstance(alpha, Scalar):
            alpha = Scalar(alpha.tensor.to(y.dtype))  # as kernels of that device round it
        x, y = _as_kernels(x, y)
        y = y * _promote_scalar(alpha, y)
    return _aten.add(x, y) if base == "add" else _aten.sub(x, y)


def _add_product(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    x, one, other = args[:3]
    value = args[3] if len(args) > 3 else kwargs["value"]
    one, other = (y.to(torch.promote_types(x.dtype, y.dtype)) for y in (one, other))
    x, one, other = _as_kernels(x, one, other)
    made = one * _promote_scalar(value, one)
    return x + (made * other if base == "addcmul" else made / other)


def _run_lerp(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    *given, weight = args
    x, end = _as_kernels(*given)
    return _aten.lerp(x, end, weight.tensor.to(x.device, x.dtype))


def _run_clamp(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    x, *bounds = args
    low = bounds[0] if bounds else kwargs.get("min")
    high = bounds[1] if len(bounds) > 1 else kwargs.get("max")
    if base == "clamp_max":
        low, high = None, low if bounds else kwargs["max"]
    for bound, call in ((low, _aten.clamp_min), (high, _aten.clamp_max)):
        if bound is not None:
            x = call(x, _promote_scalar(bound, x))
    return x


def _run_where(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    condition, *values = args
    made = [
        v if isinstance(v, torch.Tensor) else _make_scalar_tensor(v, like.dtype, condition.device)
        for v in values
    ]
    return _aten.where(condition, *made)


def _make_scalar_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if isinstance(value, Scalar):
        return value.tensor.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _run_fill(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    *given, value = args
    return getattr(_aten, base)(*given, value.tensor.to(given[0].device, given[0].dtype))


def _run_full_like(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    values = [a for a in (*args, *kwargs.values()) if isinstance(a, Scalar)]
    value = values[0].tensor.to(like.device, like.dtype)
    return value.expand(like.shape).clone(memory_format=torch.contiguous_format)


def _read_scalar(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Scalar:
    (x,) = args
    if x.dtype.is_floating_point:
        dtype = torch.float64
    else:
        dtype = torch.bool if x.dtype is torch.bool else torch.int64
    return Scalar(x.reshape(()).to(HOST, dtype))


_RunCall = Callable[[str, Sequence[Any], dict[str, Any], Any], Any]

_CALLS: dict[str, _RunCall] = {
    **dict.fromkeys(_SUMS, _run_add),
    **dict.fromkeys(("addcmul", "addcdiv"), _add_product),
    "lerp": _run_lerp,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _run_clamp),
    "where": _run_where,
    **dict.fromkeys(("fill", "masked_fill", "index_fill"), _run_fill),
    **dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor"), _run_full_like),
    "_local_scalar_dense": _read_scalar,
}
"""By op that can take a tensor in place of a number, how it is called; others elementwise."""


@lru_cache
def _find_call(base: str) -> _RunCall | None:
    """How an op takes a tensor in place of a number; None of one that cannot."""
    packet = getattr(_aten, base, None)
    if base in _CALLS or packet is None:
        return _CALLS.get(base)
    is_able = facts_of(getattr(packet, packet.overloads()[0])).takes_number_as_tensor
    return _run_elementwise if is_able else None
