"""Parameters: how one gets a value on a mesh and stays the object that optimizers hold.

A model's parameter is known by identity: to the optimizer that was made for it, to its hooks, to
whoever tied it to another module. So it is never exchanged for another; its value is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, LayoutError

from .dtensor import DTensor
from .gradient_overrides import type_hook
from .tensor_state import OURS, own_state

__all__ = ["can_hold", "hold_value", "keep_attributes", "refuse_lazy", "stand_for"]

_data: Any = torch._C.TensorBase.data
_grad: Any = torch._C.TensorBase.grad


def can_hold(p: torch.Tensor, value: torch.Tensor) -> bool:
    """May `value` become the value of `p`? Not if one of them is on "meta", or on another device
    type."""
    return p.is_meta == value.is_meta and p.device.type == value.device.type


def refuse_lazy(model: nn.Module, by: str) -> None:
    """Raise if a lazy module has yet to make its parameters, which `by` needs."""
    for name, part in model.named_modules():
        own = *part.named_parameters(recurse=False), *part.named_buffers(recurse=False)
        for key, tensor in own:
            if nn.parameter.is_lazy(tensor):
                raise LayoutError(
                    f"{by}: {name + '.' if name else ''}{key} has no shape yet",
                    place=user_line(),
                    reason=f"{type(part).__name__} makes it when it meets its first batch",
                    fixes=(Fix("model(batch)", f"once, of plain tensors, before {by}"),),
                )


def hold_value(p: nn.Parameter, value: DTensor) -> torch.Tensor | None:
    """Make `value` the value of the parameter `p`. Its attributes and hooks stay.

    Returns:
        Its gradient, which is removed from it: it is in the layout of the old value.
    """
    grad = p.grad
    with Local(), torch.no_grad():
        _grad.__set__(p, None)
        if p.is_floating_point():
            # Through another dtype: the engine then forgets the shape that it has known.
            other = torch.float32 if p.dtype == torch.float64 else torch.float64
            _data.__set__(p, torch.empty(0, dtype=other, device=p.device))
        _data.__set__(p, value.detach())
    if isinstance(p, DTensor):
        own_state(p).moved = None
    else:
        hooks: dict[int, Any] = p._backward_hooks or {}
        for number, hook in list(hooks.items()):
            hooks[number] = type_hook(p, hook)
        p.__class__ = DTensor  # type: ignore[assignment]
        p._is_param = True
        own_state(p).was_plain = True
    p._spec = value._spec  # type: ignore[attr-defined]
    for name, own in value.__dict__.items():
        if name not in OURS:
            p.__dict__.setdefault(name, own)
    return grad


def stand_for(whole: torch.Tensor, p: torch.Tensor) -> dict[str, Any]:
    """Give `whole`, which takes the place of the parameter `p` in a module, p's attributes; return
    them."""
    given = {key: v for key, v in p.__dict__.items() if key not in OURS}
    whole.__dict__.update(given)
    return given


def keep_attributes(whole: torch.Tensor, p: torch.Tensor, given: dict[str, Any]) -> None:
    """Give `p` the attributes that were set on `whole` while it was in p's place; it had `given`
    then."""
    now = whole.__dict__
    if not given and now.keys() <= OURS:
        return
    for key in given.keys() - now.keys():
        p.__dict__.pop(key, None)
    for key, v in now.items():
        if key not in OURS and (key not in given or given[key] is not v):
            p.__dict__[key] = v
