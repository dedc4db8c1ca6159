"""partita: a distributed tensor for PyTorch, and the training runtime around it."""

from .anomaly import NanError, detect_nan
from .checkpoint import (
    RandomState,
    async_save,
    full_state_dict,
    is_checkpoint,
    load,
    load_full_state_dict,
    load_safetensors,
    save,
    save_safetensors,
)
from .comm import DeviceMesh, check_ranks, dry_mesh, init_device_mesh, ledger, ranks, strict
from .compile import CaptureError, CompiledStep, compile, pad_to_bucket
from .layout import Invariant, Layout, LayoutError, Partial, Placement, Replicate, Shard
from .parallel import optimizer as _optimizer  # noqa: F401  optimizers reduce gradients first
from .parallel import plans
from .parallel.batch import distribute_batch
from .parallel.gradients import clip_grad_norm_, reduce_gradients
from .parallel.materialize import materialize
from .parallel.module_boundary import Inputs, Outputs
from .parallel.parallelize import parallelize
from .parallel.zero import MixedPrecision, no_sync, zero
from .predict import (
    Explanation,
    ModelPlan,
    Simulation,
    Strategy,
    autoplan,
    explain,
    load_machine,
    show,
    simulate,
)
from .remat import (
    RematError,
    checkpoint_name,
    keep_collectives,
    one_call,
    remat,
    remat_report,
)
from .remat.live_memory import count_memory
from .rules import rule
from .tensor import (
    CacheInfo,
    DTensor,
    cache_clear,
    cache_info,
    distribute_module,
    distribute_tensor,
    empty,
    from_torch,
    full,
    local_map,
    ones,
    rand,
    randn,
    random_mode,
    set_cache_limit,
    to_torch,
    zeros,
)
from .versions import __version__ as __version__

__all__ = [
    "CacheInfo",
    "CaptureError",
    "CompiledStep",
    "DTensor",
    "DeviceMesh",
    "Explanation",
    "Inputs",
    "Invariant",
    "Layout",
    "LayoutError",
    "MixedPrecision",
    "ModelPlan",
    "NanError",
    "Outputs",
    "Partial",
    "Placement",
    "RandomState",
    "RematError",
    "Replicate",
    "Shard",
    "Simulation",
    "Strategy",
    "async_save",
    "autoplan",
    "cache_clear",
    "cache_info",
    "check_ranks",
    "checkpoint_name",
    "clip_grad_norm_",
    "compile",
    "count_memory",
    "detect_nan",
    "distribute_batch",
    "distribute_module",
    "distribute_tensor",
    "dry_mesh",
    "empty",
    "explain",
    "from_torch",
    "full",
    "full_state_dict",
    "init_device_mesh",
    "is_checkpoint",
    "keep_collectives",
    "ledger",
    "load",
    "load_full_state_dict",
    "load_machine",
    "load_safetensors",
    "local_map",
    "materialize",
    "no_sync",
    "one_call",
    "ones",
    "pad_to_bucket",
    "parallelize",
    "plans",
    "rand",
    "randn",
    "random_mode",
    "ranks",
    "reduce_gradients",
    "remat",
    "remat_report",
    "rule",
    "save",
    "save_safetensors",
    "set_cache_limit",
    "show",
    "simulate",
    "strict",
    "to_torch",
    "zero",
    "zeros",
]
