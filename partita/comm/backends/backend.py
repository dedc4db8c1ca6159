"""Backends: how collectives begin and end on a kind of process group, such as NCCL or Gloo.

A backend also says how they appear in a graph. It calls methods of the process group, as torch's
public collectives do, because functional collectives cost more time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..collective import PendingSum, PendingWork, Request, Splits
from ..device import Device, empty_like

WayOfSum = Literal["own", "gather", "exchange"]
"""The way an all-reduce sums.

"own": the process group's all-reduce. "gather": each rank gathers all shares and adds them in rank
order. "exchange": each rank gets one part of every share and adds these in rank order; then the
sums are gathered.
"""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


Native = Callable[[Any, torch.Tensor, torch.Tensor, Request], PendingWork]
"""`(group, out, x, request)`: begins a collective of the process group."""


def begin_in_group(
    group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
) -> PendingWork:
    """Begins a collective of torch's process group `group`, and returns without waiting for it.

    Args:
        out, x: the output and the input of the collective.
        request: which collective it is.
    """
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
    """A kind of process group, with defaults for NCCL and for ranks that are threads.

    The defaults use the group's own collectives, which need no buffers beside their operands. All
    tensors are contiguous.

    Attributes:
        gathers_by_broadcast: True if an all-gather runs as a broadcast from each rank.
        sums_in_rank_order: True if a reduce-scatter exchanges shares (addends of a Partial value),
            and each rank adds them in rank order.
        waits_on_host: True if a wait blocks the Python thread, so that partita can look for the
            reason of a long wait.
        runs_in_streams: True if a collective is a kernel in a stream, which a CUDA graph can
            record.
        native: a function that begins a collective of the process group.
    """

    gathers_by_broadcast = False
    sums_in_rank_order = False
    waits_on_host = False
    runs_in_streams = True

    def __init__(self, native: Native = begin_in_group):
        self.native = native

    def way_of_sum(self, x: torch.Tensor, n: int) -> WayOfSum:
        """Returns how to all-reduce `x` over `n` ranks: a `WayOfSum`."""
        return "own"

    def gathers_pieces(self, x: torch.Tensor) -> bool:
        """True if one all-gather for several tensors (a bucket) can write each result contiguously.

        In this case nothing has to be copied out of the bucket.

        Args:
            x: the bucket.
        """
        return not Device(x.device.type).is_host

    # -- memory beside the operands, while a collective is under way -------------------------------

    def staging_of_gather(self, out: torch.Tensor) -> int:
        """Returns the bytes of temporary buffers in an all-gather into `out`."""
        return 0

    def staging_of_scatter(self, x: torch.Tensor) -> int:
        """Returns the bytes of temporary buffers in a reduce-scatter of `x`."""
        return 0

    def staging_of_sum(self, x: torch.Tensor, n: int) -> int:
        """Returns the bytes of temporary buffers in an all-reduce of `x` over `n` ranks."""
        return 0

    # -- collectives -------------------------------------------------------------------------------

    def begin(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingWork:
        """Begins a collective of `group` from `x` into `out`, and returns at once.

        For an all_gather, `x` may be a part of `out`. A sum is computed in the dtype of `out`. A
        caller that waits at once for an all_gather uses `native` instead.

        Args:
            request: which collective it is.
        """
        if request.kind == "reduce_scatter" and out.dtype != x.dtype:
            return self.exchange_and_sum(group, out, x, request)
        return self.native(group, out, x, request)

    def exchange_and_sum(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingSum:
        """Begins a reduce-scatter in which each rank gets all addends of its part and sums them.

        The sum is in rank order, so its bits do not depend on the backend.

        Args:
            out: memory for this rank's part of the sum.
            x: this rank's addend of all parts, in rank order.
            request: the reduce-scatter.
        """
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
