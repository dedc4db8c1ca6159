"""ZeRO: a model whose training state is sharded over the ranks of a data axis.

In reading order: `shard` (the call), `state` (a model: what is gathered when), `fsdp_group` (a
block's parameters), `flat_buffer` (where their bytes lie), `fsdp_hooks` (its forward),
`fsdp_backward` and `saved_tensors` (its backward), `in_graph` (the same in a captured step),
`precision`; `grad_reducer` (stages 1 and 2), `released` (what is told of a weight that is gone).
"""

from .precision import MixedPrecision
from .shard import no_sync, zero

__all__ = ["MixedPrecision", "no_sync", "zero"]
