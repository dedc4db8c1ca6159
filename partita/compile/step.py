"""Compiled steps: what `pt.compile` gives, and what a call of it does.

A function like `step`. Its first call captures a graph, compiles it and runs it; later calls run
it. A call that differs in what the graph was made for (shapes, layouts, modes, what the step read
of Python) is another program, which is captured in its turn; how many are kept is bounded, and each
says why it was made.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partita.comm import GroupWire, Wire, begin_graph, end_graph, missed_call, roll_call, user_line
from partita.tensor.watch import HERE

from .call_guard import CallGuard
from .capture.answers import Guesses, OtherAnswers, StepRaises
from .capture.block_choice import BlockChoice
from .capture.optimizers import drop_unused_state, make_optimizer_state
from .capture.state import ReachedMore, State, names_of_call, tensors_of_call
from .capture.state_search import state_of
from .captured_program import CapturedProgram
from .errors import CaptureError, Holding
from .guards import History, described, signature_of
from .guards.modes import function_modes, without_function_modes
from .guards.places import Place
from .last_program import LastProgram

if TYPE_CHECKING:
    from .passes import Passes

__all__ = ["CompiledStep"]

_EAGER_KEPT = 1024  # kinds of calls that are known not to be captured
_WAYS = 64  # programs that one call tries
_TRIES = 16  # captures of one kind of call that may fail, for other values of Python


class CompiledStep(LastProgram):
    """A step that runs as a graph."""

    def __init__(
        self,
        step: Callable[..., Any],
        state: tuple[Any, ...],
        backend: str,
        fallback: str | None,
        without: tuple[str, ...],
        passes: Passes,
        keep: int,
        budget: int | None = None,
        blocks: bool | Iterable[nn.Module | type] | None = None,
        sections: bool | None = None,
    ):
        functools.update_wrapper(self, step)
        self.step, self._given, self.backend, self.fallback = step, state, backend, fallback
        self.without, self.passes, self.keep = without, passes, max(1, keep)
        self.budget, self.sections = budget, sections
        self.blocks = blocks if blocks is None or isinstance(blocks, bool) else tuple(blocks)
        self._history = History(self.title)
        # By signature, and a number that tells programs of one signature apart.
        self._programs: OrderedDict[tuple[Any, int], CapturedProgram] = OrderedDict()
        self._made = 0
        self._counts_apart = False  # optimizers were seen to count parameters' steps apart
        self._eager: dict[Any, _Refused] = {}  # by signature
        self._runs_eagerly: _Refused | None = None
        self._raised: StepRaises | None = None
        self._is_running = True  # but for `capture`
        self._state: State | None = None
        self._reached: list[Place] = []  # where runs were seen to name something
        self._last: CapturedProgram | None = None
        self.call_guard: CallGuard | None = None  # of the last call, where others can be compared

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method, a function that stands in a class: each instance compiles for itself."""
        if instance is None:
            return self
        bound = CompiledStep(
            self.step.__get__(instance, owner), self._given, **self._describe_how()
        )
        # It is found before this.
        vars(instance)[getattr(self, "_name", self.step.__name__)] = bound
        return bound

    @property
    def title(self) -> str:
        """How errors and reports call it."""
        owner = getattr(self.step, "__self__", None)
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        return getattr(self.step, "__qualname__", None) or type(self.step).__name__

    def __reduce__(self) -> Any:
        """To be copied and pickled, without what is compiled: a copy of a module has its own."""
        return _rebuild_step, (self.step, self._given, self._describe_how())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.step(*args, **kwargs)  # part of a step that is being captured
        watcher = HERE.watcher
        if watcher is None:
            program, tensors = self._find_program(args, kwargs)
            return self._result(program, tensors, args, kwargs)
        HERE.watcher = None  # what finds and makes a program is no part of the user's
        try:
            program, tensors = self._find_program(args, kwargs)
        finally:
            HERE.watcher = watcher
        if program is None:
            return self._run_eagerly(args, kwargs)
        return self._run_heard_by_remat(program, tensors, args, kwargs)

    @property
    def programs(self) -> tuple[CapturedProgram, ...]:
        """The programs that are kept, the one that ran last at the end; at most `keep`."""
        return tuple(self._programs.values())

    def capture(self, *args: Any, **kwargs: Any) -> CapturedProgram:
        """The program of such a call, captured where there is none yet, and not run: nothing is
        told to ledgers, and what the step writes into Python stays as it is. State that the first
        step of an optimizer makes is made, of zeros.

        Raises:
            CaptureError: such a call cannot be captured.
        """
        watcher, HERE.watcher = HERE.watcher, None
        count, self._is_running = self._made, False
        try:
            program, _ = self._find_program(args, kwargs)
        finally:
            HERE.watcher, self._is_running = watcher, True
            raised, self._raised, self._runs_eagerly = self._raised, None, None
        if program is None:
            error = CaptureError(f"{self.title} runs eagerly when it is called like this")
            raise error from (None if raised is None else raised.error)
        if self._made > count:  # capture leaves what the call would have left
            for write in reversed(program.writes):
                write.undo()
        return program

    def _result(
        self,
        program: CapturedProgram | None,
        tensors: list[Any],
        args: Any,
        kwargs: Any,
        told: Any = None,
    ) -> Any:
        """Run the program; another one as long as torch's questions have other answers.

        Args:
            told: a watcher, which is told of what is written.
        """
        for _ in range(_WAYS):
            if program is None:
                return self._run_eagerly(args, kwargs)
            for i in program.written if told is not None else ():
                told.announce_write(tensors[program.inputs[i].index])
            found = self._run(program, tensors)
            if type(found) is not OtherAnswers:
                return found
            watcher, HERE.watcher = HERE.watcher, None
            try:
                self.call_guard = None
                program, tensors = self._find_program(args, kwargs, found)
            finally:
                HERE.watcher = watcher
        # A value is a rounding away from where torch's answer turns.
        said = f"{self.title} finds other answers in each program ({found.reason})"
        warnings.warn(f"runs eagerly: {said}", stacklevel=4)
        return self._run_eagerly(args, kwargs)

    def _find_program(
        self, args: Any, kwargs: Any, found: OtherAnswers | None = None
    ) -> tuple[CapturedProgram | None, list[Any]]:
        """The program of a call and the call's tensors; None where it runs eagerly.

        Args:
            found: what is known of the answers in this call.
        """
        guard = self.call_guard
        if guard is not None and (tensors := guard.tensors(args, kwargs)) is not None:
            return self._admit_program(guard.program, tensors)
        state = self._state
        if state is None or state.moved() or not state.is_of(args, kwargs):
            state = self._search_state(args, kwargs)
        slots = [*state.slots, *state.optimizer_slots()]
        tensors = tensors_of_call(slots, args, kwargs)
        signature = signature_of(state, tensors, (args, kwargs))
        key, why = self._kept(signature, tensors, found)
        if key is None:
            refused = self._eager.get(signature)
            if refused is not None and refused.holds():
                self._runs_eagerly = refused
                return None, []
            return self._run_first_call(signature, args, kwargs, why, found)
        self._history.note_reuse()
        program = self._last = self._programs[key]
        self._programs.move_to_end(key)
        program.prepare_memory(tensors)
        guard = CallGuard(slots, tensors, (args, kwargs), program, state)
        self.call_guard = guard if guard.usable else None
        return self._admit_program(program, tensors)

    def _search_state(self, args: Any, kwargs: Any) -> State:
        """What the step reaches now."""
        self._state = state_of(self.step, self._given, args, kwargs, self._reached)
        return self._state

    def _kept(
        self, signature: Any, tensors: list[Any], found: OtherAnswers | None
    ) -> tuple[tuple[Any, int] | None, str]:
        """The key of a program for such a call, for Python and for numbers as they are now.

        Returns:
            And where there is none because a condition does not hold, which.
        """
        why = found.reason if found is not None else ""
        for key, program in reversed(self._programs.items()):
            if key[0] != signature or not (program.guards is None or program.guards.hold()):
                continue
            if found is not None and not found.agrees(program.answers.values):
                continue
            failed = program.conditions.failed(tensors)
            if failed is None:
                return key, ""
            why = failed
            self._counts_apart |= program.conditions.counts_differ(tensors)
        return None, why

    def _admit_program(
        self, program: CapturedProgram, tensors: list[Any]
    ) -> tuple[CapturedProgram | None, list[Any]]:
        """A program that was captured before, unless this call must run eagerly."""
        sharing = program.sharing
        if sharing.may_overlap(tensors) and (error := sharing.find_error(tensors)) is not None:
            if self.fallback is None:
                raise error
            return None, []
        if program.scope is not None and program.scope.busy:
            self._tell(program, tensors)
        return program, tensors

    def _tell(self, program: CapturedProgram, tensors: list[Any]) -> None:
        """Let ledgers, `strict()` and `check_ranks()` know what is going to run."""
        if not self._is_running:
            return
        from .ledger_replay import tell, tell_work

        assert program.scope is not None
        if program.scope.check is not None:
            for wire in program.wires:
                wire.check(f"compiled {self.title} runs {program.key[:16]} at {user_line()}")
            program.compare(tensors)
        tell(program.runs)
        tell_work(program)

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        refused, self._runs_eagerly = self._runs_eagerly, None
        raised, self._raised = self._raised, None
        result = self.step(*args, **kwargs)
        if refused is not None:
            refused.ran()
        if raised is not None:  # which it should have in eager, too
            warnings.warn(
                f"ran eagerly: while it was captured the step raised {raised}", stacklevel=4
            )
        return result

    def _run(self, program: CapturedProgram, tensors: list[Any]) -> Any:
        if function_modes():
            with without_function_modes():  # what they make of a step is in its graph
                return self._run_graph(program, tensors)
        return self._run_graph(program, tensors)

    def _run_graph(self, program: CapturedProgram, tensors: list[Any]) -> Any:
        guard = self.call_guard
        known = guard if guard is not None and guard.program is program else None
        if program.ranks:
            begin_graph(self.title, program.ranks)
        try:
            return program.run(tensors, None if known is None else known.inputs(tensors))
        except RuntimeError as error:  # a collective's, where others do not make it
            for wire in program.wires:
                if (away := missed_call(wire, error)) is not None:
                    raise away from error
            raise
        finally:
            end_graph()

    def _run_heard_by_remat(
        self, program: CapturedProgram, tensors: list[Any], args: Any, kwargs: Any
    ) -> Any:
        """Run it as a call that remat hears of."""
        watcher = HERE.watcher

        def run() -> Any:
            return self._result(program, tensors, args, kwargs, watcher)

        return watcher.run_function(self, tuple(tensors), {}, run)

    def _run_first_call(
        self,
        signature: Any,
        args: Any,
        kwargs: Any,
        why: str,
        found: OtherAnswers | None,
        state: State | None = None,
    ) -> tuple[CapturedProgram | None, list[Any]]:
        """Capture a program.

        Args:
            why: which condition of the programs for such calls does not hold.
            found: what is known of the answers in this call.
            state: what the step reaches, where a run of it has just shown that.
        """
        from .pipeline import kept_within, make_program  # what makes graphs takes seconds to import

        self.call_guard = None
        state = self._search_state(args, kwargs) if state is None else state
        reason = self._call_roll(state, args, kwargs, why)
        how: dict[str, Any] = {
            "without": self.without,
            "passes": self.passes,
            "options": self._list_options(),
        }
        guesses = found.guesses if found is not None else Guesses()
        blocks = BlockChoice.of(self.blocks)

        def making() -> CapturedProgram:
            assert self._state is not None
            call = self.step, args, kwargs, self._state
            return make_program(
                *call,
                guesses,
                budget=self.budget,
                blocks=blocks,
                counts_apart=self._counts_apart,
                **how,
            )

        made_state = make_optimizer_state(state.optimizers)
        try:
            program = making()
        except ReachedMore as more:
            drop_unused_state(made_state, lambda t: False)
            self._state, self._reached = more.state, more.state.reached
            return self._run_first_call(signature, args, kwargs, why, found, more.state)
        except StepRaises as raised:
            drop_unused_state(made_state, lambda t: False)
            self._raised = raised
            return None, []
        except BaseException as error:
            drop_unused_state(made_state, lambda t: False)
            if self.fallback is None or not isinstance(error, CaptureError):
                raise
            warnings.warn(f"runs eagerly: {error}", stacklevel=4)
            if len(self._eager) >= _EAGER_KEPT:
                self._eager.clear()
            before = self._eager.get(signature)
            tries = 1 if before is None else before.tries + 1
            self._eager[signature] = self._runs_eagerly = _Refused(error.guards, tries)
            return None, []
        inputs = {id(i.tensor) for i in program.inputs}
        if drop_unused_state(made_state, lambda t: id(t) in inputs):
            # Its inputs are counted among tensors of which some are gone.
            for write in reversed(program.writes):
                write.undo()
            program = making()
        slots = [*state.slots, *state.optimizer_slots()]
        tensors = tensors_of_call(slots, args, kwargs)
        signature = signature_of(state, tensors, (args, kwargs))
        program.prepare_memory(tensors)
        program.compare(tensors)
        names = [name for name, _ in names_of_call(slots, args, kwargs)]
        self._made += 1
        key, guards, work = (signature, self._made), program.guards, program.work
        what = described(state, tensors, names, (args, kwargs))
        self._history.note_capture(why or reason, key, what, guards, self.keep)
        while len(self._programs) >= self.keep:
            self._history.note_drop(self._programs.popitem(last=False)[0])
        call_of = functools.partial(self.make_callable, wires=program.wires)
        writes = program.writes
        program = kept_within(program, lambda p: p.prepare(call_of), tensors, **how)
        program.guards, program.writes, program.work = guards, writes, work
        self._programs[key] = self._last = program
        if program.scope is not None and program.scope.busy:
            self._tell(program, tensors)
        return program, tensors

    def _call_roll(self, state: State, args: Any, kwargs: Any, why: str) -> str:
        """Go on when all ranks are about to capture; for which reason this one is.

        Raises:
            LayoutError: some are not: they run a program that they have, or something else.
        """
        slots = [*state.slots, *state.optimizer_slots()]
        tensors = tensors_of_call(slots, args, kwargs)
        wires = dict.fromkeys(t._spec.wire for t in tensors if hasattr(t, "_spec"))
        names = [name for name, _ in names_of_call(slots, args, kwargs)]
        why = why or self._history.reason(described(state, tensors, names, (args, kwargs)))
        for wire in wires:
            if wire.scope.check is not None:
                wire.check(f"compiled {self.title} is captured at {user_line()}")
            roll_call(wire, f"captures {self.title}, at {user_line()}: {why}")
        return why

    def _describe_how(self) -> dict[str, Any]:
        """How the user wants it."""
        return {
            "backend": self.backend,
            "fallback": self.fallback,
            "without": self.without,
            "passes": self.passes,
            "keep": self.keep,
            "budget": self.budget,
            "blocks": self.blocks,
            "sections": self.sections,
        }

    def _list_options(self) -> list[str]:
        """What of how it is compiled makes another program of it."""
        how = [] if self.sections is None else [f"sections {self.sections}"]
        return [f"backend {self.backend}", *how, f"without {sorted(self.without)}"]

    def make_callable(self, program: CapturedProgram, wires: list[Wire]) -> Callable[..., Any]:
        """What runs the graph of a program that was just captured, by the backend."""
        from .backend.executor import function_of

        # Compiled code finds process groups by name; other wires are only known to Python.
        if self.backend == "inductor" and all(isinstance(w, GroupWire) for w in wires):
            from .backend.build import build

            program.built = build(program, self._name_of_step, wires, self.sections)
            return program.built.call
        return function_of(program.graph, program.groups)

    @property
    def _name_of_step(self) -> str:
        name = getattr(self.step, "__qualname__", type(self.step).__qualname__)
        return f"{getattr(self.step, '__module__', '')}.{name}".lstrip(".")


class _Refused:
    """A kind of call that could not be captured, and what the step had read of Python by then.

    What the step itself changes of it, run eagerly, is no reason to try again: what stands there
    after one call is what the next is compared to.
    """

    def __init__(self, guards: Holding | None, tries: int):
        self._guards = guards if tries < _TRIES else None
        self.tries = tries

    def holds(self) -> bool:
        """Would another try find what the last one found?"""
        return self._guards is None or self._guards.hold()

    def ran(self) -> None:
        """The step has run eagerly."""
        if self._guards is not None and not self._guards.hold():
            self._guards = self._guards.as_now()


def _rebuild_step(step: Callable[..., Any], given: tuple[Any, ...], said: dict[str, Any]) -> Any:
    return CompiledStep(step, given, **said)
