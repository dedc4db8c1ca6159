"""Functions of lists of tensors that need the other ranks once, not once for each tensor.

The norms of all gradients are one small all-reduce, whatever the gradients' layouts; so is the
search for infinities of a GradScaler. Both read gradients: those that are pending are reduced
first, in buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd.graph import increment_version
from torch.optim.optimizer import _foreach_supported_types as _in_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _in_clip

from partita.comm import Wire
from partita.layout import Layout
from partita.redistribute import plan

from .autograd import moved
from .dispatch import op_of
from .dtensor import DTensor, tagged
from .foreach import run_foreach
from .grad_buckets import pending_gradients, reduce_pending_gradients
from .spec import spec_of
from .tensor_overrides import OVERRIDES

__all__ = ["norms"]


def norms(tensors: Sequence[torch.Tensor], ord: float = 2.0) -> list[torch.Tensor]:
    """The norm of each tensor, DTensors on any meshes and plain ones: plain scalars, no gradient.

    Equal on every rank, and in float32 at least. Costs one small all-reduce for each mesh over
    which any of the tensors is split. None of them may be pending.
    """
    with Local(), torch.no_grad():
        parts = _local_norms([_hide_padding(t, ord) for t in tensors], ord)
        split: dict[Wire, list[int]] = {}
        for i, t in enumerate(tensors):
            if isinstance(t, DTensor) and t._spec.is_sharded:
                split.setdefault(t._spec.wire, []).append(i)
        for wire, places in split.items():
            layouts = [tensors[i]._spec.layout for i in places]  # type: ignore[attr-defined]
            axes = {a for layout in layouts for stack in layout.shards for a in stack}
            dtype = torch.float64 if any(parts[i].dtype == torch.float64 for i in places) else None
            values = torch.stack([parts[i].to(dtype or torch.float32) for i in places])
            if not math.isinf(ord):
                # Of the ranks that hold the same piece, only the first counts it.
                copied = [[a for a in axes if not x.placement(a).is_shard()] for x in layouts]
                # The power comes first: 0 is what adds nothing, and 0 ** ord is not.
                values = values if ord in (0, 1) else values**ord
                values = torch.where(wire.is_first_along(copied, values.device), values, 0)
            whole = _reduce_norms(values, wire, axes, ord, "norms")
            whole = whole if math.isinf(ord) or ord in (0, 1) else whole ** (1 / ord)
            for i, value in zip(places, whole, strict=True):
                parts[i] = value.to(parts[i].dtype)
    return parts


def _hide_padding(t: torch.Tensor, ord: float) -> torch.Tensor:
    """`t` with values in its padding that do not change its norm."""
    if not isinstance(t, DTensor) or not t._spec.wire.padded:
        return t
    nothing = math.inf if ord < 0 else 0.0
    return t._spec.wire.fill_padding(t, t._spec.layout, nothing)


def _local_norms(tensors: Sequence[torch.Tensor], ord: float) -> list[torch.Tensor]:
    """The norm of each piece, by one kernel for each dtype and device."""
    parts: list[Any] = [None] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        alike.setdefault((t.dtype, t.device, t.numel() > 0), []).append(i)
    for (dtype, device, filled), places in alike.items():
        found: Sequence[torch.Tensor]
        real = torch.empty((), dtype=dtype).abs().dtype  # of complex numbers, too
        wide = real if real in (torch.float32, torch.float64) else torch.float32
        if not filled:  # a norm that changes no sum of powers, no maximum and no minimum
            nothing = math.inf if ord < 0 else 0.0
            found = [torch.full((), nothing, dtype=wide, device=device) for _ in places]
        elif real is dtype:
            found = torch._foreach_norm([tensors[i] for i in places], ord, wide)
        else:
            found = [torch.linalg.vector_norm(tensors[i].abs(), ord) for i in places]
        for i, part in zip(places, found, strict=True):
            parts[i] = part
    return parts


def _reduce_norms(
    values: torch.Tensor, wire: Wire, axes: set[str], ord: float, asked: str
) -> torch.Tensor:
    op = "sum" if not math.isinf(ord) else "max" if ord > 0 else "min"
    shape = tuple(values.shape)
    before = Layout(shape, partial=tuple((a, op) for a in wire.mesh.names if a in axes))
    for move in plan(before, Layout(shape), wire.mesh, values.element_size()).moves:
        values = wire.carry(move, values, op=asked, reason="settle")
    return values


# -- torch's own functions -------------------------------------------------------------------------


def _foreach_norm(
    tensors: Sequence[torch.Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> Sequence[torch.Tensor]:
    """torch._foreach_norm. Where the tensors live on several meshes the norms are plain."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        given = {} if dtype is None else {"dtype": dtype}
        return run_foreach(torch._foreach_norm, (tensors, ord), given, op_of(torch._foreach_norm))
    reduce_pending_gradients(pending_gradients(tensors))
    tensors = [_reduce_partial(t) for t in tensors]
    found = [
        n.to(dtype or torch.empty((), dtype=t.dtype).abs().dtype)
        for n, t in zip(norms(tensors, ord), tensors, strict=True)
    ]
    wires = {t._spec.wire if isinstance(t, DTensor) else None for t in tensors}
    (wire, *others) = wires
    if wire is None or others:
        return tuple(found)
    spec = spec_of(Layout(()), wire)
    return tuple(tagged(n, spec) for n in found)


def _reduce_partial(t: torch.Tensor) -> torch.Tensor:
    """`t`, reduced if it is Partial."""
    if not isinstance(t, DTensor) or not t._spec.is_pending:
        return t
    after = t._spec.reduced
    return tagged(moved(t, t._spec, after, "norms", "implicit"), after)


def _check_and_unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """A GradScaler's kernel: it unscales gradients, and finds on all ranks the infinities of
    any."""
    reduce_pending_gradients(pending_gradients(grads))
    with Local():
        mine = torch.zeros_like(found_inf)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, mine, inv_scale)  # type: ignore[arg-type]
        increment_version(grads)  # the kernel does not count what it changes
        wires = dict.fromkeys(t._spec.wire for t in grads if isinstance(t, DTensor))
        for wire in wires:
            mine = _reduce_norms(mine, wire, set(wire.mesh.names), math.inf, "GradScaler")
        found_inf.copy_(torch.maximum(found_inf, mine))


OVERRIDES[torch._foreach_norm] = _foreach_norm
OVERRIDES[torch._amp_foreach_non_finite_check_and_unscale_] = _check_and_unscale

# torch's clip and optimizers use foreach functions for the types in these lists. They are private;
# torch's own DTensor enters itself in the same way.
for _types in (_in_optimizers, _in_clip):
    if DTensor not in _types:
        _types.append(DTensor)
