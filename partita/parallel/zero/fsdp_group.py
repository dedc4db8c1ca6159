"""FSDP groups: the parameters of one block, sharded at rest, under way, or gathered.

They are gathered before the block's forward and released after it (`fsdp_hooks`). What autograd
saves of them in between is replaced by a note of where it lay, and unpacking a note gathers them
again (`saved_tensors`). So no graph holds what was gathered, and no alias or cast prolongs its
life.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, LayoutError
from partita.tensor.autograd import in_backward
from partita.tensor.construct import keep_attributes, stand_for
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.spec import Spec
from partita.tensor.tensor_state import count_writes, count_writes_of, own_state, state_of

from ..blocks import Block
from .flat_buffer import FlatBuffer, PartialGradients
from .precision import MixedPrecision

__all__ = ["FsdpGroup", "GroupOwner"]


_dtype = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]
_device = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]
_requires_grad = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]

_ALONE = 1 << 22
"""Bytes from which a parameter travels alone: one collective more costs less than its copies."""


class GroupOwner(Protocol):
    """What a group asks of the state of its model, which knows of all groups (`state.Zero`).

    Attributes:
        axes: of the mesh, over which parameters are sharded.
        persistent: what was gathered once stays, until a parameter is changed.
        keeps_partial_gradients: gradients stay unsharded, each rank its part of the sum.
        holds_partial_gradients: there may be such.
    """

    axes: tuple[str, ...]
    precision: MixedPrecision
    persistent: bool
    keeps_partial_gradients: bool
    holds_partial_gradients: bool

    def make_unsharded_spec(self, spec: Spec) -> Spec:
        """The layout of a parameter of `spec` when it is gathered."""

    def has_sharded(self, p: torch.Tensor | None) -> bool:
        """Is `p` a parameter sharded as this state shards them?"""

    def note_alive(self) -> None:
        """Called after something was gathered."""

    def enter_forward(self, group: FsdpGroup) -> None:
        """Gather `group`, and perhaps begin to gather the next one."""

    def enter_backward(self, group: FsdpGroup) -> None:
        """Gather `group`, and perhaps begin to gather the one before."""

    def release_after_backward(self, group: FsdpGroup) -> None:
        """Release `group` when the backward pass that is at work ends, if nothing else has."""

    def token(self, group: FsdpGroup) -> torch.Tensor:
        """A tensor with a history that ties gathered parameters to their shards."""

    def reduce(self, group: FsdpGroup, k: int, shares: PartialGradients) -> None:
        """Begin to reduce the gradients of one of the group's flat buffers."""

    def add_with_history(self, p: DTensor, grad: torch.Tensor) -> None:
        """Add to the gradient of `p`, in a backward pass with `create_graph=True`."""


