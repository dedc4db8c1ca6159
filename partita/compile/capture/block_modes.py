"""Block modes: how torch is set where a block calls it, which is a part of what it calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import cast_as, casting_now
from partita.tensor.engine import saving_hooks

from .block_tape import NotABlock

__all__ = ["modes_now", "who_hears", "within_modes"]


def modes_now() -> tuple[Any, ...]:
    """How torch is set."""
    # Private, but one question for all devices: a block asks it often.
    casts = casting_now() if torch._C._is_any_autocast_enabled() else None
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_torch_function_enabled(),
        torch.get_default_dtype(),
        _attention_kernels(),
        casts,
    )


def who_hears() -> tuple[Any, ...]:
    """Who is told of each call below torch's functions, and of what is saved for backward."""
    return torch._C._len_torch_dispatch_stack(), saving_hooks()  # type: ignore[attr-defined]


def _attention_kernels() -> tuple[bool, ...]:
    """Private torch: which kernels attention may take, as torch asks while it is traced."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


@contextmanager
def within_modes(around: tuple[Any, ...], kind: type) -> Iterator[None]:
    """The modes in which a call of a tape was made."""
    grad, inference, typed, dtype, kernels, casts, *marks = around
    set_alike = dtype is torch.get_default_dtype() and kernels == _attention_kernels()
    if inference or not set_alike or any(marks):
        raise NotABlock(kind, "two of its blocks begin alike, in modes of their own")
    with ExitStack() as stack:
        if not typed:
            stack.enter_context(Local())
        stack.enter_context(torch.set_grad_enabled(grad))
        now = torch._C._is_any_autocast_enabled()
        stack.enter_context(cast_as(casts or ()))
        if now and casts is None:
            raise NotABlock(kind, "two of its blocks begin alike, and cast otherwise")
        yield
