"""Models on a mesh: how parameters, batches, gradients and optimizers are spread over ranks.

In reading order: `parallelize` (a model by a plan: where weights and activations live), `plans`
(ready ones), `parameters` (who holds one, its exchange, blocks, memory and first values), `batch`
(batches and other tensors in nested values), `optimizer` (gradients are reduced, and a step),
`zero` (training state that is sharded, and the reducer of gradients of stages 0 to 2), `fsdp_group`
(stage 3: which blocks are gathered, and when), `flat_buffer` (their bytes, and views that outlive
them), `fsdp_hooks` (what a block's forward and backward do, in eager code and in a captured step),
`wrappers` (torch's own, which refuse a model of ours and whose models are refused).
"""
