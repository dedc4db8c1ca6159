"""Errors of a recompute that takes another way than its forward."""

from __future__ import annotations

from partita.layout import LayoutError

__all__ = ["RematError"]


class RematError(LayoutError):
    """A recompute cannot bring back what its forward made. Names the calls that differ."""
