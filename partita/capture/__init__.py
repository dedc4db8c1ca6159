"""Capture: a function run over fake tensors, and the graph of the ATen calls that it makes.

In reading order:

- The whole: `tracer` (`capture`, of a function over declared state; `Tracer`, of one run).
- What goes in: `graph_inputs` (a fake for each tensor of the state and the arguments), `fakes`
  (what stands for tensors and Python numbers), `kernel_strides` (how fakes lie in memory),
  `optimizers`, `conditions` (what a program relies on in its inputs).
- The run: `capture_context` (what is exchanged and set otherwise meanwhile), `recorder` (the modes:
  a call becomes nodes, and what the step calls of tensors by name), `equal_calls` (traced once),
  `torch_settings`, `whose_code` (the user's, or a library's).
- What comes out: `graph_outputs`, `differentiate` (gradients of a region), `left_attributes` (what
  a function leaves in modules), `known_masks` (what is computed from constants alone; of attention,
  masks).
- Writes become values: `functionalize`, `functional_calls` (what one call becomes, and
  numbers as tensors), `functional_memory` (views).
- Blocks: `block_choice` (which modules), `block_updates` (an optimizer steps block by block),
  `fold` (equal blocks and equal updates become calls of one program).
"""
