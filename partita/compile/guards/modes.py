"""Torch modes that are part of a program: gradients, autocast, determinism, function modes.

A call under other modes than a program was captured with is captured again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily

from partita.comm import read_autocast_state

from .codes import is_user_module
from .content_keys import ByIdentity

__all__ = [
    "active_modes",
    "function_modes",
    "hearing_modes",
    "kernel_settings",
    "without_function_modes",
]

# Private torch: the mode of `with torch.device(...)`.
_Device = torch.utils._device.DeviceContext


def active_modes() -> tuple[Any, ...]:
    """The torch modes of now, as a hashable value."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        read_autocast_state(),
        *kernel_settings(),
        # By these kernels are chosen when a graph is captured or compiled.
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        *map(_key_of_mode, function_modes()),
    )


def kernel_settings() -> tuple[Any, ...]:
    """The settings that kernels read when they run; a graph's kernels read those of its caller."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )


def function_modes() -> list[Any]:
    """The user's active TorchFunctionModes, the outermost first: their effect is in the graph."""
    count = torch._C._len_torch_function_stack()
    if not count:
        return []
    found = map(torch._C._get_function_stack_at, range(count))
    return [m for m in found if isinstance(m, _Device) or is_user_module(type(m).__module__)]


def hearing_modes() -> list[Any]:
    """Those of `function_modes` that hear calls: `torch.device` says where tensors are made."""
    return [mode for mode in function_modes() if not isinstance(mode, _Device)]


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Within, no TorchFunctionMode is active. Private torch: `_pop_mode_temporarily`."""
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _key_of_mode(mode: Any) -> Any:
    return mode.device if isinstance(mode, _Device) else ByIdentity(mode)
