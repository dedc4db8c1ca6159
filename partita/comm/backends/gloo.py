"""Gloo, whose waits block the processor, and which does some collectives slowly.

- Its reduce-scatter is an all-reduce of which most is thrown away. Here ranks exchange shares and
  each adds up its piece in rank order: half the bytes.
- Its all-reduce is a ring that starts each piece at another rank, so that sums of more than two
  ranks are other bits than a reduce-scatter's. In a narrow dtype, and under
  `torch.use_deterministic_algorithms(True)`, shares are exchanged instead, and a sum is the same
  bits in every collective.
- Its all-gather is a ring, which takes twice the processor time of a broadcast from each rank.

Exchanges are `alltoall_base`, which Gloo's own threads run. Sends and receives posted one by one
would wait for what the pair is already sending.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..collective import PendingList, PendingSum, PendingWork, Request
from ..waiting import WatchedWork
from .backend import Backend, WayOfSum

_SMALL = 1 << 15
"""Bytes up to which an all-reduce gathers all shares: one round instead of two."""


class Gloo(Backend):
    """The process groups of CPUs."""

    gathers_by_broadcast = True
    sums_in_rank_order = True
    waits_on_host = True
    runs_in_streams = False

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

    def begun(self, work: Any, group: dist.ProcessGroup, request: Request) -> WatchedWork:
        return WatchedWork(work, group, request)

    def start_all_gather(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingWork:
        pieces, rank = out.view(group.size(), -1), group.rank()
        if x.data_ptr() != pieces[rank].data_ptr():  # it may lie there
            pieces[rank].copy_(x.view(-1))
        # Also for two ranks no pair exchange: a rank in a reduce-scatter would take this for its
        # own.
        begun = [
            WatchedWork(group.broadcast(p, i), group, request)
            for i, p in enumerate(pieces.unbind())
        ]
        return PendingList(begun)

    def start_all_reduce(
        self, group: dist.ProcessGroup, x: torch.Tensor, op: str, request: Request
    ) -> PendingWork:
        n, size = group.size(), x.numel()
        flat, way = x.view(-1), self.way_of_sum(x, n) if op == "sum" else "own"
        if way == "gather":
            shares = x.new_empty(n * size)
            exchange = WatchedWork(group._allgather_base(shares, flat), group, request)
            return PendingSum(exchange, shares.view(n, size).unbind(), flat)
        if way == "own":
            return super().start_all_reduce(group, x, op, request)
        whole = flat if size % n == 0 else torch.nn.functional.pad(flat, (0, -size % n))
        piece = x.new_empty(whole.numel() // n)
        scatter = self.exchange_and_sum(group, piece, whole, request)
        return _Gathering(self, scatter, group, piece, flat, request)

    def start_reduce_scatter(
        self,
        group: dist.ProcessGroup,
        out: torch.Tensor,
        x: torch.Tensor,
        op: str,
        request: Request,
    ) -> PendingWork:
        if op == "sum":
            return self.exchange_and_sum(group, out, x, request)
        return super().start_reduce_scatter(group, out, x, op, request)


class _Gathering:
    """An all-reduce under way: a reduce-scatter, and then the gather of its pieces."""

    def __init__(
        self,
        backend: Gloo,
        scatter: PendingSum,
        group: dist.ProcessGroup,
        piece: torch.Tensor,
        out: torch.Tensor,
        request: Request,
    ):
        self._backend, self._scatter = backend, scatter
        self._group, self._piece, self._out, self._request = group, piece, out, request

    def wait(self) -> None:
        self._scatter.wait()
        n, size, out = self._group.size(), self._piece.numel(), self._out
        whole = out if out.numel() == n * size else out.new_empty(n * size)
        self._backend.start_all_gather(self._group, whole, self._piece, self._request).wait()
        if whole is not out:
            out.copy_(whole[: out.numel()])


class GlooOnDevice(Backend):
    """Gloo for tensors of an accelerator: it copies them to the host, and waits there."""

    runs_in_streams = False
