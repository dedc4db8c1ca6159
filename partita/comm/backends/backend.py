"""Backends: how collectives of a kind of process group begin, end, and stand in a graph.

The process group's own methods are called, which torch's public collectives end in: the functional
ones cost more than the whole of `carry` (a dispatcher op, an async wrapper and its wait).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..collective import PendingSum, PendingWork, Request

WayOfSum = Literal["own", "gather", "exchange"]
"""How an all-reduce sums: "own", by the backend's own; "gather", every rank gathers all shares and
adds them in rank order; "exchange", ranks exchange shares, each sums its piece in rank order, and
the pieces are gathered."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


Watch = Callable[[Any, dist.ProcessGroup, Request], PendingWork]
"""Makes pending work of a process group's; the request is shown to others where a rank waits."""


def leave_unwatched(work: Any, group: dist.ProcessGroup, request: Request) -> PendingWork:
    return work  # type: ignore[no-any-return]


class Backend:
    """A backend whose own collectives are the best and take no memory beside their operands: NCCL,
    and ranks that are threads.

    Tensors are contiguous.

    Attributes:
        gathers_by_broadcast: an all-gather is a broadcast of each rank.
        sums_in_rank_order: a reduce-scatter exchanges shares, and adds them in rank order.
        waits_on_host: a wait blocks the processor, so that the rank can look why it lasts.
        runs_in_streams: a collective is a kernel of the device's, which can be recorded.
        watch: given to the work of process groups whose waits block the processor.
    """

    gathers_by_broadcast = False
    sums_in_rank_order = False
    waits_on_host = False
    runs_in_streams = True

    def __init__(self, watch: Watch = leave_unwatched):
        self.watch = watch

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

    # -- collectives -------------------------------------------------------------------------------

    def run(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> None:
        """Fill `out` with what `request` makes of the group's `x`."""
        self.begin(group, out, x, request).wait()

    def begin(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingWork:
        """Begin it, and go on while the program computes. `x` of an all_gather may lie in `out`; a
        sum is made in the dtype of `out`."""
        kind = request.kind
        if kind == "all_gather":
            work = group._allgather_base(out, x)
        elif kind == "all_reduce":
            work = group.allreduce([x], _OPS[request.reduce_op])
        elif kind == "reduce_scatter":
            if out.dtype != x.dtype:
                return self.exchange_and_sum(group, out, x, request)
            options = dist.ReduceScatterOptions()
            options.reduceOp = _OPS[request.reduce_op]  # type: ignore[assignment]
            work = group._reduce_scatter_base(out, x, options)
        elif kind == "broadcast":
            work = group.broadcast(x, request.root)
        else:
            get, send = request.get, request.send
            assert get is not None and send is not None
            sizes = ([], []) if get.even and send.even else (get.sizes, send.sizes)
            work = group.alltoall_base(out, x, *sizes)
        return self.watch(work, group, request)

    def exchange_and_sum(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingSum:
        """A reduce_scatter of a sum: shares are exchanged, and added in rank order."""
        if group.size() == 2:  # one message each, and no copy
            mine, other = x.view(2, -1).unbind()[:: 1 - 2 * group.rank()]
            share = torch.empty_like(mine)
            sizes = [mine.numel(), 0] if group.rank() else [0, mine.numel()]
            work = group.alltoall_base(share, other, sizes, sizes)
            shares: Sequence[torch.Tensor] = (mine, share)  # a + b is b + a, whichever is whose
        else:
            came = torch.empty_like(x)
            work = group.alltoall_base(came.view(-1), x.view(-1), [], [])
            shares = came.view(group.size(), -1).unbind()
        return PendingSum(self.watch(work, group, request), shares, out.view(-1))
