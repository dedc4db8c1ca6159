"""The two runs of a remat region: forward, which is recorded, and recomputation in backward.

In the first run each call gets a record under a key. Autograd saves an empty slot (`SavedSlot`) in
place of each tensor, which is freed. A call also records the versions of tensors from outside the
region, because the second run reads these again. The program names a result only after the call
that made it, so results are described, without their memory, until all names are known.

Each call of the second run is looked up by its key among the calls of the first. If its result was
kept, it is not computed. The tensors that autograd saves in it fill the slots of the first run.
When all slots are filled, the run ends. A call that is not found is an error: the program took
another path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd.graph import saved_tensors_hooks

from partita.comm import recomputing
from partita.layout import Fix
from partita.parallel.batch import tensors_in
from partita.tensor.dtensor import DTensor
from partita.tensor.tensor_state import (
    HERE,
    frees_graph,
    saving_hooks,
    state_of,
    without_history,
)

from .counters import FlopMode, Recomputed, open_reports
from .saved_state import (
    AmbientState,
    KeepMode,
    KeptCall,
    KeptKernels,
    KernelsOfCall,
    OpaqueSaves,
    RandomStates,
    RegionInputs,
    ReplayMode,
    ResultsToName,
    SavedInOpaque,
    is_random,
    storage_id,
)
from .watched_calls import (
    FunctionKind,
    Key,
    OneCall,
    Policy,
    RematError,
    TensorProducers,
    describe_call,
    find_call_site,
    is_internal,
    key_of_shape,
    make_call_mode,
    make_inputs_key,
    make_local_alias,
    run_from_here,
    watching,
)

_NO_MODE = nullcontext()


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor from outside of a remat region that a call in the region has read.

    The second run (in backward) reads it again, so it must not change before.

    Attributes:
        number: the index among the call's tensors.
        source: the tensor that has the values between steps. `version` is its version when it was
            read.
        values: an alias of the tensor, which keeps its memory alive, as autograd does. None for a
            parameter: the call's key identifies it.
    """

    number: int
    source: weakref.ref[torch.Tensor]
    version: int
    values: torch.Tensor | None

    def has_values_of(self, t: torch.Tensor) -> bool:
        """True if the tensor `t`, which the second run reads instead, has the same values.

        All ranks return the same.
        """
        if self.values is None:  # a parameter
            return True
        same = self._has_local_values(self.values, make_local_alias(t))
        if not isinstance(t, DTensor):
            return same
        what = "whether a region that is run again reads equal values"
        return all(one for (one,) in t._spec.wire.gather_ints((same,), what))

    def _has_local_values(self, mine: torch.Tensor, its: torch.Tensor) -> bool:
        if type(mine) is not torch.Tensor or type(its) is not torch.Tensor:
            return True  # nothing to compare: a tensor without memory
        if mine.is_meta or its.is_meta or mine.layout is not torch.strided:
            return True
        if mine.shape != its.shape or mine.dtype != its.dtype:
            return True  # as a piece that ZeRO has gathered
        if not mine.is_inference() and mine._version != self.version:
            return False
        with torch.no_grad():
            return bool(((mine == its) | ((mine != mine) & (its != its))).all())


@dataclass(eq=False, slots=True)
class RecordedCall:
    """One call in the first run of a remat region, with what is needed to repeat or skip it.

    Attributes:
        key, ordinal: identify the call; the ordinal counts calls with the same key.
        number: its index among all calls of the run.
        slots: placeholders for the tensors that autograd saved in the call. The second run fills
            them.
        draws: if it draws random numbers, the states of the generators.
        kept: its kept result, or None.
        reads: the tensors from outside of the region that the call reads.
        borrowed: if the call is opaque (kept or repeated only as a whole): the saved tensors that
            are views of its inputs, as (input, size, stride, offset).
    """

    key: Key
    ordinal: int
    number: int
    slots: list[weakref.ref[SavedSlot]] = field(default_factory=list)
    draws: RandomStates | None = None
    kept: KeptKernels | KeptCall | None = None
    reads: tuple[Read, ...] = ()
    borrowed: list[tuple[Any, ...]] = field(default_factory=list)

    def __str__(self) -> str:
        return describe_call(self.key)


