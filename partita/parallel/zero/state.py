"""The state of ZeRO-3 for a model: which blocks are gathered, prefetched and reduced, and when.

While a block computes, the next block's parameters are being gathered; in backward the previous
block's gradients are being reduced. At most two blocks are gathered at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Replicate, Shard
from partita.tensor.autograd import after_backward, backward_pass, in_backward
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.dtensor_gradients import BROKEN_OFF
from partita.tensor.spec import Spec, spec_of
from partita.tensor.tensor_state import Rest, own_state, state_of

from ..blocks import Block
from ..nested_tensors import map_tensors
from .flat_buffer import PartialGradients
from .fsdp_group import FsdpGroup
from .precision import MixedPrecision

__all__ = ["Zero"]


@dataclass(frozen=True)
class _Reducing:
    """Gradients of a group that are being reduced.

    Attributes:
        members: the numbers of the group's parameters that have one.
        places: their indices in what `wait` returns.
        wait: waits for the reduction, and returns this rank's pieces.
    """

    group: FsdpGroup
    members: list[int]
    places: list[int]
    wait: Callable[[], list[torch.Tensor]]


class Zero:
    """The state of ZeRO-3 for one model, whose parameters are sharded over `axes` at rest.

    Attributes:
        groups: its blocks.
        persistent: what was gathered once stays, until a parameter is changed.
        keeps_partial_gradients: gradients stay unsharded, each rank its part of the sum, until it
            is False again.
        holds_partial_gradients: there may be unsharded gradients of this or an earlier pass.
        peak: the most bytes that were gathered at once.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: tuple[str, ...],
        precision: MixedPrecision,
        blocks: Sequence[Block],
    ):
        self._begin_with(model, axes, precision)
        self.groups = [FsdpGroup(self, block) for block in blocks if block.slots]
        self.adopt_parameters(model.parameters())

    def register_hooks(self) -> None:
        """Register hooks around the model's forward, outside of those of its blocks."""
        self.model.register_forward_pre_hook(self._begin_forward, prepend=True)
        self.model.register_forward_hook(self._end, always_call=True)

    def _begin_with(
        self, model: nn.Module, axes: tuple[str, ...], precision: MixedPrecision
    ) -> None:
        self.model = model
        self.axes, self.precision = axes, precision
        self.options = (axes, 3, precision)
        self.applied: list[nn.Module] = []
        self.persistent = self.keeps_partial_gradients = self.holds_partial_gradients = False
        self.peak = 0
        # Weak: a capture has specs of its own, which hold its wires.
        self._unsharded = WeakKeyDictionary[Spec, Spec]()
        self._forwards = 0
        self._token: torch.Tensor | None = None
        self._last: FsdpGroup | None = None
        self._next: dict[FsdpGroup, FsdpGroup] = {}
        self._before: dict[FsdpGroup, FsdpGroup] = {}
        self._under_way: list[_Reducing] = []
        self._passes: dict[int, list[FsdpGroup]] = {}
        self._with_history: dict[DTensor, torch.Tensor] = {}
        BROKEN_OFF.watchers.add(self)

    def detach_from_model(self) -> None:
        """Remove the hooks: the state of an enclosing model takes over."""
        self.reset_after_abort()
        BROKEN_OFF.watchers.discard(self)
        for module in {m for group in self.groups for m in group.modules} | {self.model}:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [n for n, hook in hooks.items() if self._owns_hook(hook)]:
                    del hooks[number]

    def _owns_hook(self, hook: Any) -> bool:
        owner = getattr(hook, "__self__", None)
        return owner is self or getattr(owner, "group", None) in self.groups

    def adopt_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Mark the model's parameters: their gradients and updates are laid out as they are."""
        self.parameters: list[Any] = list(parameters)
        for p in self.parameters:
            own_state(p).rest = Rest(p._spec, p._spec, self)

    # A copy of the model has a state of its own, over its own parameters, at rest.

    def __getstate__(self) -> Any:
        self.reset_after_abort()
        return (
            self.model,
            self.axes,
            self.precision,
            self.persistent,
            self.groups,
            self.parameters,
        )

    def __setstate__(self, state: Any) -> None:
        model, axes, precision, persistent, self.groups, parameters = state
        self._begin_with(model, axes, precision)
        self.persistent = persistent
        self.adopt_parameters(parameters)

    def make_unsharded_spec(self, spec: Spec) -> Spec:
        """The layout of a parameter of `spec` when it is gathered."""
        found = self._unsharded.get(spec)
        if found is None:
            layout = spec.layout
            for a in self.axes:
                layout = layout.put(a, Replicate())
            found = spec_of(layout, spec.wire)
            if found is not spec:  # else it would hold itself
                self._unsharded[spec] = found
        return found

    def has_sharded(self, p: torch.Tensor | None) -> bool:
        """Is `p` a parameter sharded as this state shards them?"""
        return (
            isinstance(p, DTensor)
            and isinstance(p, nn.Parameter)
            and all(p._spec.layout.placement(a) == Shard(0) for a in self.axes)
        )

    # -- forward -----------------------------------------------------------------------------------

    def _begin_forward(self, *_: Any) -> None:
        if not self._forwards and not in_backward():
            self.reset_after_abort()
        self._forwards += 1
        self._last = None

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._forwards = max(0, self._forwards - 1)
        self._token = None
        if not in_backward():
            self.release()
        dtype = self.precision.output_dtype
        if dtype is None or output is None:
            return None
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    def enter_forward(self, group: FsdpGroup) -> None:
        """Gather `group`, and prefetch the group that followed it last time."""
        if in_backward():
            if not group.alive:
                # A region of several blocks is recomputed: each is gathered again for its backward.
                self.release()
            group.gather()
            return
        group.gather()
        if self._last is not None and self._last is not group:
            self._next[self._last] = group
            self._before[group] = self._last
        self._last = group
        self._prefetch_group(self._next.get(group), group)

    def enter_backward(self, group: FsdpGroup) -> None:
        """Gather `group`, and prefetch the group that came before it in forward."""
        group.gather()
        before = self._before.get(group)
        while before is not None and not before.needed:
            before = self._before.get(before)
        self._prefetch_group(before, group)

    def _prefetch_group(self, group: FsdpGroup | None, beside: FsdpGroup) -> None:
        if group is None:
            return
        for other in self.groups:
            if other is not group and other is not beside and other.alive:
                return
        group.start()

    # -- backward ----------------------------------------------------------------------------------

    def release_after_backward(self, group: FsdpGroup) -> None:
        """Release `group` when the backward pass that is at work ends, if nothing else has.

        Not every pass comes to the gradients of a block's parameters: it may be asked for those of
        the inputs alone.
        """
        number = backward_pass()
        if number not in self._passes:
            self._passes[number] = []
            after_backward(lambda: self._end_backward(number))
        if group not in self._passes[number]:
            self._passes[number].append(group)

    def _end_backward(self, number: int) -> None:
        # Groups that an enclosing backward pass uses are left to it.
        groups = self._passes.pop(number, [])
        around = {group for others in self._passes.values() for group in others}
        with Local(), torch.no_grad():
            for group in groups:
                if group not in around:
                    group.end_backward()

    def token(self, group: FsdpGroup) -> torch.Tensor:
        """An empty tensor with a history that ties gathered parameters to their shards.

        One serves a whole forward of the model, so that its backward comes after every block's,
        and there waits for all gradients that are under way. A block that is called alone has its
        own.
        """
        if not self._forwards or in_backward():
            return _ShardsToToken.apply(self, [group], *_find_trained([group]))
        if self._token is None:
            self._token = _ShardsToToken.apply(self, self.groups, *_find_trained(self.groups))
        return self._token

    def reduce(self, group: FsdpGroup, k: int, shares: PartialGradients) -> None:
        """Begin to reduce gradients of one flat buffer, after waiting for other groups'
        reductions."""
        dtype = self.precision.reduce_dtype or group.shards()[group.members[k][0]].dtype
        for one in self._under_way:
            if one.group is not group:
                one.wait()
        wait = group.flats[k].start_reduce_scatter(shares.sums, dtype)
        members = [i for i, used in zip(group.members[k], shares.used, strict=True) if used]
        places = [i for i, used in enumerate(shares.used) if used]
        self._under_way.append(_Reducing(group, members, places, wait))

    def collect(self, groups: Sequence[FsdpGroup]) -> dict[DTensor, torch.Tensor]:
        """Wait for the reductions of `groups`; each parameter's gradient, plain and local."""
        if not self.keeps_partial_gradients:
            self._reduce_held_gradients(groups)
        found: dict[DTensor, torch.Tensor] = {}
        ready = [one for one in self._under_way if one.group in groups]
        self._under_way = [one for one in self._under_way if one.group not in groups]
        for one in ready:
            pieces, shards = one.wait(), one.group.shards()
            for i, place in zip(one.members, one.places, strict=True):
                p = shards[i]
                g = pieces[place].to(p.dtype)
                found[p] = found[p] + g if p in found else g
        return found

    def add_with_history(self, p: DTensor, grad: torch.Tensor) -> None:
        """Add to the gradient of `p`, which is a part of the graph of `create_graph=True`."""
        before = self._with_history.get(p)
        self._with_history[p] = grad if before is None else before + grad

    def take_with_history(self, groups: Sequence[FsdpGroup]) -> dict[DTensor, torch.Tensor]:
        """Remove and return the gradients that `add_with_history` added for `groups`."""
        mine = [p for p in _find_trained(groups) if p in self._with_history]
        return {p: self._with_history.pop(p) for p in mine}

    def replaced(self, old: DTensor, new: DTensor) -> None:
        """`new`, laid out as `old`, has taken its place in the model (see `materialize`)."""
        own_state(new).rest = state_of(old).rest
        self.parameters = [new if p is old else p for p in self.parameters]

    def updated(self) -> None:
        """An optimizer has updated the shards; they are gathered when they are used."""

    def show_gradient(self) -> None:
        """The program reads a gradient, or clears it: reduce the partial ones that were kept."""
        if self.holds_partial_gradients and not in_backward():
            self.holds_partial_gradients = False
            if any(group.held_gradients for group in self.groups):
                self.finish()

    def finish(self) -> None:
        """Reduce the partial gradients that were kept, and add them to the parameters'
        gradients."""
        with Local(), torch.no_grad():
            self._reduce_held_gradients(self.groups)
            for p, g in self.collect(self.groups).items():
                held = torch._C.TensorBase.grad.__get__(p)  # type: ignore[union-attr]
                if held is None:
                    p.grad = tagged(g, p._spec.gradient)
                else:
                    held.add_(g)

    def _reduce_held_gradients(self, groups: Sequence[FsdpGroup]) -> None:
        for group in groups:
            for k in list(group.held_gradients):
                self.reduce(group, k, group.held_gradients.pop(k))

    # -- after a step ------------------------------------------------------------------------------

    def release(self) -> None:
        """Free every block that is not in use."""
        for group in self.groups:
            group.release()

    def reset_after_abort(self) -> None:
        """Drop all of an earlier step, however it ended: release blocks, wait for reductions."""
        self._passes.clear()
        self._with_history.clear()
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            one.wait()
        for group in self.groups:
            group.reset_after_abort()
        self.release()

    @contextmanager
    def keeping_partial_gradients(self) -> Iterator[None]:
        """Within, backward passes keep their gradients; the next one outside sends them all."""
        before, self.keeps_partial_gradients = self.keeps_partial_gradients, True
        try:
            yield
        finally:
            self.keeps_partial_gradients = before

    @property
    def alive(self) -> int:
        """Bytes of gathered parameters that are held now."""
        return sum([flat.alive for group in self.groups for flat in group.flats])

    def note_alive(self) -> None:
        self.peak = max(self.peak, self.alive)


def _find_trained(groups: Sequence[FsdpGroup]) -> list[DTensor]:
    return [
        p
        for group in groups
        for p, trained in zip(group.shards(), group.trained(), strict=True)
        if trained
    ]


class _ShardsToToken(torch.autograd.Function):
    """The autograd node from shards to the token; its backward returns the shards' gradients."""

    @staticmethod
    def forward(
        ctx: Any, zero: Zero, groups: Sequence[FsdpGroup], *shards: torch.Tensor
    ) -> torch.Tensor:
        ctx.zero, ctx.groups, ctx.shards = zero, groups, shards
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        with Local():
            with torch.no_grad():
                found = ctx.zero.collect(ctx.groups)
                ctx.zero.release()
            for p, g in ctx.zero.take_with_history(ctx.groups).items():
                found[p] = found[p] + g if p in found else g
        return None, None, *[found.pop(p, None) for p in ctx.shards]
