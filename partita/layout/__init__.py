"""Layouts: which rank of a mesh holds what of a tensor. Nothing here knows of torch.

In reading order: `mesh` (the ranks and their axes), `placement` (what one axis does to a tensor,
its dual, and torch's words for it), `layout` (all axes together, as text too), `errors` (what a
user reads), `picture` (which rank holds what, drawn), `text` (amounts and tables, as printed).
"""

from .errors import Fix, LayoutError
from .layout import Layout, chunk
from .mesh import Coordinate, Mesh
from .placement import Invariant, Partial, Placement, Replicate, Shard, own_placement, split_factors

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
