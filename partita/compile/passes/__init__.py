"""What rewrites a graph; each pass in a file of its own, their order in `order`.

In reading order: `order`, `contract` (what holds after each), `rewrite` and `change` (how
a pass works, and tells of it), then the passes as `order` has them.
"""

from .change import Change
from .order import PASSES, Pass, Passes, in_order, record_changes, run_passes
from .rewrite import Making, find, put, replace

__all__ = [
    "PASSES",
    "Change",
    "Making",
    "Pass",
    "Passes",
    "find",
    "in_order",
    "put",
    "record_changes",
    "replace",
    "run_passes",
]
