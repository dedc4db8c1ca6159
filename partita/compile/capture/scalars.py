"""Scalars: symbolic Python numbers as zero-dimensional tensors, in the graph without writes.

A step is traced with symbolic numbers, but a graph has tensors alone. So each call that takes such
a number is made again as one that takes a tensor (`call_with_scalars`), with the dtype that the
number would have given, and arithmetic of Python becomes arithmetic on tensors (`compute_scalar`).
A number is a float64 tensor, as Python's floats are, an int64 or a bool.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from partita.comm.device import HOST, Device
from partita.layout import Fix
from partita.tensor.op_facts import facts_of

from ..errors import not_captured
from .symbolic import is_symbolic

__all__ = [
    "Scalar",
    "call_with_scalars",
    "compute_scalar",
    "has_scalars",
    "is_scalar_operation",
    "taken_as_numbers",
    "takes_number_exactly",
    "with_exact_numbers",
]

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
    if not any(map(is_symbolic, leaves)) or _base_op_name(func) in _CALLS:
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


def _compute_power(one: Any, other: Any) -> Any:
    return torch.pow(one, other)


_RECKONED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "pow": _compute_power,
    "neg": operator.neg,
    "pos": lambda one: one,
    "abs": torch.abs,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "sym_sqrt": torch.sqrt,
    "sym_float": lambda one: one,
    "sym_not": torch.logical_not,
    "sym_max": torch.maximum,
    "sym_min": torch.minimum,
}
"""By the name of an operation on Python numbers, the same on zero-dimensional tensors."""

_NAMES = {"_operator_abs": "abs", "_sym_sqrt": "sym_sqrt", "and_": "and", "or_": "or"}


def _name_of(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    return _NAMES.get(name, name)


def is_scalar_operation(target: Any) -> bool:
    """Is `target` an operation on Python numbers that tensors can do?"""
    return _name_of(target) in _RECKONED


def compute_scalar(target: Any, args: Sequence[Any], like: Any) -> Scalar:
    """An operation on Python numbers, done with tensors; `like` is its value when it was traced.

    Raises:
        CaptureError: tensors cannot do it as Python does.
    """
    if not is_scalar_operation(target):
        raise not_captured(
            f"the step asks for {_name_of(target)}(x) of a number that .item() gave",
            "it is known when the graph has run, and tensors do not reckon this as Python does",
            Fix("return x.item()", f"and take {_name_of(target)}(x) outside of the step"),
            place="",
        )
    whole = all(isinstance(a, (int, torch.Tensor)) for a in map(_tensor_of, args))
    exact = isinstance(like, (int, torch.SymInt)) or (
        whole and not any(_is_float(a) for a in map(_tensor_of, args))
    )
    dtype = torch.int64 if exact and _name_of(target) != "truediv" else torch.float64
    given = [_cast_to_tensor(a, dtype) for a in args]
    return Scalar(_RECKONED[_name_of(target)](*given))


def _tensor_of(value: Any) -> Any:
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
    out = _CALLS[base](base, args, kwargs, like)
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


_CALLS: dict[str, Callable[[str, Sequence[Any], dict[str, Any], Any], Any]] = {
    **dict.fromkeys(
        """mul div true_divide pow eq ne lt le gt ge remainder fmod floor_divide maximum minimum
        xlogy""".split(),
        _run_elementwise,
    ),
    **dict.fromkeys(_SUMS, _run_add),
    **dict.fromkeys(("addcmul", "addcdiv"), _add_product),
    "lerp": _run_lerp,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _run_clamp),
    "where": _run_where,
    **dict.fromkeys(("fill", "masked_fill", "index_fill"), _run_fill),
    **dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor"), _run_full_like),
    "_local_scalar_dense": _read_scalar,
}
"""By op that can take a tensor in place of a number, how it is called."""
