"""The record of a forward.

What is noted of a region's forward, so that it can be run again in backward?

Each call gets an entry under its identity, and each tensor that autograd would save a slot in its
call's entry. The slot goes to autograd in the tensor's place; the tensor itself is let go.
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
from partita.tensor.engine import saving_hooks
from partita.tensor.watch import HERE

from .ambient_state import Draws, Surroundings, is_random
from .call_key import Key, Origins, printed, redistribution_key, site
from .calls import Event, SavedSlot, reads
from .errors import RematError
from .inputs import RegionInputs
from .modes import Kind, is_plumbing
from .policy import OneCall, Policy
from .report import open_reports
from .saved_results import Inside, Keeping, KeptCall, KeptKernels, SavedWithin, start_of

__all__ = ["Forward"]


class _Owner(Protocol):
    """What a forward asks of the region whose first run it is: see `region.RematRegion`."""

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

    def recompute(self, forward: Forward, slot: SavedSlot) -> None: ...


class Forward:
    """The first run of a region: a `Watcher` while it lasts, a record afterwards.

    Attributes:
        events: by identity.
        order: the same, in order.
        saved: how many slots there are.
        kept_bytes: what is kept, counted as tensors are (one storage once).
    """

    def __init__(self, region: _Owner, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.region, self.policy, self.plan = region, region.policy, region.plan
        self.reports = open_reports()
        self.origins = Origins()
        self.events: dict[tuple[Key, int], Event] = {}
        self.order: list[Event] = []
        self.redistributed_results: dict[Any, KeptKernels] = {}
        self.saved = 0
        self.complete = False
        self._counts: dict[Any, int] = {}
        self._event: Event | None = None
        self._opened: list[torch.Tensor] = []  # the inputs of an opaque call
        self._around = HERE.watcher
        self._keeping: Keeping | None = None
        self._inside: Inside | None = None
        self._kept: dict[int, KeptKernels | KeptCall] = {}
        self._outer = saving_hooks()
        self.surroundings = Surroundings(t.device for t in tensors_in((args, kwargs)))
        self.inputs = RegionInputs(args, kwargs, self.origins)
        self.names = region.names.start(self) if self.policy.wants_names else None
        if self.plan is not None and self.plan.measures:
            self.plan.began(self)

    def saving_slots(self) -> AbstractContextManager[None]:
        """Within, autograd saves slots instead of tensors.

        Made when it is asked for: what a record held, and holds the record, would keep the region's
        inputs until Python looks for cycles.
        """
        return saved_tensors_hooks(self._pack, _unpack_slot)

    # -- identity ----------------------------------------------------------------------------------

    def _record_call(self, what: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Event:
        inputs = (printed(args, self.origins, tensors), printed(kwargs, self.origins, tensors))
        event = self._record_event((what, site(), inputs))
        event.reads = reads(tensors, self.origins)
        return event

    def _record_event(self, key: Key) -> Event:
        n = self._counts[key] = self._counts.get(key, -1) + 1
        event = self.events[key, n] = Event(key, n, len(self.order))
        self.order.append(event)
        return event

    # -- calls -------------------------------------------------------------------------------------

    def run_call(self, kind: Kind, args: Any, kwargs: Any) -> Any:
        """A function of torch, announced by the mode."""
        if self._event is not None:
            if kind.writes or "out" in kwargs:  # a compiled region writes its buffers so
                self._before_write(kind, args, kwargs, self._opened)
            return kind.func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        event = self._record_call(kind.op, args, kwargs, tensors)
        if is_random(kind.op, args, kwargs):
            event.draws = Draws(tensors, kwargs)
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

    def _record_outputs(self, event: Event, out: Any, tensors: list[torch.Tensor]) -> None:
        self.origins.learn_outputs(out, event.number, tensors)
        if self.names is not None:
            self.names.note_maker(event, out)

    def wants(self, event: Event, name: str) -> bool:
        """Is a result of this name kept?"""
        what = event.key[0]
        return self.policy.keeps(what, what, event.key, name, False)

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """The program calls `x` so."""
        if self.names is not None and self._event is None:
            self.names.note_name(x, name)

    def _is_result_kept(self, event: Event, op: str, function: Any) -> tuple[bool, bool]:
        """Is its result kept? Else, may the program yet give it a name that is?"""
        name = self.names.known(event) if self.names is not None else None
        if self.plan is not None:
            return self.plan.keeps(self.region, event), self.plan.measures
        if self.policy.keeps(op, function, event.key, name, False):
            return True, False
        return False, self.names is not None and self.names.is_new(event)

    def _keep_kernels(self, event: Event, kind: Kind, args: Any, kwargs: Any, keep: bool) -> Any:
        self._keeping = keeping = Keeping()
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
                self.plan.could_keep(self.region, event, kept.nbytes)
            elif self.names is not None:
                self.names.offer(event, kept, out)
        return out

    def keep(self, event: Event, kept: KeptKernels | KeptCall) -> None:
        """Keep what was made in this call."""
        event.kept = kept
        if event.draws is not None:
            event.draws.over()
        for start in kept.starts():
            self._kept[start] = kept

    def run_function(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """An `autograd.Function` (torch's compiled regions are such), or a region of ours."""
        if self._event is not None or is_plumbing(function):
            return run()
        return self._opaque(function, function, args, kwargs, run, None)

    def one_call(self, marked: OneCall, args: Any, kwargs: Any) -> Any:
        """A function that `one_call` marked: one call if it is kept, else what it is made of."""

        def run_once() -> Any:
            return marked.__wrapped__(*args, **kwargs)

        if self._event is not None or self.plan is not None:
            return run_once()
        tensors: list[torch.Tensor] = []
        inputs = (printed(args, self.origins, tensors), printed(kwargs, self.origins, tensors))
        key = (marked, site(), inputs)
        if not self.policy.keeps(marked.title, marked, key, None, False):
            return run_once()
        return self._opaque(marked, marked, args, kwargs, run_once, True)

    def region_within(self, region: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """A region within this one."""
        if self._event is not None:
            return run()
        return self._opaque(region, region, args, kwargs, run, None)

    def _opaque(
        self, what: Any, function: Any, args: Any, kwargs: Any, run: Any, keep: bool | None
    ) -> Any:
        tensors: list[torch.Tensor] = []
        event = self._record_call(what, args, kwargs, tensors)
        measure = False
        if keep is None:
            keep, measure = self._is_result_kept(event, _title_of_function(function), function)
        draws = Draws(tensors)
        inside = self._inside = Inside(tensors, bool(keep)) if keep or measure else None
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
            self.plan.could_keep(self.region, event, inside.nbytes(out))
            self.plan.count.note(inside.fresh(out))  # kernels of a compiled region are not seen
        self._record_outputs(event, out, tensors)
        return out

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A redistribution. It may stand in a call; it is looked for, and need not be found."""
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
            where = site() if self._event is None else self._event.key[1]
            # The global shape: every rank must come to the same answer.
            like: Key = (kinds, where, (((None, torch.Size(moves[0].before.shape), x.dtype),), ()))
            if self.policy.keeps(kinds, what, like, None, True):
                kept = KeptKernels.of_redistributed(out)
                self.redistributed_results[key] = kept
                self._kept[start_of(out)] = kept
        return out

    # -- writes in place ---------------------------------------------------------------------------

    def _before_write(
        self, kind: Kind, args: Any, kwargs: Any, among: list[torch.Tensor] | None
    ) -> None:
        """Note which buffers of the world around are written; of an opaque call, `among` these."""
        written = [kwargs.get("out")]
        written += [args[i] if i < len(args) else kwargs.get(name) for i, name in kind.writes]
        for one in tensors_in(written):
            if among is not None and not any(one is t for t in among):
                continue
            self.announce_write(one)

    def announce_write(self, one: torch.Tensor) -> None:
        """`one` is going to be written."""
        if self.origins.of(one) is None:
            self.note_write(one)
        else:
            self._note_base(one)
        kept = self._kept.get(start_of(one))
        if kept is not None:
            kept.copy()

    def _note_base(self, view: torch.Tensor) -> None:
        """Of a view that a call here made: does it lie in a buffer that a call here has read?"""
        with Local():
            base = view._base
        if base is not None and any(r() is base for e in self.order for _, r, _ in e.reads):
            self.note_write(base)

    def note_write(self, t: torch.Tensor) -> None:
        """A buffer that neither this region made, nor one around it."""
        self.surroundings.writes.note(t)
        if isinstance(self._around, Forward) and self._around.origins.of(t) is None:
            self._around.note_write(t)

    # -- what autograd saves -----------------------------------------------------------------------

    def _recompute_slot(self, slot: SavedSlot) -> None:
        self.region.recompute(self, slot)

    def _pack(self, t: torch.Tensor) -> SavedSlot | SavedWithin:
        event, inside = self._event, self._inside
        with Local():
            shape, dtype = t.shape, t.dtype
            if event is None:
                # Saved by what nobody announced: known by its place and shape.
                event = self._record_event(
                    ("a saved tensor", site(), ((((None, shape, dtype),), ())))
                )
            borrowed = None if inside is None else inside.place_of(t)
            if borrowed is not None:
                event.borrowed.append(borrowed)
            elif inside is not None and inside.holds(t):
                return SavedWithin(t, self._outer)
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
        """All that was kept."""
        kept = [e.kept for e in self.order if e.kept is not None]
        return [*kept, *self.redistributed_results.values()]

    def empty(self) -> None:
        """Let go what a second run has brought: it broke off."""
        for event in self.order:
            for ref in event.slots:
                slot = ref()
                if slot is not None:
                    slot.value = None

    def free_kept_kernels(self) -> None:
        """Let go of what kernels made: a second run has brought all that needed it.

        What is kept of an opaque call stays, since autograd holds what was saved inside. A run that
        comes after this one, which is rare, computes what is no longer here.
        """
        for event in self.order:
            if isinstance(event.kept, KeptKernels):
                event.kept = None
        self.redistributed_results.clear()

    def check_unchanged(self) -> None:
        """Raise if what was kept is not what it was."""
        for event in self.order:
            if event.kept is not None and event.kept.changed():
                raise RematError(
                    f"the kept result of {event} was written in place after {self.region.title}",
                    reason="kept results are used again in backward",
                )


def _title_of_function(function: Any) -> str:
    return getattr(function, "title", None) or function.__name__


def _unpack_slot(slot: SavedSlot | SavedWithin) -> torch.Tensor:
    return slot.take()
