"""Times of collectives: rings, and trees for all-reduces, with a latency for each message and a
bandwidth.

The formulas are those of Thakur, Rabenseifner and Gropp (2005, "Optimization of Collective
Communication Operations in MPICH", section 4), without their term for the arithmetic of a sum: in
a ring of n ranks there are n - 1 messages one after the other (an all-reduce is a reduce-scatter
and an all-gather, and has twice as many). Bytes are those that one rank sends, as a ledger counts
them.

An all-reduce may also go up two binary trees and down again, half of the bytes in each (Sanders,
Speck and Traff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"), and
the quicker one is taken. So does NVIDIA's library, which reckons both: a ring has 2 (n - 1)
messages, trees have 2 log2(n) from host to host and carry all bytes twice (src/graph/tuning.cc of
github.com/NVIDIA, in the function that tunes its model of a topology).

Gathers and reduce-scatters of ranks that are each alone on their host may go along parallel
aggregated trees (Jeaugey 2025, "PAT: a new algorithm for all-gather and reduce-scatter operations
at scale", arXiv 2506.20252): since its version 2.23 that library reckons a latency for each level
of them, a fifth of one for each rank, and three quarters of the bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["COLLECTIVES", "Link", "collective_bytes", "collective_seconds", "messages_of"]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")
"""The kinds that have a formula."""


@dataclass(frozen=True)
class Link:
    """How a rank reaches the others along a mesh axis.

    Attributes:
        latency: seconds of one message, from one rank to the next.
        bandwidth: bytes per second that a rank sends, in one direction.
    """

    latency: float
    bandwidth: float


def messages_of(kind: str, ranks: int) -> int:
    """Messages that a rank of a ring sends one after the other.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast" or "send".

    Raises:
        ValueError: a kind that is not known.
    """
    if ranks == 1:
        return 0
    steps: dict[str, int] = {
        "all_gather": ranks - 1,
        "reduce_scatter": ranks - 1,
        "all_reduce": 2 * (ranks - 1),
        "all_to_all": ranks - 1,  # pairwise exchange
        "broadcast": ranks - 1,  # a pipeline along the ring
        "send": 1,
    }
    if kind not in steps:
        raise ValueError(f"no collective {kind!r}: {', '.join(steps)} are")
    return steps[kind]


def collective_bytes(kind: str, ranks: int, whole: float) -> float:
    """Bytes that one rank of a ring sends.

    Args:
        whole: bytes of the unsharded tensor: what an all-gather gives, what a reduce-scatter or an
            all-reduce takes, what a rank holds before an all-to-all, what is sent.

    Raises:
        ValueError: a kind that is not known.
    """
    messages = messages_of(kind, ranks)
    if kind in ("send", "broadcast"):
        return whole if messages else 0.0
    return messages * whole / ranks


def collective_seconds(
    kind: str, ranks: int, nbytes: float, link: Link, *, each_on_its_host: bool = False
) -> float:
    """Seconds from when the last rank begins to the end, by the quicker algorithm.

    Args:
        nbytes: that one rank of a ring sends, as `collective_bytes` or a ledger has them.
        each_on_its_host: no two of the ranks share a host.

    Raises:
        ValueError: a kind that is not known.
    """
    if ranks == 1:
        return 0.0
    ring = messages_of(kind, ranks) * link.latency + nbytes / link.bandwidth
    levels = math.ceil(math.log2(ranks))
    if kind in ("all_gather", "reduce_scatter") and each_on_its_host:
        return min(ring, (levels + ranks / 5) * link.latency + nbytes / (0.75 * link.bandwidth))
    if kind != "all_reduce":
        return ring
    # All of the tensor goes up and comes down; a ring sends (ranks - 1) of its `ranks` parts twice.
    carried = nbytes * ranks / (ranks - 1)
    trees = 2 * levels * link.latency + carried / link.bandwidth
    return min(ring, trees)
