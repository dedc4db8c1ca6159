"""Layouts: which rank of a mesh holds which part of a tensor. This package does not import torch.

The part of a tensor that one rank holds is its *piece*: a shard, the whole value, or a *share*,
which is one addend of a Partial sum. An *axis* is a named dimension of the mesh.

In reading order: `placement` (meshes, and the placement of a tensor and its gradient on one axis),
`layout` (the placements on all axes together, also as text), `text` (errors, amounts and tables as
users read them).
"""

from .layout import Layout as Layout
from .layout import chunk as chunk
from .placement import NEUTRAL_SHARE as NEUTRAL_SHARE
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
