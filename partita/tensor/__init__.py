"""What users hold: the DTensor, the dispatch of functions on it, its gradients, its random numbers.

In reading order:

- the class: `dtensor` (the DTensor whole), `spec` (its layout and its rank's wire), `autograd` (how
  a value and its gradient cross a change of layout), `tensor_state` (what is remembered of a tensor
  and of a thread)
- a call: `dispatch` (its twin in C is in `in_c/`), `arguments` (where its tensors stand), `plan`
  (how its plan is found, and run); the first of its kind: `plan_call` (its rule, and the cheapest
  row for each axis), with `forms` (which op a function is) and `op_facts` (what an op does).
  `x + y` runs through these six files of the room, and those of `dtensor` and `spec`
- calls that need more: `foreach` (lists of tensors), `aliasing` (shared memory), `uneven_pieces`
  (padded or empty ones), `random` (one device's numbers on all ranks)
- what is no op: `tensor_overrides` (attributes, ways out to Python, `x[...] = y`),
  `dtensor_gradients` (`.grad`, `backward`, hooks, buckets), `tensor_memory` (strides, addresses,
  copies)
- making tensors: `construct`
- functions of torch that ask no tensor: `torch_patches`, `flex` (flex_attention)
"""

# Imported for what they put in place: methods of DTensor, overrides, patches of torch.
from . import flex, tensor_memory, torch_patches  # noqa: F401
from .construct import (
    distribute_module,
    distribute_tensor,
    empty,
    from_torch,
    full,
    local_map,
    ones,
    rand,
    randn,
    to_torch,
    zeros,
)
from .dtensor import DTensor
from .plan import CacheInfo, cache_clear, cache_info, set_cache_limit
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
