"""Layouts: which rank of a mesh holds what of a tensor. Nothing here knows of torch.

In reading order: `placement` (the ranks and their axes, what one axis does to a tensor, its dual,
and torch's words for it), `layout` (all axes together, as text too), `text` (what a user reads:
errors, amounts and tables), `picture` (which rank holds what, drawn).
"""

from .layout import Layout, chunk
from .placement import (
    Coordinate,
    Invariant,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    own_placement,
    split_factors,
)
from .text import Fix, LayoutError

__all__ = [
    "Coordinate",
    "Fix",
    "Invariant",
    "Layout",
    "LayoutError",
    "Mesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "chunk",
    "own_placement",
    "split_factors",
]
