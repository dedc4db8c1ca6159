"""Checks of values: those that torch makes of operands in eager, and leaves out where it traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunctionSubclass as Local

__all__ = ["check_values"]

Checks = Iterator[tuple[torch.Tensor, str]]
"""What must be true, and what torch says where it is not."""


_CHECKS: dict[Any, Callable[..., Checks]] = {}
_QUANTILES = ("quantile", "nanquantile")


def _checks(*functions: Any) -> Callable[[Callable[..., Checks]], Callable[..., Checks]]:
    """Register what calls of functions check."""

    def register_checks(f: Callable[..., Checks]) -> Callable[..., Checks]:
        _CHECKS.update(dict.fromkeys(functions, f))
        return f

    return register_checks


def check_values(func: Any, args: Any, kwargs: Any) -> None:
    """Have the graph check the values that `func` would check in eager: of this rank's pieces."""
    if func not in _CHECKS:
        return
    with Local(), torch.no_grad():
        for holds, text in _CHECKS[func](*args, **(kwargs or {})):
            torch._assert_async(holds.all(), text)


@_checks(F.one_hot)
def _check_classes(tensor: torch.Tensor, num_classes: int = -1) -> Checks:
    yield tensor >= 0, "Class values must be non-negative."
    if num_classes >= 0:
        yield tensor < num_classes, "Class values must be smaller than num_classes."


@_checks(*(getattr(home, name) for home in (torch, torch.Tensor) for name in _QUANTILES))
def _check_quantiles(input: Any, q: Any, *_: Any, **__: Any) -> Checks:
    if isinstance(q, torch.Tensor):
        yield (q >= 0) & (q <= 1), "quantile() q values must be in the range [0, 1]"
