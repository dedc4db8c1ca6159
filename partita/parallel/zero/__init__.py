"""ZeRO: a model whose training state is sharded over the ranks of a data axis.

In reading order: `shard` (`zero`, the call), `state` (stage 3 of a model: which block is gathered
when), `fsdp_group` (a block's parameters), `flat_buffer` (their bytes), `fsdp_hooks` (a block's
forward), `fsdp_backward` and `saved_tensors` (its backward), `released` (errors of a weight that is
no longer gathered), `in_graph` (the same in a captured step), `precision`; `grad_reducer` (stages 0
to 2).
"""

from .fsdp_group import MixedPrecision
from .shard import no_sync, zero

__all__ = ["MixedPrecision", "no_sync", "zero"]
