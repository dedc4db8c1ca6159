"""Overrides: what attributes and methods mean on a DTensor that are no ops.

`OVERRIDES` has them by torch's function: `x.data`, `x.T`, the ways out to Python (`item`, `numpy`,
...) and `x[...] = value` here; `.grad` and `backward` in `dtensor_gradients`, memory and copies in
`tensor_memory`. All other functions are ops and have rules, or are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, Layout, LayoutError

from .aliasing import write_through_copy
from .arguments import admit, alias_as_invariant, give_history
from .autograd import moved
from .dtensor import DTensor, make_memory_error, tagged
from .op_facts import facts_of_function
from .spec import Spec, spec_for_write_into, spec_of
from .tensor_state import own_state

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


OVERRIDES |= {find_getter("real"): torch.real, find_getter("imag"): torch.imag}


@implements(torch.numel)
def _global_numel(x: DTensor) -> int:
    return x._spec.shape.numel()


# -- ways out to Python ----------------------------------------------------------------------------


def _gather_full_value(x: Any, op: str) -> Any:
    """The whole value as a plain tensor without history, on every rank."""
    if not isinstance(x, DTensor):
        return x
    spec = x._spec
    if all(p.is_invariant() or p.is_replicate() for p in spec.placements):
        return moved(x, spec, spec, op, "explicit")
    with torch.no_grad(), spec.wire.reading(op):
        return moved(x, spec, spec_of(Layout(spec.layout.shape), spec.wire), op, "explicit")


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


@implements(T.__dlpack__)
def _refuse_dlpack(x: DTensor, *args: Any, **kwargs: Any) -> Any:
    raise LayoutError(
        "dlpack cannot take a DTensor",
        place=user_line(),
        reason="the other side would take this rank's piece for the whole tensor",
        fixes=(
            Fix("x.to_local().__dlpack__()", "this rank's piece"),
            Fix("x.full_tensor().__dlpack__()", "the whole value"),
        ),
    )


def _refuse_memory_method(name: str) -> None:
    @implements(getattr(T, name))
    def raise_memory_error(*args: Any, **kwargs: Any) -> Any:
        raise make_memory_error(name)


for _name in ("resize_", "resize_as_", "as_strided_", "apply_", "map_", "share_memory_"):
    _refuse_memory_method(_name)

# -- assignment to an index ------------------------------------------------------------------------

_write = torch.Tensor.__setitem__
"""Of DTensors it ends in `set_item`, with torch-function disabled in the shard."""


@implements(torch.Tensor.__setitem__)
def set_item(x: torch.Tensor, index: Any, value: Any) -> None:
    """`torch.Tensor.__setitem__` where x, the index or the value is a DTensor.

    Ints and slices pick a range of each dimension, of which each rank holds a part: it writes that
    part, and nothing is sent but a value that is sharded or pending. Into shares of a sum the first
    rank writes the value and the others zeros. An index with tensors is applied to the gathered
    tensor, unless it is a mask for a number; so is what is written into a pending maximum.

    Raises:
        LayoutError: x is a plain tensor, but no whole value that is the same on every rank.
    """
    if not isinstance(x, DTensor):
        _write_plain(x, index, value)
        return
    spec = x._spec
    if spec.is_copy:
        write_through_copy(_write, x, index, value)
        return
    entries = list(index) if isinstance(index, tuple) else [index]
    if all(op == "sum" for _, op in spec.layout.partial) and all(_is_basic(e) for e in entries):
        _write_range(x, spec, entries, value)
    elif _is_mask(x, index) and not (isinstance(value, torch.Tensor) and value.dim()):
        x.masked_fill_(index, value)
    else:
        _write_whole(x, spec, index, value)


def _write_plain(x: torch.Tensor, index: Any, value: Any) -> None:
    if isinstance(value, DTensor):
        wire = value._spec.wire
        admit(x, wire, "setitem", with_gradient=True)
        set_item(alias_as_invariant(x, wire), index, value)
        give_history(x, wire)
        return
    entries = index if isinstance(index, tuple) else (index,)
    whole = tuple(e.full_tensor() if isinstance(e, DTensor) else e for e in entries)
    _write(x, whole, value)


def _is_basic(entry: Any) -> bool:
    return (
        entry is None
        or entry is Ellipsis
        or isinstance(entry, slice)
        or (isinstance(entry, int) and not isinstance(entry, bool))
        or _is_number(entry)
    )


def _is_number(entry: Any) -> bool:
    """Is it an integer in a tensor of no dimensions? It is one that nobody has to read."""
    kinds = (torch.bool, torch.uint8)
    return isinstance(entry, torch.Tensor) and not entry.dim() and entry.dtype not in kinds


def _is_mask(x: DTensor, index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.shape == x.shape


def _redistribute_value(value: Any, spec: Spec, x: torch.Tensor | None = None) -> Any:
    """`value` whole on every rank, or Partial where `spec` is."""
    layout = spec.layout
    if not isinstance(value, torch.Tensor):
        if x is None or not layout.partial:
            return value
        value = torch.tensor(value, dtype=x.dtype, device=x.device)
    whole = spec_of(Layout(tuple(value.shape), (), layout.partial, layout.invariant), spec.wire)
    if isinstance(value, DTensor):
        # As it is where nothing moves: an alias's strides may tell a piece of x from itself.
        same = value._spec is whole
        return value if same else moved(value, value._spec, whole, "setitem", "implicit")
    admit(value, spec.wire, "setitem")
    if not layout.partial:
        return value
    before = spec_of(Layout(tuple(value.shape)), spec.wire)
    return moved(value, before, whole, "setitem", "implicit")


def _write_range(x: DTensor, spec: Spec, entries: list[Any], value: Any) -> None:
    """Write the part of the range that this rank holds; every rank takes the same steps."""
    used = sum(e is not None and e is not Ellipsis for e in entries)
    if used > len(spec.shape):
        raise IndexError(f"too many indices for tensor of dimension {len(spec.shape)}")
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    entries = entries[:at] + [slice(None)] * (len(spec.shape) - used) + entries[at + 1 :]
    # Dimensions of x[...], of which None adds one to x's and an int takes one away.
    result: list[int] = []
    added, taken = [], []
    ranges: list[Any] = []
    for entry in entries:
        if entry is None:
            added.append(len(result))
            result.append(1)
            continue
        dim = len(ranges)
        if _is_number(entry):
            entry = _redistribute_value(entry, spec_of(Layout(tuple(spec.shape)), spec.wire))
        ranges.append(_find_picked_places(entry, spec.shape[dim], dim))
        if isinstance(entry, slice):
            result.append(len(ranges[-1]))
        else:
            taken.append(dim)
    if any(isinstance(at, torch.Tensor) for at in (*ranges, *(o for o, _ in spec.region))):
        value = _redistribute_value(value, spec, x)
        with Local():
            _write_traced(x, spec, ranges, _align_value_dims(value, result, added, taken))
        return
    pieces, local = [], []
    for places, (offset, length) in zip(ranges, spec.region, strict=True):
        first = max(0, -(-(offset - places.start) // places.step))
        end = max(first, min(len(places), -(-(offset + length - places.start) // places.step)))
        pieces.append((first, end - first))
        start = places.start + first * places.step - offset
        stop = start + (end - first - 1) * places.step + 1
        local.append(slice(start, stop, places.step) if end > first else slice(0, 0))
    value = _redistribute_value(value, spec, x)
    with Local():
        value = _align_value_dims(value, result, added, taken)
        if isinstance(value, torch.Tensor):
            for dim, (first, count) in enumerate(pieces):
                if count != value.shape[dim]:
                    value = value.narrow(dim, first if count else 0, count)
        _write(x, tuple(local), value)


def _align_value_dims(value: Any, result: list[int], added: list[int], taken: list[int]) -> Any:
    """A value of shape `result`, as `x[...]` has it, with the dimensions of x in their order."""
    if not isinstance(value, torch.Tensor):
        return value
    while value.dim() > len(result) and value.shape[0] == 1:
        value = value.squeeze(0)
    value = value.expand(result)
    for dim in reversed(added):
        value = value.squeeze(dim)
    for dim in taken:
        value = value.unsqueeze(dim)
    return value


def _write_traced(x: torch.Tensor, spec: Spec, ranges: list[Any], value: Any) -> None:
    """Write a range in a captured step, where it is not known at which index a piece begins.

    In such dimensions a mask says which of this rank's places are in the range.
    """
    if not all(len(places) for places in ranges):
        return
    local: list[slice] = []
    mask: Any = None
    if not isinstance(value, torch.Tensor):
        value = torch.full((1,) * x.dim(), value, dtype=x.dtype, device=x.device)
    value = value.to(x.dtype)
    for dim, (places, (offset, length)) in enumerate(zip(ranges, spec.region, strict=True)):
        if isinstance(places, range) and not isinstance(offset, torch.Tensor):
            local.append(slice(places.start, places.stop, places.step))
            continue
        local.append(slice(None))
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        start = places.start if isinstance(places, range) else places
        stride = places.step if isinstance(places, range) else 1
        at = torch.arange(length, device=x.device) + offset - start
        step = at.div(stride, rounding_mode="floor")
        inside = (at >= 0) & (step < len(places)) & (step * stride == at)
        mask = inside.view(shape) if mask is None else mask & inside.view(shape)
        if value.shape[dim] != 1:
            value = value.index_select(dim, step.clamp(0, len(places) - 1))
    part = x[tuple(local)]
    part.copy_(torch.where(mask, value, part))


def _find_picked_places(entry: Any, size: int, dim: int) -> Any:
    """The indices that an int or a slice picks from a dimension of `size`: a range, or a tensor."""
    if isinstance(entry, torch.Tensor):
        with Local():
            return torch.arange(size, device=entry.device)[entry.reshape(1)]  # if it is in bounds
    if isinstance(entry, slice):
        places = range(*entry.indices(size))
        if places.step < 1:
            raise ValueError("step must be greater than zero")
        return places
    if not -size <= entry < size:
        raise IndexError(f"index {entry} is out of bounds for dimension {dim} with size {size}")
    return range(entry % size, entry % size + 1)


def _write_whole(x: DTensor, spec: Spec, index: Any, value: Any) -> None:
    """Gather x, write, and take the pieces back."""
    whole = spec.invariant_of(spec.shape)
    value = _redistribute_value(value, whole)
    entries = index if isinstance(index, tuple) else (index,)
    places = tuple(
        _redistribute_value(e, whole) if isinstance(e, torch.Tensor) else e for e in entries
    )
    with Local():
        if spec is whole:
            _write(x, places, value)
            return
        copy = moved(x, spec, whole, "setitem", "implicit").clone()
        _write(copy, places, value)
        torch.Tensor.copy_(x, moved(copy, whole, spec_for_write_into(spec), "setitem", "implicit"))
