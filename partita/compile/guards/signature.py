"""Signatures: what a graph is made for, of a call's tensors and arguments and of torch's modes.

What a step reads of Python beside its arguments is in its guards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from ..arguments import flatten_call
from .content_keys import argument_key
from .modes import modes
from .tensor_kinds import kind_of_tensor

if TYPE_CHECKING:
    from ..capture.state import State

__all__ = ["signature_of"]


def signature_of(state: State, tensors: list[Any], call: Any) -> tuple[Any, ...]:
    """All that a graph is made for, as a hashable value: name and value of each part.

    Args:
        tensors: the leaves of the call and of what the step reaches.
        call: its arguments.
    """
    first: dict[int, int] = {}
    arguments, structure = flatten_call(call)
    parts: list[Any] = [("structure", structure)]
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            parts.append((f"value {i}", argument_key(t)))
            continue
        same = first.setdefault(id(t), i)
        parts.append((f"tensor {i}", same, kind_of_tensor(t)))
    parts += [(name, argument_key(value)) for name, value in state.settings()]
    parts.append(("strides", *_strides_of_tensors(tensors, len(tensors) - len(arguments))))
    parts.append(("modes", *modes()))
    return tuple(parts)


def _strides_of_tensors(tensors: list[Any], arguments: int) -> list[tuple[int, ...]]:
    """Of what another program makes, and may make otherwise the next time; and of what a step
    reaches where it does not lie as usual."""
    with Local():
        return [
            t.stride() if i >= arguments or not t.is_leaf or not t.is_contiguous() else ()
            for i, t in enumerate(tensors)
            if isinstance(t, torch.Tensor) and t.layout == torch.strided
        ]
