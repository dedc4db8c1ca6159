"""The state of a parameter's gradient: pending or settled, and in which layout it rests.

The gradient of a Replicate value is Partial: *pending*. Once it is reduced, by an optimizer's step
or a clip, it is whole: *settled*. If another backward pass is then to add shares to it, the whole
value must first become shares again: the first rank keeps it, the others hold zero. That is the
move R -> P, which carries nothing. A hook does it (`mark_settled`).

    backward       x.grad  Partial      pending
    clip, step     x.grad  Replicate    settled, by one all-reduce (`grad_buckets`)
    backward       x.grad  Partial      the hook: the first rank's share is the value; then added to
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
    """The spec of x's gradient once it is settled: that of x, or the one that ZeRO keeps it in."""
    rest = state_of(x).rest
    return x._spec if rest is None else rest.gradient


def update_spec(x: DTensor) -> Spec:
    """The spec in which an optimizer updates x and keeps its state: that of x, or ZeRO's."""
    rest = state_of(x).rest
    return x._spec if rest is None else rest.update


def lay_out_state(x: DTensor, state: dict[str, Any]) -> None:
    """Redistribute what an optimizer keeps of each element of x to `update_spec(x)`: it may have
    been made, or loaded, in the layout of x."""
    update = update_spec(x)
    for name, value in state.items():
        if isinstance(value, DTensor) and value._spec is not update:
            before = value._spec
            if before.wire is update.wire and before.shape == update.shape:
                with torch.no_grad():
                    part = moved(value, before, update, "optimizer state", "explicit")
                state[name] = tagged(part, update)


def store_gradient(x: DTensor, grad: DTensor) -> None:
    """Make `grad` the gradient of x though its local shape is another, which torch would refuse."""
    # Modes do not hear of it either: it is no write of the program's.
    with torch._C.DisableTorchFunction(), torch.no_grad():
        whole = x.data
        if whole.shape != grad.shape:
            # torch looks at the shape when a gradient is set, and not again.
            x.data = whole.new_empty(grad.shape)
        _grad.__set__(x, grad)
        x.data = whole


def lay_out_gradient(x: DTensor, grad: DTensor) -> DTensor:
    """`grad` in a layout in which x may have it: pending, as autograd leaves it, or settled.

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
    """Note that x's gradient is settled: a hook makes it pending before backward adds shares to
    it."""
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
    """Note that x has no settled gradient any more: take the hook off."""
    watch = state_of(x).reopens
    if watch is not None:
        with Local():
            _hooks(x).pop(watch.id, None)


def is_watched(x: torch.Tensor) -> bool:
    """Is the hook of `mark_settled` on x?"""
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
        grad_now = _grad.__get__(x)
        if isinstance(grad_now, DTensor) and grad_now._spec is not x._spec.gradient:
            wire, wanted = grad_now._spec.wire, x._spec.gradient
            moves = plan(grad_now._spec.layout, wanted.layout, wire.mesh, grad_now.element_size())
            shares = carry_all(moves, grad_now, wire, "grad", "gradient")
            if stays and shares.shape == grad_now.shape:
                grad_now.copy_(shares)
                tagged(grad_now, wanted)
            else:
                _grad.__set__(x, tagged(shares.detach(), wanted))
