"""Layouts: which rank of a mesh holds what of a tensor. Nothing here knows of torch.

In reading order: `placement` (the ranks and their axes, what one axis does to a tensor, its dual,
and torch's words for it), `layout` (all axes together, as text too), `text` (what a user reads:
errors, amounts and tables).
"""

from .layout import Layout as Layout
from .layout import chunk as chunk
from .placement import Coordinate as Coordinate
from .placement import Invariant as Invariant
from .placement import Mesh as Mesh
from .placement import Partial as Partial
from .placement import Placement as Placement
from .placement import Replicate as Replicate
from .placement import Shard as Shard
from .placement import own_placement as own_placement
from .placement import split_factors as split_factors
from .text import Fix as Fix
from .text import LayoutError as LayoutError
