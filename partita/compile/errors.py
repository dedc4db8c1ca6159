"""What is raised where a step cannot become one graph?"""

from __future__ import annotations

from partita.comm import user_line
from partita.layout import Fix, LayoutError

__all__ = ["EAGER", "CaptureError"]

EAGER = Fix('pt.compile(step, fallback="eager")', "runs a step that cannot be captured eagerly")


class CaptureError(LayoutError):
    """A step does what a graph cannot say: a branch on data, a tensor from nowhere."""


def not_captured(fact: str, reason: str, *fixes: Fix, place: str | None = None) -> CaptureError:
    """The error to raise; `place` is the user's line where None."""
    return CaptureError(
        f"capture: {fact}",
        place=user_line() if place is None else place,
        reason=reason,
        fixes=(*fixes, EAGER),
    )
