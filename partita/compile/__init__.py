"""A training step as one graph: captured, checked, rewritten and compiled.

In reading order:

- The call: `entry` (`pt.compile`), `step`, `call_guard`, `guards/` (may a program be used again).
- How a program is made: `pipeline`, which calls `capture/`, `passes/`, `verify`, `key`, `backend/`.
- What a program is: `program`, `captured_program`, `conditions`, `arguments` (leaves of a call),
  `node_metadata`, `graph_nodes`, `section` (parts that are called), `ordering`, `memory/` (its
  schedule). What becomes of its blocks: `block_sections`; how much is made again for a budget of
  memory: `budgets`.
- A part of an eager model: `region` and `split`.
- Around a run: `padding_boundary`, `sharing`, `replicated_input_check`, `ledger_replay`, `phases`.
- What people read: `graph` and `repeats`, `pass_report`, `step_facts`, `last_program`, `errors`.
- For batches of many lengths: `length_buckets`.
"""

from .entry import compile
from .errors import CaptureError
from .length_buckets import pad_to_bucket
from .step import CompiledStep

__all__ = ["CaptureError", "CompiledStep", "compile", "pad_to_bucket"]
