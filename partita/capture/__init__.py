"""Capture: runs a function over fake tensors and makes a graph of the ATen calls that it makes.

In reading order:

- The entry: `tracer` (`capture` takes a function and its state; `Tracer` traces one run).
- Inputs: `graph_inputs` (a fake for each tensor of the state and the arguments), `fakes` (fakes of
  tensors and symbolic numbers), `number_env` (makes the symbolic numbers), `kernel_strides` (the
  strides of fakes), `optimizers`, `conditions` (checks of inputs before a later call).
- The run: `capture_context` (settings and replacements during a run), `recorder` (the dispatch mode
  that turns calls into nodes), `function_mode` (intercepts functions called on tensors),
  `equal_calls` (equal calls are traced once), `code_origin` (distinguishes the user's code from a
  library's).
- Outputs: `graph_outputs`, `differentiate` (gradients of a part of a model), `left_attributes`
  (tensors that a function stores in modules), `known_masks` (removes attention masks).
- The graph without in-place writes: `functionalize`, `functional_calls` (single calls, and numbers
  as tensors), `functional_memory` (views).
- Blocks: `block_choice` (which modules), `block_updates` (optimizers step block by block), `fold`
  (equal blocks become calls of one subgraph).
"""
