"""What users hold: the tensor, its dispatch, its random numbers.

In reading order: `spec` and `dtensor` (the class), `dispatch` (the way of a call; its twin in C is
loaded by `hot_path`), `plan_cache` and `plan` (a call that was seen before), `plan_call` (one that
was not) with `names`, `library`, `arguments` and `choose`, `autograd` (a change of layout, and its
gradient), `gathered`, `composite` and `lists` (calls without a rule of their own),
`tensor_overrides` (what is no op) with `gradient_overrides` (`.grad`, `backward`), `construct`,
`copies`, `setitem`, `random` with `draws`, `padding` with `padded_storage`, `op_facts` and
`function_facts` (what is so of every call), `written`, `view_writes` and `origin` (memory),
`tensor_state`, `mixed_operands`, `grad_state` and `grad_buckets` (gradients), `torch_patches`
(functions of torch that ask no tensor); calls of torch with ways of their own: `constructors`,
`may_copy`, `out`, `foreach`, `flex`, `local_map`, `custom_function`, `module_hooks`, `parameter`,
`scalar_reads`, `checkpoint_inputs`, `checkpoint_in_graph`, `dynamo`, `torch_doors`; what ranks
compare: `agreement`, `number_check`, `checksum`; and small parts: `autocast`, `pieces`,
`empty_pieces`, `one_device`, `memory_view`, `plain_writes`, `engine`, `watch`.
"""

# They take their places in torch.
from . import (  # noqa: F401
    checkpoint_in_graph,
    checkpoint_inputs,
    constructors,
    copies,
    custom_function,
    dynamo,
    flex,
    gradient_overrides,
    lists,
    memory_view,
    module_hooks,
    number_check,
    scalar_reads,
    torch_patches,
)
from .construct import distribute_module, distribute_tensor, empty, full, ones, rand, randn, zeros
from .dtensor import DTensor
from .local_map import local_map
from .plan_cache import CacheInfo, cache_clear, cache_info, set_cache_limit
from .random import random_mode
from .torch_doors import from_torch, to_torch

__all__ = [
    "CacheInfo",
    "DTensor",
    "cache_clear",
    "cache_info",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "from_torch",
    "full",
    "local_map",
    "ones",
    "rand",
    "randn",
    "random_mode",
    "set_cache_limit",
    "to_torch",
    "zeros",
]
