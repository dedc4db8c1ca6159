"""Records of a region's first run, from which it can be run again in backward.

Each call gets an entry under its key, and each tensor that autograd would save a slot in its call's
entry. Autograd saves the slot in place of the tensor, which is freed. A call also notes which
versions it read of tensors from outside of the region: the second run reads them anew. A name that
the program gives to a result comes after the call that made it, so that results are described,
without their memory, until it is known which calls make named ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd.graph import saved_tensors_hooks

from partita.layout import Fix
from partita.parallel.batch import find_instances, replace_instances, tensors_in
from partita.tensor.tensor_state import HERE, saving_hooks, state_of

from .counters import open_reports
from .policy import OneCall, Wrapped
from .saved_state import (
    AmbientState,
    KeepMode,
    KeptCall,
    KeptKernels,
    OpaqueSaves,
    RandomStates,
    RegionInputs,
    SavedInOpaque,
    is_random,
    storage_id,
)
from .watched_calls import (
    FunctionKind,
    Key,
    RematError,
    TensorOrigins,
    describe_call,
    find_call_site,
    is_internal,
    make_inputs_key,
    make_local_alias,
    watching,
)

Read = tuple[int, "weakref.ref[torch.Tensor]", int]
"""(index among the call's tensors, the tensor that holds the values at rest, its version)."""


class RecordedCall:
    """One call of the first run.

    Attributes:
        key, ordinal: its identity; the ordinal is among the calls of this key.
        number: among all calls of the run.
        slots: of the tensors that autograd saved in it, which the second run has to fill.
        draws: the states of random generators, where it draws.
        kept: its kept result, or None.
        reads: its tensors from outside of the region.
        borrowed: of a kept opaque call: saved tensors that are views of its inputs, as (input,
            size, stride, offset).
    """

    __slots__ = ("borrowed", "draws", "kept", "key", "number", "ordinal", "reads", "slots")

    def __init__(self, key: Key, ordinal: int, number: int):
        self.key, self.ordinal, self.number = key, ordinal, number
        self.slots: list[weakref.ref[SavedSlot]] = []
        self.draws: RandomStates | None = None
        self.kept: KeptKernels | KeptCall | None = None
        self.reads: tuple[Read, ...] = ()
        self.borrowed: list[tuple[Any, ...]] = []

    def __str__(self) -> str:
        return describe_call(self.key)


def redistribution_key(
    counts: dict[Any, int], event: RecordedCall | None, op: str, what: Any, x: torch.Tensor
) -> Any:
    """The key of a redistribution: its call site, or the call that it is in, and what it does."""
    where: Any = find_call_site() if event is None else (event.key, event.ordinal)
    key = ("carried", op, str(what), where, x.shape, x.dtype)
    n = counts[key] = counts.get(key, -1) + 1
    return (*key, n)


class SavedSlot:
    """Stands for a tensor that autograd saved. Only autograd holds it.

    Attributes:
        recompute: called with the slot, runs the region again to fill it.
        inside: the tensor was made within an opaque call, unseen.
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "event",
        "inside",
        "recompute",
        "shape",
        "value",
        "version",
    )

    def __init__(
        self,
        recompute: Callable[[SavedSlot], None],
        event: RecordedCall,
        shape: torch.Size,
        dtype: torch.dtype,
    ):
        self.recompute, self.event, self.shape, self.dtype = recompute, event, shape, dtype
        self.value: torch.Tensor | None = None
        self.version = 0
        self.inside = False

    def fill(self, t: torch.Tensor) -> None:
        self.value = make_local_alias(t)
        self.version = self.value._version

    def take(self) -> torch.Tensor:
        """The tensor, recomputed if it is not here; the slot is empty afterwards."""
        if self.value is None:
            self.recompute(self)
        value, self.value = self.value, None
        assert value is not None
        if value._version != self.version:  # with hooks, autograd does not look
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(self.shape)}, saved by {self.event}"
            )
        return value


# -- tensors from outside of a region ---------------------------------------------------


def _find_reads(tensors: list[torch.Tensor], origins: TensorOrigins) -> tuple[Read, ...]:
    """The `tensors` of a call that are from outside of its region, with their versions."""
    found: tuple[Read, ...] = ()
    for i, t in enumerate(tensors):
        if origins.of(t) is None:
            held, version = _find_source(t)
            found += ((i, weakref.ref(held), version),)
    return found


def check_unwritten(
    event: RecordedCall, tensors: list[torch.Tensor], region: Wrapped, ambient: AmbientState
) -> None:
    """Raise unless the second run's call that is `event` reads what the first one read.

    A parameter that was stepped in between would give other values. Inputs are checked by autograd,
    and what the region itself writes is restored for the second run.

    Args:
        region: that is run again, in these surroundings.

    Raises:
        RematError: a tensor was written in place in between. Names it, the call and both versions.
    """
    for i, ref, before in event.reads:
        if i >= len(tensors):
            continue
        held, now = _find_source(tensors[i])
        if now == before or ref() is not held or ambient.writes.has(held):
            continue
        name = _name_of(tensors[i], region.module)
        raise RematError(
            f"the recompute of {region.title} reads a tensor that was written in place "
            "since its forward read it",
            operands=(
                f"{name or f'tensor {i}'} of {event}",
                f"forward    read version {before}",
                f"recompute  reads version {now}",
            ),
            reason="gradients would be of values that forward did not have; without remat autograd "
            "says as much",
            fixes=(Fix("go backward first, and write it then", "an optimizer's step, say"),),
        )


def _find_source(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor that holds the values of `t` at rest, and the version that was read.

    A gathered parameter is a new tensor each time: its shard and the version of that, then.
    """
    rest = state_of(t).gathered_from
    if rest is not None:
        return rest
    with Local():
        return t, 0 if t.is_inference() else t._version


def _name_of(t: torch.Tensor, module: nn.Module | None) -> str | None:
    if module is None:
        return None
    named: Iterable[tuple[str, torch.Tensor]]
    for named in (module.named_parameters(), module.named_buffers()):
        for name, one in named:
            if one is t:
                return name
    return None


# -- the first run ---------------------------------------------------------------------------------


class ForwardRecord:
    """The first run of a region: a `Watcher` while it lasts, a record afterwards.

    Attributes:
        region: the `region.RematRegion`.
        budget_step: as that has it.
        events: the calls by key and ordinal.
        order: the calls in order.
        redistributed_results: kept results of redistributions, by key.
        saved: the number of slots.
        complete: the run is over.
    """

    def __init__(self, region: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.region, self.policy, self.budget_step = region, region.policy, region.budget_step
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
        if self.budget_step is not None and self.budget_step.measures:
            self.budget_step.began(self)

    def saving_slots(self) -> AbstractContextManager[None]:
        """Within, autograd saves slots instead of tensors.

        Not an attribute: it holds the record, and a cycle would keep the region's inputs until
        Python collects garbage.
        """
        return saved_tensors_hooks(self._pack, _unpack_slot)

    # -- records of calls --------------------------------------------------------------------------

    def _record_call(
        self, what: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> RecordedCall:
        inputs = make_inputs_key(args, kwargs, self.origins, tensors)
        event = self._record_event((what, find_call_site(), inputs))
        event.reads = _find_reads(tensors, self.origins)
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
        if self.budget_step is not None:
            return self.budget_step.keeps(self.region, event), self.budget_step.measures
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
            elif self.budget_step is not None:
                self.budget_step.note_candidate(self.region, event, kept.nbytes)
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
        """An `autograd.Function` (torch's compiled regions are such), a compiled step, or a region
        within this one."""
        if self._event is not None or is_internal(function):
            return run()
        return self._run_opaque(function, args, kwargs, run, None)

    def run_one_call(self, function: OneCall, args: Any, kwargs: Any) -> Any:
        """A function that `one_call` marked: one call if it is kept, else the calls inside."""
        run_once = partial(function.__wrapped__, *args, **kwargs)
        if self._event is not None or self.budget_step is not None:
            return run_once()
        tensors: list[torch.Tensor] = []
        inputs = make_inputs_key(args, kwargs, self.origins, tensors)
        key = (function, find_call_site(), inputs)
        if not self.policy.keeps(function.title, function, key, None, False):
            return run_once()
        return self._run_opaque(function, args, kwargs, run_once, True)

    def _run_opaque(
        self, function: Any, args: Any, kwargs: Any, run: Any, keep: bool | None
    ) -> Any:
        tensors: list[torch.Tensor] = []
        event = self._record_call(function, args, kwargs, tensors)
        measure = False
        if keep is None:
            title = getattr(function, "title", None) or function.__name__
            keep, measure = self._is_result_kept(event, title, function)
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
            self.keep(event, KeptCall(out, inside.own))
        elif inside is not None and self.budget_step is not None:
            self.budget_step.note_candidate(self.region, event, inside.nbytes(out))
            # Kernels of a compiled region are not seen.
            self.budget_step.count.note(inside.fresh(out))
        self._record_outputs(event, out, tensors)
        return out

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A redistribution, maybe within a call. The second run need not make it."""
        moves = [m for m in what.moves if m.sends]
        keeping = self._keeping
        with watching(None), keeping.pausing() if keeping is not None else nullcontext():
            out = run()
        if keeping is not None and out is not x:
            keeping.note_redistributed(out)
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


def _unpack_slot(slot: SavedSlot | SavedInOpaque) -> torch.Tensor:
    return slot.take()


# -- named results ---------------------------------------------------------------------------------

_Calls = tuple[Any, tuple[int, ...]]
"""(function, call site): the calls of one function from one place."""


class LearnedNames:
    """What a region has learned of names in its runs so far.

    Attributes:
        seen: calls that have been made.
        named: the names of results, by the calls that make them.
    """

    def __init__(self) -> None:
        self.seen: set[_Calls] = set()
        self.named: dict[_Calls, str] = {}

    def __reduce__(self) -> Any:
        return LearnedNames, ()  # places in the program are known within one process

    def start(self, forward: ForwardRecord) -> _RunNames:
        return _RunNames(self, forward)


@dataclass(frozen=True)
class _PlaceInStorage:
    """Stands for a tensor in a storage of this id, without holding it."""

    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _RunNames:
    """The names that are given during one run."""

    def __init__(self, names: LearnedNames, forward: ForwardRecord):
        self._names = names
        self._forward: Any = weakref.proxy(forward)
        self._makers: dict[int, RecordedCall] = {}
        self._offers: dict[RecordedCall, Any] = {}

    def known(self, event: RecordedCall) -> str | None:
        """The name of this call's result, if it is known."""
        return self._names.named.get(event.key[:2])

    def is_new(self, event: RecordedCall) -> bool:
        return event.key[:2] not in self._names.seen

    def note_maker(self, event: RecordedCall, out: Any) -> None:
        """Note that this call returned `out`."""
        for t in tensors_in(out):
            self._makers[storage_id(t)] = event

    def offer(self, event: RecordedCall, kept: KeptKernels, out: Any) -> None:
        """Note, without the memory of `out`, what to keep if this call's result is named."""
        own = {storage_id(t) for t in tensors_in(out)}

        def reference_weakly(t: torch.Tensor) -> Any:
            start = storage_id(t)
            if start not in own:
                return t
            return _PlaceInStorage(start, t.dtype, t.size(), t.stride(), t.storage_offset())  # type: ignore[arg-type]

        self._offers[event] = replace_instances(kept.made, torch.Tensor, reference_weakly)

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """The program gives `x` this name."""
        start = storage_id(x)
        event = self._makers.get(start)
        if event is None:
            return  # an input of the region, which lives anyhow
        self._names.named[event.key[:2]] = name
        forward = self._forward
        offer = self._offers.pop(event, None)
        if event.kept is not None or offer is None or not forward.is_name_kept(event, name):
            return
        made = _rebuild_offer(offer, x, start)
        if made is not None:
            forward.keep(event, KeptKernels(made, x))

    def close(self, events: list[RecordedCall]) -> None:
        """The run is over: all of its calls have been seen."""
        self._names.seen.update(e.key[:2] for e in events)
        self._makers, self._offers = {}, {}


def _rebuild_offer(offer: Any, x: torch.Tensor, start: int) -> Any:
    """The offer with tensors in the storage of `x` again; None if it needs other storages too."""
    if any(w.start != start for w in find_instances(offer, _PlaceInStorage)):
        return None
    with Local():
        storage = x.untyped_storage()

        def view_storage(w: _PlaceInStorage) -> torch.Tensor:
            view = torch.empty(0, dtype=w.dtype, device=x.device)
            return view.set_(storage, w.offset, w.size, w.stride)

        return replace_instances(offer, _PlaceInStorage, view_storage)
