"""Modes of torch: what of them is part of a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily

from partita.comm import read_autocast_state

from .codes import is_of_users
from .content_keys import ByIdentity

__all__ = ["function_modes", "kernel_settings", "modes", "without_function_modes"]

# Private torch: the mode by which new tensors are put on a device.
_Device = torch.utils._device.DeviceContext


def modes() -> tuple[Any, ...]:
    """What of torch's modes is part of a program."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        read_autocast_state(),
        *kernel_settings(),
        # What kernels are chosen by, when a graph is made or compiled.
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        *map(_key_of_mode, function_modes()),
    )


def kernel_settings() -> tuple[Any, ...]:
    """The settings that kernels ask for when they run: those of a graph get its caller's."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )


def function_modes() -> list[Any]:
    """The user's modes that take the calls of torch's functions, the outermost first.

    What they make of these is in the graph.
    """
    count = torch._C._len_torch_function_stack()
    if not count:
        return []
    found = map(torch._C._get_function_stack_at, range(count))
    return [m for m in found if isinstance(m, _Device) or is_of_users(type(m).__module__)]


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Within, no mode takes the calls of torch's functions. Private torch: what pops them."""
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _key_of_mode(mode: Any) -> Any:
    return mode.device if isinstance(mode, _Device) else ByIdentity(mode)
