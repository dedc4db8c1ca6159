"""The record of a region's first run, from which it can be run again in backward.

Each call gets an entry under its key, and each tensor that autograd would save a slot in its call's
entry. Autograd saves the slot in place of the tensor, which is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd.graph import saved_tensors_hooks

from partita.parallel.nested_tensors import tensors_in
from partita.tensor.autograd import saving_hooks
from partita.tensor.tensor_state import HERE

from .ambient_state import AmbientState, RandomStates, is_random
from .call_key import Key, TensorOrigins, find_call_site, make_inputs_key, redistribution_key
from .calls import RecordedCall, SavedSlot, find_reads
from .errors import RematError
from .inputs import RegionInputs
from .modes import FunctionKind, is_internal
from .policy import OneCall, Policy
from .report import open_reports
from .saved_results import KeepMode, KeptCall, KeptKernels, OpaqueSaves, SavedInOpaque, storage_id

__all__ = ["ForwardRecord"]


class _Owner(Protocol):
    """What a record needs of its region: see `region.RematRegion`."""

    policy: Policy
    names: Any

    @property
    def __wrapped__(self) -> Callable[..., Any]: ...

    @property
    def title(self) -> str: ...

    @property
    def module(self) -> nn.Module | None: ...

    @property
    def plan(self) -> Any: ...

    def recompute(self, forward: ForwardRecord, slot: SavedSlot) -> None: ...


class ForwardRecord:
    """The first run of a region: a `Watcher` while it lasts, a record afterwards.

    Attributes:
        events: the calls by key and ordinal.
        order: the calls in order.
        redistributed_results: kept results of redistributions, by key.
        saved: the number of slots.
        complete: the run is over.
    """

    def __init__(self, region: _Owner, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.region, self.policy, self.plan = region, region.policy, region.plan
        self.reports = open_reports()
        self.origins = TensorOrigins()
        self.events: dict[tuple[Key, int], RecordedCall] = {}
        self.order: list[RecordedCall] = []
        self.redistributed_results: dict[Any, KeptKernels] = {}
        self.saved = 0
        self.complete = False
        self._counts: dict[Any, int] = {}
        self._event: RecordedCall | None = None
        self._opened: list[torch.Tensor] = []  # the inputs of an opaque call
        self._around = HERE.watcher
        self._keeping: KeepMode | None = None
        self._inside: OpaqueSaves | None = None
        self._kept: dict[int, KeptKernels | KeptCall] = {}
        self._outer = saving_hooks()
        self.ambient = AmbientState(t.device for t in tensors_in((args, kwargs)))
        self.inputs = RegionInputs(args, kwargs, self.origins)
        self.names = region.names.start(self) if self.policy.wants_names else None
        if self.plan is not None and self.plan.measures:
            self.plan.began(self)

    def saving_slots(self) -> AbstractContextManager[None]:
        """Within, autograd saves slots instead of tensors.

        Not an attribute: it holds the record, and a cycle would keep the region's inputs until
        Python collects garbage.
        """
        return saved_tensors_hooks(self._pack, _unpack_slot)

    # -- identity ----------------------------------------------------------------------------------

    def _record_call(
        self, what: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> RecordedCall:
        inputs = make_inputs_key(args, kwargs, self.origins, tensors)
        event = self._record_event((what, find_call_site(), inputs))
        event.reads = find_reads(tensors, self.origins)
        return event

    def _record_event(self, key: Key) -> RecordedCall:
        n = self._counts[key] = self._counts.get(key, -1) + 1
        event = self.events[key, n] = RecordedCall(key, n, len(self.order))
        self.order.append(event)
        return event

    # -- calls -------------------------------------------------------------------------------------

    def run_call(self, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
        """A function of torch, announced by the mode."""
        if self._event is not None:
            if kind.writes or "out" in kwargs:  # as where a compiled region writes its buffers
                self._before_write(kind, args, kwargs, self._opened)
            return kind.func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        event = self._record_call(kind.op, args, kwargs, tensors)
        if is_random(kind.op, args, kwargs):
            event.draws = RandomStates(tensors, kwargs)
        if kind.writes or "out" in kwargs:
            self._before_write(kind, args, kwargs, None)
            keep = watch = False
        else:
            keep, watch = self._is_result_kept(event, kind.op, kind.func)
        self._event = event
        try:
            if keep or watch:
                out = self._keep_kernels(event, kind, args, kwargs, keep)
            else:
                out = kind.func(*args, **kwargs)
        finally:
            self._event = None
        self._record_outputs(event, out, tensors)
        return out

    def _record_outputs(self, event: RecordedCall, out: Any, tensors: list[torch.Tensor]) -> None:
        self.origins.learn_outputs(out, event.number, tensors)
        if self.names is not None:
            self.names.note_maker(event, out)

    def is_name_kept(self, event: RecordedCall, name: str) -> bool:
        """Does the policy keep a result of this name?"""
        what = event.key[0]
        return self.policy.keeps(what, what, event.key, name, False)

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """The program calls `x` so."""
        if self.names is not None and self._event is None:
            self.names.note_name(x, name)

    def _is_result_kept(self, event: RecordedCall, op: str, function: Any) -> tuple[bool, bool]:
        """(Is the call's result kept? If not, may it be, once it is named or measured?)"""
        name = self.names.known(event) if self.names is not None else None
        if self.plan is not None:
            return self.plan.keeps(self.region, event), self.plan.measures
        if self.policy.keeps(op, function, event.key, name, False):
            return True, False
        return False, self.names is not None and self.names.is_new(event)

    def _keep_kernels(
        self, event: RecordedCall, kind: FunctionKind, args: Any, kwargs: Any, keep: bool
    ) -> Any:
        self._keeping = keeping = KeepMode()
        try:
            with keeping:
                out = kind.func(*args, **kwargs)
        finally:
            self._keeping = None
        kept = keeping.kernels(out)
        if kept is not None:
            if keep:
                self.keep(event, kept)
            elif self.plan is not None:
                self.plan.note_candidate(self.region, event, kept.nbytes)
            elif self.names is not None:
                self.names.offer(event, kept, out)
        return out

    def keep(self, event: RecordedCall, kept: KeptKernels | KeptCall) -> None:
        """Keep the result of this call."""
        event.kept = kept
        if event.draws is not None:
            event.draws.over()
        for start in kept.starts():
            self._kept[start] = kept

    def run_function(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """An `autograd.Function` (torch's compiled regions are such), or a region of ours."""
        if self._event is not None or is_internal(function):
            return run()
        return self._run_opaque(function, function, args, kwargs, run, None)

    def run_one_call(self, function: OneCall, args: Any, kwargs: Any) -> Any:
        """A function that `one_call` marked: one call if it is kept, else the calls inside."""

        def run_once() -> Any:
            return function.__wrapped__(*args, **kwargs)

        if self._event is not None or self.plan is not None:
            return run_once()
        tensors: list[torch.Tensor] = []
        inputs = make_inputs_key(args, kwargs, self.origins, tensors)
        key = (function, find_call_site(), inputs)
        if not self.policy.keeps(function.title, function, key, None, False):
            return run_once()
        return self._run_opaque(function, function, args, kwargs, run_once, True)

    def run_region(self, region: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """A region within this one."""
        if self._event is not None:
            return run()
        return self._run_opaque(region, region, args, kwargs, run, None)

    def _run_opaque(
        self, what: Any, function: Any, args: Any, kwargs: Any, run: Any, keep: bool | None
    ) -> Any:
        tensors: list[torch.Tensor] = []
        event = self._record_call(what, args, kwargs, tensors)
        measure = False
        if keep is None:
            keep, measure = self._is_result_kept(event, _title_of_function(function), function)
        draws = RandomStates(tensors)
        inside = self._inside = OpaqueSaves(tensors, bool(keep)) if keep or measure else None
        self._event, self._opened = event, tensors
        try:
            out = run()
        finally:
            self._event, self._opened, self._inside = None, [], None
        if draws.over():
            event.draws = draws
        if inside is not None and keep:
            self.keep(event, KeptCall.of(out, inside.own))
        elif inside is not None and self.plan is not None:
            self.plan.note_candidate(self.region, event, inside.nbytes(out))
            self.plan.count.note(inside.fresh(out))  # kernels of a compiled region are not seen
        self._record_outputs(event, out, tensors)
        return out

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A redistribution, maybe within a call. The second run need not make it."""
        moves = [m for m in what.moves if m.sends]
        paused = self._keeping
        if paused is not None:
            paused.paused = True
        before, HERE.watcher = HERE.watcher, None
        try:
            out = run()
        finally:
            HERE.watcher = before
            if paused is not None:
                paused.paused = False
        if paused is not None and out is not x:
            paused.note_redistributed(out)
        key = redistribution_key(self._counts, self._event, op, what, x)
        if moves and out is not x:
            kinds = " ".join(m.kind for m in moves)
            where = find_call_site() if self._event is None else self._event.key[1]
            # The global shape, so that the policy answers alike on every rank.
            like: Key = (kinds, where, (((None, torch.Size(moves[0].before.shape), x.dtype),), ()))
            if self.policy.keeps(kinds, what, like, None, True):
                kept = KeptKernels.of_redistributed(out)
                self.redistributed_results[key] = kept
                self._kept[storage_id(out)] = kept
        return out

    # -- writes in place ---------------------------------------------------------------------------

    def _before_write(
        self, kind: FunctionKind, args: Any, kwargs: Any, among: list[torch.Tensor] | None
    ) -> None:
        """Note the buffers from outside that a call writes; within an opaque call, those `among`
        its inputs."""
        written = [kwargs.get("out")]
        written += [args[i] if i < len(args) else kwargs.get(name) for i, name in kind.writes]
        for one in tensors_in(written):
            if among is not None and not any(one is t for t in among):
                continue
            self.announce_write(one)

    def announce_write(self, one: torch.Tensor) -> None:
        """`one` is about to be written."""
        if self.origins.of(one) is None:
            self.note_write(one)
        else:
            self._note_base(one)
        kept = self._kept.get(storage_id(one))
        if kept is not None:
            kept.copy()

    def _note_base(self, view: torch.Tensor) -> None:
        """Note a write to the base of `view`, if a call of this run has read the base."""
        with Local():
            base = view._base
        if base is not None and any(r() is base for e in self.order for _, r, _ in e.reads):
            self.note_write(base)

    def note_write(self, t: torch.Tensor) -> None:
        """Note a write to a buffer from outside of this region, and of those around it."""
        self.ambient.writes.note(t)
        if isinstance(self._around, ForwardRecord) and self._around.origins.of(t) is None:
            self._around.note_write(t)

    # -- what autograd saves -----------------------------------------------------------------------

    def _recompute_slot(self, slot: SavedSlot) -> None:
        self.region.recompute(self, slot)

    def _pack(self, t: torch.Tensor) -> SavedSlot | SavedInOpaque:
        event, inside = self._event, self._inside
        with Local():
            shape, dtype = t.shape, t.dtype
            if event is None:
                # Saved by a call that no mode saw: identified by call site and shape.
                event = self._record_event(
                    ("a saved tensor", find_call_site(), ((((None, shape, dtype),), ())))
                )
            borrowed = None if inside is None else inside.place_of(t)
            if borrowed is not None:
                event.borrowed.append(borrowed)
            elif inside is not None and inside.holds(t):
                return SavedInOpaque(t, self._outer)
        slot = SavedSlot(self._recompute_slot, event, shape, dtype)
        slot.inside = inside is not None and borrowed is None
        event.slots.append(weakref.ref(slot))
        self.saved += 1
        return slot

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """The run is over."""
        self.complete = True
        self._around = None
        self.origins.forget_the_dead()
        if self.names is not None:
            self.names.close(self.order)
        self._kept = {}

    @property
    def kept_results(self) -> list[KeptKernels | KeptCall]:
        """All kept results."""
        kept = [e.kept for e in self.order if e.kept is not None]
        return [*kept, *self.redistributed_results.values()]

    def empty(self) -> None:
        """Empty all slots, after a second run that failed."""
        for event in self.order:
            for ref in event.slots:
                slot = ref()
                if slot is not None:
                    slot.value = None

    def free_kept_kernels(self) -> None:
        """Drop kept results of kernels, after a second run that has used them.

        Kept results of opaque calls stay, since autograd holds what was saved inside. A third run,
        which is rare, computes what was dropped.
        """
        for event in self.order:
            if isinstance(event.kept, KeptKernels):
                event.kept = None
        self.redistributed_results.clear()

    def check_unchanged(self) -> None:
        """Raise RematError if a kept result was written since."""
        for event in self.order:
            if event.kept is not None and event.kept.changed():
                raise RematError(
                    f"the kept result of {event} was written in place after {self.region.title}",
                    reason="kept results are used again in backward",
                )


def _title_of_function(function: Any) -> str:
    return getattr(function, "title", None) or function.__name__


def _unpack_slot(slot: SavedSlot | SavedInOpaque) -> torch.Tensor:
    return slot.take()