class FsdpGroup:
    """One block's parameters, and whether they are gathered.

    Attributes:
        depth: forwards of the block that have begun and not ended.
        needed: the last backward read the parameters, as far as is known.
        calls_in_backward: the forwards whose backward has begun and not ended.
        open_calls: the forwards whose gradients are yet to come; those of the last one are sent
            with all before.
        held_gradients: unsharded gradients that were kept, by number of the flat.
        installed: the modules hold the gathered parameters.
        versions: of the shards when they were gathered.
        members: for each flat, the numbers of the parameters in it.
        open_forwards: for each forward that has begun: its hooks of saved tensors, or None.
    """

    def __init__(self, zero: GroupOwner, block: Block):
        self._begin_with(zero, block)
        self._rebuild_buffers()

    def _begin_with(self, zero: GroupOwner, block: Block) -> None:
        self.zero, self.name, self.slots = zero, block.name, block.slots
        self.modules = block.modules
        self.depth = 0
        self.calls_in_backward: set[Any] = set()
        self.open_calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self.held_gradients: dict[int, PartialGradients] = {}
        self.installed = False
        self.versions: list[int] = []
        self._seen: list[tuple[int, DTensor, int, dict[str, Any]]] = []
        self._shards: list[DTensor] = []
        self.members: list[list[int]] = []
        self.flats: list[FlatBuffer] = []
        self._kinds: list[Any] = []
        self._specs: list[Spec] = []
        self._order: list[int] = []
        self._firsts = [(s[0].owner, s[0].attr, s[0]) for s in self.slots]
        self._places: list[tuple[nn.Module, str, DTensor, Spec]] = []
        self.open_forwards: list[Any] = []

    # A copied or unpickled model has groups of its own over its own modules, at rest.

    def __getstate__(self) -> Any:
        return self.zero, Block(self.name, self.modules, self.slots)

    def __setstate__(self, state: Any) -> None:
        self._begin_with(*state)

    def _rebuild_buffers(self) -> None:
        """Make the flat buffers for the parameters as they are now: `model.to(dtype)` changes
        them."""
        shards = self.shards()
        with Local():
            kinds = [(_dtype(p), _device(p), p._spec) for p in shards]
        if kinds == self._kinds:
            return
        for flat in self.flats:
            flat.release()
        self._kinds = kinds
        self.needed = self.may_recompute_within
        by_kind: dict[tuple[torch.dtype, int | None], list[int]] = {}
        for i, p in enumerate(shards):
            dtype = self.zero.precision.param_dtype or p.dtype
            alone = self.zero.make_unsharded_spec(p._spec).largest * dtype.itemsize >= _ALONE
            by_kind.setdefault((dtype, i if alone else None), []).append(i)
        self.members = list(by_kind.values())
        self._order = [i for members in self.members for i in members]
        self.flats = []
        for (dtype, _), members in by_kind.items():
            specs = [shards[i]._spec for i in members]
            wholes = [self.zero.make_unsharded_spec(s) for s in specs]
            device = shards[members[0]].device
            names = [self._name_of(i) for i in members]
            self.flats.append(
                FlatBuffer(self.name, names, wholes, specs, self.zero.axes, dtype, device)
            )
        self._specs = [p.whole for flat in self.flats for p in flat.pieces]

    def shards(self) -> list[DTensor]:
        """The parameters at rest, as the modules hold them now."""
        if not self.installed:
            self._shards = [
                p if (p := owner._parameters.get(attr)) is not None else slot.parameter  # type: ignore[misc]
                for owner, attr, slot in self._firsts
            ]
        return self._shards

    def trained(self) -> list[bool]:
        """For each parameter at rest: does it get a gradient?"""
        with Local():
            return [_requires_grad(p) for p in self.shards()]

    @property
    def holds_own_shards(self) -> bool:
        """Are the shards in their places?

        `torch.func.functional_call` puts other values there, a program sets `p.data` to one of
        another layout, or unties a weight. Such values are not gathered: ops use them as they lie.
        """
        if self.installed:
            return True
        for owner, attr, p, spec in self._places:
            if owner._parameters.get(attr) is not p or p._spec is not spec:  # type: ignore[comparison-overlap]
                break
        else:
            if self._places:
                return True
        return self._find_places()

    def _find_places(self) -> bool:
        """`holds_own_shards` in full; notes the places for a quick comparison next time."""
        self._places = []
        held: list[list[tuple[Any, Any]]] = [
            [(s, s.owner._parameters.get(s.attr)) for s in some] for some in self.slots
        ]
        for some in held:
            first = some[0][1]
            if not self.zero.has_sharded(first) or any(p is not first for _, p in some):
                return False
        self._places = [(s.owner, s.attr, p, p._spec) for some in held for s, p in some]
        return True

    @property
    def may_recompute_within(self) -> bool:
        """May a part of the block run under a checkpoint of its own, which saves unseen?"""
        for m in self.modules:
            if "forward" in m.__dict__ or any(c is not None for c in m._modules.values()):
                return True
        return False

    # -- where the bytes are -----------------------------------------------------------------------

    @property
    def alive(self) -> int:
        """Bytes that are gathered, or under way."""
        return sum([flat.alive for flat in self.flats])

    @property
    def _is_ready(self) -> bool:
        return bool(self.depth or self.calls_in_backward) and all(flat.here for flat in self.flats)

    def start(self) -> None:
        """Begin to gather."""
        if self._is_ready or not self.holds_own_shards:
            return
        shards = self.shards()
        if not self.depth and not self.calls_in_backward:
            self._rebuild_buffers()
        versions = count_writes_of(shards)
        if versions != self.versions and not self.depth and not self.calls_in_backward:
            for flat in self.flats:  # parameters that stayed gathered are out of date
                flat.release()
        self.versions = versions
        reason = "regather" if in_backward() else "gather"
        started = False
        for flat, members in zip(self.flats, self.members, strict=True):
            started |= flat.start_gather([shards[i] for i in members], reason)
        if started:
            self.zero.note_alive()

    def gather(self) -> None:
        """Gather, and wait for it."""
        if self._is_ready:
            return
        if in_backward():
            self.zero.release_after_backward(self)
        self.start()
        for flat in self.flats:
            flat.finish_gather()
        self.zero.note_alive()

    def check_unwritten(
        self,
        flat: FlatBuffer,
        i: int,
        versions: list[int],
        written: Mapping[int, int],
        version: int,
    ) -> None:
        """Raise where the flat's parameter `i` was written since a forward saved it.

        Args:
            versions: of the shards when it was saved; `version` of the gathered parameter.
            written: the parameters that the forward wrote, and their versions at its end.

        Raises:
            RuntimeError: as autograd's own check, which does not know the shards.
        """
        number = self.members[self.flats.index(flat)][i]
        before, now = versions[number], self.versions[number]
        if before == now:
            before, now = version, written.get(number, version)
        if before != now:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self._name_of(number)} is at version {now}; expected version "
                f"{before}"
            )

    def _name_of(self, i: int) -> str:
        slot = self.slots[i][0]
        return f"{slot.attr} of a {type(slot.owner).__name__} in the block {self.name!r}"

    def release(self) -> None:
        """Free what is gathered, unless a forward or backward is using it."""
        if not self.depth and not self.calls_in_backward and not self.zero.persistent:
            for flat in self.flats:
                flat.release()

    def end_backward(self) -> None:
        """A backward pass that gathered this block has ended, whichever gradients it computed."""
        self.calls_in_backward.clear()
        if not self.depth:
            self.put_shards_back()
        self.release()

    def reset_after_abort(self) -> None:
        """Forget a forward or a backward that was aborted."""
        self.calls_in_backward.clear()
        self.open_calls.clear()
        self.open_forwards.clear()
        self.depth = 0
        self.put_shards_back()

    # -- what the modules see ----------------------------------------------------------------------

    def views(self) -> list[torch.Tensor]:
        """The gathered parameters, plain and local, in the order of the flats."""
        return [v for flat in self.flats for v in flat.views()]

    def install(self, plain: Sequence[torch.Tensor]) -> None:
        """Put `plain`, the gathered parameters in the order of the flats, in the modules."""
        self.shards()
        self.installed = True
        wholes, given = [], []
        for i, t, spec in zip(self._order, plain, self._specs, strict=True):
            whole, p = tagged(t, spec), self._shards[i]
            # Of which version: remat compares it with that of the next time (remat/calls.py).
            own_state(whole).gathered_from = (p, self.versions[i])
            wholes.append(whole)
            given.append(stand_for(whole, p))
            for slot in self.slots[i]:
                slot.owner._parameters[slot.attr] = whole  # type: ignore[assignment]
        writes = count_writes_of(wholes)
        self._seen = list(zip(self._order, wholes, writes, given, strict=True))

    def write_back(self) -> dict[int, int]:
        """Write what the forward wrote into gathered parameters into this rank's shards.

        Returns:
            The parameters that were written where autograd counts it, and their versions now.

        Raises:
            LayoutError: it was written in a dtype that holds less than the shard's.
        """
        written: dict[int, int] = {}
        writes = count_writes_of([whole for _, whole, _, _ in self._seen])
        for (i, whole, before, given), now in zip(self._seen, writes, strict=True):
            keep_attributes(whole, self._shards[i], given)
            if now == before and not state_of(whole).written_unseen:
                continue
            p = self._shards[i]
            mine, held = p._spec.region[0], whole._spec.region[0]
            with Local(), torch.no_grad():
                rows = whole.detach().narrow(0, mine[0] - held[0], mine[1])
                if torch.equal(rows, p.to(rows.dtype)):
                    continue
                if rows.dtype != p.dtype:
                    raise self._written_in(i, rows.dtype)
                    # Through `.data` where it was written through that: autograd counts neither.
                (p if now != before else p.data).copy_(rows)
            # Changed in place in the list that saved tensors of this forward refer to.
            self.versions[i] = count_writes(p)
            if now != before:
                written[i] = now
        return written

    def _written_in(self, i: int, dtype: torch.dtype) -> LayoutError:
        return LayoutError(
            f"{self._name_of(i)} is written in the forward, where it is gathered as {dtype}",
            place=user_line(),
            reason="its shards would lose the digits that they have and this dtype has not",
            fixes=(Fix("write it after the optimizer's step", "there it is what the ranks hold"),),
        )

    def put_shards_back(self) -> None:
        """Put the shards in the modules, in the places of what was gathered."""
        for _, whole, _, _ in self._seen:
            # It holds a view of `whole`, which holds `whole`: a cycle that no garbage collector
            # sees.
            own_state(whole).moved = None
        self._seen = []
        if self.installed:
            for places, p in zip(self.slots, self._shards, strict=True):
                for slot in places:
                    slot.owner._parameters[slot.attr] = p  # type: ignore[assignment]
            self.installed = False
