"""Assignment to an index: what `x[...] = value` writes on each rank.

Ints and slices pick a range of each dimension, of which each rank holds a part: it writes that
part, and nothing is sent but a value that is sharded or pending. Into shares of a sum the first
rank writes the value and the others zeros. An index with tensors is applied to the gathered
tensor, unless it is a mask for a number; so is what is written into a pending maximum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Layout

from .aliasing import write_through_copy
from .autograd import moved
from .dtensor import DTensor
from .mixed_operands import admit, alias_as_invariant, give_history
from .spec import Spec, spec_for_write_into, spec_of

__all__ = ["set_item"]

_write = torch.Tensor.__setitem__
"""Of DTensors it ends in `set_item`, with torch-function disabled in the shard."""


def set_item(x: torch.Tensor, index: Any, value: Any) -> None:
    """`torch.Tensor.__setitem__` where x, the index or the value is a DTensor.

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
    mesh = spec.wire.mesh
    split = [a for a in mesh.names if not spec.layout.placement(a).is_replicate()]
    whole = spec_of(Layout(tuple(spec.shape), invariant=tuple(split)), spec.wire)
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
