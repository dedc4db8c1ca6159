"""Settings of torch: what a process sets for all calls, and kernels, composites and autograd read.

A call is compared in all of them with the call that was captured. What differs is the reason of a
new capture, by the name in the table.

Private torch: functions of `torch._C`, where torch has no public name, or one that raises once a
precision was set for one backend alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_C: Any = torch._C
_opt_einsum: Any = torch.backends.opt_einsum.m  # type: ignore[attr-defined]


def read_matmul_precision() -> str:
    """`torch.get_float32_matmul_precision()`, which raises where backends differ in it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "by backend"


_PRECISIONS = {
    "torch.backends": ("generic", "all"),
    "torch.backends.cuda.matmul": ("cuda", "matmul"),
    "torch.backends.cudnn": ("cuda", "all"),
    "torch.backends.cudnn.conv": ("cuda", "conv"),
    "torch.backends.cudnn.rnn": ("cuda", "rnn"),
    "torch.backends.mkldnn": ("mkldnn", "all"),
    "torch.backends.mkldnn.matmul": ("mkldnn", "matmul"),
    "torch.backends.mkldnn.conv": ("mkldnn", "conv"),
    "torch.backends.mkldnn.rnn": ("mkldnn", "rnn"),
}
"""By what has an attribute `fp32_precision`, the backend and the kind of kernel."""

OF_KERNELS: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.are_deterministic_algorithms_enabled()": _C._get_deterministic_algorithms,
    "torch.is_deterministic_algorithms_warn_only_enabled()": (
        _C._get_deterministic_algorithms_warn_only
    ),
    "torch.get_float32_matmul_precision()": read_matmul_precision,
}
"""The settings that a step must not change, as the kernels of its graph read its caller's."""

SETTINGS: dict[str, Callable[[], Any]] = {
    **OF_KERNELS,
    "torch.utils.deterministic.fill_uninitialized_memory": (
        _C._get_deterministic_fill_uninitialized_memory
    ),
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.is_anomaly_enabled()": torch.is_anomaly_enabled,
    "torch.is_anomaly_check_nan_enabled()": torch.is_anomaly_check_nan_enabled,
    "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled,
    "torch.autograd.forward_ad": _C._is_fwd_grad_enabled,
    "torch.autograd.grad_mode.set_multithreading_enabled": _C._is_multithreading_enabled,
    "torch.autograd._force_original_view_tracking": _C._is_view_replay_enabled,
    "torch.sparse.check_sparse_tensor_invariants": _C._check_sparse_tensor_invariants,
    "torch.__future__.get_overwrite_module_params_on_conversion()": (
        torch.__future__.get_overwrite_module_params_on_conversion
    ),
    "torch.__future__.get_swap_module_params_on_conversion()": (
        torch.__future__.get_swap_module_params_on_conversion
    ),
    # By these, kernels of attention are chosen when a graph is captured or compiled.
    "torch.backends.cuda.flash_sdp_enabled()": _C._get_flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": _C._get_mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": _C._get_math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": _C._get_cudnn_sdp_enabled,
    "torch.nn.attention's overrideable kernel": _C._get_overrideable_sdp_enabled,
    "torch.nn.attention's priorities": lambda: tuple(_C._get_sdp_priority_order()),
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": (
        _C._get_math_sdp_allow_fp16_bf16_reduction
    ),
    "torch.backends.cuda.preferred_linalg_library()": _C._get_linalg_preferred_backend,
    "torch.backends.cuda.preferred_blas_library()": _C._get_blas_preferred_backend,
    "torch.backends.cuda.preferred_rocm_fa_library()": _C._get_rocm_fa_preferred_backend,
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        _C._get_cublas_allow_fp16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        _C._get_cublas_allow_bf16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": _C._get_cublas_allow_fp16_accumulation,
    "torch.backends.cpu.allow_fp16_reduced_precision_reduction": (
        _C._get_cpu_allow_fp16_reduced_precision_reduction
    ),
    "torch.backends.cudnn.enabled": _C._get_cudnn_enabled,
    "torch.backends.cudnn.benchmark": _C._get_cudnn_benchmark,
    "torch.backends.cudnn.deterministic": _C._get_cudnn_deterministic,
    "torch.backends.cudnn.depthwise_kernel": _C._get_cudnn_depthwise_kernel,
    "torch.backends.mkldnn.enabled": _C._get_mkldnn_enabled,
    "torch.backends.mkldnn.deterministic": _C._get_mkldnn_deterministic,
    "torch.backends.mkldnn.allow_tf32": _C._get_onednn_allow_tf32,
    "torch.backends.miopen.immediate": _C._get_miopen_immediate,
    "torch.backends.nnpack": _C._get_nnpack_enabled,
    "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled,
    "torch.backends.quantized.engine": _C._get_qengine,
    "torch.backends.opt_einsum.enabled": partial(getattr, _opt_einsum, "enabled"),
    "torch.backends.opt_einsum.strategy": partial(getattr, _opt_einsum, "strategy"),
    **{
        f"{name}.fp32_precision": partial(_C._get_fp32_precision_getter, *key)
        for name, key in _PRECISIONS.items()
    },
}
"""By name, the function that reads a setting."""

_READ, _READ_OF_KERNELS = tuple(SETTINGS.values()), tuple(OF_KERNELS.values())


def read_settings() -> tuple[Any, ...]:
    """The values of all settings now, in the order of `SETTINGS`."""
    return tuple([read() for read in _READ])


def read_kernel_settings() -> tuple[Any, ...]:
    """The values of the settings in `OF_KERNELS` now."""
    return tuple([read() for read in _READ_OF_KERNELS])
