"""CTC loss in a graph: two ops whose output shapes are known before they run.

torch's op returns a table for backward whose size depends on the longest target. Here backward
computes it again, so that it is the value of no node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["REPLACED"]

_aten = torch.ops.aten
_library = torch.library.Library("partita", "FRAGMENT")


def _compute_loss(log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    """The loss of each sequence."""
    loss: torch.Tensor = _aten._ctc_loss(log_probs, *args)[0]
    return loss


def _compute_gradient(grad: torch.Tensor, log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    """The gradient of `log_probs`; `grad` is that of each sequence's loss."""
    *operands, blank, zero_infinity = args
    made = _aten._ctc_loss(log_probs, *args)
    given = (grad, log_probs, *operands, *made, blank, zero_infinity)
    found: torch.Tensor = _aten._ctc_loss_backward(*given)
    return found


def _shape_of_loss(log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _shape_of_gradient(grad: torch.Tensor, log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _define_operators(kind: str, overload: str) -> tuple[Any, Any]:
    operands = f"Tensor log_probs, Tensor targets, {kind} input_lengths, {kind} target_lengths"
    found = []
    for name, first, run, shape in (
        ("ctc_loss", "", _compute_loss, _shape_of_loss),
        ("ctc_gradient", "Tensor grad, ", _compute_gradient, _shape_of_gradient),
    ):
        full = f"{name}.{overload}"
        _library.define(f"{full}({first}{operands}, int blank, bool zero_infinity) -> Tensor")
        _library.impl(full, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"partita::{full}", shape, lib=_library)
        found.append(getattr(getattr(torch.ops.partita, name), overload))
    return found[0], found[1]


def _make_replacements(loss: Any, gradient: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Replacements of torch's loss op and of its backward op, with their signatures."""

    def forward(*args: Any, blank: int = 0, zero_infinity: bool = False) -> Any:
        given = (*args, *(blank, zero_infinity)[len(args) - 4 :])
        return loss(*given), args[0].new_empty(0)

    def backward(*args: Any, zero_infinity: bool = False) -> Any:
        grad, log_probs, targets, of_inputs, of_targets, _, _, blank, *last = args
        given = (log_probs, targets, of_inputs, of_targets, blank, *(last or [zero_infinity]))
        return gradient(grad, *given)

    return forward, backward


REPLACED: dict[Any, Callable[..., Any]] = {}
"""By the op that is called while a step is captured, what is called instead."""

for _kind, _overload in (("int[]", "default"), ("Tensor", "Tensor")):
    _name = "ints" if _overload == "default" else "tensors"
    _forward, _backward = _make_replacements(*_define_operators(_kind, _name))
    REPLACED[getattr(_aten._ctc_loss, _overload)] = _forward
    REPLACED[getattr(_aten._ctc_loss_backward, _overload)] = _backward
