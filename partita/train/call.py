"""What does backward know of one forward of a block?

When the block is needed again, and when it is done: an embedding's parameters are not read in
backward, and a block whose parameters all have their gradients is not read any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, LayoutError
from partita.tensor.autograd import moved
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.engine import in_backward

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["ForwardCall", "GatherBlock", "Shares", "leave"]


@dataclass(frozen=True)
class Shares:
    """A rank's shares of the gradients of one flat, a row for each rank; not all may have one."""

    sums: torch.Tensor
    used: list[bool]


class ForwardCall:
    """One forward of a block, as its backward sees it.

    Attributes:
        trains: does any of the block's parameters get a gradient?
        written: parameters that the forward wrote in place, and their versions at its end.
        shards: the parameters that the forward gathered.
        since: autograd's number of the first node that the block itself made.
        needs: will backward read the parameters? Not of an embedding, say. What a checkpoint within
            saves is not seen here.
        watches_inputs: is the block done only when its inputs' gradients are there? Only where a
            parameter gets none: else no node reads a parameter after its own gradient is complete.
    """

    def __init__(self, unit: Unit, graded: bool, trained: list[bool] | None = None):
        self.unit = unit
        self.needs = unit.saves_unseen
        wanting = unit.trained() if trained is None else trained
        self.trains = any(wanting)
        self.since = 0
        self.written: dict[int, int] = {}
        self.shards = unit.shards()
        self.watches_inputs = graded and not all(wanting)
        if self.trains and not in_backward():
            unit.calls.add(self)
        self._to_come = {"parameters"} if self.trains else set()
        self._to_come |= {"inputs"} if self.watches_inputs else set()
        self._came: set[str] = set()

    def made(self, t: torch.Tensor) -> bool:
        """Did this forward compute `t`? What it was given and hands on, it did not.

        The gradient of what others made may come when all of the block's are there already.
        """
        node = t.grad_fn
        return node is not None and node._sequence_nr() >= self.since  # type: ignore[attr-defined]

    def begin_backward(self, *_: Any) -> None:
        """The first gradient of an output is here."""
        unit = self.unit
        if self in unit.busy or not self.needs:
            return
        unit.busy.add(self)
        unit.zero.enter_backward(unit)
        if not unit.shown:
            # A checkpoint within the block runs parts of its forward again.
            with torch.enable_grad():
                unit.show(ForwardCall(unit, False))

    def came(self, what: str) -> None:
        """The gradients of the "parameters", or of the "inputs", are complete."""
        self._came.add(what)
        if self._came >= self._to_come:
            self._came.clear()
            unit = self.unit
            unit.busy.discard(self)
            if not unit.busy and not unit.depth:
                unit.hide()
            unit.release()

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of the gathered parameters, in the order of the flats."""
        unit = self.unit
        unit.calls.discard(self)
        if any(a is not b for a, b in zip(self.shards, unit.shards(), strict=True)):
            raise LayoutError(
                f"the block {unit.name!r} holds other parameters than in the forward of this pass",
                place=user_line(),
                reason="their gradients would be lost",
                fixes=(Fix("exchange parameters after backward", "or take no nn.Parameter there"),),
            )
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
            self._reduce_with_history(grads)
        else:
            with torch.no_grad():
                self._reduce(grads)

    def _reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        unit, zero, at = self.unit, self.unit.zero, 0
        for k, flat in enumerate(unit.flats):
            some = grads[at : at + len(flat.pieces)]
            at += len(flat.pieces)
            if all(g is None for g in some):
                continue
            dtype = zero.precision.grad_dtype or flat.dtype
            held = unit.held.pop(k, None)
            used = [g is not None for g in some]
            if held is not None:
                used = [a or b for a, b in zip(used, held.used, strict=True)]
            shares = Shares(flat.shares(some, dtype, held and held.sums), used)
            if zero.keeps_shares or unit.calls:
                unit.held[k] = shares
                zero.holds_shares = True
            else:
                zero.reduce(unit, k, shares)

    def _reduce_with_history(self, grads: Sequence[torch.Tensor | None]) -> None:
        """The same where the gradients are to be differentiated again (`create_graph=True`)."""
        unit, zero = self.unit, self.unit.zero
        order = [
            (i, flat) for flat, some in zip(unit.flats, unit.groups, strict=True) for i in some
        ]
        for (i, flat), g in zip(order, grads, strict=True):
            if g is None:
                continue
            p = unit.shards()[i]
            summed = zero.precision.reduce_dtype or p.dtype
            g = g.to(zero.precision.grad_dtype or flat.dtype).to(summed)
            whole = zero.whole(p._spec)
            zero.add_with_history(
                p, moved(g, whole.gradient, p._spec.gradient, unit.name, "gradient").to(p.dtype)
            )


class GatherBlock(torch.autograd.Function):
    """Gathered parameters, tied to their shards by a token; backward reduces and scatters."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, call: ForwardCall) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        unit = call.unit
        views = [v for flat in unit.flats for v in flat.views()]
        order = [i for members in unit.groups for i in members]
        trained = unit.trained()
        frozen = [v for i, v in zip(order, views, strict=True) if not trained[i]]
        ctx.mark_non_differentiable(*frozen)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with Local():
            ctx.call.came("parameters")  # frees what was gathered, before its gradients are copied
            ctx.call.reduce(grads)
        return torch.empty(0), None


class _Left(torch.autograd.Function):
    """The identity on an input of a block; tells when the input's gradient is complete."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: ForwardCall) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.call.came("inputs")
        return grad, None


def leave(t: torch.Tensor, call: ForwardCall | None) -> torch.Tensor:
    with Local():
        out = _Left.apply(t, call)
    return tagged(out, t._spec) if isinstance(t, DTensor) else out
