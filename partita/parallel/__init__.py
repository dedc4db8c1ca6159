"""Models on a mesh: how parameters, batches, gradients and optimizers are spread over ranks.

In reading order: `parallelize` with `plan_parser`, `plans` (ready ones) and `module_boundary`
(activations), `parameters` (exchanging one for another), `batch`, `materialize`, `blocks` (which
parameters are gathered together), `zero/`, `gradients`, `optimizer`; `nested_tensors` (tensors in
the arguments of modules).
"""
