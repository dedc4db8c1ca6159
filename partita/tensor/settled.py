"""May this be a parameter's gradient, and what if shares arrive after it was settled?

The gradient of a Replicate value is Partial. Once it is settled (reduced, by an optimizer's step or
a clip) it is whole. If then another backward pass adds shares to it, the whole value must first
become shares again: the first rank keeps it, the others hold zero. That is the move R -> P, which
carries nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, LayoutError
from partita.redistribute import plan

from .autograd import carry_all, moved
from .dtensor import DTensor, tagged
from .spec import Spec

__all__ = ["allowed_gradient", "mark_settled", "settled_spec"]

_grad = torch._C.TensorBase.grad  # type: ignore[attr-defined]


def settled_spec(spec: Spec) -> Spec:
    """Where the gradient of a value of `spec` rests once it is settled: where the value does."""
    return spec


def allowed_gradient(x: DTensor, grad: DTensor) -> DTensor:
    """`grad` as it may be stored for `x`: pending as autograd leaves it, or settled.

    Raises:
        LayoutError: another shape or mesh.
    """
    spec = x._spec
    if grad._spec.shape != spec.shape or grad._spec.wire is not spec.wire:
        raise LayoutError(
            f"a gradient of shape {tuple(grad._spec.shape)} for a tensor of {tuple(spec.shape)}",
            place=user_line(),
            fixes=(Fix("assign a gradient of the same shape on the same mesh"),),
        )
    if grad._spec is spec.gradient:
        return grad
    if grad._spec is not spec:
        grad = tagged(moved(grad, grad._spec, spec, "grad", "explicit"), spec)
    mark_settled(x)
    return grad


def mark_settled(x: DTensor) -> None:
    """From now on, before shares are added to x's settled gradient, make it shares again."""
    if x._spec is x._spec.gradient or not x.requires_grad:
        return
    state = x.__dict__
    state["_settled"] = True
    if "_reopens" in state:
        return

    def reopen(_: Any) -> None:
        if not state["_settled"]:
            return
        state["_settled"] = False
        with Local(), torch.no_grad():
            held = _grad.__get__(x)
            if isinstance(held, DTensor) and held._spec is not x._spec.gradient:
                wire, wanted = held._spec.wire, x._spec.gradient
                moves = plan(held._spec.layout, wanted.layout, wire.mesh, held.element_size())
                shares = carry_all(moves, held, wire, "grad", "gradient")
                _grad.__set__(x, tagged(shares.detach(), wanted))

    with Local():
        state["_reopens"] = x.register_hook(reopen)
