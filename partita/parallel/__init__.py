"""Models on a mesh: how parameters, batches, gradients and optimizers are spread over ranks.

In reading order: `parallelize` with `plans`, `plan_parser` and `module_boundary`, `batch`,
`materialize`, `zero` (ZeRO), `gradients`, `optimizer`; `blocks` (which parameters are gathered
together), `nested_tensors` (what modules take and give).
"""
