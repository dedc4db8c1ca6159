"""Which calls may Inductor run in one kernel?

It also fuses calls that only read something together, such as the updates of all parameters, which
share a learning rate. That saves little where they are large, and then all their gradients live
until the last of them is there: what a pass has put apart would be together again.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.choices import InductorChoices

__all__ = ["Choices"]

_SMALL = 1 << 16  # bytes: what is less may wait
_SHARED = 4  # of what each of two calls reads and writes, one in so many must be common


class Choices(InductorChoices):
    """Inductor's own, but that large calls side by side must have much in common to be fused."""

    def uuid(self) -> str:
        """Of these rules, for Inductor's keys."""
        return f"partita.compile.fusion 1 {_SMALL} {_SHARED}"

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """May two that do not need each other be one kernel?"""
        least = min(_nbytes(scheduler, node1), _nbytes(scheduler, node2))
        if least > _SMALL and _SHARED * shared_data_score < least:
            return False
        return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)


def _nbytes(scheduler: Any, node: Any) -> int:
    """What a call reads and writes."""
    return sum(scheduler.dep_size_hint(dep) for dep in node.read_writes.reads_and_writes())
