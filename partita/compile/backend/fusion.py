"""Fusion: which calls may Inductor run in one kernel?

It also fuses calls that only read something together, such as the updates of all parameters, which
share a learning rate. That saves little where they are large, and then all their gradients live
until the last of them is there: what a pass has put apart would be together again. And what is made
again for backward reads what forward read: in one kernel it would be made once, and wait. A sum
that is fused with what reads it later, a bucket of gradients, has all that it sums wait until then.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.choices import InductorChoices

from ..node_metadata import note_of

__all__ = ["Choices", "mark"]

_SMALL = 1 << 16  # bytes: what is less may wait
_SHARED = 4  # of what each of two calls reads and writes, one in so many must be common


_FORWARD, _AGAIN = "forward", "again"
_OURS = "partita"


def mark(node: fx.Node) -> None:
    """Have what Inductor makes of a node tell whether it is forward's, or made again for backward.

    `custom` is the one entry of a node's `meta` that is the user's own and that tracing hands on.
    """
    note = note_of(node)
    if node.op == "call_function" and (note.again or note.phase == "forward"):
        mine = {_OURS: _AGAIN if note.again else _FORWARD}
        node.meta["custom"] = node.meta.get("custom", {}) | mine


class Choices(InductorChoices):
    """Inductor's own, but that what is made again is never in one kernel with what made it first.

    And large calls side by side must have much in common to be fused.
    """

    def uuid(self) -> str:
        """Of these rules, for Inductor's keys."""
        return f"partita.compile.backend.fusion 4 {_SMALL} {_SHARED}"

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """May two be one kernel, whether or not one needs the other?"""
        marks = _marks_of_kernel(node1), _marks_of_kernel(node2)
        if any(_AGAIN in one and _FORWARD in other for one, other in (marks, marks[::-1])):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """May the second, which needs the first, be one kernel with it?"""
        if node1.is_reduction():
            read, written = (
                _count_bytes_read(scheduler, node1),
                _count_written_bytes(scheduler, node1),
            )
            if read > _SMALL and _SHARED * max(written, shared_data_score) < read:
                return False  # it lets go of more than it makes, and should do so when it can
        return InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """May two that do not need each other be one kernel?"""
        least = min(_count_moved_bytes(scheduler, node1), _count_moved_bytes(scheduler, node2))
        if least > _SMALL and _SHARED * shared_data_score < least:
            return False
        return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)


def _count_moved_bytes(scheduler: Any, node: Any) -> int:
    return _count_bytes_read(scheduler, node) + _count_written_bytes(scheduler, node)


def _count_bytes_read(scheduler: Any, node: Any) -> int:
    return sum(scheduler.dep_size_hint(dep) for dep in node.read_writes.reads)


def _count_written_bytes(scheduler: Any, node: Any) -> int:
    return sum(scheduler.dep_size_hint(dep) for dep in node.read_writes.writes)


def _marks_of_kernel(node: Any) -> set[str]:
    """Of the nodes of the graph that a kernel computes."""
    origins = (
        o for part in node.get_nodes() if part.node is not None for o in part.node.get_origins()
    )
    return {o.meta.get("custom", {}).get(_OURS, "") for o in origins}
