"""Recomputation: the second run of a region, which brings back what its first run did not keep.

Each call of the second run is looked up by its key among the calls of the first. Where its result
was kept it is not computed; what autograd saves in it fills the slots of the first run; and once
all slots have been met the run ends. A call that is not found shows that the program took another
way, which is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd.graph import saved_tensors_hooks

from partita.comm import recomputing
from partita.layout import Fix
from partita.tensor.tensor_state import HERE, frees_graph, without_history

from .counters import FlopMode, Recomputed, open_reports
from .policy import OneCall
from .record import ForwardRecord, RecordedCall, check_unwritten, redistribution_key
from .saved_state import KeptCall, KeptKernels, ReplayMode
from .watched_calls import (
    FunctionKind,
    Key,
    RematError,
    TensorOrigins,
    describe_call,
    find_call_site,
    is_internal,
    make_call_mode,
    make_inputs_key,
    run_from_here,
    watching,
)

_SAME = "a region that is run again may leave calls out, but makes no others"
_FIXES = (
    Fix("pass what the region reads as an argument", "if it has changed since its forward"),
    Fix("policy=[...] with this call, by pt.one_call", "if it is not the same twice"),
)


class _AllSlotsFilled(BaseException):
    """Ends a run whose slots are all met. No `except Exception` of the program may catch it."""


def is_recomputing() -> bool:
    """Is this thread running a region's forward again, in backward?"""
    return isinstance(HERE.watcher, Recomputation)


