"""Models on a mesh: distribution of parameters, batches, gradients and optimizers over ranks.

In reading order: `parallelize` (distributes a model by a plan), `plans` (ready plans), `parameters`
(finds and replaces parameters; blocks; initial values), `batch` (distributes batches), `optimizer`
(reduces gradients before a step), `zero` (`pt.zero`, and stages 0 to 2), `fsdp_group` (stage 3:
when each block is gathered and freed), `gathered_parameters` (what a forward has in their place),
`backward_pass` (which gradients have arrived), `flat_buffer` (the memory of a gathered block),
`fsdp_hooks` (stage 3: hooks around a block's forward and backward), `wrappers` (errors for wrappers
such as DDP).
"""
