"""Construction: functions that make DTensors, of plain tensors, of modules and from nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from partita.comm import Wire, agree, user_line, wire_of
from partita.layout import Fix, LayoutError, Placement
from partita.rules.piece_kernels import narrow_piece

from .agreement import make_no_strides_error
from .dtensor import DTensor, tagged
from .padded_storage import copy_with_room, with_room
from .parameter import can_hold, hold_value, refuse_lazy
from .random import run_with_generator_check
from .spec import Spec, spec_on_mesh

__all__ = [
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "ones",
    "piece_of",
    "place_buffer",
    "rand",
    "randn",
    "spread",
    "zeros",
]


def piece_of(whole: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's piece of a `whole` value in the layout of `spec`, in memory of its own.

    Of a pending axis the first rank takes the value and the others hold zeros.
    """
    part = whole
    for dim, (offset, length) in enumerate(spec.region):
        if length != part.shape[dim]:
            part = narrow_piece(part, dim, offset, length)
    part = part.contiguous()
    if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        # A piece that shares memory would keep the whole value alive. One without elements, which
        # is contiguous as it is, has the strides that other ranks' pieces have.
        part = copy_with_room(part, spec)
    _keep_on_first(part, spec)
    return part


def _keep_on_first(local: torch.Tensor, spec: Spec) -> None:
    """Of the ranks whose shares are summed, the first keeps what it holds, the others zeros."""
    summed = [axis for axis, op in spec.layout.partial if op == "sum"]
    if summed:
        local.masked_fill_(~spec.wire.is_first_along([summed], local.device)[0], 0)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Spread a tensor over a mesh: each rank keeps its part of rank `src_data_rank`'s value.

    Args:
        tensor: a leaf, of the same shape and dtype on every rank.
        placements: one per mesh axis; all Replicate where not given.
        src_data_rank: the rank, in mesh order, whose value counts; it is sent to all (its bytes
            are not in the ledger: this is setting up, not the program). None: each rank's own
            value, which the caller knows to be equal, and nothing is sent.

    Returns:
        A leaf that requires grad if `tensor` does.

    Raises:
        LayoutError: placements that do not fit the mesh or the shape; ranks that pass different
            shapes, dtypes or placements; a tensor with a history; a DTensor on another mesh.
    """
    if isinstance(tensor, DTensor):
        if device_mesh is not None and wire_of(device_mesh) is not tensor._spec.wire:
            raise LayoutError(
                "distribute_tensor of a DTensor that lives on another mesh",
                place=user_line(),
                fixes=(Fix("pt.distribute_tensor(x.full_tensor(), mesh, placements)"),),
            )
        return tensor.redistribute(placements=placements)
    if not tensor.is_leaf:
        raise LayoutError(
            "distribute_tensor needs a leaf: the gradient of this tensor flows on",
            place=user_line(),
            fixes=(
                Fix("pt.distribute_tensor(t.detach(), ...)", "without a gradient"),
                Fix("pt.DTensor.from_local(t, ...)", "differentiable"),
            ),
        )
    if tensor.layout is not torch.strided:
        raise make_no_strides_error("distribute_tensor", tensor)
    spec = spec_on_mesh(device_mesh, tensor.shape, placements)
    if src_data_rank is not None:
        agree("distribute_tensor", f"{spec.layout} of {tensor.dtype}", spec.wire)
        if not 0 <= src_data_rank < spec.wire.mesh.size():
            raise LayoutError(
                f"distribute_tensor: src_data_rank={src_data_rank} is no rank of the mesh",
                place=user_line(),
                operands=(f"mesh {spec.wire.mesh} has ranks 0 to {spec.wire.mesh.size() - 1}",),
                reason="ranks are counted along the mesh, row by row",
                fixes=(Fix("src_data_rank=0"), Fix("src_data_rank=None", "each rank's own value")),
            )
    return spread(tensor, spec, src_data_rank).requires_grad_(tensor.requires_grad)


def spread(tensor: torch.Tensor, spec: Spec, src_data_rank: int | None = 0) -> DTensor:
    """`distribute_tensor` of a plain `tensor` as `spec`, which needs no gradient yet."""
    with torch.no_grad():
        value = tensor.detach()
        if value.is_meta:
            return tagged(torch.empty(spec.local_shape, dtype=value.dtype, device="meta"), spec)
        if src_data_rank is not None:
            value = spec.wire.from_first(value, src_data_rank)
        return tagged(piece_of(value, spec), spec)


def distribute_module(
    module: torch.nn.Module,
    device_mesh: Any,
    partition_fn: Callable[[str, torch.nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> torch.nn.Module:
    """Make each parameter and buffer of `module` a DTensor, as `partition_fn` says, else Replicate.

    As `torch.distributed.tensor.distribute_module`; the arguments mean the same.
    """
    refuse_lazy(module, "distribute_module")
    wire = wire_of(device_mesh)
    for name, part in module.named_modules():
        before = dict(part.named_parameters(recurse=False))
        if partition_fn is not None:
            partition_fn(name, part, device_mesh)
        for key, p in list(part.named_parameters(recurse=False)):
            _put_on_mesh(part, key, before.get(key, p), device_mesh)
        for key, b in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            if not isinstance(b, DTensor):
                part._buffers[key] = place_buffer(
                    b, wire, lambda b: distribute_tensor(b, device_mesh)
                )
    if input_fn is not None:
        module.register_forward_pre_hook(lambda m, args: input_fn(m, args, device_mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda m, args, out: output_fn(m, out, device_mesh))
    return module


def place_buffer(b: torch.Tensor, wire: Wire, spread: Callable[[torch.Tensor], DTensor]) -> DTensor:
    """What takes the place of the plain buffer `b` on a mesh: the same DTensor for all modules that
    share `b`, whenever they are put there. `spread` makes it."""
    known = _PLACED.get(b)
    placed = None if known is None else known()
    if placed is None or placed._spec.wire is not wire:
        placed = spread(b)
        _PLACED[b] = weakref.ref(placed)
    return placed


_PLACED: Any = WeakIdKeyDictionary()
"""By a plain buffer that was exchanged, a weak reference to what has its place now."""


def _put_on_mesh(part: torch.nn.Module, key: str, before: Any, device_mesh: Any) -> None:
    """Put the value of parameter `key` into the parameter that `part` had `before`, as a DTensor:
    others know that by identity."""
    now: Any = part._parameters[key]
    value = now if isinstance(now, DTensor) else distribute_tensor(now.detach(), device_mesh)
    if now is before and value is now:
        return
    if not can_hold(before, value) or before.shape != value.shape:
        setattr(part, key, torch.nn.Parameter(value.detach(), now.requires_grad))
        return
    grad = hold_value(before, value)
    before.requires_grad_(now.requires_grad)
    if grad is not None:
        before.grad = grad if isinstance(grad, DTensor) else distribute_tensor(grad, device_mesh)
    setattr(part, key, before)  # as the user's code sets it: recurrent layers keep a list of theirs


# -- factories -------------------------------------------------------------------------------------


def _normalize_size(size: tuple[Any, ...]) -> tuple[int, ...]:
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        return tuple(size[0])
    return tuple(size)


def _make_filled(
    make: Callable[..., torch.Tensor],
    size: tuple[Any, ...],
    device_mesh: Any,
    placements: Sequence[Placement] | None,
    requires_grad: bool,
    pending: bool,
    **options: Any,
) -> DTensor:
    spec = spec_on_mesh(device_mesh, _normalize_size(size), placements)
    options.setdefault("device", spec.wire.device)
    local = with_room(make(spec.local_shape, **options), spec)
    if spec.is_pending and not pending:
        _keep_on_first(local, spec)
    return tagged(local, spec).requires_grad_(requires_grad)


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """As torch.zeros: global `size`, each rank making its own piece only."""
    return _make_filled(
        torch.zeros, size, device_mesh, placements, requires_grad, True, dtype=dtype
    )


def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """As torch.empty: global `size`, each rank making its own piece only."""
    return _make_filled(
        torch.empty, size, device_mesh, placements, requires_grad, True, dtype=dtype
    )


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """As torch.ones: global `size`, each rank making its own piece only."""
    return _make_filled(
        torch.ones, size, device_mesh, placements, requires_grad, False, dtype=dtype
    )


def full(
    size: Any,
    fill_value: Any,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """As torch.full: global `size`, each rank making its own piece only."""

    def make_full_piece(shape: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.full(shape, fill_value, **options)

    return _make_filled(
        make_full_piece, (size,), device_mesh, placements, requires_grad, False, dtype=dtype
    )


def _make_drawn(
    make: Callable[..., torch.Tensor],
    size: tuple[Any, ...],
    device_mesh: Any,
    placements: Sequence[Placement] | None,
    requires_grad: bool,
    dtype: torch.dtype | None,
) -> DTensor:
    """A tensor of random numbers: every rank draws all of one device's, and keeps its piece."""
    wire: Wire = wire_of(device_mesh)
    spec = spec_on_mesh(device_mesh, _normalize_size(size), placements)
    draw = partial(make, _normalize_size(size), dtype=dtype, device=wire.device)
    whole = run_with_generator_check(draw, make.__name__, wire)
    return tagged(piece_of(whole, spec), spec).requires_grad_(requires_grad)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """As torch.randn, with the values that one device with the same seed has, in every layout."""
    return _make_drawn(torch.randn, size, device_mesh, placements, requires_grad, dtype)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """As torch.rand, with the values that one device with the same seed has, in every layout."""
    return _make_drawn(torch.rand, size, device_mesh, placements, requires_grad, dtype)
