"""How is a Python function of torch entered, so that the ops inside find their own rules?

`torch.nn.functional` is full of functions that ask `has_torch_function(...)` and, if so, hand
themselves over whole. Entering one means running its body as if that question were answered no: a
copy of the function whose globals say so. The ops inside ask again, and are dispatched one by one.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["entered"]

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no(*_: object) -> bool:
    return False


class _Torch(types.ModuleType):
    """Stands for torch where a function asks `torch.overrides.has_torch_function...`."""

    def __init__(self) -> None:
        super().__init__("torch")
        names = vars(torch.overrides) | dict.fromkeys(_QUESTIONS, _no)
        self.overrides = types.SimpleNamespace(**names)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_entered_globals: dict[tuple[int, bool], dict[str, Any]] = {}


def _answering_no(space: dict[str, Any], through_torch: bool) -> dict[str, Any]:
    """A copy of a module's globals in which nothing has a torch function. One per module."""
    key = (id(space), through_torch)
    if key not in _entered_globals:
        changed = dict(space)
        changed.update((q, _no) for q in _QUESTIONS if q in changed)
        if through_torch and changed.get("torch") is torch:
            changed["torch"] = _Torch()
        _entered_globals[key] = changed
    return _entered_globals[key]


@cache
def entered(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a Python function that runs its body on DTensors; None if it is not Python."""
    if not isinstance(func, types.FunctionType):
        return None
    copy = types.FunctionType(
        func.__code__,
        _answering_no(func.__globals__, "overrides" in func.__code__.co_names),
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
