"""What users hold: the DTensor, the dispatch of functions on it, its gradients, its random numbers.

In reading order:

- the class: `dtensor` (the DTensor whole, and how its value and its gradient cross a change of
  layout), `tensor_state` (its spec, that is its layout and its rank's wire, and what is remembered
  of it and of a thread)
- a call: `dispatch` (its twin in C is in `in_c/`), `arguments` (where its tensors stand), `plan`
  (how its plan is found, and run); the first of its kind: `plan_call` (its rule, and the cheapest
  row for each axis), with `op_facts` (which op a function is, and what an op does). `x + y` runs
  through these five files of the room, and that of `tensor_state`
- calls that need more: `foreach` (lists of tensors), `aliasing` (shared memory), `uneven_pieces`
  (padded or empty ones), `random` (one device's numbers on all ranks)
- what is no op: `tensor_overrides` (attributes, ways out to Python, `x[...] = y`, strides,
  addresses, copies), `dtensor_gradients` (`.grad`, `backward`, hooks, buckets)
- making tensors: `construct`
- functions of torch that ask no tensor: `torch_patches`
"""

# Imported for what they put in place: methods of DTensor, overrides, patches of torch.
from . import tensor_overrides, torch_patches  # noqa: F401
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
