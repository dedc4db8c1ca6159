"""Passes: rewrites of a captured graph, each in a file of its own, run by `pass_manager`.

In reading order:

- The frame: `pass_manager` (the order, the contract, what changed), `rewrite` (find, add and
  replace nodes).
- Collectives: `dedupe`, `cancel`, `cast`, `bucket`, `backend_ways`; `gathered_parameters` (those
  that ZeRO gathers, and the runs in which they are used) with `regather` and `overlap`.
- Memory: `remat` (regions, budgets, and what is worth keeping), `lifetime`. Views: `merge_views`.
"""

from ..program import Pass, Passes
from .pass_manager import PASSES, Change, order_passes, record_changes, run_passes
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
    "replace",
    "run_passes",
]
