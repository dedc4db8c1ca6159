"""Gloo: replacements for its collectives that are slow or inexact. Its waits block the Python
thread.

- Its reduce-scatter is an all-reduce whose result is mostly discarded. Here ranks exchange addends,
  and each rank sums its part in rank order. This sends half the bytes.
- Its all-reduce is a ring. With more than two ranks its sums have other bits than a
  reduce-scatter's. So narrow dtypes, and programs under `torch.use_deterministic_algorithms(True)`,
  exchange addends instead. A sum then has the same bits in every collective.
- Its all-gather is a ring, which takes twice the CPU time of a broadcast from each rank.

Exchanges use `alltoall_base`, which Gloo's own threads run. Single sends and receives would each
wait until the previous one between the same two ranks is complete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..collective import PendingCall, PendingList, PendingSum, PendingWork, Request, shares_memory
from ..device import new_empty
from .backend import Backend, WayOfSum

_SMALL = 1 << 15
"""Bytes up to which an all-reduce gathers all shares: one round instead of two."""


class Gloo(Backend):
    """Torch's Gloo process groups, for CPU tensors."""

    gathers_by_broadcast = True
    sums_in_rank_order = True
    waits_on_host = True
    runs_in_streams = False

    def way_of_sum(self, x: torch.Tensor, n: int) -> WayOfSum:
        """Returns how to sum `x` over `n` ranks: "gather" if it is small, else "exchange" or "own".

        "exchange" is for narrow dtypes and deterministic mode, on more than two ranks. For two
        ranks Gloo's ring is exact, since a + b is b + a. For more ranks it starts each part at
        another rank, and rounds after each addition in a narrow dtype.
        """
        if x.nbytes <= _SMALL:
            return "gather"
        narrow = x.is_floating_point() and x.element_size() < 4
        exact = narrow or torch.are_deterministic_algorithms_enabled()
        return "exchange" if n > 2 and exact else "own"

    def gathers_pieces(self, x: torch.Tensor) -> bool:
        return False  # each piece would be a round of messages

    def staging_of_gather(self, out: torch.Tensor) -> int:
        return out.nbytes  # the ring gathers into one flat buffer

    def staging_of_scatter(self, x: torch.Tensor) -> int:
        return x.nbytes  # the received shares, or a copy for the all-reduce

    def staging_of_sum(self, x: torch.Tensor, n: int) -> int:
        way = self.way_of_sum(x, n)
        if way == "gather":
            return n * x.nbytes
        if way == "own":
            return 0
        piece = -(-x.numel() // n) * x.element_size()
        padded = n * piece if x.numel() % n else 0
        return piece + n * piece + padded

    def begin(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingWork:
        if request.kind == "all_gather":
            return self._begin_broadcasts(group, out, x, request)
        if request.reduce_op == "sum":
            if request.kind == "reduce_scatter":
                return self.exchange_and_sum(group, out, x, request)
            if request.kind == "all_reduce":
                return self._begin_sum(group, x, request)
        return super().begin(group, out, x, request)

    def _begin_broadcasts(
        self, group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
    ) -> PendingList:
        """Begin an all-gather as broadcasts.

        For two ranks it is not an exchange of pieces: a rank that runs a reduce-scatter would
        mistake that for its own exchange.
        """
        pieces, rank, why = out.view(group.size(), -1), group.rank(), request[1:3]
        if not shares_memory(x, out):  # otherwise it is a part of `out` already
            pieces[rank].copy_(x.view(-1))
        return PendingList(
            [
                self.native(group, piece, piece, Request("broadcast", *why, root=i))
                for i, piece in enumerate(pieces.unbind())
            ]
        )

    def _begin_sum(
        self, group: dist.ProcessGroup, x: torch.Tensor, request: Request
    ) -> PendingWork:
        n, size = group.size(), x.numel()
        flat, way = x.view(-1), self.way_of_sum(x, n)
        if way == "own":
            return super().begin(group, x, x, request)
        if way == "gather":
            shares = new_empty(x, n * size)
            ask = Request("all_gather", request.move, request.op)
            exchange = self.native(group, shares, flat, ask)
            return PendingSum(exchange, shares.view(n, size).unbind(), flat)
        whole = flat if size % n == 0 else torch.nn.functional.pad(flat, (0, -size % n))
        piece = new_empty(x, whole.numel() // n)
        scatter = self.exchange_and_sum(group, piece, whole, request)

        def gather_pieces() -> None:
            scatter.wait()
            self._begin_broadcasts(group, whole, piece, request).wait()
            if whole is not flat:
                flat.copy_(whole[:size])

        return PendingCall(gather_pieces)


class GlooOnDevice(Backend):
    """Gloo process groups for GPU tensors: they copy tensors to the host, and wait there."""

    runs_in_streams = False

    def gathers_pieces(self, x: torch.Tensor) -> bool:
        return False


# -- the control plane -----------------------------------------------------------------------------
# Control groups, over which ranks compare texts, use Gloo: every machine has it, whatever its
# devices.

LOST = re.compile(
    r"(connection (closed|reset|refused)|broken pipe|socket closed|gloo/transport"
    r"|recvValue failed)",
    re.IGNORECASE,
)
"""The text of RuntimeErrors that Gloo and its store raise when a peer is gone."""
TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
"""The text of RuntimeErrors that they raise when a peer is late. It may still be alive."""


def can_compare() -> bool:
    """True if this torch was built with Gloo, over which ranks compare messages."""
    return dist.is_available() and dist.is_gloo_available()


def rendezvous_group(name: str, ranks: Sequence[int], limit: timedelta) -> Any:
    """Makes a process group of some ranks of the job, which find each other by `name`.

    `new_group` is not sufficient. It names a group by the number of groups that this rank is in
    already, and this number may differ between ranks.

    Args:
        ranks: the global ranks.
        limit: the timeout of its operations.
    """
    store = dist.PrefixStore(name, dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    return dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), limit)


def prepare_control(environment: Any, loopback: str) -> None:
    """Make Gloo use the loopback interface if all ranks are on this machine.

    Call this before process groups are made.

    Args:
        environment: the environment variables, which are changed.
        loopback: the name of the interface.
    """
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE", ""):
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)


def timeouts_of_job() -> list[timedelta]:
    """Returns the timeouts of the job's default group, one for each kind of device."""
    # Private torch: only the backends know a timeout that the user has set.
    world: Any = dist.group.WORLD
    found = []
    for kind in world._device_types:
        backend = world._get_backend(kind)
        limit = getattr(getattr(backend, "options", None), "_timeout", None)
        if limit is not None:
            found.append(limit)
    return found
