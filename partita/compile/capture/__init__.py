"""Capture: a training step run once over tensors without memory, and the graph of what it called.

In reading order: `capture` (the run), `state` and `inputs` (what the step reads), `symbolic`,
`scalars`, `numbers` and `answers` (Python numbers and questions), `optimizers`, `block_calls` with
`block_tape`, `block_follower` and `block_traces` (blocks traced once), `differentiate` and
`result_parts` (regions), `functionalize` with `functional_rewrite` (writes become values),
`lower_trace` (what is the step's program).
"""
