"""Passes: rewrites of a captured graph, each in a file of its own, run in the order of `order`.

In reading order:

- The frame: `order`, `rewrite` (find, add and replace nodes), `contract` (what a pass must not
  change), `change` (the report of what it changed).
- Collectives: `dedupe`, `cancel`, `cast`, `bucket`, `backend_ways`; `gathered` (the parameters that
  ZeRO gathers, and where they are used) with `regather` and `overlap`.
- Memory: `remat` with `remat_regions` and `recompute`, `lifetime`. Views: `merge_views`.
"""

from .change import Change
from .order import (
    PASSES,
    Pass,
    Passes,
    order_passes,
    record_changes,
    record_each_change,
    run_passes,
)
from .rewrite import Making, find, put, replace

__all__ = [
    "PASSES",
    "Change",
    "Making",
    "Pass",
    "Passes",
    "find",
    "order_passes",
    "put",
    "record_changes",
    "record_each_change",
    "replace",
    "run_passes",
]
