"""DTensors: the class, the dispatch of functions on it, its gradients, and its random numbers.

A *spec* is a DTensor's global layout and its rank's wire (connection to the other ranks).

In reading order:

- the class: `dtensor` (the DTensor, and how its value and gradient are redistributed),
  `tensor_state` (its spec, that is, its layout and its rank's wire; what is stored for it and for a
  thread), `trace_hooks` (what a capture records)
- a call: `dispatch` (also in C, in `in_c/`), `arguments` (the positions of its tensors), `plan`
  (how its plan is found and run). For the first call of its kind: `plan_call` (its rule, and the
  cheapest row for each axis) and `op_facts` (which op a function is, and properties of ops). For
  example, `x + y` runs through these five files, `dtensor` and `tensor_state`
- calls that need more: `foreach` (lists of tensors), `aliasing` (shared memory), `uneven_pieces`
  (padded or empty local tensors), `infinite_factors` (Partial values times infinity), `random` (the
  same random numbers as on one device), `origins` (which call made a tensor that ranks read)
- functions that are not ops: `tensor_overrides` (attributes, conversion to Python, `x[...] = y`,
  strides, addresses, copies), `dtensor_gradients` (`.grad`, `backward`, hooks, buckets)
- making tensors: `construct`
- functions of torch without `__torch_function__`: `torch_patches`; function transforms:
  `transforms`; which forward a checkpoint reruns: `reruns`
"""

# Imported for their side effects: methods of DTensor, overrides, patches of torch.
from . import tensor_overrides, torch_patches, transforms  # noqa: F401
from .construct import distribute_module as distribute_module
from .construct import distribute_tensor as distribute_tensor
from .construct import empty as empty
from .construct import from_torch as from_torch
from .construct import full as full
from .construct import local_map as local_map
from .construct import ones as ones
from .construct import rand as rand
from .construct import randn as randn
from .construct import to_torch as to_torch
from .construct import zeros as zeros
from .dtensor import DTensor as DTensor
from .plan import CacheInfo as CacheInfo
from .plan import cache_clear as cache_clear
from .plan import cache_info as cache_info
from .plan import set_cache_limit as set_cache_limit
from .random import random_mode as random_mode
