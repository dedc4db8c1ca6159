"""When does a pending gradient become whole? Once, before somebody reads it who needs it whole.

A Replicate parameter has a Partial gradient, and accumulating micro-batches adds shares to shares
and sends nothing. `reduce_gradients` settles all pending gradients together: one all-reduce for
each set of axes and dtype (cut into buckets). Every `torch.optim` optimizer does this by itself
before a step (see `optimizer`). A settled gradient is not reduced again, and
shares that arrive after it was settled still add up (see `tensor.settled`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire
from partita.layout import Layout
from partita.redistribute import plan
from partita.tensor.dtensor import DTensor
from partita.tensor.settled import mark_settled

__all__ = ["BUCKET_BYTES", "clip_grad_norm_", "reduce_gradients"]

BUCKET_BYTES = 64 << 20
"""One all-reduce settles at most about this many bytes of gradients."""


def reduce_gradients(params: Iterable[torch.Tensor]) -> None:
    """Settle the pending gradients of `params`: afterwards each lies where its parameter does.

    Sends each pending byte once. Gradients that are not pending, and plain ones, are left alone, so
    calling it twice reduces once. Noted in the ledger with the reason "settle".
    """
    groups: dict[Any, list[DTensor]] = {}
    for p in params:
        if not isinstance(p, DTensor):
            continue
        grad = p.grad
        if grad is None or not grad._spec.is_pending:
            continue
        key = (grad._spec.wire, grad._spec.layout.partial, grad.dtype, grad.device)
        groups.setdefault(key, []).append(p)
    for (wire, partial, _, _), group in groups.items():
        for bucket in _buckets(group):
            _settle(bucket, wire, partial)


def _buckets(params: list[DTensor]) -> Iterable[list[DTensor]]:
    bucket: list[DTensor] = []
    size = 0
    for p in params:
        nbytes = p._spec.local_shape.numel() * p.element_size()
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += nbytes
    if bucket:
        yield bucket


def _settle(params: list[DTensor], wire: Wire, partial: tuple[tuple[str, str], ...]) -> None:
    """One all-reduce of a flat buffer, written back into the gradients' own memory."""
    mesh = wire.mesh
    pending = {axis for axis, _ in partial}
    others = tuple(a for a in mesh.names if a not in pending)
    # The flat buffers of ranks that hold other shards may differ in size where shards are uneven;
    # the first rank's is the largest, and all are made as long, so that all make one move.
    origin = (0,) * mesh.ndim
    longest = sum(math.prod(p._spec.layout.local_shape(mesh, origin)) for p in params)
    copies = math.prod([mesh.size(a) for a in others])
    before = Layout((longest * copies,), (others,), partial)
    after = Layout((longest * copies,), (others,))
    with Local(), torch.no_grad():
        grads = [p.grad for p in params]
        flat = torch.cat([g.reshape(-1) for g in grads])  # type: ignore[union-attr]
        used = flat.numel()
        if used < longest:
            flat = torch.nn.functional.pad(flat, (0, longest - used))
        moves = plan(before, after, mesh, flat.element_size())
        for move in moves.moves:
            flat = wire.carry(move, flat, op="gradients", reason="settle")
        sizes = [g.numel() for g in grads]  # type: ignore[union-attr]
        pieces = flat[:used].split(sizes)
        torch._foreach_copy_(
            grads, [piece.view(g.shape) for piece, g in zip(pieces, grads, strict=True)]
        )
    for p, g in zip(params, grads, strict=True):
        g._spec = p._spec  # type: ignore[union-attr]
        mark_settled(p)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_, over DTensors and plain tensors together.

    Pending gradients are settled first; the norm costs one small all-reduce for each mesh.

    Returns:
        The norm of all gradients together, a plain scalar, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    params = [p for p in params if p.grad is not None]
    reduce_gradients(params)
    if not params:
        return torch.tensor(0.0)
    norm_type, largest = float(norm_type), math.isinf(norm_type)
    parts: dict[Wire | None, list[torch.Tensor]] = {}
    grads = []
    with Local(), torch.no_grad():
        for p in params:
            g = p.grad
            grads.append(g)
            wire = g._spec.wire if isinstance(g, DTensor) else None
            part = torch.linalg.vector_norm(g, norm_type, dtype=torch.float32)
            if not largest:
                part = part**norm_type
                if wire is not None and not _counts(g):
                    part = torch.zeros_like(part)
            parts.setdefault(wire, []).append(part)
        totals = []
        for wire, values in parts.items():
            stacked = torch.stack(values)
            total = stacked.max() if largest else stacked.sum()
            totals.append(total if wire is None else _over_mesh(total, wire, largest))
        both = torch.stack(totals)
        norm = both.max() if largest else both.sum() ** (1.0 / norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped."
            )
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
    return norm


def _counts(grad: DTensor) -> bool:
    """Of the ranks that hold the same piece, does this one speak for it?"""
    spec = grad._spec
    mesh = spec.wire.mesh
    return all(
        spec.wire.at[i] == 0 or spec.layout.placement(a).is_shard()
        for i, a in enumerate(mesh.names)
    )


def _over_mesh(total: torch.Tensor, wire: Wire, largest: bool) -> torch.Tensor:
    op = "max" if largest else "sum"
    before = Layout((), partial=tuple((a, op) for a in wire.mesh.names))
    for move in plan(before, Layout(()), wire.mesh, 4).moves:
        total = wire.carry(move, total, op="clip_grad_norm_", reason="settle")
    return total
