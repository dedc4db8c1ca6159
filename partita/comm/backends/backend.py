"""Backends: how collectives of a kind of process group begin, end, and appear in a graph.

They call the process group's own methods, which torch's public collectives call in the end. The
functional collectives cost more than all of `carry` (a dispatcher op, an async wrapper, its wait).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..collective import PendingSum, PendingWork, Request, Splits
from ..device import empty_like

WayOfSum = Literal["own", "gather", "exchange"]
"""How an all-reduce sums: "own", by the backend's own; "gather", every rank gathers all shares and
adds them in rank order; "exchange", ranks exchange shares, each sums its piece in rank order, and
the pieces are gathered."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


Native = Callable[[Any, torch.Tensor, torch.Tensor, Request], PendingWork]
"""`(group, out, x, request)`: begins a collective as the group has it."""


def begin_in_group(
    group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
) -> PendingWork:
    """Begin a process group's own collective."""
    kind = request.kind
    work: Any
    get, send = request.get, request.send
    if kind == "all_gather":
        work = group._allgather_base(out, x)
    elif get is not None and send is not None:
        sizes = ([], []) if get.even and send.even else (get.sizes, send.sizes)
        work = group.alltoall_base(out, x, *sizes)
    elif kind == "all_reduce":
        work = group.allreduce([x], _OPS[request.reduce_op])
    elif kind == "reduce_scatter":
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[request.reduce_op]  # type: ignore[assignment]
        work = group._reduce_scatter_base(out, x, options)
    else:
        assert kind == "broadcast", kind
        work = group.broadcast(x, request.root)
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
        native: what its own collectives begin by.
    """

    gathers_by_broadcast = False
    sums_in_rank_order = False
    waits_on_host = False
    runs_in_streams = True

    def __init__(self, native: Native = begin_in_group):
        self.native = native

    def way_of_sum(self, x: torch.Tensor, n: int) -> WayOfSum:
        """Returns how an all-reduce sums `x` over `n` ranks."""
        return "own"

    # -- memory beside the operands, while a collective is under way -------------------------------

    def staging_of_gather(self, out: torch.Tensor) -> int:
        """Returns bytes that an all-gather takes beside `out`."""
        return 0

    def staging_of_scatter(self, x: torch.Tensor) -> int:
        """Returns bytes that a reduce-scatter takes beside `x`."""
        return 0

    def staging_of_sum(self, x: torch.Tensor, n: int) -> int:
        """Returns bytes that an all-reduce over `n` ranks takes beside `x`."""
        return 0

    # -- collectives -------------------------------------------------------------------------------

    def begin(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingWork:
        """Begin to fill `out` with the result of `request` on the group's `x`, and return at once.

        `x` of an all_gather may lie in `out`. A sum is made in the dtype of `out`. An all_gather
        that is waited for at once uses `native`.
        """
        if request.kind == "reduce_scatter" and out.dtype != x.dtype:
            return self.exchange_and_sum(group, out, x, request)
        return self.native(group, out, x, request)

    def exchange_and_sum(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingSum:
        """Returns a reduce_scatter of a sum: shares are exchanged, and added in rank order."""
        n, rank, each = group.size(), group.rank(), x.numel() // group.size()
        shares: Sequence[torch.Tensor]
        if n == 2:  # one message each, and no copy
            mine, x = x.view(2, -1).unbind()[:: 1 - 2 * rank]
            came, splits = empty_like(mine), Splits.of([each, 0] if rank else [0, each])
            shares = mine, came  # a + b is b + a: in rank order whichever is whose
        else:
            came, splits = empty_like(x), Splits.evenly(n, each)
            shares = came.view(n, -1).unbind()
        ask = Request("all_to_all", request.move, request.op, get=splits, send=splits)
        return PendingSum(self.native(group, came.view(-1), x.view(-1), ask), shares, out.view(-1))
