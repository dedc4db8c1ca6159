"""Block functions: which functions of torch a block may call, and which of them only ask.

While a block is followed a tensor is one that only says what it is. What hangs on a tensor, or
reads what is in it, cannot be asked of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import cast_as, casting_now
from partita.tensor.engine import saving_hooks
from partita.tensor.function_facts import VIEW_ATTRIBUTES, facts_of_function

from .block_tape import NotABlock

__all__ = ["is_question", "modes_now", "who_hears", "why_refused", "within_modes", "writes_first"]


_REFUSED_ATTRIBUTES = frozenset(
    "grad data grad_fn _base _version _grad _grad_fn _backward_hooks output_nr retains_grad".split()
)


def why_refused(func: Any) -> str:
    """Why a block cannot call it; "" where it can."""
    name = getattr(func, "__name__", "")
    if facts_of_function(name).needs_itself or name in ("__set__", "__delete__"):
        return f"it calls {name} of a tensor"
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute in _REFUSED_ATTRIBUTES:
            return f"it asks for .{attribute} of a tensor"
    if getattr(func, "__module__", "") == "torch.autograd" and name == "grad":
        return "it asks for gradients"
    return ""


def writes_first(name: str) -> bool:
    """Does a method or function of this name write into its first operand?"""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITES)
    return name.endswith("_")


_NO_WRITES = ("__invert__", "__index__", "__int__", "__init__")


def is_question(func: Any) -> bool:
    """Does it ask what a tensor is, and makes none?"""
    name = getattr(func, "__name__", "")
    return facts_of_function(name).is_question or (
        name == "__get__" and getattr(func.__self__, "__name__", "") not in VIEW_ATTRIBUTES
    )


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
