"""Models on a mesh: distribution of parameters, batches, gradients and optimizers over ranks.

In reading order: `parallelize` (a model by a plan: layouts of weights and activations), `plans`
(ready plans), `parameters` (the modules that hold each, its exchange, blocks, memory and first
values), `batch` (batches and other tensors in nested values), `optimizer` (gradients are reduced,
then a step), `zero` (sharded training state, and the reducer of gradients of stages 0 to 2),
`fsdp_group` (stage 3: which blocks are gathered, and when), `flat_buffer` (their bytes, and views
that outlive them), `fsdp_hooks` (forward and backward of a block, in eager code and in a captured
step), `wrappers` (torch's wrappers, which refuse a model of ours and whose models we refuse).
"""
