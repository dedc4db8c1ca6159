"""The backward of a block: when its parameters are gathered again and released, and how gradients
go from gathered parameters to shards.

An autograd node (`GatherBlock`) stands between the shards and what was gathered; its backward
reduces and scatters. A block is gathered again when the first gradient of its outputs comes, unless
its backward reads no parameter (as an embedding's). It is released when all its parameters have
their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, LayoutError
from partita.tensor.autograd import in_backward, moved
from partita.tensor.dtensor import DTensor, tagged

from .flat_buffer import PartialGradients
from .fsdp_group import FsdpGroup

__all__ = ["ForwardCall", "GatherBlock", "install_gathered", "watch_input_gradient"]


class ForwardCall:
    """One forward of a block, as its backward sees it.

    Attributes:
        trains: some of the block's parameters get gradients. written: the numbers of parameters
            that the forward wrote in place, and their versions at its
            end.
        shards: the parameters that the forward gathered.
        since: autograd's sequence number of the first node that the block itself made.
        needs: backward will read the parameters, which that of an embedding does not. What a
            checkpoint within saves is not seen here.
        watches_inputs: the block is done only when its inputs' gradients are there. Only where a
            parameter gets none: else no node reads a parameter after its own gradient is complete.
    """

    def __init__(self, group: FsdpGroup, graded: bool, trained: list[bool] | None = None):
        self.group = group
        self.needs = group.may_recompute_within
        wanting = group.trained() if trained is None else trained
        self.trains = any(wanting)
        self.since = 0
        self.written: dict[int, int] = {}
        self.shards = group.shards()
        self.watches_inputs = graded and not all(wanting)
        if self.trains and not in_backward():
            group.open_calls.add(self)
        self._to_come = {"parameters"} if self.trains else set()
        self._to_come |= {"inputs"} if self.watches_inputs else set()
        self._came: set[str] = set()

    def has_computed(self, t: torch.Tensor) -> bool:
        """Did this forward compute `t`, and not only pass it on?

        The gradient of what others made may come when the block is done.
        """
        node = t.grad_fn
        return node is not None and node._sequence_nr() >= self.since  # type: ignore[attr-defined]

    def begin_backward(self, *_: Any) -> None:
        """The first gradient of an output is here."""
        group = self.group
        if self in group.calls_in_backward or not self.needs:
            return
        group.calls_in_backward.add(self)
        group.zero.enter_backward(group)
        if not group.installed:
            # A checkpoint within the block runs parts of its forward again.
            with torch.enable_grad():
                install_gathered(group, ForwardCall(group, False))

    def note_gradients(self, what: str) -> None:
        """The gradients of the "parameters", or of the "inputs", are complete."""
        self._came.add(what)
        if self._came >= self._to_come:
            self._came.clear()
            group = self.group
            group.calls_in_backward.discard(self)
            if not group.calls_in_backward and not group.depth:
                group.put_shards_back()
            group.release()

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Reduce the gradients of the gathered parameters, which are in the order of the flats."""
        group = self.group
        group.open_calls.discard(self)
        if any(a is not b for a, b in zip(self.shards, group.shards(), strict=True)):
            raise LayoutError(
                f"the block {group.name!r} holds other parameters than in the forward of this pass",
                place=user_line(),
                reason="their gradients would be lost",
                fixes=(Fix("exchange parameters after backward", "or take no nn.Parameter there"),),
            )
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
            self._reduce_with_history(grads)
        else:
            with torch.no_grad():
                self._reduce_gradients(grads)

    def _reduce_gradients(self, grads: Sequence[torch.Tensor | None]) -> None:
        group, zero, at = self.group, self.group.zero, 0
        for k, flat in enumerate(group.flats):
            some = grads[at : at + len(flat.pieces)]
            at += len(flat.pieces)
            if all(g is None for g in some):
                continue
            dtype = zero.precision.grad_dtype or flat.dtype
            held = group.held_gradients.pop(k, None)
            used = [g is not None for g in some]
            if held is not None:
                used = [a or b for a, b in zip(used, held.used, strict=True)]
            shares = PartialGradients(
                flat.pack_gradients(some, dtype, None if held is None else held.sums), used
            )
            if zero.keeps_partial_gradients or group.open_calls:
                group.held_gradients[k] = shares
                zero.holds_partial_gradients = True
            else:
                zero.reduce(group, k, shares)

    def _reduce_with_history(self, grads: Sequence[torch.Tensor | None]) -> None:
        """The same where the gradients are to be differentiated again (`create_graph=True`)."""
        group, zero = self.group, self.group.zero
        order = [
            (i, flat) for flat, some in zip(group.flats, group.members, strict=True) for i in some
        ]
        for (i, flat), g in zip(order, grads, strict=True):
            if g is None:
                continue
            p = group.shards()[i]
            summed = zero.precision.reduce_dtype or p.dtype
            g = g.to(zero.precision.grad_dtype or flat.dtype).to(summed)
            whole = zero.make_unsharded_spec(p._spec)
            zero.add_with_history(
                p, moved(g, whole.gradient, p._spec.gradient, group.name, "gradient").to(p.dtype)
            )


def install_gathered(group: FsdpGroup, call: ForwardCall | None) -> None:
    """Put the gathered parameters into the modules of a block; tied to their shards for `call`."""
    with Local():
        if call is not None and call.trains:
            plain = GatherBlock.apply(group.zero.token(group), call)
        else:
            plain = group.views()
    group.install(plain)


class GatherBlock(torch.autograd.Function):
    """Gathered parameters, tied to their shards by a token; backward reduces and scatters."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, call: ForwardCall) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        group = call.group
        views = group.views()
        order = [i for members in group.members for i in members]
        trained = group.trained()
        frozen = [v for i, v in zip(order, views, strict=True) if not trained[i]]
        ctx.mark_non_differentiable(*frozen)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with Local():
            # Frees what was gathered, before its gradients are copied.
            ctx.call.note_gradients("parameters")
            ctx.call.reduce(grads)
        return torch.empty(0), None


class _WatchInputGradient(torch.autograd.Function):
    """The identity on an input of a block, whose backward notes the input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: ForwardCall) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.call.note_gradients("inputs")
        return grad, None


def watch_input_gradient(t: torch.Tensor, call: ForwardCall | None) -> torch.Tensor:
    """An alias of the input `t` of a block; `call` is notified when its gradient is complete."""
    with Local():
        out = _WatchInputGradient.apply(t, call)
    return tagged(out, t._spec) if isinstance(t, DTensor) else out
