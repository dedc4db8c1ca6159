"""ZeRO: a model whose training state is sharded over the ranks of a data axis.

In reading order: `shard` (`zero`, the call), `fsdp_group` (stage 3: which blocks are gathered, and
when), `flat_buffer` (their bytes, and views that outlive them), `fsdp_hooks` (what a block's
forward and backward do, in eager code and in a captured step); `grad_reducer` (stages 0 to 2).
"""

from .fsdp_group import MixedPrecision
from .shard import no_sync, zero

__all__ = ["MixedPrecision", "no_sync", "zero"]
