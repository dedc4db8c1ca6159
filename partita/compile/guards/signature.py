"""Call signatures: what a program is made for, as one hashable value.

A signature has the metadata of the call's tensors and of those that the step reaches, the keys of
other arguments, and torch's modes. Calls of equal signatures may run one program, if its guards
(what the step read of Python besides) hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from ..arguments import flatten_call
from .attributes_and_hooks import OWN_ATTRIBUTES, user_attributes_of, user_hooks_of
from .content_keys import argument_key, content_key
from .modes import active_modes

if TYPE_CHECKING:
    from ..capture.state import State

__all__ = ["kind_of_tensor", "signature_of"]

_base: Any = torch._C.TensorBase
_dtype, _requires_grad = _base.dtype.__get__, _base.requires_grad.__get__


def signature_of(state: State, tensors: list[Any], call: Any) -> tuple[Any, ...]:
    """The signature of a call: a tuple of (name, value...) for each part.

    Args:
        tensors: the leaves of what the step reaches, then those of the call.
        call: its (args, kwargs).
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
    parts.append(("modes", *active_modes()))
    return tuple(parts)


def _strides_of_tensors(tensors: list[Any], arguments: int) -> list[tuple[int, ...]]:
    """The strides of arguments and of results of other steps, which may differ from call to call;
    of the step's own tensors only where they are not contiguous."""
    with Local():
        return [
            t.stride() if i >= arguments or not t.is_leaf or not t.is_contiguous() else ()
            for i, t in enumerate(tensors)
            if isinstance(t, torch.Tensor) and t.layout == torch.strided
        ]


def kind_of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    """What a program is made for, of a tensor: shape, layout, dtype, hooks, not strides."""
    with Local():
        return _key_of_tensor(t)


def _key_of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    attributes = t.__dict__
    spec = attributes.get("_spec")
    own: tuple[Any, ...] = ()
    if attributes and not OWN_ATTRIBUTES.issuperset(attributes):
        own = tuple([(name, _attribute_key(attributes[name])) for name in user_attributes_of(t)])
    trained = _requires_grad(t)
    hooks = user_hooks_of(t) if trained else ()
    shown = t.is_conj(), t.is_neg()
    return (spec or t.shape, _dtype(t), trained, t.device, type(t), own, hooks, shown)


def _attribute_key(value: Any) -> Any:
    return torch.Tensor if isinstance(value, torch.Tensor) else content_key(value)
