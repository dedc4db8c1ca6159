"""Functions that a block may call, and the torch modes that are part of each call.

While a block is followed its tensors have metadata and nothing else: no history, no gradient, no
memory. `why_refused` names the functions that would need these. `current_modes` reads the settings
of torch that decide what a call does (grad mode, autocast, default dtype, attention kernels), so
that they are compared with a tape; `within_modes` sets them again when the call is traced later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import read_autocast_state, switch_off, use_autocast_state
from partita.tensor.op_facts import VIEW_ATTRIBUTES, facts_of_function

from .block_tape import NotABlock

__all__ = ["current_modes", "is_question", "why_refused", "within_modes", "writes_first"]


_REFUSED_ATTRIBUTES = frozenset(
    "grad data grad_fn _base _version _grad _grad_fn _backward_hooks output_nr retains_grad".split()
)


def why_refused(func: Any) -> str:
    """Why a block cannot call `func`, as words for an error; "" where it can."""
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
    """Does `func` read metadata of a tensor and make none?"""
    name = getattr(func, "__name__", "")
    return facts_of_function(name).is_question or (
        name == "__get__" and getattr(func.__self__, "__name__", "") not in VIEW_ATTRIBUTES
    )


# -- torch modes -----------------------------------------------------------------------------------


def current_modes() -> tuple[Any, ...]:
    """The settings of torch that decide what a call does."""
    # Private, but one question for all devices: a block asks it often.
    casts = read_autocast_state() if torch._C._is_any_autocast_enabled() else None
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_torch_function_enabled(),
        torch.get_default_dtype(),
        _attention_kernels(),
        casts,
    )


def _attention_kernels() -> tuple[bool, ...]:
    """The kernels that attention may take. Private torch: as it asks while it is traced."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


@contextmanager
def within_modes(modes: tuple[Any, ...], kind: type) -> Iterator[None]:
    """Within, torch is set to the recorded modes of a call. Raises NotABlock where it cannot be."""
    grad, inference, torch_function, dtype, kernels, casts, *marks = modes
    set_alike = dtype is torch.get_default_dtype() and kernels == _attention_kernels()
    if inference or not set_alike or any(marks):
        raise NotABlock(kind, "two of its blocks begin alike, in modes of their own")
    with ExitStack() as stack:
        if not torch_function:
            stack.enter_context(Local())
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(use_autocast_state(casts or switch_off(read_autocast_state())))
        yield
