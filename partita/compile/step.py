"""Compiled steps: `pt.compile`, the `CompiledStep` that it returns, and what a call of it does.

The first call captures a program, compiles it and runs it; later calls run it. If shapes, layouts,
modes or the Python state that the step reads have changed, the call captures another program. At
most `keep` programs are kept, and `reasons` says why each was captured. To find the program of a
call:

1. The call guard compares it with the last call (`CallGuard`): the usual case.
2. Otherwise the programs of its signature are tried: their guards and conditions must hold.
3. Otherwise all ranks capture the step (`pipeline`), or it runs eagerly if a capture has failed.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from partita.capture.block_choice import BlockChoice
from partita.capture.capture_context import (
    attribute_set,
    find_user_dispatch_mode,
    function_modes,
    without_function_modes,
)
from partita.capture.optimizers import MadeState, drop_unused_state, make_optimizer_state
from partita.comm import (
    GroupWire,
    Wire,
    begin_graph,
    end_graph,
    explain_failed_collective,
    user_line,
    wait_for_all_ranks,
)
from partita.comm.device import Device
from partita.graph.backend.executor import make_graph_function
from partita.graph.errors import (
    CaptureError,
    RefusedCall,
    make_dispatch_mode_error,
    make_lazy_parameter_error,
    not_captured,
)
from partita.graph.graph_text import Graph
from partita.graph.memory import scheduled
from partita.graph.program import Passes, StepOptions
from partita.graph.slots import Slot
from partita.graph.step_report import (
    explain_passes,
    facts_of_graph,
    facts_of_layouts,
    facts_of_moves,
)
from partita.guards import CaptureHistory, describe_call, signature_of
from partita.guards.answers import Guesses, OtherAnswers, StepRaises, ValuesWanted
from partita.guards.call_guard import CallGuard
from partita.guards.captured_program import CapturedProgram, announce_run, list_sent_moves
from partita.guards.inputs import NewStateFound, State, find_state, names_of_call, tensors_of_call
from partita.guards.predicted_values import ValuesOfCall
from partita.guards.values import Place
from partita.report import RunFacts, check_plotly, write_report
from partita.tensor.dtensor_gradients import zero_owners_of
from partita.tensor.tensor_state import HERE

from .progress import begin_phase, note_section, showing_progress

if TYPE_CHECKING:
    from pathlib import Path

    from partita.graph.memory import Memory
    from partita.graph.program import Built, Program
    from partita.report import HasTimeline


def _as_tuple(given: Any) -> tuple[Any, ...]:
    """Returns a tuple of the items of an iterable, or of one object."""
    return tuple(given) if isinstance(given, Iterable) else (given,)


def compile(
    step: Callable[..., Any] | None = None,
    *,
    state: Iterable[Any] = (),
    backend: str = "inductor",
    fallback: str | None = None,
    without: Iterable[str] = (),
    passes: Passes = (),
    keep: int = 8,
    budget: int | None = None,
    blocks: bool | Iterable[nn.Module | type] | None = None,
    sections: bool | None = None,
    cuda_graphs: bool | None = None,
) -> Any:
    """Captures a training step (forward, loss, backward, update) into one compiled graph.

    `step` may also be a region, a part of a model that otherwise runs eagerly. It is captured as
    two graphs, forward and backward. A region is a module, which is compiled in place, or a
    function that runs no backward through its results. Gradients flow through it to its arguments
    and parameters.

    Args:
        step: a module, or an ordinary function of DTensors or plain tensors. Capture finds the
            modules, optimizers and tensors that are its arguments, or that it reaches by name
            (closure, globals, `self`). The graph makes every write that the step makes to them.
            Gradients that the step computes, uses in its update and clears are not kept. Without a
            step, `compile` returns a decorator.
        state: modules, optimizers, and containers or objects with tensors that the step uses, but
            does not reach by name.
        backend: "inductor" compiles the graph. "graph" runs it node by node without compiling.
            Ranks that are not processes (`pt.ranks`, a dry mesh) always use "graph".
        fallback: "eager": a step that cannot be captured runs eagerly.
        without: names of passes to leave out, such as "bucket".
        passes: your own passes. A pass is a function of a `Program` that changes its graph and
            returns a few words on what it did. A list runs in order before all other passes. A
            dictionary maps the name of a pass to yours that run before it ("end": after the last).
        keep: the most programs that are kept.
        budget: the most bytes that the step may use above what it holds between calls. To stay
            below, backward recomputes the results that are cheapest to recompute.
        blocks: modules or classes of modules. In a deep step equal blocks become calls of one
            program, so that everything after tracing costs less. True finds them: the outermost
            modules that occur at least twice. None is like True, but needs six equal modules. False
            uses no blocks.
        sections: True compiles the graph in sections; equal sections are compiled once. False
            compiles it in one piece. None uses sections if the graph has more than 3,000 calls,
            and the distinct sections have at most half of them.
        cuda_graphs: None records the kernels of a step as a CUDA graph in its second call, if they
            run on a GPU and can be recorded. Each later call is one launch. Otherwise
            `step.why_not_recorded` is the reason. The recording keeps the peak memory of the step
            between calls: `step.memory.recorded`. True is like None, but gives a warning with the
            reason, and raises an error if CUDA refuses to record. False does not record.

    Returns:
        A `CompiledStep`. For a module: the module itself, whose `forward` is a `CompiledStep`.

    Raises:
        TypeError: `step` is neither a function nor a module.
        ValueError: an unknown backend or fallback; blocks that are not modules.
        CaptureError: raised by the call, not by `compile`, if the step does something that a graph
            cannot express and there is no fallback.
    """
    if not (step is None or callable(step)):
        raise TypeError(f"compile takes a function or a module, not a {type(step).__name__}")
    options = StepOptions(
        backend,
        fallback,
        (without,) if isinstance(without, str) else tuple(without),
        dict(passes) if isinstance(passes, Mapping) else _as_tuple(passes),
        max(1, keep),
        budget,
        blocks if blocks is None or isinstance(blocks, bool) else tuple(blocks),
        sections,
        cuda_graphs,
    )
    BlockChoice.from_option(options.blocks)
    given = _as_tuple(state)

    def compile_step(step: Callable[..., Any]) -> Any:
        if not isinstance(step, nn.Module):
            return CompiledStep(step, given, options)
        forward = step.forward
        if isinstance(forward, CompiledStep):
            forward = forward.step
        object.__setattr__(step, "forward", CompiledStep(forward, given, options))
        return step

    return compile_step if step is None else compile_step(step)


# -- the step --------------------------------------------------------------------------------------

_REFUSED_KEPT = 1024  # signatures of calls that could not be captured
_MOST_PROGRAMS_TRIED = 64  # the most programs that one call tries

Found = tuple[CapturedProgram | None, list[Any], RefusedCall | StepRaises | None]
"""(program, leaves, None) for a call; or (None, [], the reason to run eagerly, if known)."""


@dataclass(frozen=True, eq=False)
class _StepCall:
    """A call of a step, and what the step reaches in it."""

    args: Any
    kwargs: Any
    state: State

    @property
    def slots(self) -> list[Slot]:
        """The slots of the state: where each parameter, buffer and other tensor is stored now."""
        return [*self.state.slots, *self.state.optimizer_slots()]

    def list_leaves(self) -> list[Any]:
        """Returns the tensors and numbers of the state and the arguments (`tensors_of_call`)."""
        return tensors_of_call(self.slots, self.args, self.kwargs)

    def find_signature(self, leaves: list[Any]) -> tuple[Any, ...]:
        return signature_of(self.state, leaves, self._list_names(), (self.args, self.kwargs))

    def describe(self, leaves: Sequence[Any]) -> Any:
        """Returns a description of the call, from which `CaptureHistory` explains a new capture.

        Args:
            leaves: the leaves (tensors and numbers) of the call.
        """
        return describe_call(self.state, leaves, self._list_names(), (self.args, self.kwargs))

    def _list_names(self) -> list[str]:
        return [name for name, _ in names_of_call(self.slots, self.args, self.kwargs)]


class CompiledStep:
    """A compiled training step, or part of a model, from `pt.compile`. Call it like the step."""

    def __init__(self, step: Callable[..., Any], state: tuple[Any, ...], options: StepOptions):
        functools.update_wrapper(self, step)
        self.step, self._given, self.options = step, state, options
        self._history = CaptureHistory(self.title)
        # By signature and number of the capture.
        self._programs: OrderedDict[tuple[Any, int], CapturedProgram] = OrderedDict()
        self._made = 0
        self._counts_apart = False  # parameters' step counts were seen to differ
        self._eager: dict[Any, RefusedCall] = {}  # by signature
        # By device type, one memory pool for the CUDA graphs of all programs.
        self._recording_pool = functools.cache(lambda kind: Device(kind).make_recording_pool())
        self._is_running = True  # False in `capture`
        self._state: State | None = None
        self._reached: list[Place] = []  # places with state that only capture runs have shown
        self._last: CapturedProgram | None = None
        # Of the last call, if others can be compared with it.
        self.call_guard: CallGuard | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the compiled step of an instance, if a method is decorated: each has its own."""
        if instance is None:
            return self
        bound = CompiledStep(self.step.__get__(instance, owner), self._given, self.options)
        # Attribute lookup finds it before this descriptor.
        vars(instance)[getattr(self, "_name", self.step.__name__)] = bound
        return bound

    @property
    def title(self) -> str:
        """The name of the step in errors and reports."""
        owner = getattr(self.step, "__self__", None)
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        return getattr(self.step, "__qualname__", None) or type(self.step).__name__

    def __reduce__(self) -> Any:
        """Copies and pickles without programs: a copy of a module captures its own."""
        return CompiledStep, (self.step, self._given, self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.step(*args, **kwargs)  # part of a step that is being captured
        watcher = HERE.watcher
        if watcher is None:
            return self._run_program(self._find_program(args, kwargs), args, kwargs)
        with attribute_set(HERE, "watcher", None):  # finding or making a program runs no user code
            program, tensors, why_eager = found = self._find_program(args, kwargs)
        if program is None:
            return self._run_eagerly(args, kwargs, why_eager)

        def run() -> Any:
            return self._run_program(found, args, kwargs, watcher)

        return watcher.run_function(self, tuple(tensors), {}, run)  # as one call, which it records

    @property
    def programs(self) -> tuple[CapturedProgram, ...]:
        """The kept programs, at most `keep`. The one that ran last is at the end."""
        return tuple(self._programs.values())

    def capture(self, *args: Any, **kwargs: Any) -> CapturedProgram:
        """Returns the program for these arguments without running it; captures it if there is none.

        Ledgers record nothing. Python objects that the step writes stay as they are. State that an
        optimizer creates in its first step is created, filled with zeros.

        Raises:
            CaptureError: the step cannot be captured for these arguments.
            Exception: any that the step itself raises.
        """
        with attribute_set(HERE, "watcher", None), attribute_set(self, "_is_running", False):
            program, _, why = self._find_program(args, kwargs)
        if isinstance(why, StepRaises):
            raise why.error
        if program is None:
            raise CaptureError(f"{self.title} runs eagerly when it is called like this")
        program.undo_writes()  # a capture makes the writes that its call makes
        return program

    # -- the last program, for people to read ------------------------------------------------------

    @property
    def reasons(self) -> list[str]:
        """Why each capture was necessary, as text, in order."""
        return self._history.reasons

    @property
    def program(self) -> CapturedProgram:
        """The program that ran last.

        Raises:
            ValueError: nothing has been captured yet.
        """
        if self._last is None:
            raise ValueError("this step has not been captured: call it first")
        return self._last

    @property
    def graph(self) -> Graph:
        """The graph of the program that ran last, for printing.

        Raises:
            ValueError: nothing has been captured yet.
        """
        return Graph(self.program)

    def explain(self) -> str:
        """Returns a text: what each pass did to the last program, and the bytes that it saved.

        Runs the passes again to measure their effect on the predicted peak. May take seconds.

        Raises:
            ValueError: nothing has been captured yet.
        """
        captured = self.program.captured
        assert captured is not None
        return explain_passes(captured)

    def report(self, path: str | Path, timeline: HasTimeline | None = None) -> None:
        """Writes an HTML page about the program that ran last; it needs no network. Needs plotly.

        It shows memory over the step by class, and the buffers at the peak. It also shows bytes
        sent by source line, the bytes that each pass saved, and layouts.

        Args:
            path: the file to write.
            timeline: adds a timeline by stream: the result of `pt.simulate(step, mesh, machine)`.

        Raises:
            ValueError: nothing has been captured yet, or plotly is not installed.
            OSError: the file cannot be written.
        """
        check_plotly()
        run = RunFacts(self.title)
        run.record_event("graph", facts_of_graph(self))
        run.record_event("moves", {"moves": facts_of_moves(list_sent_moves(self.program.runs))})
        run.record_event("layouts", {"parameters": facts_of_layouts(self.program.runs)})
        if timeline is not None:
            run.timeline, run.timeline_source = [*timeline.events], timeline.source
        write_report(path, run)

    @property
    def memory(self) -> Memory:
        """The memory schedule of the program that ran last: lifetimes of buffers, and the peak.

        A region has the schedule of its forward, followed by that of its backward.

        Raises:
            ValueError: nothing was captured yet, or this version of torch generates unknown code.
        """
        memory = scheduled(self.program)
        copied = getattr(self.program.call, "copied_bytes", None)
        if copied is None or self.why_not_recorded:
            return memory
        return dataclasses.replace(memory, recorded=memory.peak + copied)

    @property
    def artifact(self) -> Built | None:
        """The compiled code of the program that ran last; None if its graph is not compiled.

        It prints as "compiled in 10.3 s" or "loaded in 0.4 s". For a region, `artifact.sections`
        has the results for the forward and for each part of the backward.

        Raises:
            ValueError: nothing was captured yet.
        """
        return self.program.artifact

    @property
    def is_recorded(self) -> bool:
        """True if the program that ran last is recorded as a CUDA graph.

        Raises:
            ValueError: nothing was captured yet.
        """
        return bool(getattr(self.program.call, "is_recorded", False))

    @property
    def why_not_recorded(self) -> str:
        """Why the program that ran last is not recorded as a CUDA graph.

        "" if it is recorded, or will be in its second call.

        Raises:
            ValueError: nothing was captured yet.
        """
        program = self.program
        reason = program.not_recorded or program.runs.not_recorded
        return reason or getattr(program.call, "refusal", "")

    @property
    def key(self) -> str:
        """The key of the program that ran last, equal for equal programs on all ranks and runs."""
        return self.program.key

    # -- the program of a call, and its run --------------------------------------------------------

    def _run_program(self, found: Found, args: Any, kwargs: Any, watcher: Any = None) -> Any:
        """Runs the program of a call, and others while answers to branches on values differ.

        Args:
            watcher: an object that is notified of written tensors.
        """
        for _ in range(_MOST_PROGRAMS_TRIED):
            program, tensors, why_eager = found
            if program is None:
                return self._run_eagerly(args, kwargs, why_eager)
            for i in program.written if watcher is not None else ():
                watcher.announce_write(tensors[program.inputs[i].index])
            if function_modes():
                with without_function_modes():  # their effect is in the graph already
                    result = self._run_graph(program, tensors)
            else:
                result = self._run_graph(program, tensors)
            if type(result) is not OtherAnswers:
                return result
            program.undo_writes()
            self.call_guard = None
            with attribute_set(HERE, "watcher", None):
                found = self._find_program(args, kwargs, result)
        # A value is so close to a threshold that programs round it to different sides.
        said = f"the programs of {self.title} disagree about a branch ({result.reason})"
        warnings.warn(f"runs eagerly: {said}", stacklevel=4)
        return self._run_eagerly(args, kwargs, found[2])

    def _find_program(self, args: Any, kwargs: Any, others: OtherAnswers | None = None) -> Found:
        """Returns the program of a call and the call's leaves; or why it runs eagerly.

        Args:
            others: the answers of this call's last run, if they differed from its program's.
        """
        guard = self.call_guard
        if guard is not None and (tensors := guard.tensors(args, kwargs)) is not None:
            return self._admit_program(guard.program, tensors)
        state = self._state
        if state is None or state.has_changed() or not state.is_of(args, kwargs):
            state = self._search_state(args, kwargs)
        call = _StepCall(args, kwargs, state)
        tensors = call.list_leaves()
        for owner in zero_owners_of(tensors):
            owner.complete_gradients()
        if any(map(is_lazy, tensors)):
            if self.options.fallback is None:
                raise make_lazy_parameter_error()
            return None, [], None
        signature = call.find_signature(tensors)
        key, why = self._find_kept_program(signature, tensors, (args, kwargs), others)
        if key is None:
            refused = self._eager.get(signature)
            if refused is not None and refused.holds():
                if self.options.fallback is None:
                    raise not_captured(f"the step raised {refused.why}", "it did not when it ran")
                return None, [], refused
            call = _StepCall(args, kwargs, self._search_state(args, kwargs))
            return self._capture_call(signature, call, why, others)
        self._history.note_reuse()
        program = self._last = self._programs[key]
        self._programs.move_to_end(key)
        program.prepare_memory(tensors)
        guard = CallGuard(call.args, call.kwargs, call.slots, call.state, tensors, program)
        self.call_guard = guard if guard.usable else None
        return self._admit_program(program, tensors)

    def _search_state(self, args: Any, kwargs: Any) -> State:
        """Returns the state that the step reaches now."""
        self.call_guard = None  # because its slots may get other homes
        before = self._state
        self._state = find_state(self.step, self._given, args, kwargs, self._reached, before)
        return self._state

    def _find_kept_program(
        self, signature: Any, tensors: list[Any], call: Any, others: OtherAnswers | None
    ) -> tuple[tuple[Any, int] | None, str]:
        """Returns the key of a kept program for `call`, its (args, kwargs), or None.

        Also returns the condition that does not hold, or "".
        """
        why = ""  # why the newest program does not fit
        for key, program in reversed(self._programs.items()):
            if key[0] != signature:
                continue
            if program.guards is not None and not program.guards.hold(tensors, call):
                continue
            if others is not None and not others.agrees_with(program.answers.values):
                continue
            failed = program.conditions.failed(tensors)
            if failed is None:
                return key, ""
            why = why or failed
            self._counts_apart |= program.conditions.counts_differ(tensors)
        return None, why or (others.reason if others is not None else "")

    def _admit_program(self, program: CapturedProgram, tensors: list[Any]) -> Found:
        """Returns a kept program and the leaves, if it may run in this call.

        It may not if a written input overlaps another, or a user's dispatch mode would miss the
        calls of compiled code. Then the step runs eagerly; without a fallback this raises
        CaptureError.
        """
        sharing, error = program.overlap_check, None
        if sharing.may_overlap(tensors):
            error = sharing.find_error(tensors)
        if program.artifact is not None and (mode := find_user_dispatch_mode()) is not None:
            error = make_dispatch_mode_error(mode)
        if error is not None:
            program.undo_writes()
            if self.options.fallback is None:
                raise error
            return None, [], None
        if program.scope is not None and program.scope.busy and self._is_running:
            announce_run(program, self.title, tensors)
        if self._is_running:
            program.note_call(tensors)
        return program, tensors, None

    def _run_eagerly(self, args: Any, kwargs: Any, why: RefusedCall | StepRaises | None) -> Any:
        result = self.step(*args, **kwargs)
        if isinstance(why, StepRaises):  # eager has not raised
            warnings.warn(f"ran eagerly: while it was captured the step raised {why}", stacklevel=4)
            why = self._refuse_call(why.signature, why)
        if why is not None:
            why.note_run()
        return result

    def _run_graph(self, program: CapturedProgram, tensors: list[Any]) -> Any:
        guard = self.call_guard
        known = guard if guard is not None and guard.program is program else None
        if program.ranks:
            begin_graph(self.title, program.ranks)
        try:
            return program.run(tensors, None if known is None else known.inputs(tensors))
        except BaseException as error:
            program.undo_writes()
            if isinstance(error, RuntimeError):  # perhaps other ranks lack the collective
                for wire in program.wires:
                    if (away := explain_failed_collective(wire, error)) is not None:
                        raise away from error
            raise
        finally:
            end_graph()

    # -- capture -----------------------------------------------------------------------------------

    def _capture_call(
        self, signature: Any, call: _StepCall, why: str, others: OtherAnswers | None
    ) -> Found:
        """Captures a program for a call. Returns what `_find_program` returns.

        Args:
            why: the condition of kept programs that does not hold, or "".
            others: as for `_find_program`.
        """
        self.call_guard = None
        reason = self._barrier_before_capture(call, why)
        guesses = others.guesses if others is not None else Guesses()
        made_state = make_optimizer_state(call.state.optimizers)
        try:
            with showing_progress(self.title, is_first=not self._made) as show_result:
                program, tensors = self._prepare_program(call, guesses, made_state)
                show_result(program.artifact)
        except BaseException as error:
            drop_unused_state(made_state, lambda t: False)
            if isinstance(error, NewStateFound):
                self._state, self._reached = error.state, error.state.reached
                call = dataclasses.replace(call, state=error.state)
                return self._capture_call(signature, call, why, others)
            if isinstance(error, StepRaises):
                error.signature = signature
                return None, [], error
            if self.options.fallback is None or not isinstance(error, CaptureError):
                raise
            warnings.warn(f"runs eagerly: {error}", stacklevel=4)
            return None, [], self._refuse_call(signature, error)
        self._made += 1
        key, keep = (call.find_signature(tensors), self._made), self.options.keep
        what, numbers = call.describe(tensors), program.conditions.identify_numbers()
        self._history.note_capture(why or reason, key, what, program.guards, numbers, keep)
        while len(self._programs) >= keep:
            self._history.note_drop(self._programs.popitem(last=False)[0])
        self._programs[key] = self._last = program
        return self._admit_program(program, tensors)

    def _refuse_call(self, signature: Any, error: CaptureError | StepRaises) -> RefusedCall:
        """Stores that calls of a signature could not be captured."""
        if len(self._eager) >= _REFUSED_KEPT:
            self._eager.clear()
        before = self._eager.get(signature)
        tries = 1 if before is None else before.tries + 1
        self._eager[signature] = refused = RefusedCall(error.guards, tries, str(error))
        return refused

    def _prepare_program(
        self, call: _StepCall, guesses: Guesses, made_state: MadeState
    ) -> tuple[CapturedProgram, list[Any]]:
        """Returns a program that is captured for a call and ready to run, and the call's leaves.

        State that was made for optimizers and that the step does not use is removed. After an
        error, Python objects are as they were before the capture.
        """
        # Here, because importing it takes seconds.
        from partita.guards.capture_run import CaptureRequest

        from .pipeline import compile_within_budget, make_program

        options = self.options
        blocks = BlockChoice.from_option(options.blocks)
        blocks = dataclasses.replace(blocks, section_threshold=options.section_threshold)

        def make() -> CapturedProgram:
            begin_phase("capture")
            given = self.step, call.args, call.kwargs, call.state, guesses
            values = ValuesOfCall()
            while True:
                request = CaptureRequest(*given, values, blocks, self._counts_apart)
                try:
                    return make_program(request, options)
                except ValuesWanted as wanted:
                    values = wanted.compute(call.list_leaves())

        program = make()
        inputs = {id(i.tensor) for i in program.inputs}
        if drop_unused_state(made_state, lambda t: id(t) in inputs):
            # Some leaves were removed, so that the indices of the program's inputs are wrong.
            program.undo_writes()
            program = make()
        try:
            tensors = call.list_leaves()
            program.prepare_memory(tensors)
            program.compare(tensors)
            call_of = functools.partial(self.make_callable, wires=program.wires)
            ready = compile_within_budget(program, lambda p: p.prepare(call_of), tensors)
        except BaseException:
            program.undo_writes()
            raise
        ready.guards, ready.writes, ready.work = program.guards, program.writes, program.work
        return ready, tensors

    def _barrier_before_capture(self, call: _StepCall, why: str) -> str:
        """Waits until all ranks are about to capture; returns this rank's reason.

        Raises:
            LayoutError: some ranks run a kept program, or do something else.
        """
        tensors = call.list_leaves()
        why = why or self._history.reason(lambda: call.describe(tensors), tensors)
        for wire in dict.fromkeys(t._spec.wire for t in tensors if hasattr(t, "_spec")):
            if wire.scope.check is not None:
                wire.check(f"compiled {self.title} is captured at {user_line()}")
            wait_for_all_ranks(wire, f"captures {self.title}, at {user_line()}: {why}")
        return why

    # -- what runs a program's graph ---------------------------------------------------------------

    def make_callable(self, program: CapturedProgram, wires: list[Wire]) -> Callable[..., Any]:
        """Compiles a program with the chosen backend, and returns the function that runs it.

        The function records the kernels as a CUDA graph if the options allow it and it is possible.

        Args:
            program: the program.
            wires: the wires (connections to the ranks) of the program's meshes.
        """
        compile_part = functools.partial(self._compile, wires=wires)
        is_required = bool(self.options.cuda_graphs)
        if self.options.cuda_graphs is False:
            program.not_recorded = "cuda_graphs=False"
            return compile_part(program)
        from partita.graph.backend.cuda_graphs import NotRecorded, ReplayedProgram

        try:
            pool = self._recording_pool
            return ReplayedProgram(program, compile_part, pool, self.title, is_required)
        except NotRecorded as reason:
            program.not_recorded = str(reason)
        if is_required:
            text = f"{self.title} runs without CUDA graphs: {program.not_recorded}"
            warnings.warn(text, stacklevel=2)
        return compile_part(program)

    def _compile(self, program: Program, wires: list[Wire]) -> Callable[..., Any]:
        """Compiles a program by the backend; returns the function that runs its graph."""
        # Compiled code finds process groups by name; other wires exist only in Python.
        if self.options.backend == "inductor" and all(isinstance(w, GroupWire) for w in wires):
            from partita.graph.backend.inductor import build

            begin_phase("compile")
            name = getattr(self.step, "__qualname__", type(self.step).__qualname__)
            what = f"{getattr(self.step, '__module__', '')}.{name}".lstrip(".")
            program.built = build(program, what, wires, self.options.sections, note_section)
            begin_phase("graph")
            return program.built.call
        return make_graph_function(program.graph, program.groups)
