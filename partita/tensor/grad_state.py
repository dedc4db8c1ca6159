"""The state of a gradient.

May this be a parameter's gradient, and what if shares arrive after it was settled?

The gradient of a Replicate value is Partial. Once it is settled (reduced, by an optimizer's step or
a clip) it is whole. If then another backward pass adds shares to it, the whole value must first
become shares again: the first rank keeps it, the others hold zero. That is the move R -> P, which
carries nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, LayoutError
from partita.redistribute import plan

from .autograd import carry_all, moved
from .dtensor import DTensor, tagged
from .spec import Spec, make_two_meshes_error
from .tensor_state import ReopenHook, own_state, state_of
from .watch import HERE

__all__ = [
    "is_watched",
    "lay_out_gradient",
    "lay_out_state",
    "mark_settled",
    "settled_spec",
    "store_gradient",
    "unmark_settled",
    "update_spec",
]

_base: Any = torch._C.TensorBase
_grad, _requires_grad = _base.grad, _base.requires_grad.__get__
_hooks = _base._backward_hooks.__get__


def settled_spec(x: DTensor) -> Spec:
    """Where x's gradient rests once it is settled: where x does, or where ZeRO says."""
    rest = state_of(x).rest
    return x._spec if rest is None else rest.gradient


def update_spec(x: DTensor) -> Spec:
    """Where an optimizer updates x and keeps its state: where x is, or where ZeRO says."""
    rest = state_of(x).rest
    return x._spec if rest is None else rest.update


def lay_out_state(x: DTensor, state: dict[str, Any]) -> None:
    """Have what an optimizer keeps of each element of x lie where it updates x: it may be made, or
    loaded, as x lies."""
    update = update_spec(x)
    for name, value in state.items():
        if isinstance(value, DTensor) and value._spec is not update:
            before = value._spec
            if before.wire is update.wire and before.shape == update.shape:
                with torch.no_grad():
                    part = moved(value, before, update, "optimizer state", "explicit")
                state[name] = tagged(part, update)


def store_gradient(x: DTensor, grad: DTensor) -> None:
    """Make `grad` x's gradient, though its local shape is another than x's."""
    # Modes do not hear of it either: it is no write of the program's.
    with torch._C.DisableTorchFunction(), torch.no_grad():
        whole = x.data
        if whole.shape != grad.shape:
            # torch looks at the shape when a gradient is set, and not again.
            x.data = whole.new_empty(grad.shape)
        _grad.__set__(x, grad)
        x.data = whole


def lay_out_gradient(x: DTensor, grad: DTensor) -> DTensor:
    """`grad` as it may be stored for `x`: pending as autograd leaves it, or settled.

    Raises:
        LayoutError: another shape or mesh.
    """
    spec = x._spec
    if grad._spec.wire is not spec.wire:
        raise make_two_meshes_error("x.grad = g", spec.wire, grad._spec.wire)
    if grad._spec.shape != spec.shape:
        raise LayoutError(
            f"a gradient of shape {tuple(grad._spec.shape)} for a tensor of {tuple(spec.shape)}",
            place=user_line(),
            operands=(f"x  {spec.layout.brief()}", f"gradient  {grad._spec.layout.brief()}"),
            fixes=(Fix(f"g.reshape({tuple(spec.shape)})", "if it has as many elements"),),
        )
    if grad._spec is spec.gradient:
        return grad
    rests = settled_spec(x)
    if grad._spec is not rests:
        grad = tagged(moved(grad, grad._spec, rests, "grad", "explicit"), rests)
    mark_settled(x)
    return grad


def mark_settled(x: DTensor) -> None:
    """From now on, before shares are added to x's settled gradient, make it shares again."""
    if x._spec is x._spec.gradient:
        return
    with Local():  # or each question to torch would be a function of torch's, of a DTensor
        if not _requires_grad(x):
            return
        watch = state_of(x).reopens
        if watch is None:
            known = weakref.ref(x)
            handle = x.register_hook(lambda _: _restore_partial_gradient(known()))
            watch = ReopenHook(handle.id, _hooks(x)[handle.id])
            own_state(x).reopens = watch
        _hooks(x)[watch.id] = watch.hook


def unmark_settled(x: DTensor) -> None:
    """x has no settled gradient any more."""
    watch = state_of(x).reopens
    if watch is not None:
        with Local():
            _hooks(x).pop(watch.id, None)


def is_watched(x: torch.Tensor) -> bool:
    """Is one of x's hooks ours?"""
    watch = state_of(x).reopens
    if watch is None:
        return False
    with Local():
        return watch.id in _hooks(x)


def _restore_partial_gradient(x: DTensor | None) -> None:
    if x is None:
        return
    unmark_settled(x)
    # As autograd adds to it: into the tensor that is there, which others may hold, or else anew.
    stays = not (torch.is_grad_enabled() or HERE.capturing)
    with Local(), torch.no_grad():
        held = _grad.__get__(x)
        if isinstance(held, DTensor) and held._spec is not x._spec.gradient:
            wire, wanted = held._spec.wire, x._spec.gradient
            moves = plan(held._spec.layout, wanted.layout, wire.mesh, held.element_size())
            shares = carry_all(moves, held, wire, "grad", "gradient")
            if stays and shares.shape == held.shape:
                held.copy_(shares)
                tagged(held, wanted)
            else:
                _grad.__set__(x, tagged(shares.detach(), wanted))