class Recomputation:
    """The second run of a region: a `Watcher` while it lasts."""

    def __init__(self, forward: ForwardRecord):
        self.forward, self.policy = forward, forward.policy
        self.origins = TensorOrigins(forward.origins)
        self._counts: dict[Any, int] = {}
        self._done: set[RecordedCall] = set()
        self._event: RecordedCall | None = None
        self._slot = 0
        self._replaying: ReplayMode | None = None
        self._to_meet = forward.saved
        self._met = 0
        self._flops: FlopMode | None = None
        self.flops_of: dict[RecordedCall, int] = {}

    def run(self) -> None:
        """Fill the slots of the first run."""
        forward = self.forward
        forward.check_unchanged()
        args, kwargs = forward.inputs.rebuild(self.origins)
        enough = False
        try:
            with ExitStack() as modes:
                context = modes.enter_context(forward.ambient.restored())
                modes.enter_context(HERE.breaking_off())
                modes.enter_context(recomputing())
                meters = [r for r in {*forward.reports, *open_reports()} if r.is_open]
                measuring = forward.budget_step is not None and forward.budget_step.measures
                if meters or measuring:
                    self._flops = modes.enter_context(FlopMode())
                if measuring:
                    modes.enter_context(forward.budget_step.counting())
                modes.enter_context(watching(self))
                modes.enter_context(saved_tensors_hooks(self._pack, _as_it_is))
                mode = make_call_mode()
                if mode is not None:
                    modes.enter_context(mode)
                context.run(run_from_here, forward.region.__wrapped__, args, kwargs)
        except _AllSlotsFilled:
            enough = True
        except BaseException:
            forward.empty()
            raise
        try:
            self._check_counts(enough)
            for report in meters:
                kept = forward.kept_results
                report.regions.append(
                    Recomputed(
                        forward.region.title,
                        len(forward.order),
                        len(self._done),
                        len(kept),
                        sum(k.nbytes for k in kept),
                        self._flops.total,  # type: ignore[union-attr]
                    )
                )
            if measuring:
                forward.budget_step.recomputed(forward, self.flops_of)
        except BaseException:
            forward.empty()
            raise
        if frees_graph():
            forward.free_kept_kernels()

    # -- lookup ----------------------------------------------------------------------------------

    def _match_call(
        self, what: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> RecordedCall:
        inputs = make_inputs_key(args, kwargs, self.origins, tensors)
        event = self._match_key((what, find_call_site(), inputs))
        self._check_unwritten(event, tensors)
        return event

    def _check_unwritten(self, event: RecordedCall, tensors: list[torch.Tensor]) -> None:
        forward = self.forward
        check_unwritten(event, tensors, forward.region, forward.ambient)

    def _match_key(self, key: Key) -> RecordedCall:
        n = self._counts[key] = self._counts.get(key, -1) + 1
        event = self.forward.events.get((key, n))
        if event is None:
            raise self._make_unexpected_call_error(key, n)
        self._done.add(event)
        return event

    @contextmanager
    def _enter_event(self, event: RecordedCall) -> Iterator[None]:
        """Within a call: its saved tensors fill its slots, and it draws the same random numbers."""
        before = (self._event, self._slot)
        self._event, self._slot = event, 0
        flops = 0 if self._flops is None else self._flops.total
        draws = event.draws
        if draws is not None:
            self.forward.ambient.draw_as(draws.before)
        try:
            yield
            if self._slot != len(event.slots):
                raise self._make_saved_count_error(event, self._slot)
        finally:
            self._event, self._slot = before
            if self._flops is not None:
                self.flops_of[event] = self._flops.total - flops
        if draws is not None:
            self.forward.ambient.draw_as(draws.after)

    # -- calls -------------------------------------------------------------------------------------

    def run_call(self, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
        """A function of torch, announced by the mode."""
        if self._event is not None:
            return kind.func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        event = self._match_call(kind.op, args, kwargs, tensors)
        with self._enter_event(event):
            if isinstance(event.kept, KeptKernels):
                self._replaying = replaying = ReplayMode(event.kept)
                try:
                    with replaying:
                        out = kind.func(*args, **kwargs)
                finally:
                    self._replaying = None
            else:
                out = kind.func(*args, **kwargs)
        self.origins.learn_outputs(out, event.number, tensors)
        return out

    def run_function(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """An `autograd.Function` (torch's compiled regions are such), a compiled step, or a region
        within this one: run anew, unless its result was kept."""
        if self._event is not None or is_internal(function):
            return run()
        tensors: list[torch.Tensor] = []
        return self._run_opaque(self._match_call(function, args, kwargs, tensors), tensors, run)

    def run_one_call(self, function: OneCall, args: Any, kwargs: Any) -> Any:
        """A function that `one_call` marked: one call if the first run kept it."""
        run_once = partial(function.__wrapped__, *args, **kwargs)
        if self._event is not None:
            return run_once()
        tensors: list[torch.Tensor] = []
        inputs = make_inputs_key(args, kwargs, self.origins, tensors)
        key = (function, find_call_site(), inputs)
        if (key, self._counts.get(key, -1) + 1) not in self.forward.events:
            return run_once()
        event = self._match_key(key)
        self._check_unwritten(event, tensors)
        return self._run_opaque(event, tensors, run_once)

    def _run_opaque(
        self, event: RecordedCall, tensors: list[torch.Tensor], run: Callable[[], Any]
    ) -> Any:
        with self._enter_event(event):
            if isinstance(event.kept, KeptCall):
                for i, size, stride, offset in event.borrowed:
                    with Local():
                        self._pack(tensors[i].detach().as_strided(size, stride, offset))
                out = event.kept.restore_output(str(event), tensors)
            else:
                out = run()
        self.origins.learn_outputs(out, event.number, tensors)
        return out

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A redistribution: its kept result; without one it is carried again."""
        replaying = self._replaying
        given = None if replaying is None else replaying.give_redistributed()
        key = redistribution_key(self._counts, self._event, op, what, x)
        kept = self.forward.redistributed_results.get(key)
        if given is None and kept is not None:
            given = kept.give()
        if given is not None:
            return given
        with watching(None), replaying.pausing() if replaying is not None else nullcontext():
            return run()

    def announce_write(self, t: torch.Tensor) -> None:
        """Nothing to note: the first run did."""

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """Nothing to note: the first run did."""

    # -- what autograd saves -----------------------------------------------------------------------

    def _pack(self, t: torch.Tensor) -> torch.Tensor:
        with Local():
            shape, dtype = t.shape, t.dtype
        event = self._event
        number = self._slot
        if event is None:
            event = self._match_key(
                ("a saved tensor", find_call_site(), (((None, shape, dtype),), ()))
            )
            number = 0
        else:
            self._slot += 1
        if number >= len(event.slots):
            raise self._make_saved_count_error(event, number + 1)
        slot = event.slots[number]()
        if slot is not None:
            if slot.shape != shape or slot.dtype != dtype:
                raise self._make_error(
                    f"{slot.dtype} {tuple(slot.shape)} in {event}",
                    f"{dtype} {tuple(shape)} in the same call",
                    fixes=(),
                    fact=f"the recompute of {self._title} "
                    "saves another tensor than its forward did",
                )
            if slot.value is None:
                slot.fill(t)
                if slot.inside and self.forward.budget_step is not None:
                    self.forward.budget_step.count.note(slot.value)
        self._met += 1
        if self._met == self._to_meet:
            raise _AllSlotsFilled
        return without_history(t)

    # -- errors -------------------------------------------------------------------------

    def _find_expected_event(self, key: Key | None = None) -> RecordedCall | None:
        """The call of the first run that was expected here: from the same site, or next in
        order."""
        left = [e for e in self.forward.order if e not in self._done]
        if key is not None:
            for e in left:
                if e.key[1] == key[1]:
                    return e
        last = max((e.number for e in self._done), default=-1)
        after = [e for e in left if e.number > last]
        return after[0] if after else (left[-1] if left else None)

    @property
    def _title(self) -> str:
        return self.forward.region.title

    def _make_error(
        self,
        forward: object,
        recompute: str,
        *more: str,
        fact: str,
        reason: str = _SAME,
        fixes: tuple[Fix, ...] = _FIXES,
    ) -> RematError:
        return RematError(
            fact,
            operands=(f"forward    {forward}", f"recompute  {recompute}", *more),
            reason=reason,
            fixes=fixes,
        )

    def _make_unexpected_call_error(self, key: Key, n: int) -> RematError:
        call = describe_call(key)
        if n:
            return self._make_error(
                f"{call}, {n} time{'s' if n > 1 else ''}",
                f"{call}, once more",
                fact=f"the recompute of {self._title} makes a call more often than its forward did",
            )
        expected = self._find_expected_event(key)
        return self._make_error(
            expected or "was over",
            call,
            *_describe_difference(expected, key),
            fact=f"the recompute of {self._title} makes a call that its forward did not make",
        )

    def _make_saved_count_error(self, event: RecordedCall, count: int) -> RematError:
        more = " or more" if count > len(event.slots) else ""
        return self._make_error(
            f"{len(event.slots)} tensors saved in {event}",
            f"{count}{more} in the same call",
            fact=f"the recompute of {self._title} saves more or fewer tensors than its forward did",
        )

    def make_missing_call_error(self, event: RecordedCall) -> RematError:
        """The error where a slot was not filled, since its call was left out."""
        later = [e for e in self.forward.order if e.number > event.number and e in self._done]
        return self._make_error(
            event,
            f"{later[0] if later else 'ended'}, without it",
            reason="a result that the program remembers is not computed again, and what backward "
            "needs of it is gone",
            fixes=(
                Fix("compute it before the region, and pass it in"),
                Fix("policy=[...] with this call", "its result is kept"),
            ),
            fact=f"the recompute of {self._title} "
            "leaves out a call whose saved tensors backward needs",
        )

    def _check_counts(self, enough: bool) -> None:
        """Raise where of several calls of one key some were left out: it is unknown which."""
        last = max((e.number for e in self._done), default=-1)
        for (key, n), event in self.forward.events.items():
            if event in self._done or key not in self._counts:
                continue
            if enough and event.number > last:
                continue
            if event.slots or event.kept is not None or event.draws is not None:
                call, count = describe_call(key), self._counts[key] + 1
                raise self._make_error(
                    f"{call}, {n + 1} times or more",
                    f"{call}, {count} time{'s' if count > 1 else ''}",
                    reason="which of them were left out cannot be told",
                    fact=f"the recompute of {self._title} "
                    "makes a call less often than its forward did",
                )


def _describe_difference(event: RecordedCall | None, key: Key) -> tuple[str, ...]:
    """A line that says what differs, where two calls have the same description."""
    if event is None or describe_call(event.key) != describe_call(key):
        return ()
    if event.key[0] != key[0]:
        return ("           another function of the same name",)
    return ("           its inputs come from other calls, or are other parameters",)


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t
