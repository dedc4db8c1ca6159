"""Where a tensor lives. Nothing here knows of torch."""

from .errors import Fix, LayoutError
from .layout import Layout, chunk
from .mesh import Coordinate, Mesh
from .placement import Invariant, Partial, Placement, Replicate, Shard
from .torch_placements import own_placement, split_factors

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
