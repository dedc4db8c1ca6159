"""Passes: rewrites of a captured graph, run by `pass_manager`.

In reading order:

- The frame: `pass_manager` (the order of passes, what a pass must not change, what it changed),
  `rewrite` (functions to find, add and replace nodes).
- Collectives: `moves` (removes unnecessary moves: `dedupe`, `cancel`, `cast`; `merge_views`),
  `regather` (frees and regathers the parameters of ZeRO), `bucket`, `overlap`, `backend_ways`.
- Memory: `remat` (recomputes in backward), `free_remat` (recomputes in the kernels that read),
  `lifetime` (updates parameters early).

A new pass is a function `(Program) -> str` in a file here and an entry of `PASSES`. The first line
of its docstring is what `explain()` shows. It changes the graph with `find`, `put` and `replace`.
Each new node needs its value's metadata and a note. `put` adds one call and copies the note of the
next call; `NodeBuilder` adds several calls with a note of your choice. All four are in `rewrite`.
In the graph of a deep step each block is one call. A pass runs over the block's own graph as well,
unless `pass_manager` lists it as a pass of only the step. If a step has a pass of the user, no
block becomes a call, and the pass gets all nodes (`Tracer.fold` in `capture/tracer.py`).
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
