"""Models on a mesh: distribution of parameters, batches, gradients and optimizers over ranks.

In reading order: `parallelize` (a model by a plan: layouts of weights and activations), `plans`
(ready plans), `parameters` (the modules that hold each parameter, its replacement, blocks, memory
and initial values), `batch` (batches, and tensors in nested containers), `optimizer` (reduces
gradients before a step), `zero` (sharded training state, and the reducer of gradients of stages 0
to 2), `fsdp_group` (stage 3: which blocks are gathered, and when), `flat_buffer` (the gathered
memory of a block, and views that outlive it), `fsdp_hooks` (forward and backward of a block, in
eager code and in a captured step), `wrappers` (wrappers such as DDP, which do not work with a model
of DTensors).
"""
