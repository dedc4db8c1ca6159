"""Overrides: attributes and methods of a DTensor that are not ops.

`OVERRIDES` (`op_facts`) maps functions of torch to them. This module has `x.data`, `x.T`,
conversions to Python (`item`, `numpy`, ...), `x[...] = value`, memory and copies. `.grad` and
`backward` are in `dtensor_gradients`. All other functions are ops: they have rules, or their
operands are gathered.
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction  # type: ignore[attr-defined]  # for modes, too
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._C import _is_torch_function_enabled as _global_view

from partita.comm import describe_saved_mesh, find_saved_wire, is_alone
from partita.comm.device import is_seen_by_processes, keys_of_kernels
from partita.layout import Fix, Layout, LayoutError

from .aliasing import (
    compose_named_calls,
    connect_copy,
    describe_views,
    global_strides,
    make_meta_twin,
    refuse_partial_overlap,
    write_through_copy,
)
from .arguments import OpCall, alias_as_invariant, check_plain_tensor, give_history, read_number
from .dispatch import run_gathered
from .dtensor import DTensor, as_dtensor, make_memory_error, move_local
from .dtensor_gradients import gradient_of
from .op_facts import ADDRESSES, OVERRIDES, find_getter, form_of, implements
from .origins import describe_reading, is_beside_program
from .tensor_state import (
    HERE,
    ON_NEW_SPEC,
    OURS,
    WRITTEN_UNSEEN,
    Function,
    Spec,
    count_writes,
    current,
    make_layout_error,
    note_other_memory,
    own_state,
    spec_for_write_into,
    spec_of,
    state_of,
)
from .uneven_pieces import copy_with_room, find_padded, has_room, with_room

T: Any = torch.Tensor

# -- the shard behind it ---------------------------------------------------------------------------

_data: Any = torch._C.TensorBase.data


@implements(find_getter("data"))
def _get_data(x: DTensor) -> DTensor:
    # Writes through the result are not counted in x's version, but in the version of an alias that
    # all results of this getter share.
    state = own_state(x)
    if state.copied_view is not None:  # a write through it must reach the base
        return T.detach(x)
    if (alias := HERE.trace.alias_data(x)) is not None:
        return as_dtensor(alias, x._spec)
    with local_ops():
        now = _data.__get__(x)
        known = state.data
        if known is None or not show_same_memory(known, now):
            state.unseen_writes += 0 if known is None else count_writes(known)
            state.data = known = now
            # Other tensors may view this memory: they find the mark in its storage.
            vars(now.untyped_storage())[WRITTEN_UNSEEN] = True
        return as_dtensor(known.detach(), x._spec)


def show_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.stride() == other.stride()
        and one.shape == other.shape
        and one.dtype == other.dtype
    )


@implements(T.data.__set__)
def _set_data(x: torch.Tensor, value: Any) -> None:
    if isinstance(x, DTensor) and isinstance(value, DTensor):
        value = current(value)
        before, after = value._spec, x._spec
        with local_ops(), torch.no_grad():
            alike = before.wire is after.wire and before.shape == after.shape
            is_kept = x.requires_grad or isinstance(x, nn.Parameter)  # also a frozen parameter
            if is_kept and alike and before is not after:
                # The optimizer's state, the gradient and ZeRO's blocks depend on its layout.
                value = as_dtensor(
                    move_local(value, before, after, "x.data = y", "explicit"), after
                )
            _data.__set__(x, value)
        own_state(x).retyped = None  # torch does not count this as a write
        own_state(x).copied_view = None
        note_other_memory(x)
        x._spec = spec_of(value._spec.layout, value._spec.wire)
        return
    fixes = [
        Fix("x.data.copy_(y)", "for a y that is whole on every rank: x keeps its layout"),
        Fix("y = pt.distribute_tensor(y, mesh, placements)", "one copy from rank 0"),
        Fix("y = y.full_tensor()", "the whole value, plain"),
        Fix("y = y.to_local()", "this rank's piece"),
    ]
    fixes = fixes[:2] if isinstance(x, DTensor) else fixes[2:]
    if isinstance(x, nn.Parameter):
        fixes.append(Fix("do it before pt.zero or pt.parallelize", "if a layer gets another size"))
    raise make_layout_error(
        "x.data = y needs two DTensors or two plain tensors",
        *fixes,
        reason="a tensor cannot become a DTensor, or stop being one, by its data",
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
    """Returns the whole value as a plain tensor without history, on every rank."""
    if not isinstance(x, DTensor):
        return x
    spec = x._spec
    if all(p.is_invariant() or p.is_replicate() for p in spec.placements):
        return move_local(x, spec, spec, op, "explicit")
    with torch.no_grad(), spec.wire.reading(describe_reading(x, op, spec)):
        return move_local(x, spec, spec_of(Layout(spec.layout.shape), spec.wire), op, "explicit")


def _call_on_full_value(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(T, name)(_gather_full_value(x, name), *args, **kwargs)


for _name in (
    "item tolist __bool__ __int__ __float__ __index__ __complex__ __contains__ is_nonzero"
).split():
    OVERRIDES[getattr(T, _name)] = partial(_call_on_full_value, _name)


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
    raise make_layout_error(
        "dlpack cannot take a DTensor",
        Fix("x.to_local().__dlpack__()", "this rank's piece"),
        Fix("x.full_tensor().__dlpack__()", "the whole value"),
        reason="the other side would take this rank's piece for the whole tensor",
    )


def _raise_memory_error(name: str, *args: Any, **kwargs: Any) -> Any:
    raise make_memory_error(name)


for _name in ("resize_", "resize_as_", "as_strided_", "apply_", "map_", "share_memory_"):
    OVERRIDES[getattr(T, _name)] = partial(_raise_memory_error, _name)

# -- assignment to an index ------------------------------------------------------------------------

_write = torch.Tensor.__setitem__
"""For DTensors it calls `set_item`, with torch-function disabled in the shard."""


@implements(torch.Tensor.__setitem__)
def set_item(x: torch.Tensor, index: Any, value: Any) -> None:
    """Runs `x[index] = value` if x, the index or the value is a DTensor.

    - Ints and slices: each rank writes the part of the range that it holds. Only a sharded or
      Partial value is sent. Into a Partial sum the first rank writes the value, and the others
      write zeros.
    - A mask of x's shape, with a number as value: each rank fills its piece.
    - Other indices with tensors, and ranges of a Partial max or min: `x` is gathered.

    Raises:
        LayoutError: x is a plain tensor, but not a whole value that is equal on every rank.
    """
    if not isinstance(x, DTensor):
        _write_plain(x, index, value)
        return
    spec = x._spec
    if spec.is_copy:
        write_through_copy(_write, x, index, value)
        return
    if isinstance(value, DTensor):
        refuse_partial_overlap("setitem", x, value, lambda whole: whole[index])
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
        check_plain_tensor(x, wire, "setitem", with_gradient=True)
        set_item(alias_as_invariant(x, wire), index, value)
        give_history(x, wire)
        return
    entries = index if isinstance(index, tuple) else (index,)
    whole = tuple(e.full_tensor() if isinstance(e, DTensor) else e for e in entries)
    _write(x, whole, value)


def _is_basic(entry: Any) -> bool:
    is_index = isinstance(entry, int) and not isinstance(entry, bool)
    return (
        entry is None or entry is ... or isinstance(entry, slice) or is_index or _is_number(entry)
    )


def _is_number(entry: Any) -> bool:
    """True if the entry is an integer in a 0-d tensor, which can be used without reading it."""
    kinds = (torch.bool, torch.uint8)
    return isinstance(entry, torch.Tensor) and not entry.dim() and entry.dtype not in kinds


def _is_mask(x: DTensor, index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.shape == x.shape


def _redistribute_value(value: Any, spec: Spec, x: torch.Tensor | None = None) -> Any:
    """Returns `value` whole on every rank, or Partial where `spec` is."""
    layout = spec.layout
    if not isinstance(value, torch.Tensor):
        if x is None or not layout.partial:
            return value
        value = torch.tensor(value, dtype=x.dtype, device=x.device)
    whole = spec_of(Layout(tuple(value.shape), (), layout.partial, layout.invariant), spec.wire)
    if isinstance(value, DTensor):
        # Unchanged if nothing is redistributed, because an alias may have other strides.
        same = value._spec is whole
        return value if same else move_local(value, value._spec, whole, "setitem", "implicit")
    check_plain_tensor(value, spec.wire, "setitem")
    if not layout.partial:
        return value
    before = spec_of(Layout(tuple(value.shape)), spec.wire)
    return move_local(value, before, whole, "setitem", "implicit")


def _write_range(x: DTensor, spec: Spec, entries: list[Any], value: Any) -> None:
    """Write the part of the range that this rank holds; every rank takes the same steps."""
    used = sum(e is not None and e is not Ellipsis for e in entries)
    if used > len(spec.shape):
        raise IndexError(f"too many indices for tensor of dimension {len(spec.shape)}")
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    entries = entries[:at] + [slice(None)] * (len(spec.shape) - used) + entries[at + 1 :]
    # Dimensions of x[...]: None adds one to those of x, and an int removes one.
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
        with local_ops():
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
    with local_ops():
        value = _align_value_dims(value, result, added, taken)
        if isinstance(value, torch.Tensor):
            for dim, (first, count) in enumerate(pieces):
                if count != value.shape[dim]:
                    value = value.narrow(dim, first if count else 0, count)
        _write(x, tuple(local), value)


def _align_value_dims(value: Any, result: list[int], added: list[int], taken: list[int]) -> Any:
    """Returns a value with the shape of `x[...]`, with its dimensions in the order of x's."""
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
    """Write a range whose bounds are in tensors.

    The bounds of the range are tensors if the index contains tensors. The bounds of this rank's
    piece are tensors in a captured step. In such dimensions, and in split ones, a mask marks this
    rank's elements in the range.
    """
    if not all(len(places) for places in ranges):
        return
    local: list[slice] = []
    mask: Any = None
    if not isinstance(value, torch.Tensor):
        value = torch.full((1,) * x.dim(), value, dtype=x.dtype, device=x.device)
    value = value.to(x.dtype)
    for dim, (places, (offset, length)) in enumerate(zip(ranges, spec.region, strict=True)):
        if isinstance(places, range) and length == spec.shape[dim]:  # this rank has all of it
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
    """Returns the indices that an int or slice selects in a dimension: a range or a tensor."""
    if isinstance(entry, torch.Tensor):
        with local_ops():
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
    """Run `x[index] = value` on the gathered tensor, and write the pieces back to x."""
    whole = spec.invariant_of(spec.shape)
    value = _redistribute_value(value, whole)
    entries = index if isinstance(index, tuple) else (index,)
    places = tuple(
        _redistribute_value(e, whole) if isinstance(e, torch.Tensor) else e for e in entries
    )
    with local_ops():
        if spec is whole:
            _write(x, places, value)
            return
        copy = move_local(x, spec, whole, "setitem", "implicit").clone()
        _write(copy, places, value)
        torch.Tensor.copy_(
            x, move_local(copy, whole, spec_for_write_into(spec), "setitem", "implicit")
        )


