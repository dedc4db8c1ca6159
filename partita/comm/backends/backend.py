"""Backend: how collectives of a kind of process group begin, end, and stand in a graph.

The group's own methods are called, in which torch's public collectives end: the functional ones
cost more than the whole of `carry` (a dispatcher op, an async wrapper and its wait).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from ..collective_request import Ask
from ..pending_work import Summed, UnderWay
from ..splits import Splits

__all__ = ["Backend", "WayOfSum"]

WayOfSum = Literal["own", "gather", "exchange"]
"""How the sum of all ranks' tensors is made: by the backend's own all-reduce; or of what every rank
gives to all, added in rank order; or so of pieces that are exchanged, and gathered again."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Backend:
    """A backend whose collectives are best as they are and work in the memory that they are given:
    NCCL, and ranks that are threads.

    Tensors are contiguous.

    Attributes:
        gathers_by_broadcast: is what is gathered broadcast by each rank in turn?
        sums_in_rank_order: does a reduce-scatter exchange shares, and add them in rank order?
        waits_on_host: does a rank that waits wait with its processor, so that it may find out why?
    """

    gathers_by_broadcast = False
    sums_in_rank_order = False
    waits_on_host = False

    def way_of_sum(self, x: torch.Tensor, n: int) -> WayOfSum:
        """How is an `x` of each of `n` ranks summed?"""
        return "own"

    # -- bytes of its own, while a collective is under way -----------------------------------------

    def staging_of_gather(self, out: torch.Tensor) -> int:
        """Bytes beside `out` in which its own gather keeps what is under way."""
        return 0

    def staging_of_scatter(self, x: torch.Tensor) -> int:
        """Bytes beside `x` of its own reduce-scatter."""
        return 0

    def staging_of_sum(self, x: torch.Tensor, n: int) -> int:
        """Bytes beside `x` in which the sum of `n` ranks is made."""
        return 0

    # -- collectives that are waited for -----------------------------------------------------------

    def begun(self, work: Any, group: dist.ProcessGroup, ask: Ask) -> UnderWay:
        """`work` of the group, to be waited for; `ask` is what one who waits tells other ranks."""
        return work  # type: ignore[no-any-return]

    def all_gather(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask
    ) -> None:
        """Fill `out` with the group's `x`, in group order."""
        self.begun(group._allgather_base(out, x), group, ask).wait()

    def reduce_scatter(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, op: str, ask: Ask
    ) -> None:
        """Fill `out` with this rank's piece of the reduction of the group's `x`."""
        if op == "sum":
            self.start_reduce_scatter(group, out, x, ask).wait()
            return
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        self.begun(group._reduce_scatter_base(out, x, options), group, ask).wait()

    def all_reduce(self, group: dist.ProcessGroup, x: torch.Tensor, op: str, ask: Ask) -> None:
        """Put the reduction of the group's `x` into `x`."""
        if op == "sum":
            self.start_all_reduce(group, x, ask).wait()
            return
        self.begun(group.allreduce([x], _OPS[op]), group, ask).wait()

    def all_to_all(
        self,
        group: dist.ProcessGroup,
        out: torch.Tensor,
        x: torch.Tensor,
        get: Splits,
        send: Splits,
        ask: Ask,
    ) -> None:
        """Send each member its segment of `x`, and get from it its segment of `out`."""
        sizes = ([], []) if get.even and send.even else (get.sizes, send.sizes)
        self.begun(group.alltoall_base(out, x, *sizes), group, ask).wait()

    def broadcast(self, group: dist.ProcessGroup, x: torch.Tensor, root: int, ask: Ask) -> None:
        """Fill `x` with that of member `root`."""
        self.begun(group.broadcast(x, root), group, ask).wait()

    # -- collectives that go on beside the program -------------------------------------------------

    def start_all_gather(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask
    ) -> UnderWay:
        """Begin to fill `out` with the group's `x`, in group order. `x` may lie in `out`."""
        return self.begun(group._allgather_base(out, x), group, ask)

    def start_all_reduce(self, group: dist.ProcessGroup, x: torch.Tensor, ask: Ask) -> UnderWay:
        """Begin to put the sum of the group's `x` into `x`."""
        return self.begun(group.allreduce([x], dist.ReduceOp.SUM), group, ask)

    def start_reduce_scatter(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask
    ) -> UnderWay:
        """Begin to fill `out` with this rank's piece of the sum of the group's `x`, which is made
        in the dtype of `out`."""
        if out.dtype != x.dtype:
            return self.exchange_and_sum(group, out, x, ask)
        return self.begun(group._reduce_scatter_base(out, x), group, ask)  # type: ignore[call-arg]

    def exchange_and_sum(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask
    ) -> Summed:
        """`start_reduce_scatter` by an exchange of shares, which are added in rank order."""
        if group.size() == 2:
            mine, other = x.view(2, -1).unbind()[:: 1 - 2 * group.rank()]
            share = torch.empty_like(mine)
            # a + b is b + a: in rank order whichever is whose.
            return Summed(
                self._start_pair_exchange(group, share, other, ask), (mine, share), out.view(-1)
            )
        shares = torch.empty_like(x)
        work = group.alltoall_base(shares.view(-1), x.view(-1), [], [])
        pieces = shares.view(group.size(), -1).unbind()
        return Summed(self.begun(work, group, ask), pieces, out.view(-1))

    def _start_pair_exchange(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, ask: Ask
    ) -> UnderWay:
        """Begin to fill `out` with the other's `x`, of two ranks: one message each, and no copy."""
        sizes = [x.numel(), 0] if group.rank() else [0, x.numel()]
        return self.begun(group.alltoall_base(out, x, sizes, sizes), group, ask)
