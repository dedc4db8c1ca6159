"""Capture: a training step run once over tensors without memory, and the graph of what it called.

In reading order: `capture` and `capture_run` (the run), `state` with `state_slots` and
`state_search`, and `inputs` (what the step reads), `symbolic`, `scalars`, `numbers` and `answers`
(Python numbers and questions), `optimizers`, `block_calls` with `block_tape`, `block_follower`,
`block_tracing` and `block_traces` (blocks traced once), `differentiate` and `result_parts`
(regions), `functionalize` with `functional_rewrite` (writes become values), `outputs` and
`lower_trace` (what is the step's program); what a run meets: `capture_context`, `hearing`, `hooks`,
`fakes`, `traced_tensors`, `tensor_facts`, `identity`, `value_checks`, `predicted_answers`,
`captured_attributes`, `data_writes`, `left_on_results`, `ctc`, `refusals`, `graph_checks`; what is
traced once: `equal_calls`, `equal_counts`, `repeated_calls`, `repeated_moves`, `block_choice`,
`block_modes`, `block_functions`, `block_operands`; what writes become: `functional_calls`,
`functional_memory`, `functional_trace`, `draws_in_place`, `views_in_place`, `overlapping_results`,
`shared_results`, `write_order`, `gating`.
"""
