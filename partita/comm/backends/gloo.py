"""Gloo, which has the collectives but does some of them slowly, and waits with the processor.

Its reduce-scatter is an all-reduce of which most is thrown away. Here the shares are exchanged and
each rank adds up in rank order: half the bytes. Its all-reduce is a ring that starts each piece at
another rank: as it is, the sums of more than two ranks are other bits than a reduce-scatter's.
Under `torch.use_deterministic_algorithms(True)` shares are exchanged there, too, and a sum is the
same bits in every collective. Its all-gather is a ring, which takes twice the processor's time that
a broadcast from each rank does. For a sum of two ranks each sends what the other lacks. It is
Gloo's own threads that exchange: who posts sends and receives one by one waits for what the pair is
carrying.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..collective_request import Ask
from ..pending_work import All, Summed, UnderWay
from ..waiting import Pending
from .backend import Backend, WayOfSum

__all__ = ["Gloo"]

_SMALL = 1 << 15
"""Bytes up to which every rank sends its whole share to all: one round instead of two."""


class Gloo(Backend):
    """The process groups of CPUs."""

    gathers_by_broadcast = True
    sums_in_rank_order = True
    waits_on_host = True

    def way_of_sum(self, x: torch.Tensor, n: int) -> WayOfSum:
        """Of two ranks, a + b is b + a: Gloo's ring gives the same bits, and sends as much. Of more
        it starts each piece at another rank, and in a narrow dtype rounds at each."""
        if x.nbytes <= _SMALL:
            return "gather"
        narrow = x.is_floating_point() and x.element_size() < 4
        exact = narrow or torch.are_deterministic_algorithms_enabled()
        return "exchange" if n > 2 and exact else "own"

    def staging_of_gather(self, out: torch.Tensor) -> int:
        return out.nbytes  # the ring ends in one flat buffer

    def staging_of_scatter(self, x: torch.Tensor) -> int:
        return x.nbytes  # the shares, or the all-reduce of a copy

    def staging_of_sum(self, x: torch.Tensor, n: int) -> int:
        way = self.way_of_sum(x, n)
        if way == "gather":
            return n * x.nbytes
        if way == "own":
            return 0
        piece = -(-x.numel() // n) * x.element_size()
        padded = n * piece if x.numel() % n else 0
        return piece + n * piece + padded

    def begun(self, work: Any, group: dist.ProcessGroup, ask: Ask) -> Pending:
        return Pending(work, group, ask)

    def start_all_gather(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask
    ) -> UnderWay:
        pieces, rank = out.view(group.size(), -1), group.rank()
        if x.data_ptr() != pieces[rank].data_ptr():  # it may lie there
            pieces[rank].copy_(x.view(-1))
        # Not `_swap`, of two: a rank in a reduce-scatter would take this for its own, silently.
        begun = [Pending(group.broadcast(p, i), group, ask) for i, p in enumerate(pieces.unbind())]
        return All(begun)

    def start_all_reduce(self, group: dist.ProcessGroup, x: torch.Tensor, ask: Ask) -> UnderWay:
        n, size = group.size(), x.numel()
        flat, way = x.view(-1), self.way_of_sum(x, n)
        if way == "gather":
            shares = x.new_empty(n * size)
            exchange = Pending(group._allgather_base(shares, flat), group, ask)
            return Summed(exchange, shares.view(n, size).unbind(), flat)
        if way == "own":
            return Pending(group.allreduce([x], dist.ReduceOp.SUM), group, ask)
        whole = flat if size % n == 0 else torch.nn.functional.pad(flat, (0, -size % n))
        piece = x.new_empty(whole.numel() // n)
        scatter = self.exchange_and_sum(group, piece, whole, ask)
        return _Gathering(self, scatter, group, piece, flat, ask)

    def start_reduce_scatter(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask
    ) -> UnderWay:
        return self.exchange_and_sum(group, out, x, ask)


class _Gathering:
    """A reduce-scatter that is under way, and then the gather that makes it an all-reduce."""

    def __init__(
        self,
        backend: Gloo,
        scatter: Summed,
        group: dist.ProcessGroup,
        piece: torch.Tensor,
        out: torch.Tensor,
        ask: Ask,
    ):
        self._backend, self._scatter = backend, scatter
        self._group, self._piece, self._out, self._ask = group, piece, out, ask

    def wait(self) -> None:
        self._scatter.wait()
        n, size, out = self._group.size(), self._piece.numel(), self._out
        whole = out if out.numel() == n * size else out.new_empty(n * size)
        self._backend.start_all_gather(self._group, whole, self._piece, self._ask).wait()
        if whole is not out:
            out.copy_(whole[: out.numel()])
