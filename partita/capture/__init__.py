"""Capture: a training step run once over fake tensors, and the graph of the ATen calls it makes.

In reading order:

- The run: `capture` (runs until one gives a complete graph), `capture_context` (what is exchanged
  and set otherwise meanwhile), `recorder` (the modes: a call becomes nodes, and what the step calls
  of tensors by name), `fakes` (what stands for tensors and Python numbers), `kernel_strides` (how
  these lie in memory) and `equal_calls` (computed once, traced once).
- State: `optimizers`. Gradients of a region: `differentiate`. Constants: `known_masks` (what is
  computed from them alone; of attention, masks).
- Writes become values: `functionalize`, `functional_calls` (what one call becomes, and
  numbers as tensors), `functional_memory` (views).
- Blocks: `block_choice` (which modules), `fold` (equal ones become calls of one program),
  `block_updates` (equal updates of optimizers are traced once, by `block_tracing`),
  `update_programs` (these as graphs of their own).
"""
