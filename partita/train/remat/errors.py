"""What does a user read when a recompute goes another way than its forward did?"""

from __future__ import annotations

from partita.layout import LayoutError

__all__ = ["RematError"]


class RematError(LayoutError):
    """A recompute cannot give what its forward made. Says which calls differ, and where."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.fact, self.place, self.operands, self.reason, self.fixes)


def _rebuild(fact: str, place: str, operands: object, reason: str, fixes: object) -> RematError:
    return RematError(fact, place=place, operands=operands, reason=reason, fixes=fixes)  # type: ignore[arg-type]