@dataclass(eq=False, slots=True, weakref_slot=True)
class SavedSlot:
    """A placeholder that autograd saves in place of a tensor; recomputation fills it in backward.

    Only autograd refers to it.

    Attributes:
        recompute: a function that runs the region again to fill the slot.
        event: the call in which autograd saved the tensor.
        shape, dtype: those of the tensor; the shape is local.
        inside: True if the tensor was made inside an opaque call, whose parts are not intercepted.
        value, version: the tensor and its version, while the slot is filled.
    """

    recompute: Callable[[SavedSlot], None]
    event: RecordedCall
    shape: torch.Size
    dtype: torch.dtype
    inside: bool
    value: torch.Tensor | None = None
    version: int = 0

    def fill(self, t: torch.Tensor) -> None:
        self.value = make_local_alias(t)
        self.version = self.value._version

    def take(self) -> torch.Tensor:
        """Returns the saved tensor and empties the slot. Reruns the region if the slot is empty."""
        if self.value is None:
            self.recompute(self)
        value, self.value = self.value, None
        assert value is not None
        if value._version != self.version:  # autograd does not check this if there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(self.shape)}, saved by {self.event}"
            )
        return value


def _find_source(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the tensor that has the values of `t` between steps, and its version when read.

    For a gathered parameter, which is a new tensor each time, it is the shard.
    """
    rest = state_of(t).gathered_from
    if rest is not None:
        return rest
    with local_ops():
        return t, 0 if t.is_inference() else t._version


class _RegionRun:
    """The common part of the two runs of a region. Each is a `Watcher` while it runs.

    Attributes:
        policy: the policy of the region.
        producers: the call that made each tensor.
    """

    def __init__(self, policy: Policy, producers: TensorProducers):
        self.policy, self.producers = policy, producers
        self._counts: dict[Any, int] = {}
        self._event: RecordedCall | None = None  # the call that runs now
        self._kernels: KernelsOfCall | None = None  # intercepts kernels of the current call

    def _count_key(self, key: Any) -> int:
        """Returns the number of this occurrence of a key in the run."""
        n = self._counts[key] = self._counts.get(key, -1) + 1
        return n

    def _make_key(self, what: Any, args: Any, kwargs: Any) -> tuple[Key, list[torch.Tensor]]:
        """Returns the key of a call, and its tensors."""
        tensors: list[torch.Tensor] = []
        inputs = make_inputs_key(args, kwargs, self.producers, tensors)
        return (what, find_call_site(), inputs), tensors

    def run_call(self, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
        """Runs and records a call of a torch function that `CallMode` intercepted.

        Args:
            kind: the function, and how regions treat its calls.
            args, kwargs: the arguments of the call.
        """
        if self._event is not None:
            return self._run_within(kind, args, kwargs)
        key, tensors = self._make_key(kind.op, args, kwargs)
        event = self._enter_call(key, tensors)
        out = self._run_kernels(event, kind, args, kwargs, tensors)
        return self._note_outputs(event, out, tensors)

    def run_function(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Runs and records a call that is not a torch function.

        It is an `autograd.Function` (such as a region of torch.compile), a compiled step, or a
        region within this one.

        Args:
            function, args, kwargs: what is called, and the arguments of the call.
            run: makes the call and returns its result.
        """
        if self._event is not None or is_internal(function):
            return run()
        with watching(None):
            return self._run_as_one(*self._make_key(function, args, kwargs), run)

    def run_one_call(self, function: OneCall, args: Any, kwargs: Any) -> Any:
        """Runs a function marked by `one_call`.

        It counts as a single call if its result is kept. Otherwise the calls inside it are
        recorded.

        Args:
            function, args, kwargs: the function, and the arguments of the call.
        """
        run = partial(function.__wrapped__, *args, **kwargs)
        if self._event is not None:
            return run()
        with watching(None):
            key, tensors = self._make_key(function, args, kwargs)
            if self._is_one_call(key):
                return self._run_as_one(key, tensors, run)
        return run()

    def _run_as_one(self, key: Key, tensors: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Run a call as a whole. Only the calls that `run` makes are watched."""

        def run_watched() -> Any:
            with watching(self):
                return run()

        event = self._enter_call(key, tensors)
        return self._note_outputs(event, self._run_opaque(event, tensors, run_watched), tensors)

    def _note_outputs(self, event: RecordedCall, out: Any, tensors: list[torch.Tensor]) -> Any:
        self.producers.note_outputs(out, event.number, tensors)
        return out

    def _count_redistribution(self, op: str, what: Any, x: torch.Tensor) -> Any:
        """Returns the key of a redistribution, with the number of its occurrence.

        The key consists of its call site, or the call that contains it, and of what it does.
        """
        event = self._event
        where: Any = find_call_site() if event is None else (event.key, event.ordinal)
        key = ("carried", op, str(what), where, x.shape, x.dtype)
        return (*key, self._count_key(key))

    def _run_unwatched(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a redistribution without watching its calls, because it has a record of its own."""
        kernels = self._kernels
        with watching(None), nullcontext() if kernels is None else kernels.pausing():
            return run()

    def _run_within(self, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
        """Run a function of torch that is called inside another recorded call."""
        return kind.func(*args, **kwargs)

    def _enter_call(self, key: Key, tensors: list[torch.Tensor]) -> RecordedCall:
        """Returns the entry of a call that is going to run."""
        raise NotImplementedError

    def _run_kernels(
        self, event: RecordedCall, kind: FunctionKind, args: Any, kwargs: Any, tensors: Any
    ) -> Any:
        raise NotImplementedError

    def _run_opaque(self, event: RecordedCall, tensors: list[torch.Tensor], run: Any) -> Any:
        raise NotImplementedError

    def _is_one_call(self, key: Key) -> bool:
        """True if this call, of a function marked by `one_call`, is kept as a whole."""
        raise NotImplementedError


# -- the first run ---------------------------------------------------------------------------------


class ForwardRecord(_RegionRun):
    """The first run of a remat region (its forward), which records the calls in it.

    Attributes:
        region: the `region.RematRegion`.
        budget_step: the step of the region's budget, or None.
        events: maps (key, ordinal) of a call to the call, in order.
        redistributions: maps the key of each redistribution of the program to a `RecordedCall`,
            which has the tensor that was read.
        redistributed_results: maps the key of a redistribution to its kept result.
        saved: the number of slots.
        is_counted: True if the budget waits until this forward has been recomputed, to choose what
            to keep.
    """

    def __init__(self, region: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__(region.policy, TensorProducers())
        self.region, self.budget_step = region, region.budget_step
        self.reports = open_reports()
        self.events: dict[tuple[Key, int], RecordedCall] = {}
        self.redistributed_results: dict[Any, KeptKernels] = {}
        self.redistributions: dict[Any, RecordedCall] = {}
        self.saved = 0
        self._opened: list[torch.Tensor] = []  # the inputs of an opaque call
        self._around = HERE.watcher
        self._inside: OpaqueSaves | None = None
        self._kept: dict[int, KeptKernels | KeptCall] = {}
        self._outer = saving_hooks()
        self.ambient = AmbientState(t.device for t in tensors_in((args, kwargs)))
        self.inputs = RegionInputs(args, kwargs, self.producers)
        self._names = ResultsToName(region.names) if self.policy.wants_names else None
        self.is_counted = False

    @property
    def measures(self) -> bool:
        """True if this training step measures memory for a budget, so that nothing is kept."""
        return self.budget_step is not None and self.budget_step.measures

    @property
    def order(self) -> list[RecordedCall]:
        """The recorded calls, in the order in which they ran."""
        return [*self.events.values()]

    def saving_slots(self) -> AbstractContextManager[None]:
        """Returns a context manager. Inside, autograd saves placeholders (slots), not tensors.

        It is made anew for each use. As an attribute it would be a reference cycle, which keeps the
        region's inputs alive until Python collects garbage.
        """
        return saved_tensors_hooks(self._pack, _unpack_slot)

    # -- calls -------------------------------------------------------------------------------------

    def _record_event(self, key: Key) -> RecordedCall:
        n = self._count_key(key)
        event = self.events[key, n] = RecordedCall(key, n, len(self.events))
        return event

    def _enter_call(self, key: Key, tensors: list[torch.Tensor]) -> RecordedCall:
        event = self._record_event(key)
        self._record_reads(event, tensors)
        return event

    def _record_reads(self, event: RecordedCall, tensors: list[torch.Tensor]) -> None:
        for i, t in enumerate(tensors):
            if self.producers.find(t) is None:
                held, version = _find_source(t)
                values = None if isinstance(held, nn.Parameter) else make_local_alias(held)
                event.reads += (Read(i, weakref.ref(held), version, values),)

    def _run_within(self, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
        self._before_write(kind, args, kwargs)  # as where a compiled region writes its buffers
        return kind.func(*args, **kwargs)

    def _run_kernels(
        self, event: RecordedCall, kind: FunctionKind, args: Any, kwargs: Any, tensors: Any
    ) -> Any:
        if is_random(kind.op, args, kwargs):
            event.draws = RandomStates(tensors, kwargs)
        keep = watch = False
        if not self._before_write(kind, args, kwargs):
            keep, watch = self._is_result_kept(event, kind.op, kind.func)
        self._event = event
        self._kernels = kernels = KeepMode() if keep or watch else None
        try:
            with kernels or _NO_MODE:
                out = kind.func(*args, **kwargs)
        finally:
            self._event = self._kernels = None
        kept = None if kernels is None else kernels.kernels(out)
        if kept is not None and keep:
            self._keep(event, kept)
        elif kept is not None and self.budget_step is not None:
            self.budget_step.note_candidate(self.region, event, kept.nbytes)
        elif kept is not None and self._names is not None:
            self._names.offer(event, kept, out)
        return out

    def _run_opaque(self, event: RecordedCall, tensors: list[torch.Tensor], run: Any) -> Any:
        function = event.key[0]
        title = getattr(function, "title", None) or function.__name__
        keep, watch = True, False  # `_is_one_call` has called the policy already
        if not isinstance(function, OneCall):
            keep, watch = self._is_result_kept(event, title, function)
        draws = RandomStates(tensors)
        inside = self._inside = OpaqueSaves(tensors, keep) if keep or watch else None
        self._event, self._opened = event, tensors
        try:
            out = run()
        finally:
            self._event, self._opened, self._inside = None, [], None
        if draws.over():
            event.draws = draws
        if inside is not None and keep:
            self._keep(event, KeptCall(out, inside.own))
        elif inside is not None and self.budget_step is not None:
            self.budget_step.note_candidate(self.region, event, inside.nbytes(out))
            # Kernels of a compiled region are not seen.
            self.budget_step.count.note(inside.fresh(out))
        return out

    def _is_one_call(self, key: Key) -> bool:
        function = key[0]
        return self.budget_step is None and self.policy.keeps(
            function.title, function, key, None, False
        )

    def _note_outputs(self, event: RecordedCall, out: Any, tensors: list[torch.Tensor]) -> Any:
        if self._names is not None:
            self._names.note_maker(event, out)
        return super()._note_outputs(event, out, tensors)

    def _is_result_kept(self, event: RecordedCall, op: str, function: Any) -> tuple[bool, bool]:
        """Returns (is the result kept, may it be kept later, after it was named or measured)."""
        if self.budget_step is not None:
            return self.budget_step.keeps(self.region, event), self.measures
        name = None if self._names is None else self._names.name_of(event)
        if self.policy.keeps(op, function, event.key, name, False):
            return True, False
        return False, self._names is not None and self._names.is_new(event)

    def _keep(self, event: RecordedCall, kept: KeptKernels | KeptCall) -> None:
        event.kept = kept
        if event.draws is not None:
            event.draws.over()
        for start in kept.starts():
            self._kept[start] = kept

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """Records the name that `checkpoint_name` gives to `x`. Keeps `x` if the policy says so."""
        if self._names is None or self._event is not None:
            return
        event = self._names.note_name(x, name)
        if event is None or event.kept is not None:
            return  # an input of the region, which stays alive anyway
        what = event.key[0]
        if self.policy.keeps(what, what, event.key, name, False):
            kept = self._names.take_offer(event, x)
            if kept is not None:
                self._keep(event, kept)

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Runs a redistribution, and keeps its result if the policy says so.

        The program or a call in the region requested it.

        Args:
            op, reason: the op that needs it, and why.
            what: the redistribution: a plan of moves.
            x: the local tensor that is redistributed.
            run: does it and returns the result.
        """
        out = self._run_unwatched(run)
        if isinstance(self._kernels, KeepMode) and out is not x:
            self._kernels.note_redistributed(out)
        key = self._count_redistribution(op, what, x)
        if self._event is None:
            event = RecordedCall(key_of_shape(op, x.shape, x.dtype), 0, 0)
            self._record_reads(event, [x])
            self.redistributions[key] = event
        if out is not x:
            self.producers.note(out, key)
        where = find_call_site() if self._event is None else self._event.key[1]
        if out is not x and self.policy.keeps_redistribution(what, x, where):
            kept = KeptKernels.of_redistributed(out)
            self.redistributed_results[key] = self._kept[storage_id(out)] = kept
        return out

    # -- writes in place ---------------------------------------------------------------------------

    def _before_write(self, kind: FunctionKind, args: Any, kwargs: Any) -> bool:
        """Record the tensors from outside that a call writes. Returns True if it writes any.

        Inside an opaque call, only those among its inputs are recorded.
        """
        if not kind.writes and "out" not in kwargs:
            return False
        written = [kwargs.get("out")]
        written += [args[i] if i < len(args) else kwargs.get(name) for i, name in kind.writes]
        for one in tensors_in(written):
            if self._event is None or any(one is t for t in self._opened):
                self.announce_write(one)
        return True

    def announce_write(self, one: torch.Tensor) -> None:
        """Copies `one` before a call writes it, if recomputation needs its old value."""
        if self.producers.find(one) is None:
            self._note_write(one)
        else:
            with local_ops():
                base = one._base
            reads = chain.from_iterable(event.reads for event in self.events.values())
            if base is not None and any(read.source() is base for read in reads):
                self._note_write(base)  # a call of this run has read it
        kept = self._kept.get(storage_id(one))
        if kept is not None:
            kept.copy()

    def _note_write(self, t: torch.Tensor) -> None:
        """Record a write to a tensor from outside of this region, also for enclosing regions."""
        self.ambient.writes.note(t)
        if isinstance(self._around, ForwardRecord) and self._around.producers.find(t) is None:
            self._around._note_write(t)

    # -- what autograd saves -----------------------------------------------------------------------

    def _recompute_slot(self, slot: SavedSlot) -> None:
        """Run the region again to fill a slot."""
        recomputation = Recomputation(self)
        recomputation.run()
        if slot.value is None:
            self.empty()
            raise recomputation.make_missing_call_error(slot.event)

    def _pack(self, t: torch.Tensor) -> SavedSlot | SavedInOpaque:
        event, inside = self._event, self._inside
        with local_ops():
            shape, dtype = t.shape, t.dtype
            if event is None:  # saved by a call that no mode intercepted
                event = self._record_event(key_of_shape("a saved tensor", shape, dtype))
            borrowed = None if inside is None else inside.place_of(t)
            if borrowed is not None:
                event.borrowed.append(borrowed)
            elif inside is not None and inside.record_saved(t):
                return SavedInOpaque(t, self._outer)
        is_made_inside = inside is not None and borrowed is None
        slot = SavedSlot(self._recompute_slot, event, shape, dtype, is_made_inside)
        event.slots.append(weakref.ref(slot))
        self.saved += 1
        return slot

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the first run, and frees the data that only this run needs."""
        self._around = None
        self.producers.forget_freed()
        if self._names is not None:
            self._names.close(self.order)
        self._kept = {}
        if self.saved and self.measures:
            self.budget_step.note_forward(self)

    @property
    def kept_results(self) -> list[KeptKernels | KeptCall]:
        """The results of calls and redistributions that the region keeps."""
        kept = [e.kept for e in self.order if e.kept is not None]
        return [*kept, *self.redistributed_results.values()]

    def empty(self) -> None:
        """Empties all slots after a failed recomputation, so that backward uses no part of it."""
        for ref in chain.from_iterable(event.slots for event in self.order):
            if (slot := ref()) is not None:
                slot.value = None

    def free_kept_kernels(self) -> None:
        """Frees the kept results of kernels after recomputation has used them.

        Kept results of opaque calls (kept or run as a whole) stay, because autograd still has
        tensors saved inside them. If there is a third run, which is rare, it recomputes the freed
        results.
        """
        for event in self.order:
            if isinstance(event.kept, KeptKernels):
                event.kept = None
        self.redistributed_results.clear()

    def check_unchanged(self) -> None:
        """Raises RematError if a kept result was written in place after the forward."""
        for event in self.order:
            if event.kept is not None and event.kept.changed():
                raise RematError(
                    f"the kept result of {event} was written in place after {self.region.title}",
                    reason="kept results are used again in backward",
                )


def _unpack_slot(slot: SavedSlot | SavedInOpaque) -> torch.Tensor:
    return slot.take()


# -- the second run --------------------------------------------------------------------------------

_SAME = "a region that runs again may skip calls, but must make no others"
_FIXES = (
    Fix("pass what the region reads as an argument", "if it has changed since its forward"),
    Fix("policy=[...] with this call, by pt.one_call", "if its result differs in each run"),
)


class _AllSlotsFilled(BaseException):
    """Raised to end a run when all slots are filled. `except Exception` does not catch it."""


def is_recomputing() -> bool:
    """True if this thread is running a remat region's forward again, in backward."""
    return isinstance(HERE.watcher, Recomputation)


class Recomputation(_RegionRun):
    """The second run of a remat region, in backward: it restores the tensors that autograd needs.

    It skips calls whose results were kept.
    """

    def __init__(self, forward: ForwardRecord):
        super().__init__(forward.policy, TensorProducers(forward.producers))
        self.forward, self._title = forward, forward.region.title
        self._done: set[RecordedCall] = set()
        self._slot = 0
        self._to_meet = forward.saved
        self._met = 0
        self._flops: FlopMode | None = None
        self._flops_of: dict[RecordedCall, int] = {}

    def run(self) -> None:
        """Runs the region again until all tensors that backward needs are restored."""
        forward = self.forward
        forward.check_unchanged()
        inputs = forward.inputs.rebuild(self.producers)
        meters = [r for r in {*forward.reports, *open_reports()} if r.is_open]
        if meters or forward.measures:
            self._flops = FlopMode()
        try:
            self._check_counts(self._run_again(*inputs))
            kept = forward.kept_results
            for report in meters:
                report.regions.append(
                    Recomputed(
                        self._title,
                        len(forward.events),
                        len(self._done),
                        len(kept),
                        sum(k.nbytes for k in kept),
                        self._flops.total,  # type: ignore[union-attr]
                    )
                )
            if forward.measures:
                forward.budget_step.note_recompute(forward, self._flops_of)
        except BaseException:
            forward.empty()
            raise
        if frees_graph():
            forward.free_kept_kernels()

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Run the region; True if all slots were filled before it came to its end."""
        forward = self.forward
        try:
            with ExitStack() as modes:
                context = modes.enter_context(forward.ambient.restored())
                modes.enter_context(HERE.breaking_off())
                modes.enter_context(recomputing())
                modes.enter_context(self._flops or nullcontext())
                if forward.budget_step is not None:
                    modes.enter_context(forward.budget_step.counting())
                modes.enter_context(watching(self))
                modes.enter_context(saved_tensors_hooks(self._pack, _as_it_is))
                modes.enter_context(make_call_mode())
                context.run(run_from_here, forward.region.__wrapped__, args, kwargs)
        except _AllSlotsFilled:
            return True
        return False

    # -- calls -------------------------------------------------------------------------------------

    def _enter_call(self, key: Key, tensors: list[torch.Tensor]) -> RecordedCall:
        event = self._match_key(key)
        self._check_unwritten(event, tensors)
        return event

    def _match_key(self, key: Key) -> RecordedCall:
        n = self._count_key(key)
        event = self.forward.events.get((key, n))
        if event is None:
            raise self._make_unexpected_call_error(key, n)
        self._done.add(event)
        return event

    @contextmanager
    def _within_call(self, event: RecordedCall) -> Iterator[None]:
        """Inside the `with` block, the call's saved tensors fill slots, and it draws the same
        numbers.
        """
        before = (self._event, self._slot)
        self._event, self._slot = event, 0
        flops = 0 if self._flops is None else self._flops.total
        if event.draws is not None:
            self.forward.ambient.draw_as(event.draws.before)
        try:
            yield
            if self._slot != len(event.slots):
                raise self._make_saved_count_error(event, self._slot)
        finally:
            self._event, self._slot = before
            if self._flops is not None:
                self._flops_of[event] = self._flops.total - flops
        if event.draws is not None:
            self.forward.ambient.draw_as(event.draws.after)

    def _run_kernels(
        self, event: RecordedCall, kind: FunctionKind, args: Any, kwargs: Any, tensors: Any
    ) -> Any:
        with self._within_call(event):
            self._kernels = ReplayMode(event.kept) if isinstance(event.kept, KeptKernels) else None
            try:
                with self._kernels or _NO_MODE:
                    return kind.func(*args, **kwargs)
            finally:
                self._kernels = None

    def _run_opaque(self, event: RecordedCall, tensors: list[torch.Tensor], run: Any) -> Any:
        with self._within_call(event):
            if not isinstance(event.kept, KeptCall):
                return run()
            for i, size, stride, offset in event.borrowed:
                with local_ops():
                    self._pack(tensors[i].detach().as_strided(size, stride, offset))
            return event.kept.restore_output(str(event), tensors)

    def _is_one_call(self, key: Key) -> bool:
        return (key, self._counts.get(key, -1) + 1) in self.forward.events

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the kept result of a redistribution, if there is one. Otherwise it is run again.

        Args:
            op, reason: the op that needs it, and why.
            what: the redistribution: a plan of moves.
            x: the local tensor that is redistributed.
            run: runs the redistribution and returns the result.
        """
        replaying = isinstance(self._kernels, ReplayMode)
        given = self._kernels.give_redistributed() if replaying else None  # type: ignore[union-attr]
        key = self._count_redistribution(op, what, x)
        if (event := self.forward.redistributions.get(key)) is not None:
            with watching(None):
                self._check_unwritten(event, [x])
        kept = self.forward.redistributed_results.get(key)
        if given is None and kept is not None:
            given = kept.give()
        out = self._run_unwatched(run) if given is None else given
        if out is not x:
            self.producers.note(out, key)
        return out

    def announce_write(self, t: torch.Tensor) -> None:
        """Ignores the write of `t`, because the first run has saved the old value."""

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """Ignores the name of `x`, because the first run has recorded it."""

    # -- what autograd saves -----------------------------------------------------------------------

    def _pack(self, t: torch.Tensor) -> torch.Tensor:
        with local_ops():
            shape, dtype = t.shape, t.dtype
        event, number = self._event, self._slot
        if event is None:
            event, number = self._match_key(key_of_shape("a saved tensor", shape, dtype)), 0
        else:
            self._slot += 1
        if number >= len(event.slots):
            raise self._make_saved_count_error(event, number + 1)
        slot = event.slots[number]()
        if slot is not None and (slot.shape != shape or slot.dtype != dtype):
            raise self._make_error(
                "saves another tensor than its forward did",
                f"{slot.dtype} {tuple(slot.shape)} in {event}",
                f"{dtype} {tuple(shape)} in the same call",
                fixes=(),
            )
        if slot is not None and slot.value is None:
            slot.fill(t)
            if slot.inside and self.forward.budget_step is not None:
                self.forward.budget_step.count.note(slot.value)
        self._met += 1
        if self._met == self._to_meet:
            raise _AllSlotsFilled
        return without_history(t)

    # -- errors ------------------------------------------------------------------------------------

    def _make_error(
        self,
        does: str,
        forward: object,
        recompute: str,
        *more: str,
        reason: str = _SAME,
        fixes: tuple[Fix, ...] = _FIXES,
    ) -> RematError:
        return RematError(
            f"the recompute of {self._title} {does}",
            operands=(f"forward    {forward}", f"recompute  {recompute}", *more),
            reason=reason,
            fixes=fixes,
        )

    def _check_unwritten(self, event: RecordedCall, tensors: list[torch.Tensor]) -> None:
        """Raise unless the call reads the same values from outside as in the first run.

        A parameter that an optimizer has updated since has other values. Autograd checks the
        inputs, and buffers that the region itself writes are restored for the second run.
        """
        forward = self.forward
        for read in event.reads:
            t, before = tensors[read.number], read.version
            held, now = _find_source(t)
            if forward.ambient.writes.has(held):
                continue
            is_other = read.source() is not held
            if read.has_values_of(held) if is_other else now == before:
                continue
            name = _name_of(t, forward.region.module) or f"tensor {read.number}"
            if is_other:
                raise self._make_error(
                    "reads another tensor than its forward read",
                    f"{name} of {event}",
                    "reads a tensor with other values in its place",
                    reason="gradients would be of values that forward did not have",
                )
            raise RematError(
                f"the recompute of {self._title} reads a tensor that was written in place "
                "since its forward read it",
                operands=(
                    f"{name} of {event}",
                    f"forward    read version {before}",
                    f"recompute  reads version {now}",
                ),
                reason="gradients would be computed from values that forward did not have; "
                "without remat autograd raises, too",
                fixes=(
                    Fix(
                        "call backward() first, and write it afterwards",
                        "as an optimizer's step does",
                    ),
                ),
            )

    def _last_number(self) -> int:
        return max((e.number for e in self._done), default=-1)

    def _make_unexpected_call_error(self, key: Key, n: int) -> RematError:
        call = describe_call(key)
        if n:
            return self._make_error(
                "makes a call more often than its forward did",
                f"{call}, {_times(n)}",
                f"{call}, once more",
            )
        # The expected call: one from the same call site, or the next in order.
        left = [e for e in self.forward.order if e not in self._done]
        last = self._last_number()
        same_site = (e for e in left if e.key[1] == key[1])
        later = (e for e in left if e.number > last)
        expected = next(chain(same_site, later, reversed(left)), None)
        return self._make_error(
            "makes a call that its forward did not make",
            expected or "was over",
            call,
            *_describe_difference(expected, key),
        )

    def _make_saved_count_error(self, event: RecordedCall, count: int) -> RematError:
        more = " or more" if count > len(event.slots) else ""
        return self._make_error(
            "saves more or fewer tensors than its forward did",
            f"{len(event.slots)} tensors saved in {event}",
            f"{count}{more} in the same call",
        )

    def make_missing_call_error(self, event: RecordedCall) -> RematError:
        """Returns the error for a call that backward needs, but the second run did not make."""
        later = [e for e in self.forward.order if e.number > event.number and e in self._done]
        return self._make_error(
            "leaves out a call whose saved tensors backward needs",
            event,
            f"{later[0] if later else 'ended'}, without it",
            reason="a result that the program stores is not computed again, and what backward "
            "needs of it was freed",
            fixes=(
                Fix("compute it before the region, and pass it in"),
                Fix("policy=[...] with this call", "its result is kept"),
            ),
        )

    def _check_counts(self, enough: bool) -> None:
        """Raise if a call occurred less often than in the first run: it is unknown which one is
        missing.

        Args:
            enough: True if all slots were filled. Then calls after the last one do not count.
        """
        last = self._last_number()
        for (key, n), event in self.forward.events.items():
            left_out = event not in self._done and key in self._counts
            if not left_out or (enough and event.number > last):
                continue
            if event.slots or event.kept is not None or event.draws is not None:
                call = describe_call(key)
                raise self._make_error(
                    "makes a call less often than its forward did",
                    f"{call}, {n + 1} times or more",
                    f"{call}, {_times(self._counts[key] + 1)}",
                    reason="it is unknown which of them were skipped",
                )


def _times(n: int) -> str:
    return f"{n} time{'s' if n > 1 else ''}"


def _name_of(t: torch.Tensor, module: nn.Module | None) -> str | None:
    if module is None:
        return None
    named = chain(module.named_parameters(), module.named_buffers())
    return next((name for name, one in named if one is t), None)


def _describe_difference(event: RecordedCall | None, key: Key) -> tuple[str, ...]:
    """Returns a line that says how two calls differ whose descriptions are equal."""
    if event is None or describe_call(event.key) != describe_call(key):
        return ()
    if event.key[0] != key[0]:
        return ("           another function of the same name",)
    return ("           its inputs come from other calls, or are other parameters",)


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t
