"""Library calls: calls of torch's functions during which no code of the user's runs.

The profile function (`guards.calls`) hears of each Python call that a captured step makes, since
it may be the user's. One function of torch makes hundreds over fake tensors, and hearing of them
takes longer than making them. `LibraryCalls` tells which functions call nothing of the user's.
Kernels that a program registers for torch's own ops, and its rules, are not heard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from ..guards.modes import function_modes
from .capture_context import dispatch_listeners, profiled_again, unprofiled
from .fakes import FakeDTensor

__all__ = ["C_FUNCTION_TYPES", "LibraryCalls"]

C_FUNCTION_TYPES = (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
"""Types of functions and methods of C."""

_CALLING_BACK = frozenset(("apply_", "map_", "map2_"))
_PLAIN = frozenset(
    (bool, int, float, complex, str, NoneType, type(...), torch.dtype, torch.device, torch.layout)
    + (torch.memory_format, torch.Size, torch.Tensor, torch.nn.Parameter, FakeTensor, FakeDTensor)
)
"""Types of operands that have no method of the user's."""


class LibraryCalls:
    """Calls functions of torch, unprofiled where that calls nothing of the user's.

    What the user may have put between a function and its kernels is compared with what is there
    when this is made: torch-function modes must not be the user's, dispatch modes and hooks on
    saved tensors not have become more.
    """

    def __init__(self) -> None:
        self._is_heard = bool(function_modes())
        self._listeners = dispatch_listeners()

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`func(*args, **kwargs)`. Called within `unprofiled`."""
        if self._calls_nothing_of_users(func, args, kwargs):
            return func(*args, **kwargs)
        return profiled_again(func, *args, **kwargs)

    def call_own(self, func: Callable[..., Any], *args: Any) -> Any:
        """`func(*args)`, a function of partita's, unprofiled unless a mode of the user's hears what
        it calls of torch."""
        if function_modes() or dispatch_listeners() != self._listeners:
            return func(*args)
        return unprofiled(func, *args)

    def _calls_nothing_of_users(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        return (
            not self._is_heard
            and _calls_nothing_back(func)
            and all(map(_is_plain, args))
            and all(map(_is_plain, kwargs.values()))
            and dispatch_listeners() == self._listeners
        )


def _calls_nothing_back(func: Any) -> bool:
    """Is it a function of torch that calls at most its operands' methods?"""
    if type(func) in C_FUNCTION_TYPES:
        return func.__name__ not in _CALLING_BACK
    return type(func) is FunctionType and _is_functional(func)


@lru_cache(maxsize=1024)
def _is_functional(func: FunctionType) -> bool:
    """Is it a Python function of torch.nn.functional itself?"""
    return vars(F).get(func.__name__) is func and func.__module__ == F.__name__


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind in (tuple, list) and all(map(_is_plain, value)))
