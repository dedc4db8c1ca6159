"""The rendezvous of all ranks.

What does a rank bring to a meeting of all, and what is it told where that breaks off?
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from partita.layout import LayoutError

from .collective_request import Ask
from .source import user_line

__all__ = ["MeetingCall", "Payload", "Verdict", "brief", "is_from_verdict"]

Payload = tuple[Any, ...]


class MeetingCall:
    """What one rank brings to a collective and waits for.

    Attributes:
        everyone: the ranks of its mesh: all must come and ask for the same, in whatever groups.
        group: the ranks among them that exchange data with this one, in group order.
        key: what must be equal besides the move: the primitive, the dtype and its options.
    """

    def __init__(
        self,
        rank: int,
        everyone: tuple[int, ...],
        group: tuple[int, ...],
        key: tuple[Any, ...],
        ask: Ask,
        payload: Payload,
    ):
        self.rank, self.everyone, self.group = rank, everyone, group
        self.key, self.ask, self.payload = key, ask, payload
        self.frame: FrameType | None = sys._getframe(2)

    def agrees(self, other: MeetingCall) -> bool:
        a, b = self.ask, other.ask
        return self.key == other.key and a.kind == b.kind and (a.move is b.move or a.move == b.move)

    def describe(self) -> str:
        dtype = str(self.key[1]).removeprefix("torch.")
        at = user_line(self.frame) or "no line"
        return f"rank {self.rank}  {self.ask.describe()} ({dtype})  at {at}"


class Verdict:
    """Why ranks must stop; an error of its own for each, since each has its own traceback."""

    def __init__(self, fact: str, calls: tuple[str, ...] = (), cause: BaseException | None = None):
        self.fact, self.calls, self.cause = fact, calls, cause

    def error(self) -> LayoutError:
        reason = "every rank of a mesh must make the same moves in the same order"
        error = LayoutError(self.fact, operands=self.calls, reason="" if self.cause else reason)
        error.__cause__ = self.cause
        error._from_verdict = True  # type: ignore[attr-defined]
        return error


def is_from_verdict(error: BaseException) -> bool:
    """Whether it is the word that the ranks must stop, or was raised because of it."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if getattr(one, "_from_verdict", False):
            return True
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return False


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
