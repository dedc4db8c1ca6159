"""partita: a distributed tensor for PyTorch, and the training runtime around it."""

from .comm import DeviceMesh, check_ranks, init_device_mesh, ledger, ranks, strict
from .layout import Invariant, Layout, LayoutError, Partial, Placement, Replicate, Shard
from .rules import rule
from .tensor import (
    CacheInfo,
    DTensor,
    cache_clear,
    cache_info,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    local_map,
    ones,
    rand,
    randn,
    random_mode,
    set_cache_limit,
    zeros,
)
from .train import optimizer as _optimizer  # noqa: F401  optimizers settle gradients first
from .train.gradients import clip_grad_norm_, reduce_gradients

__version__ = "0.1.0"

__all__ = [
    "CacheInfo",
    "DTensor",
    "DeviceMesh",
    "Invariant",
    "Layout",
    "LayoutError",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "cache_clear",
    "cache_info",
    "check_ranks",
    "clip_grad_norm_",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "ledger",
    "local_map",
    "ones",
    "rand",
    "randn",
    "random_mode",
    "ranks",
    "reduce_gradients",
    "rule",
    "set_cache_limit",
    "strict",
    "zeros",
]
