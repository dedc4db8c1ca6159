"""Errors of a recompute.

What does a user read when a recompute goes another way than its forward did?
"""

from __future__ import annotations

from partita.layout import LayoutError

__all__ = ["RematError"]


class RematError(LayoutError):
    """A recompute cannot give what its forward made. Says which calls differ, and where."""
