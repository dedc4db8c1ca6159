"""When may a plain tensor stand next to a DTensor?

Where it needs no gradient, it is taken as a whole value: an `arange`, a mask made in forward. If it
is in truth each rank's own data, that would be a silent fault, so the ranks compare a checksum the
first time that each place of the user's program does this (each time under `check_ranks()`).
"""

from __future__ import annotations

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire, user_line
from partita.layout import Fix, LayoutError

__all__ = ["admit", "checksum"]


def admit(value: torch.Tensor, wire: Wire, op: str) -> None:
    """Let a plain tensor pass as a whole value, or say why not.

    Raises:
        LayoutError: it requires grad (its gradient would have no layout); it differs between
            ranks; `strict()` is on; or it met a DTensor inside a backward function.
    """
    if value.requires_grad and torch.is_grad_enabled():
        raise LayoutError(
            f"{op}: a plain tensor that requires grad stands next to a DTensor",
            place=user_line(),
            operands=(f"plain tensor of shape {tuple(value.shape)}",),
            reason="its gradient would have no layout, and ranks would go apart unseen",
            fixes=(
                Fix("pt.distribute_tensor(t, mesh, placements)", "one copy from rank 0"),
                Fix("pt.DTensor.from_local(t, mesh, placements)", "each rank's own piece"),
                Fix("t.detach()", "if no gradient is wanted"),
            ),
        )
    scope = wire.scope
    if scope.strict:
        raise LayoutError(
            f"{op}: a plain tensor stands next to a DTensor, which strict() refuses",
            place=user_line(),
            fixes=(Fix("pt.distribute_tensor(t, mesh, placements)"),),
        )
    if wire.mesh.size() == 1:
        return
    place = user_line()
    seen = wire.__dict__.setdefault("plain_seen", set())
    if (place, op) in seen and scope.check is None:
        return
    mine = checksum(value)
    for rank, theirs in enumerate(wire.gather_ints(mine)):
        if theirs != mine:
            raise LayoutError(
                f"{op}: a plain tensor next to a DTensor differs between ranks",
                place=place,
                operands=(
                    f"rank {wire.rank}: shape {tuple(value.shape)}, checksum {mine[-1]:x}",
                    f"rank {rank}: checksum {theirs[-1]:x}",
                ),
                reason="a plain tensor is taken as one whole value, the same on every rank",
                fixes=(
                    Fix("pt.DTensor.from_local(t, mesh, placements)", "if it is this rank's piece"),
                    Fix("pt.distribute_tensor(t, mesh, placements)", "to take rank 0's"),
                ),
            )
    seen.add((place, op))


def checksum(value: torch.Tensor) -> tuple[int, int, int]:
    """Dimensions, elements and a sum over the bytes in which their places count, in 63 bits."""
    with Local(), torch.no_grad():
        flat = value.detach().contiguous().view(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        if flat.numel() == 0:
            return value.dim(), 0, 0
        data = flat.view(torch.uint8).to(torch.int64)
        weights = torch.arange(data.numel(), device=data.device).mul_(2654435761).remainder_(65521)
        total = int(((data + 1) * (weights + 1)).sum())
        shape = 0
        for n in value.shape:
            shape = (shape * 1000003 + n) & 0x7FFFFFFF
        return value.dim(), shape, total & 0x7FFFFFFFFFFFFFFF
