"""A training step as one graph: captured, checked, rewritten and compiled.

In reading order:

- The call: `step` (`pt.compile`, `CompiledStep`, is a call like the last one?), `guards/` (is what
  the step read of Python as it was?), `arguments` (the leaves of a call), `progress` (what is
  shown while a first call takes minutes).
- How a program is made: `pipeline`, which calls `capture/`, `step_forms` (blocks as calls; how
  much is made again for a budget), `passes/`, `verify` (the grammar of graphs) and `backend/`.
- What a program is: `program` (a graph, its inputs and outputs, its options), `captured_program`
  (how a call runs it), `conditions` (what must hold of its inputs), `region` (a part of an eager
  model: forward and backward), `graph_nodes` (nodes, their notes, sections), `memory` (its
  schedule).
- What people and other ranks read: `graph_text` (and the key), `step_report`, `errors`.
"""

from .arguments import pad_to_bucket
from .errors import CaptureError
from .step import CompiledStep, compile

__all__ = ["CaptureError", "CompiledStep", "compile", "pad_to_bucket"]
