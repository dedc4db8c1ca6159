"""How are sums done on Gloo, which has the collectives but does some of them slowly?

Gloo's reduce-scatter is an all-reduce of which most is thrown away. Here the shares are exchanged
and each rank adds up in rank order: half the bytes. Its all-reduce is a ring that starts each piece
at another rank: as it is, the sums of more than two ranks are other bits than a reduce-scatter's.
Under `torch.use_deterministic_algorithms(True)` shares are exchanged there, too, and a sum is the
same bits in every collective. Its all-gather is a ring, which takes twice the processor's time that
a broadcast from each rank does. For a sum of two ranks each sends what the other lacks. It is
Gloo's own threads that exchange: who posts sends and receives one by one waits for what the pair is
carrying.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .deadlock import Pending
from .under_way import All, Summed, UnderWay

if TYPE_CHECKING:
    from .ask import Ask

__all__ = [
    "SMALL",
    "ring_serves",
    "start_all_gather",
    "start_all_reduce",
    "start_reduce_scatter",
]

SMALL = 1 << 15
"""Bytes up to which every rank sends its whole share to all: one round instead of two."""


def start_all_gather(
    group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask
) -> UnderWay:
    """Begin to fill `out` with the group's `x`, in group order, all contiguous.

    Args:
        ask: what a rank that waits for it tells the others.
    """
    pieces, rank = out.view(group.size(), -1), group.rank()
    if x.data_ptr() != pieces[rank].data_ptr():  # it may lie there
        pieces[rank].copy_(x.view(-1))
    # Not `_swap`, of two ranks: a rank in a reduce-scatter would take this for its own, silently.
    return All([Pending(group.broadcast(p, i), group, ask) for i, p in enumerate(pieces.unbind())])


def start_reduce_scatter(
    group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask
) -> Summed:
    """Begin to fill `out` with this rank's piece of the sum of the group's `x`, all contiguous.

    The sum is in the dtype of `out`.
    """
    if group.size() == 2:
        mine, other = x.view(2, -1).unbind()[:: 1 - 2 * group.rank()]
        share = torch.empty_like(mine)
        # a + b is b + a: in rank order whichever is whose.
        return Summed(_swap(group, share, other, ask), (mine, share), out.view(-1))
    shares = torch.empty_like(x)
    exchange = Pending(group.alltoall_base(shares.view(-1), x.view(-1), [], []), group, ask)
    return Summed(exchange, shares.view(group.size(), -1).unbind(), out.view(-1))


def _swap(group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask) -> Pending:
    """Begin to fill `out` with the other's `x`, of two ranks: one message each, and no copy."""
    sizes = [x.numel(), 0] if group.rank() else [0, x.numel()]
    return Pending(group.alltoall_base(out, x, sizes, sizes), group, ask)


def start_all_reduce(group: dist.ProcessGroup, x: torch.Tensor, ask: Ask) -> UnderWay:
    """Begin to put the sum of the group's contiguous `x` into `x`."""
    n, size = group.size(), x.numel()
    flat = x.view(-1)
    if x.nbytes <= SMALL:
        shares = x.new_empty(n * size)
        exchange = Pending(group._allgather_base(shares, flat), group, ask)
        return Summed(exchange, shares.view(n, size).unbind(), flat)
    if ring_serves(x, n):
        return Pending(group.allreduce([x], dist.ReduceOp.SUM), group, ask)
    whole = flat if size % n == 0 else torch.nn.functional.pad(flat, (0, -size % n))
    piece = x.new_empty(whole.numel() // n)
    return _Gathering(start_reduce_scatter(group, piece, whole, ask), group, piece, flat, ask)


def ring_serves(x: torch.Tensor, n: int) -> bool:
    """Is Gloo's own ring what sums an `x` of each of `n` ranks?

    Of two, a + b is b + a: it gives the same bits, and sends as much. Of more it starts each piece
    at another rank, and in a narrow dtype rounds at each.
    """
    narrow = x.is_floating_point() and x.element_size() < 4
    return n == 2 or not (narrow or torch.are_deterministic_algorithms_enabled())


class _Gathering:
    """A reduce-scatter that is under way, and then the gather that makes it an all-reduce."""

    def __init__(
        self,
        scatter: Summed,
        group: dist.ProcessGroup,
        piece: torch.Tensor,
        out: torch.Tensor,
        ask: Ask,
    ):
        self._scatter, self._group, self._piece, self._out = scatter, group, piece, out
        self._ask = ask

    def wait(self) -> None:
        self._scatter.wait()
        n, size, out = self._group.size(), self._piece.numel(), self._out
        whole = out if out.numel() == n * size else out.new_empty(n * size)
        start_all_gather(self._group, whole, self._piece, self._ask).wait()
        if whole is not out:
            out.copy_(whole[: out.numel()])
