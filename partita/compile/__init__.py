"""A training step as one graph: captured, checked, rewritten and compiled.

In reading order: `entry` and `step` (the call), `call_guard` and `guards/` (may a program be used
again), `pipeline` (how one is made): `capture/`, `program` and `captured_program`, `passes/`,
`verify` and `key`, `backend/`; `memory/` (its schedule), `region` and `split` (a part of an eager
model), `graph`, `pass_report` and `last_program` (what people read), `ledger_replay`,
`padding_boundary`, `sharing` and `replicated_input_check` (around a run); and small parts:
`arguments` (leaves of a call), `conditions`, `errors`, `phases`, `node_metadata`, `graph_nodes`,
`effects`, `cotangents`, `repeats`, `ordering`, `graph_modules`, `step_facts`, `length_buckets`.
"""

from .entry import compile
from .errors import CaptureError
from .length_buckets import pad_to_bucket
from .step import CompiledStep

__all__ = ["CaptureError", "CompiledStep", "compile", "pad_to_bucket"]
