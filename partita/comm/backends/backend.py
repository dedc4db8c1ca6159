"""Backends: how collectives of a kind of process group begin, end, and stand in a graph.

The process group's own methods are called, which torch's public collectives end in: the functional
ones cost more than the whole of `carry` (a dispatcher op, an async wrapper and its wait).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from ..collective import PendingSum, PendingWork, Request, Splits

WayOfSum = Literal["own", "gather", "exchange"]
"""How an all-reduce sums: "own", by the backend's own; "gather", every rank gathers all shares and
adds them in rank order; "exchange", ranks exchange shares, each sums its piece in rank order, and
the pieces are gathered."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Backend:
    """A backend whose own collectives are the best and take no memory beside their operands: NCCL,
    and ranks that are threads.

    Tensors are contiguous.

    Attributes:
        gathers_by_broadcast: an all-gather is a broadcast of each rank.
        sums_in_rank_order: a reduce-scatter exchanges shares, and adds them in rank order.
        waits_on_host: a wait blocks the processor, so that the rank can look why it lasts.
        runs_in_streams: a collective is a kernel of the device's, which can be recorded.
    """

    gathers_by_broadcast = False
    sums_in_rank_order = False
    waits_on_host = False
    runs_in_streams = True

    def way_of_sum(self, x: torch.Tensor, n: int) -> WayOfSum:
        """How an all-reduce sums `x` over `n` ranks."""
        return "own"

    # -- memory beside the operands, while a collective is under way -------------------------------

    def staging_of_gather(self, out: torch.Tensor) -> int:
        """Bytes that an all-gather takes beside `out`."""
        return 0

    def staging_of_scatter(self, x: torch.Tensor) -> int:
        """Bytes that a reduce-scatter takes beside `x`."""
        return 0

    def staging_of_sum(self, x: torch.Tensor, n: int) -> int:
        """Bytes that an all-reduce over `n` ranks takes beside `x`."""
        return 0

    # -- collectives that return when they are done ------------------------------------------------

    def begun(self, work: Any, group: dist.ProcessGroup, request: Request) -> PendingWork:
        """`work` of the group as pending work; `request` is shown to others where a rank waits."""
        return work  # type: ignore[no-any-return]

    def all_gather(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> None:
        """Fill `out` with the group's `x`, in group order."""
        self.begun(group._allgather_base(out, x), group, request).wait()

    def all_to_all(
        self,
        group: dist.ProcessGroup,
        out: torch.Tensor,
        x: torch.Tensor,
        get: Splits,
        send: Splits,
        request: Request,
    ) -> None:
        """Send each member its segment of `x`, and get from it its segment of `out`."""
        sizes = ([], []) if get.even and send.even else (get.sizes, send.sizes)
        self.begun(group.alltoall_base(out, x, *sizes), group, request).wait()

    def broadcast(
        self, group: dist.ProcessGroup, x: torch.Tensor, root: int, request: Request
    ) -> None:
        """Fill `x` with that of member `root`."""
        self.begun(group.broadcast(x, root), group, request).wait()

    # -- collectives that go on while the program computes -----------------------------------------

    def start_all_gather(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingWork:
        """Begin to fill `out` with the group's `x`, in group order. `x` may lie in `out`."""
        return self.begun(group._allgather_base(out, x), group, request)

    def start_all_reduce(
        self, group: dist.ProcessGroup, x: torch.Tensor, op: str, request: Request
    ) -> PendingWork:
        """Begin to put the reduction of the group's `x` into `x`."""
        return self.begun(group.allreduce([x], _OPS[op]), group, request)

    def start_reduce_scatter(
        self,
        group: dist.ProcessGroup,
        out: torch.Tensor,
        x: torch.Tensor,
        op: str,
        request: Request,
    ) -> PendingWork:
        """Begin to fill `out` with this rank's piece of the reduction of the group's `x`; a sum is
        made in the dtype of `out`."""
        if out.dtype != x.dtype:
            return self.exchange_and_sum(group, out, x, request)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        return self.begun(group._reduce_scatter_base(out, x, options), group, request)

    def exchange_and_sum(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingSum:
        """`start_reduce_scatter` of a sum: shares are exchanged, and added in rank order."""
        if group.size() == 2:
            mine, other = x.view(2, -1).unbind()[:: 1 - 2 * group.rank()]
            share = torch.empty_like(mine)
            # a + b is b + a: in rank order whichever is whose.
            return PendingSum(
                self._start_pair_exchange(group, share, other, request), (mine, share), out.view(-1)
            )
        shares = torch.empty_like(x)
        work = group.alltoall_base(shares.view(-1), x.view(-1), [], [])
        pieces = shares.view(group.size(), -1).unbind()
        return PendingSum(self.begun(work, group, request), pieces, out.view(-1))

    def _start_pair_exchange(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingWork:
        """Begin to fill `out` with the other's `x`, of two ranks: one message each, and no copy."""
        sizes = [x.numel(), 0] if group.rank() else [0, x.numel()]
        return self.begun(group.alltoall_base(out, x, sizes, sizes), group, request)
