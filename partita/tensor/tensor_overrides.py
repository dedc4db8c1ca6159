"""Overrides: what attributes and methods mean on a DTensor that are no ops.

`OVERRIDES` has them by torch's function: `x.data`, `x.T`, the ways out to Python (`item`, `numpy`,
...) here; `.grad` and `backward` in `gradient_overrides`, memory in `memory_view`, copies in
`copies`. All other functions are ops and have rules, or are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, Layout, LayoutError

from .autograd import moved
from .dtensor import DTensor, tagged
from .function_facts import facts_of_function
from .setitem import set_item
from .spec import spec_of
from .tensor_state import own_state

__all__ = [
    "MEMORY",
    "OVERRIDES",
    "find_getter",
    "implements",
    "make_refusal",
    "runs_as_torch_has_it",
]

T: Any = torch.Tensor
OVERRIDES: dict[Callable[..., Any], Callable[..., Any]] = {}
"""What is called in place of a function of torch, with its arguments, if a DTensor is among
them."""


def runs_as_torch_has_it(func: Callable[..., Any]) -> bool:
    """Is this function answered by the piece? Attributes are, unless `OVERRIDES` has them."""
    name = getattr(func, "__name__", "")
    attributes = ("__get__", "__set__", "__delete__")
    return name in attributes or facts_of_function(name).answered_by_piece


def implements(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that puts a function into `OVERRIDES` for functions of torch."""

    def register_override(f: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            OVERRIDES[function] = f
        return f

    return register_override


def find_getter(name: str) -> Any:
    """The function that reads an attribute of a tensor, as `__torch_function__` gets it."""
    return getattr(T, name).__get__


# -- the shard behind it ---------------------------------------------------------------------------

_data: Any = torch._C.TensorBase.data


@implements(find_getter("data"))
def _get_data(x: DTensor) -> DTensor:
    # What is written through it is not counted in x's version: x must not be remembered elsewhere.
    own_state(x).written_unseen = True
    with Local():
        return tagged(_data.__get__(x), x._spec)


@implements(T.data.__set__)
def _set_data(x: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(x, DTensor) and isinstance(value, DTensor):
        before, after = value._spec, x._spec
        with Local(), torch.no_grad():
            alike = before.wire is after.wire and before.shape == after.shape
            if x.requires_grad and alike and before is not after:
                # Its optimizer's state, its gradient and ZeRO's blocks lie as a parameter does.
                value = tagged(moved(value, before, after, "x.data = y", "explicit"), after)
            _data.__set__(x, value)
        own_state(x).moved = None  # torch does not count this as a write
        x._spec = value._spec
        return
    raise LayoutError(
        "x.data = y needs two DTensors or two plain tensors",
        place=user_line(),
        reason="a tensor cannot become a DTensor, or stop being one, by its data",
        fixes=(
            (
                Fix("x.data.copy_(y)", "of a y that every rank has whole: x stays what it is"),
                Fix("y = pt.distribute_tensor(y, mesh, placements)", "one copy from rank 0"),
            )
            if isinstance(x, DTensor)
            else (
                Fix("y = y.full_tensor()", "the whole value, plain"),
                Fix("y = y.to_local()", "this rank's piece"),
            )
        ),
    )


@implements(find_getter("T"))
def _reverse_dims(x: DTensor) -> Any:
    return torch.permute(x, tuple(range(x.ndim - 1, -1, -1)))


@implements(find_getter("mT"))
def _transpose_matrices(x: DTensor) -> Any:
    return x.transpose(-2, -1)


@implements(find_getter("H"), find_getter("mH"))
def _compute_adjoint(x: DTensor) -> Any:
    return x.transpose(-2, -1).conj() if x.is_complex() else x.transpose(-2, -1)


OVERRIDES[find_getter("real")] = lambda x: torch.real(x)
OVERRIDES[find_getter("imag")] = lambda x: torch.imag(x)


@implements(torch.numel)
def _global_numel(x: DTensor) -> int:
    return x._spec.shape.numel()


# -- ways out to Python ----------------------------------------------------------------------------


def _gather_full_value(x: Any, op: str) -> Any:
    """The whole value as a plain tensor without history, on every rank."""
    if not isinstance(x, DTensor):
        return x
    spec = x._spec
    after = spec_of(Layout(spec.layout.shape), spec.wire)
    if all(p.is_invariant() or p.is_replicate() for p in spec.placements):
        after = spec
    if after is spec:
        return moved(x, spec, after, op, "explicit")
    with torch.no_grad(), spec.wire.reading(op):
        return moved(x, spec, after, op, "explicit")


def _by_value(name: str) -> None:
    function = getattr(T, name)

    def call_on_full_value(x: Any, *args: Any, **kwargs: Any) -> Any:
        return function(_gather_full_value(x, name), *args, **kwargs)

    OVERRIDES[function] = call_on_full_value


for _name in (
    "item tolist __bool__ __int__ __float__ __index__ __complex__ __contains__ is_nonzero"
).split():
    _by_value(_name)


@implements(T.numpy, T.__array__)
def _convert_to_numpy(x: DTensor, *args: Any, **kwargs: Any) -> Any:
    if x.requires_grad:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    return _gather_full_value(x, "numpy").numpy()


@implements(T.__format__)
def _format_dtensor(x: DTensor, spec: str) -> str:
    if x.ndim == 0:
        return format(_gather_full_value(x, "format").item(), spec)
    return object.__format__(x, spec)


def make_refusal(name: str, reason: str, *fixes: Fix) -> Callable[..., Any]:
    """An override that raises LayoutError: the function cannot take a DTensor."""

    def raise_refusal(*args: Any, **kwargs: Any) -> Any:
        raise LayoutError(
            f"{name} cannot take a DTensor", place=user_line(), reason=reason, fixes=fixes
        )

    return raise_refusal


OVERRIDES[T.__dlpack__] = make_refusal(
    "dlpack",
    "the other side would take this rank's piece for the whole tensor",
    Fix("x.to_local().__dlpack__()", "this rank's piece"),
    Fix("x.full_tensor().__dlpack__()", "the whole value"),
)
MEMORY = "it works on memory, of which each rank has another part"
for _name in ("resize_", "resize_as_", "as_strided_", "apply_", "map_", "share_memory_"):
    _way_out = Fix(f"x.to_local().{_name}(...)", "on this rank's piece")
    OVERRIDES[getattr(T, _name)] = make_refusal(_name, MEMORY, _way_out)


OVERRIDES[T.__setitem__] = set_item
