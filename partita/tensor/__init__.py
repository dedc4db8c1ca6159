"""What users hold: the DTensor, the dispatch of functions on it, its gradients, its random numbers.

In reading order:

- the class: `spec`, `dtensor`, `tensor_state`, `origin`
- a call: `dispatch` (its twin in C is loaded by `hot_path`), `plan_cache`, `plan`; the first of its
  kind: `plan_call` with `forms`, `function_facts`, `op_facts`, `arguments`, `choose`
- a change of layout and its gradient: `autograd`
- calls that need more than a rule: `gathered` (no rule), `composite` (Python functions of torch),
  `foreach` and `lists` (lists of tensors), `tensor_overrides` (what is no op), `memory_view`,
  `setitem`, `copies`, `out`, `mixed_operands` (plain tensors), `custom_function`, `flex`
- shared memory: `aliasing`
- gradients: `gradient_overrides` (`.grad`, `backward`), `grad_state`, `grad_buckets`,
  `module_hooks`
- making tensors: `construct`, `constructors`, `parameter`, `local_map`, `interop`
- uneven pieces: `uneven_pieces`, `padded_storage`
- numbers: `random`, `scalar_reads`, `autocast`
- what ranks compare: `agreement`, `checksum`, `number_check`
- functions of torch that ask no tensor: `torch_patches`, `torch_checkpoint`, `dynamo`
- small parts: `pieces` (for checkpoints), `engine` (is this backward?), `watch` (what watches a
  thread)
"""

# Imported for what they put in place: methods of DTensor, overrides, patches of torch.
from . import (  # noqa: F401
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
    torch_checkpoint,
    torch_patches,
)
from .construct import distribute_module, distribute_tensor, empty, full, ones, rand, randn, zeros
from .dtensor import DTensor
from .interop import from_torch, to_torch
from .local_map import local_map
from .plan_cache import CacheInfo, cache_clear, cache_info, set_cache_limit
from .random import random_mode

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
