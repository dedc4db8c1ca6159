"""Passes: rewrites of a captured graph, run by `pass_manager`.

In reading order:

- The frame: `pass_manager` (the order, the contract, what changed), `rewrite` (`find`, `put`,
  `replace`, and `NodeBuilder` for several new nodes).
- Collectives: `moves` (`dedupe`, `cancel`, `cast`: unnecessary ones; `merge_views`), `regather` (of
  parameters that ZeRO gathers, by the runs in which they are used), `bucket`, `overlap`,
  `backend_ways`.
- Memory: `remat` (regions, and what exceeds the step's budget), `lifetime`.

A new pass is a function `(Program) -> str` in a file here and an entry of `PASSES`. The first line
of its docstring is what `explain()` shows. It changes the graph with `find`, `put` and `replace`.
Each new node needs its value's metadata and a note: `put` gives them to one call, with the source
of the call behind it; `NodeBuilder` to several calls, with a note of your choice. All four are in
`rewrite`. In deep steps a pass also runs over the graph of each block, and sees blocks as calls of
sections, unless `pass_manager` lists it as one of the step alone.
"""

from ..program import Pass, Passes
from .pass_manager import PASSES, Change, order_passes, record_changes, run_passes
from .rewrite import NodeBuilder, find, put, replace

__all__ = [
    "PASSES",
    "Change",
    "NodeBuilder",
    "Pass",
    "Passes",
    "find",
    "order_passes",
    "put",
    "record_changes",
    "replace",
    "run_passes",
]
