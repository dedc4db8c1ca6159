"""What a step leaves on a tensor that it makes beside its value: a gradient, hooks, attributes.

A gradient becomes an output of the graph, and is put there again by each call. What a program has
written on the tensor itself, an attribute or a hook, would be there once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor

from partita.layout import Fix

from ..errors import not_captured
from ..guards.marks import attributes_of, hooks_of
from .differentiate import asks_gradient, has_history

__all__ = ["attributes_given_to", "check_no_marks", "left_gradient", "retains_gradient"]

_grad: Any = torch._C.TensorBase.grad
_OF_FAKES = frozenset(FakeTensor.__annotations__)
"""Attributes that a tensor without memory has."""
_MEMO = ("_memo", "_memo_vc", "_memo_epoch")


def attributes_given_to(fake: torch.Tensor) -> list[str]:
    """The names of a tensor's attributes, but of what it remembers of itself: of `.item()`, say."""
    return [name for name in attributes_of(fake) if not name.endswith(_MEMO)]


def left_gradient(made: torch.Tensor) -> torch.Tensor | None:
    """What backward passes of the step left in the `.grad` of a tensor that it made."""
    if has_history(made) and not retains_gradient(made):
        return None  # torch warns who asks
    with Local():
        found: torch.Tensor | None = _grad.__get__(made)
        return found


def retains_gradient(made: torch.Tensor) -> bool:
    """Has the step asked for the gradient of a value that it computed?"""
    with Local():
        return made.retains_grad


def check_no_marks(made: torch.Tensor) -> None:
    """Raise CaptureError if the step gives a tensor that it makes a hook or an attribute."""
    given = [name for name in attributes_given_to(made) if name not in _OF_FAKES]
    marks = [f"the attribute {name}" for name in given]
    if asks_gradient(made) and hooks_of(made):
        marks.append("a hook")
    if marks:
        raise not_captured(
            f"the step gives a tensor that it returns or leaves {marks[0]}",
            "what is no value is no part of a graph: it would be there once",
            Fix("set it outside the step", "on what the call returns"),
        )
