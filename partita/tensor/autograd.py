"""How does a gradient cross a change of layout?

The only Python that runs in a backward pass: the transposed moves of each redistribution. All else
is plain local autograd, whose gradients are laid out by `Placement.dual` and so need no handling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire
from partita.redistribute import Plan, plan

from .autocast import without_autocast
from .origin import current
from .spec import Spec, two_meshes
from .watch import HERE

__all__ = ["carry_all", "convert_gradient", "moved"]


def carry_all(moves: Plan, x: torch.Tensor, wire: Wire, op: str, reason: str) -> torch.Tensor:
    """Carry local `x` along each move of a plan, without autograd."""
    watcher = HERE.watcher
    if watcher is not None and reason != "gradient":
        return watcher.carried(op, reason, moves, x, lambda: _carry(moves, x, wire, op, reason))
    return _carry(moves, x, wire, op, reason)


def _carry(moves: Plan, x: torch.Tensor, wire: Wire, op: str, reason: str) -> torch.Tensor:
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        with without_autocast(x.device.type):  # bytes are moved, in whatever dtype
            return _carry(moves, x, wire, op, reason)
    for move in moves.moves:
        x = wire.carry(move, x, op=op, reason=reason)
    return x


class _Moved(torch.autograd.Function):
    """Forward a plan of moves; backward its transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, moves: Plan, wire: Wire, op: str, reason: str) -> Any:
        ctx.moves, ctx.wire, ctx.op = moves, wire, op
        if not x.is_floating_point() and not x.is_complex():
            ctx.set_materialize_grads(False)
        return carry_all(moves, x, wire, op, reason)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = ctx.moves.transpose(ctx.wire.mesh)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()  # a sparse one, as gather(sparse_grad=True) makes it
        # Through apply again, so that a backward pass of the backward pass works too.
        return _moved(grad, back, ctx.wire, ctx.op, "gradient"), None, None, None, None


def _moved(x: torch.Tensor, moves: Plan, wire: Wire, op: str, reason: str) -> torch.Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Moved.apply(x, moves, wire, op, reason)
    with torch.no_grad():
        return carry_all(moves, x, wire, op, reason)


def moved(x: torch.Tensor, before: Spec, after: Spec, op: str, reason: str) -> torch.Tensor:
    """The local tensor of spec `after` that holds the same global value as local `x` of `before`.

    Differentiable. Never `x` itself: where nothing has to move the result is an alias.
    """
    if before.is_copy:
        x = current(x)
    with Local():
        if before is after or (before.layout == after.layout and before.wire is after.wire):
            return x.view_as(x)
        if before.wire is not after.wire:
            raise two_meshes(op, before.wire, after.wire)
        moves = plan(before.layout, after.layout, before.wire.mesh, x.element_size())
        return _moved(x, moves, before.wire, op, reason)


class _ConvertGradient(torch.autograd.Function):
    """The identity, whose gradient arrives as `given` and leaves as `wanted`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, given: Spec, wanted: Spec) -> torch.Tensor:
        ctx.given, ctx.wanted = given, wanted
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return moved(grad, ctx.given, ctx.wanted, "to_local", "gradient"), None, None


def convert_gradient(x: torch.Tensor, given: Spec, wanted: Spec) -> torch.Tensor:
    """An alias of local `x` whose incoming gradient is laid out as `given`; it is made `wanted`."""
    with Local():
        return _ConvertGradient.apply(x, given, wanted)
