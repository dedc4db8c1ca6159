"""Capture: a training step run once over fake tensors, and the graph of the ATen calls it makes.

In reading order:

- The run: `capture` (runs until one is complete), `capture_run` (one run), `capture_context`,
  `step_function_mode`, `library_calls` and `tensor_facts` (torch functions that the step calls),
  `fakes`.
- What the step reads: `state_slots`, `state`, `state_search`, `inputs`, `optimizers`,
  `step_counts`.
- Python numbers and questions: `symbolic`, `numbers`, `scalars`, `answers`, `equal_counts`.
- What it leaves: `captured_attributes`, `differentiate` (gradients of a region), `outputs`.
- Blocks traced once: `block_choice`, `block_nodes`, `block_tape`, `block_functions`,
  `block_follower`, `block_traces`, `block_calls`, `block_updates`, `outlined_updates`,
  `block_programs`.
- Calls traced once: `equal_calls`, `repeated_calls`, `repeated_moves`, `traced_tensors`.
- Writes become values: `functionalize`, `functional_rewrite`, `functional_calls`,
  `functional_memory`, `shared_results`.
- The result: `lower_trace`. What is refused: `refusals`, `capture_checks`. One operator: `ctc`.
"""
