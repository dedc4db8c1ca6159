"""Capture: runs a step under `CaptureRun` until one run gives a complete graph.

A run may show that another is needed, and with what: tensors whose gradients the step reads, other
answers to what torch asks of values, modules that cannot be blocks, numbers that cannot be
symbolic, or state that was not found before. What a run writes into Python objects is undone, so
that guards are read as things were before the step, and then written again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from partita.layout import LayoutError

from ..captured_program import CapturedProgram
from ..errors import CaptureError
from ..guards.expected import MISSING
from .answers import Guesses, StepRaises
from .block_choice import BlockChoice
from .block_tape import NotABlock, VaryingFloatRead
from .capture_context import errors_not_logged, without_dispatch_modes
from .capture_run import CaptureRun
from .numbers import PlainNumbers
from .state import State

__all__ = ["capture", "taking_turns", "trace_once"]

# A tracer of torch.fx replaces nn.Module.__call__, which all threads see.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def taking_turns() -> Iterator[None]:
    """Within, no other thread captures, and no dispatch mode of the user's follows the calls."""
    with _ONE_AT_A_TIME, without_dispatch_modes(), errors_not_logged():
        yield


@taking_turns()
def capture(
    step: Callable[..., Any],
    args: Any,
    kwargs: Any,
    state: State,
    guesses: Guesses,
    blocks: BlockChoice,
    counts_apart: bool,
) -> CapturedProgram:
    """The program of `step(*args, **kwargs)`.

    Args:
        state: the modules, optimizers and tensors that the step reaches.
        guesses: answers to what torch asks of values.
        blocks: which modules are traced once for all that are built alike.
        counts_apart: optimizers' step counts of parameters may differ: none stands for all.

    Raises:
        CaptureError: the step does what a graph cannot express; names the user's line.
        ReachedMore: a run has read state that `state` does not have.
        StepRaises: the step raises, on the way that the call's own answers lead.
    """
    # A first run gives a mark as the gradient of each tensor that has none, to see whether the
    # step reads it. Those whose marks were read are given none in the next run.
    unmarked: set[int] = set()
    plain, tried_guesses = PlainNumbers(), guesses
    first_failure: tuple[Exception, CaptureRun] | None = None

    def make_run() -> CaptureRun:
        return CaptureRun(
            step, args, kwargs, state, unmarked, plain, tried_guesses, blocks, counts_apart
        )

    while True:
        run = make_run()
        try:
            program = trace_once(run)
        except VaryingFloatRead as refusal:
            blocks = blocks.with_constants(refusal.kind)
            continue
        except NotABlock as refusal:
            blocks = blocks.without_class(refusal.kind, refusal.reason)
            continue
        except Exception as error:
            if (more := state.find_more(run.record.places.values())) is not None:
                raise more from error
            first_failure = first_failure or (error, run)
            other_guesses = run.questions.other_way()
            if other_guesses is not None:
                tried_guesses = other_guesses
                continue
            error, run = first_failure
            if isinstance(error, LayoutError):
                _note_guards(error, run)
            if run.raised and guesses.certain:
                raise StepRaises(error) from error
            if isinstance(error, LayoutError) or plain.why or not run.numbers.made:
                raise error
            # Symbolic numbers cannot do all that floats can: try once more with Python's own.
            plain.why = str(error).strip().split("\n")[0] or type(error).__name__
            tried_guesses, first_failure = guesses, None
            continue
        if (
            run.meets_unknown_tensors
            and (more := state.find_more(run.record.places.values())) is not None
        ):
            run.undo()
            raise more
        if program is not None and not run.numbers.asked_zeros():
            if run.writes:
                repetition = make_run()
                try:
                    trace_once(repetition)
                    _check_repeats(run, repetition)
                except LayoutError as error:
                    _note_guards(error, run)
                    raise
            _attach_guards(run, program)
            return program
        run.undo()
        unmarked |= run.read_marks


def _note_guards(error: LayoutError, run: CaptureRun) -> None:
    """Attach to an error the guards of what the step had read until then."""
    if isinstance(error, CaptureError):
        error.guards = run.guards()


def trace_once(run: CaptureRun) -> CapturedProgram | None:
    """The program of one run, after which nothing is watched; None where `run.program()` is."""
    try:
        return run.program()
    finally:
        run.record.restore_floats()
        run.numbers.env.stop_asking()
        for wire in run.wires.values():
            wire.forget()


def _check_repeats(run: CaptureRun, other: CaptureRun) -> None:
    """Raise CaptureError if `other`, a second run, changes again what `run` has changed.

    A counter would, and a graph would not count. A cache, or a value that is set to the same in
    each call, is written once.
    """
    other.undo()
    repeated = {w.identity for w in other.writes}
    growing = {id(w.home) for w in other.writes if w.before is MISSING}
    for write in run.writes:
        grows = write.before is MISSING and id(write.home) in growing
        if grows or write.identity in repeated:
            run.undo()
            raise run.make_unrepeated_write_error(write)


def _attach_guards(run: CaptureRun, program: CapturedProgram) -> None:
    """Give a program its guards, read as things were before the step, and its writes."""
    run.undo()
    program.guards = run.guards()
    for write in run.writes:
        write.redo()
    program.writes = run.writes
