"""The check of numbers: what a program gives to ops besides tensors is compared between ranks.

Under `check_ranks()`, at each call. `D * (1 + rank)` makes no move, so nothing else would tell that
the ranks have parted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C import _is_torch_function_enabled as _global_view
from torch.overrides import TorchFunctionMode

from partita.comm import ON_CHECK, Wire, agree
from partita.layout import Fix

from .arguments import all_tensors
from .dtensor import DTensor
from .engine import in_backward
from .watch import HERE

__all__ = ["NumberCheck"]

_ATOMS = (int, float, complex, bool, str, slice, type(None))


class NumberCheck(TorchFunctionMode):
    """Within, what ops on DTensors take besides tensors is compared."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # What runs on pieces is ours, and may well be another number on each rank.
        if _global_view() and not in_backward() and not HERE.capturing:
            wires = {t._spec.wire for _, t in all_tensors(args, kwargs) if isinstance(t, DTensor)}
            numbers = _format_numbers((*args, *sorted(kwargs.items()))) if wires else ""
            for wire in wires:
                _compare_numbers(getattr(func, "__name__", "?"), numbers, wire)
        return func(*args, **kwargs)


def _compare_numbers(name: str, numbers: str, wire: Wire) -> None:
    if not numbers:
        return
    agree(
        name,
        f"{name}({numbers})",
        wire,
        fact="the ranks give it other numbers",
        reason="each rank computes its part of one value, or its copy of it",
        fixes=(Fix("the same number on every rank"), Fix("a DTensor of Shard", "if it is data")),
    )


def _format_numbers(values: Any) -> str:
    """What is no tensor, as text; "" where all are tensors."""
    parts = []
    for value in values:
        if isinstance(value, (tuple, list)):
            parts.append(f"({_format_numbers(value)})" if _format_numbers(value) else "")
        elif isinstance(value, _ATOMS):
            parts.append(repr(value))
    return ", ".join(p for p in parts if p)


ON_CHECK.append(NumberCheck)
