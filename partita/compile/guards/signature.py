"""Signatures: what a graph is made for, of a call's tensors and arguments and of torch's modes.

What a step reads of Python beside its arguments is in its guards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from ..arguments import flatten_call
from .attributes_and_hooks import OF_TENSORS, attributes_of, hooks_of
from .content_keys import argument_key, content_key
from .modes import modes

if TYPE_CHECKING:
    from ..capture.state import State

__all__ = ["kind_of_tensor", "signature_of"]

_base: Any = torch._C.TensorBase
_dtype, _requires_grad = _base.dtype.__get__, _base.requires_grad.__get__


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


def kind_of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    """What a graph is made for, of a tensor, beside its strides."""
    with Local():
        return _key_of_tensor(t)


def _key_of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    attributes = t.__dict__
    spec = attributes.get("_spec")
    own: tuple[Any, ...] = ()
    if attributes and not OF_TENSORS.issuperset(attributes):
        own = tuple([(name, _attribute_key(attributes[name])) for name in attributes_of(t)])
    trained = _requires_grad(t)
    hooks = hooks_of(t) if trained else ()
    shown = t.is_conj(), t.is_neg()
    return (spec or t.shape, _dtype(t), trained, t.device, type(t), own, hooks, shown)


def _attribute_key(value: Any) -> Any:
    return torch.Tensor if isinstance(value, torch.Tensor) else content_key(value)