# -- memory ----------------------------------------------------------------------------------------
# Shape and size are those of the global tensor. Reading that many elements from the address of a
# local tensor would read beyond its memory. Properties with a global meaning are computed: strides,
# their order, `is_contiguous`. Others (`ADDRESSES`) raise on all ranks, unless torch-function is
# disabled or every rank holds the whole value.


@implements(T.stride)
def _global_stride(x: DTensor, dim: int | None = None) -> Any:
    strides = global_strides(current(x))
    if dim is None:
        return strides
    return torch.empty_strided(x.shape, strides, device="meta").stride(dim)  # torch checks `dim`


@implements(T.is_contiguous)
def _is_contiguous(
    x: DTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    with local_ops():
        return make_meta_twin(current(x)).is_contiguous(memory_format=memory_format)


@implements(T.dim_order)
def _dim_order(x: DTensor, **options: Any) -> tuple[int, ...]:
    with local_ops():
        return make_meta_twin(current(x)).dim_order(**options)


@implements(torch.as_strided, T.as_strided)
def _as_strided(
    x: DTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """Runs `x.as_strided(...)` on the gathered tensor; strides count its elements.

    Raises:
        LayoutError: x is a part of a larger tensor, or not contiguous, and so has other strides.
    """
    if not x._spec.is_whole and (not x.is_contiguous() or _is_part_of_another(x)):
        raise make_layout_error(
            "as_strided cannot take this DTensor",
            Fix("x.contiguous().as_strided(...)", "counts in x's own elements"),
            Fix("x.full_tensor().as_strided(...)", "the whole value"),
            operands=(f"x  {x._spec.layout.brief()} on {x._spec.wire.mesh}",),
            reason="it addresses memory, and x is a part of a larger tensor, or in another order",
        )
    args = (x, size, stride) if storage_offset is None else (x, size, stride, storage_offset)
    return run_gathered(OpCall(form_of(torch.as_strided), torch.as_strided, args, {}))


def _is_part_of_another(x: DTensor) -> bool:
    if x._spec.is_copy:
        return True
    with local_ops():
        return x.untyped_storage().nbytes() != math.prod(x.shape) * x.element_size()


# -- properties without a global meaning -----------------------------------------------------------


def _answer_if_replicated(
    answer: Function, name: str, fix: Fix, x: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns `answer(x, *args)` if this rank has the whole value; otherwise raises an error.

    Args:
        name, fix: the name of the function and the suggested fix, for the error.
    """
    for t in (x, *args):
        if isinstance(t, DTensor) and not t._spec.is_whole:
            raise _make_piece_error(name, t, fix)
    x = current(x) if isinstance(x, DTensor) else x
    with local_ops():
        return answer(x, *args, **kwargs)


def _make_piece_error(name: str, x: DTensor, fix: Fix) -> LayoutError:
    spec = x._spec
    held = "share" if spec.is_pending else "piece"
    return make_layout_error(
        f"{name} of a DTensor: this rank holds only a {held} of it",
        Fix("pt.full_state_dict(model)", "a model's whole values, for files of other programs"),
        Fix("x.full_tensor()", "one whole value"),
        fix,
        operands=(f"x  {spec.layout.brief()} on {spec.wire.mesh}",),
        reason=f"x's shape says more than the {held} has: a reader would run over its end",
    )


_ADDRESSES: dict[str, Any] = {f"{name}()": getattr(T, name) for name in ADDRESSES}
_ADDRESSES["__cuda_array_interface__"] = T.__cuda_array_interface__.__get__
for _call, _method in _ADDRESSES.items():
    _fix = Fix(f"x.to_local().{_call}", "of this rank's piece")
    _answer = partial(_answer_if_replicated, _method, _call.removesuffix("()"), _fix)
    OVERRIDES[_method] = _answer

# -- copies and pickles ----------------------------------------------------------------------------


@implements(T.copy_)
def _copy_into(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """Run `x.copy_(src)`: redistribute src to the layout of x."""
    if not isinstance(x, DTensor):
        wire = src._spec.wire  # type: ignore[attr-defined]
        _copy_into(alias_as_invariant(x, wire), src, non_blocking)
        give_history(x, wire)
        return x
    spec = x._spec
    if spec.is_copy:
        return write_through_copy(T.copy_, x, src, non_blocking)
    refuse_partial_overlap("copy", x, src)
    if not isinstance(src, DTensor):
        check_plain_tensor(src, spec.wire, "copy_")
        src = as_dtensor(src.view_as(src), spec_of(Layout(tuple(src.shape)), spec.wire))
    fitting = _fit_broadcast_spec(src, spec)
    if src._spec is not fitting:
        fitting = spec_for_write_into(fitting)
    with local_ops():
        local = (
            src
            if src._spec is fitting
            else move_local(src, src._spec, fitting, "copy_", "implicit")
        )
        torch._C.TensorBase.copy_(x, local, non_blocking)
    return x


def _fit_broadcast_spec(src: DTensor, spec: Spec) -> Spec:
    """Returns the spec to which `src` is redistributed before it is copied into `spec`.

    Raises:
        RuntimeError: `src` cannot be broadcast to the shape.
    """
    shape, wanted = tuple(src._spec.shape), spec.layout
    if shape == wanted.shape:
        return spec
    if torch.broadcast_shapes(shape, wanted.shape) != spec.shape:
        raise RuntimeError(f"copy_ of a tensor of {shape} into one of {tuple(wanted.shape)}")
    last = zip(shape, wanted.shape[-len(shape) :], wanted.shards[-len(shape) :], strict=True)
    shards = tuple(axes if n == m else () for n, m, axes in last) if shape else ()
    return spec_of(Layout(shape, shards, wanted.partial, wanted.invariant), spec.wire)


@implements(T.__deepcopy__)
def _deepcopy_dtensor(x: DTensor, memo: dict[int, Any]) -> DTensor:
    if id(x) in memo:
        return memo[id(x)]
    with local_ops(), torch.no_grad():
        if not x.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        new: DTensor = _copy_memory(x, memo)
        new.requires_grad_(x.requires_grad)
        # Torch does not copy the gradient of a parameter.
        if not getattr(x, "_is_param", False) and (grad := gradient_of(x)) is not None:
            new.grad = _deepcopy_dtensor(grad, memo)
    for name, value in x.__dict__.items():
        if name not in OURS:
            new.__dict__[name] = copy.deepcopy(value, memo)
    memo[id(x)] = new
    return new


def _copy_memory(x: DTensor, memo: dict[int, Any]) -> DTensor:
    """Returns a copy of `x` without history, for `copy.deepcopy`. As in torch, copies of tensors
    that share memory share memory, too, except copies of parameters.
    """
    spec, local = spec_of(x._spec.layout, x._spec.wire), x.detach()
    copied = state_of(x).copied_view
    if copied is not None:
        new = as_dtensor(current(x).detach().clone(), spec.as_copy)
        source = _copy_memory(copied.source, memo)
        seen = count_writes(source)
        own_state(new).copied_view = replace(
            copied, source=source, source_writes=seen, retaken=None
        )
        return new
    storage = local.untyped_storage()
    has_memory = storage.device.type != "meta" and not (local.is_conj() or local.is_neg())
    if getattr(x, "_is_param", False) or not has_memory:
        return as_dtensor(_clone_piece(local, spec), spec)
    # Views of one tensor, so that torch counts a write to one for all.
    bases = memo.setdefault("partita", {})  # type: ignore[call-overload]
    if (base := bases.get(storage._cdata)) is None:
        base = torch.empty(0, dtype=torch.uint8, device=local.device)
        bases[storage._cdata] = base.set_(copy.deepcopy(storage, memo))
    base = base[: len(base) // local.itemsize * local.itemsize].view(local.dtype)
    new = base.as_strided(local.size(), local.stride(), local.storage_offset())
    return as_dtensor(new.detach(), spec)


def _clone_piece(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Returns a copy of a rank's piece, with room for padding where the piece has it."""
    if find_padded(local, spec.padded_shape) is not None:
        return copy_with_room(local, spec)
    return local.clone()


def _rebuild(
    local: torch.Tensor,
    mesh: tuple[Any, ...],
    layout: str,
    at: tuple[int, ...],
    names: dict[str, Any],
    view: tuple[torch.Tensor, str, list[Any]] | None = None,
    memory: dict[Any, Any] | None = None,
) -> DTensor:
    """Returns the DTensor that was pickled. `torch.load(weights_only=True)` allows this function.

    Args:
        view: for a view copy: this rank's piece of its base, the base's layout, and the calls that
            make the view (`describe_views`).
        memory: a dictionary for this load, the same for all tensors that were in one memory, and
            for view copies of them. Its "pair" is in one memory, except after `pickle.loads`, which
            keeps no memory that tensors share.

    Raises:
        LayoutError: this rank has no such mesh, or `local` is another rank's piece.
    """
    spec = spec_of(Layout.parse(layout), find_saved_wire(mesh))
    where = spec.wire.mesh
    elsewhere = [
        a
        for i, (a, p) in enumerate(spec.by_axis())
        if at[i] != spec.wire.at[i] and (p.is_shard() or p.is_partial())
    ]
    if elsewhere:
        raise make_layout_error(
            f"the piece of another rank of axis {elsewhere[0]} was loaded",
            Fix("torch.save(..., f'{rank}.pt')", "a file for each rank"),
            Fix("pt.save(state, path)", "one folder for all, on any mesh"),
            Fix("torch.save(x.full_tensor(), path)", "the whole value"),
            operands=(
                f"{spec.layout.brief()} on {where}, saved at {at}, loaded at {spec.wire.at}",
            ),
            reason="torch.save writes the piece of one rank, and only that rank can load it",
        )
    # The piece stays as it is: torch keeps strides, and memory that tensors share.
    base = local.detach() if view is None else view[0].detach()
    if memory is not None and not show_same_memory(*memory["pair"]):
        memory = None
    if memory is not None:
        # Tensors in one memory share a version counter, as views do.
        first = memory.setdefault((base.dtype, base.is_conj(), base.is_neg()), base)
        base = first.as_strided(base.size(), base.stride(), base.storage_offset()).detach()
    users = [] if memory is None else memory.setdefault("users", [])
    piece = base.detach()
    out = as_dtensor(base if view is None else local.detach(), spec)
    out.requires_grad_(local.requires_grad)
    out.__dict__.update(names)
    is_first = view is None and not users and has_room(spec, piece.device)
    if is_first and not is_seen_by_processes(piece.untyped_storage()):
        with local_ops(), torch.no_grad():  # a captured step would copy it in each call
            _data.__set__(out, with_room(piece, spec))
    users.append((out, piece, view))
    if len(users) == 2:  # the first shares its memory after all
        with local_ops(), torch.no_grad():
            first, piece, view = users[0]
            if view is None:
                _data.__set__(first, piece)
    if len(users) > 1:
        _connect_loaded(users)
    return out


def _connect_loaded(users: list[tuple[DTensor, torch.Tensor, Any]]) -> None:
    """Makes loaded view copies change with their base, if other tensors are in its memory, too."""
    for i, (user, base, view) in enumerate(users):
        if view is not None:
            spec = spec_of(Layout.parse(view[1]), user._spec.wire)
            connect_copy(user, as_dtensor(base, spec), compose_named_calls(view[2]), False)
            users[i] = user, base, None


_in_indices: list[Any] = [slice, (Ellipsis, "builtins.Ellipsis")]
torch.serialization.add_safe_globals([_rebuild, *_in_indices])


_one = torch.zeros(1)
_PAIR = _one, _one.detach()
"""Two tensors in one memory, which show after a load if it keeps memory that tensors share."""


def _reduce_piece(x: DTensor) -> tuple[Callable[..., DTensor], tuple[Any, ...]]:
    """Returns the function that makes this rank's `x` again, and its arguments."""
    with local_ops():
        local = current(x).detach().requires_grad_(x.requires_grad)
    names = {k: v for k, v in x.__dict__.items() if k not in OURS}
    spec, view, base = x._spec, None, local
    if (described := describe_views(x)) is not None:
        with local_ops():
            base = described[0].detach()
        view = base, str(described[0]._spec.layout), described[1]
    # Not by the loaded storages: those of empty pieces are always apart.
    memory = vars(base.untyped_storage()).setdefault("saved_as", {"pair": _PAIR})
    mesh = describe_saved_mesh(spec.wire)
    return _rebuild, (local, mesh, str(spec.layout), spec.wire.at, names, view, memory)


@implements(T.__reduce_ex__)
def _reduce_dtensor(x: DTensor, protocol: Any) -> Any:
    wire = x._spec.wire
    if not x._spec.is_whole and not is_alone(wire) and not is_beside_program(wire):
        # A file that only one rank writes would lack the other ranks' pieces. If all ranks write
        # one, nothing is lost. A thread that saves in the background is not compared.
        shown = f" {x.layout_over_mesh}"
        wire.exchange("pickles its piece of a tensor (torch.save):", b"", shown=shown)
    return _reduce_piece(x)


def _copy_dtensor(x: DTensor) -> DTensor:
    """Returns `copy.copy(x)`: a DTensor in the same memory, and a view copy if `x` is one."""
    with local_ops():
        new = as_dtensor(x.detach().requires_grad_(x.requires_grad), x._spec)
    if (copied := state_of(x).copied_view) is not None:
        own_state(new).copied_view = copied
    new.__dict__.update({k: v for k, v in x.__dict__.items() if k not in OURS})
    return new


DTensor.__copy__ = _copy_dtensor  # type: ignore[attr-defined]

# -- numbers that C++ reads ------------------------------------------------------------------------
# In `torch.add(a, b, alpha=s)` with plain a and b, torch accepts a 0-d DTensor s as a number. Since
# no operand is a DTensor, `__torch_function__` is not called. Torch reads the number by the ATen
# operator `_local_scalar_dense`, which would return this rank's local value. When the first DTensor
# is made whose number a rank does not hold, that operator is replaced by one in Python. It costs
# each plain `x.item()` about a microsecond. A program without such DTensors, or with one rank,
# keeps torch's own.

# These functions read memory in C++ without an operator, so only that of one rank.
_value_held = torch._C.TensorBase.tolist


def is_read_in_part(x: torch.Tensor) -> bool:
    """True if this rank must exchange data with other ranks to read the DTensor `x`.

    This is so if it has only a part of the value. A view copy counts, because it may be out of
    date.
    """
    if not (isinstance(x, DTensor) and _global_view()):
        return False
    return x._spec.is_copy or not x._spec.is_whole


_NUMBERS = frozenset((int, float, bool, complex))


def _read_scalar(x: Any) -> Any:
    if type(x) in _NUMBERS:  # a number that C++ has wrapped, as autograd saves it
        return x
    if is_read_in_part(x):
        return read_number(x)
    with DisableTorchFunction():
        value = _value_held(x)
    while type(value) is list:
        (value,) = value
    return value


installed_libraries: list[torch.library.Library] = []
"""The library that overrides the read of a number. Empty until there is a DTensor with one element
that not all ranks have.
"""
_installing = threading.Lock()


def _install_read_kernels(spec: Spec) -> None:
    """Replace the operator that reads a number, at the first spec whose number must be moved."""
    if spec.shape.numel() != 1 or (spec.is_whole and not spec.is_copy):
        return
    with _installing:
        if installed_libraries:
            return
        ON_NEW_SPEC.remove(_install_read_kernels)
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it replaces a kernel
            for key in keys_of_kernels():
                if torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, key):
                    library.impl("_local_scalar_dense", _read_scalar, key, allow_override=True)
        installed_libraries.append(library)


_OPERATOR = "aten::_local_scalar_dense"
ON_NEW_SPEC.append(_install_read_kernels)
