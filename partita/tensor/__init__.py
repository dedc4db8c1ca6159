"""What users hold: the DTensor, the dispatch of functions on it, its gradients, its random numbers.

In reading order:

- the class: `dtensor` (the DTensor whole, and how its value and its gradient cross a change of
  layout), `tensor_state` (its spec, that is its layout and its rank's wire, and what is remembered
  of it and of a thread), `trace_hooks` (what a capture makes nodes of)
- a call: `dispatch` (its twin in C is in `in_c/`), `arguments` (where its tensors stand), `plan`
  (how its plan is found, and run); the first of its kind: `plan_call` (its rule, and the cheapest
  row for each axis), with `op_facts` (which op a function is, and what an op does). `x + y` runs
  through these five files of the room, and those of `dtensor` and `tensor_state`
- calls that need more: `foreach` (lists of tensors), `aliasing` (shared memory), `uneven_pieces`
  (padded or empty ones), `infinite_factors` (of shares), `random` (one device's numbers on all
  ranks), `origins` (which call made what ranks read)
- what is no op: `tensor_overrides` (attributes, ways out to Python, `x[...] = y`, strides,
  addresses, copies), `dtensor_gradients` (`.grad`, `backward`, hooks, buckets)
- making tensors: `construct`
- functions of torch that ask no tensor: `torch_patches`; those that take functions: `transforms`
"""

# Imported for what they put in place: methods of DTensor, overrides, patches of torch.
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
