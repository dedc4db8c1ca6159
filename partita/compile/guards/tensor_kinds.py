"""Kinds of tensors: what a graph is made for, of a tensor, beside where it lies."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from .content_keys import content_key
from .marks import OF_TENSORS, attributes_of, hooks_of

__all__ = ["kind_of_tensor"]

_base: Any = torch._C.TensorBase
_dtype, _requires_grad = _base.dtype.__get__, _base.requires_grad.__get__


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
