"""Settings of torch for the whole process, read by kernels, composites and autograd.

Each call compares them with their values at capture. If one differs, the step is captured again,
and the reason contains the setting's name from the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from partita.comm.device import KERNELS_WITH_PRECISIONS


def read_matmul_precision() -> str:
    """Returns `torch.get_float32_matmul_precision()`, or "by backend" if backends differ."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "by backend"


OF_KERNELS: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.is_deterministic_algorithms_warn_only_enabled()": (
        torch.is_deterministic_algorithms_warn_only_enabled
    ),
    "torch.get_float32_matmul_precision()": read_matmul_precision,
}
"""Settings that a step must not change, because its graph's kernels use the caller's values."""

# Private torch: the public names take twenty times as long, or raise once a precision was set for
# one backend alone. Names that a version lacks are skipped.
OF_C = {
    "torch.utils.deterministic.fill_uninitialized_memory": (
        "_get_deterministic_fill_uninitialized_memory"
    ),
    "torch.autograd.forward_ad": "_is_fwd_grad_enabled",
    "torch.autograd.set_multithreading_enabled": "_is_multithreading_enabled",
    "torch.autograd._force_original_view_tracking": "_is_view_replay_enabled",
    "torch.sparse.check_sparse_tensor_invariants": "_check_sparse_tensor_invariants",
    # By these, kernels of attention are chosen when a graph is captured or compiled.
    "torch.backends.cuda.flash_sdp_enabled()": "_get_flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled()": "_get_mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled()": "_get_math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled()": "_get_cudnn_sdp_enabled",
    "torch.nn.attention.SDPBackend.OVERRIDEABLE": "_get_overrideable_sdp_enabled",
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": (
        "_get_math_sdp_allow_fp16_bf16_reduction"
    ),
    "torch.backends.cuda.preferred_linalg_library()": "_get_linalg_preferred_backend",
    "torch.backends.cuda.preferred_blas_library()": "_get_blas_preferred_backend",
    "torch.backends.cuda.preferred_rocm_fa_library()": "_get_rocm_fa_preferred_backend",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        "_get_cublas_allow_fp16_reduced_precision_reduction"
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        "_get_cublas_allow_bf16_reduced_precision_reduction"
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": "_get_cublas_allow_fp16_accumulation",
    "torch.backends.cpu.allow_fp16_reduced_precision_reduction": (
        "_get_cpu_allow_fp16_reduced_precision_reduction"
    ),
    "torch.backends.cudnn.enabled": "_get_cudnn_enabled",
    "torch.backends.cudnn.benchmark": "_get_cudnn_benchmark",
    "torch.backends.cudnn.deterministic": "_get_cudnn_deterministic",
    "torch.backends.cudnn.depthwise_kernel": "_get_cudnn_depthwise_kernel",
    "torch.backends.mkldnn.enabled": "_get_mkldnn_enabled",
    "torch.backends.mkldnn.deterministic": "_get_mkldnn_deterministic",
    "torch.backends.mkldnn.allow_tf32": "_get_onednn_allow_tf32",
    "torch.backends.miopen.immediate": "_get_miopen_immediate",
    "torch.backends.nnpack": "_get_nnpack_enabled",
    "torch.backends.quantized.engine": "_get_qengine",
}
"""Maps the name of a setting to the function of torch's C code that reads it."""

_opt_einsum: Any = torch.backends.opt_einsum.m  # type: ignore[attr-defined]
SETTINGS: dict[str, Callable[[], Any]] = {
    **OF_KERNELS,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.is_anomaly_enabled()": torch.is_anomaly_enabled,
    "torch.is_anomaly_check_nan_enabled()": torch.is_anomaly_check_nan_enabled,
    "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled,
    "torch.__future__.get_overwrite_module_params_on_conversion()": (
        torch.__future__.get_overwrite_module_params_on_conversion
    ),
    "torch.__future__.get_swap_module_params_on_conversion()": (
        torch.__future__.get_swap_module_params_on_conversion
    ),
    "torch.distributions.Distribution.set_default_validate_args": partial(
        getattr, torch.distributions.Distribution, "_validate_args"
    ),
    "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled,
    "torch.backends.opt_einsum.enabled": partial(getattr, _opt_einsum, "enabled"),
    "torch.backends.opt_einsum.strategy": partial(getattr, _opt_einsum, "strategy"),
    "the order of attention's backends": lambda: (*torch._C._get_sdp_priority_order(),),
    **{name: getattr(torch._C, of_c) for name, of_c in OF_C.items() if hasattr(torch._C, of_c)},
    **{
        f"{name}.fp32_precision": partial(torch._C._get_fp32_precision_getter, *key)
        for name, key in KERNELS_WITH_PRECISIONS.items()
    },
}
"""Maps the name of a setting to the function that reads it."""

_READ, _READ_OF_KERNELS = tuple(SETTINGS.values()), tuple(OF_KERNELS.values())


def read_settings() -> tuple[Any, ...]:
    """Returns the values of all torch settings on which a captured program depends.

    They are in the order of `SETTINGS`.
    """
    return tuple([read() for read in _READ])


def read_kernel_settings() -> tuple[Any, ...]:
    """Returns the values of the torch settings that kernels read (`OF_KERNELS`)."""
    return tuple([read() for read in _READ_OF_KERNELS])
