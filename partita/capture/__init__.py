"""Capture: runs a function over fake tensors and makes a graph of the ATen calls that it makes.

In reading order:

- The whole: `tracer` (`capture`, of a function over declared state; `Tracer`, of one run).
- Inputs: `graph_inputs` (a fake for each tensor of the state and the arguments), `fakes` (fakes of
  tensors and symbolic numbers), `kernel_strides` (the strides of fakes), `optimizers`, `conditions`
  (what must hold of a program's inputs).
- The run: `capture_context` (what is replaced and set meanwhile), `recorder` (the modes that turn
  calls into nodes), `equal_calls` (equal calls are traced once), `torch_settings`, `whose_code`
  (the user's code or a library's).
- Outputs: `graph_outputs`, `differentiate` (gradients of a region), `left_attributes` (tensors that
  a function stores in modules), `known_masks` (attention masks that depend on constants alone).
- The graph without in-place writes: `functionalize`, `functional_calls` (single calls, and numbers
  as tensors), `functional_memory` (views).
- Blocks: `block_choice` (which modules), `block_updates` (optimizers step block by block), `fold`
  (equal blocks become calls of one subgraph).
"""
