"""Capture: how does a training step become one graph?

It is run once over tensors without memory (`capture_run`), and again as long as a run shows that
another would say more: other gradients to give, other answers, blocks that are none, state that it
names. What it writes of Python is undone, and found again.
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
from .capture_context import unlogged, without_dispatch_modes
from .capture_run import CaptureRun
from .numbers import Plain
from .state import State

__all__ = ["capture", "taking_turns", "trace_once"]

# Tracers of torch.fx put theirs in place of nn.Module.__call__, which all threads see.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def taking_turns() -> Iterator[None]:
    """Captures of several threads are made one after the other, and no mode of others follows."""
    with _ONE_AT_A_TIME, without_dispatch_modes(), unlogged():
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
    """The graph of `step(*args, **kwargs)`.

    Captures of several threads are made one after the other.

    Args:
        guesses: answers to what torch asks of values.
        blocks: which modules are traced once for all that are built alike.
        counts_apart: what optimizers count is not taken for equal where it is.

    Raises:
        CaptureError: the step does what a graph cannot say, naming the user's line.
    """
    # Whether a step reads the gradients that it finds is seen by giving it some to read.
    unmarked: set[int] = set()
    plain, ways = Plain(), guesses
    failed: tuple[Exception, CaptureRun] | None = None

    def make_run() -> CaptureRun:
        return CaptureRun(step, args, kwargs, state, unmarked, plain, ways, blocks, counts_apart)

    while True:
        run = make_run()
        try:
            program = trace_once(run)
        except VaryingFloatRead as no:
            blocks = blocks.with_constants(no.kind)
            continue
        except NotABlock as no:
            blocks = blocks.leaving(no.kind, no.reason)
            continue
        except Exception as error:
            if (more := state.find_more(run.record.places.values())) is not None:
                raise more from error
            failed = failed or (error, run)
            other = run.asked.other_way()
            if other is not None:
                ways = other
                continue
            error, run = failed
            if isinstance(error, LayoutError):
                _note_guards(error, run)
            # What is traced of numbers is not all that can be done with them.
            if run.raised and guesses.certain:
                raise StepRaises(error) from error
            if isinstance(error, LayoutError) or plain.why or not run.numbers.made:
                raise error
            plain.why = str(error).strip().split("\n")[0] or type(error).__name__
            ways, failed = guesses, None
            continue
        more = state.find_more(run.record.places.values()) if run.meets_others else None
        if more is not None:
            run.undo()
            raise more
        if program is not None and not run.numbers.asked_zeros():
            if run.writes:
                again = CaptureRun(
                    step, args, kwargs, state, unmarked, plain, ways, blocks, counts_apart
                )
                try:
                    trace_once(again)
                    _check_repeats(run, again)
                except LayoutError as error:
                    _note_guards(error, run)
                    raise
            _attach_guards(run, program)
            return program
        run.undo()
        unmarked |= run.read_marks


def _note_guards(error: LayoutError, run: CaptureRun) -> None:
    """Have an error know what the step had read until then."""
    if isinstance(error, CaptureError):
        error.guards = run.guards()


def trace_once(run: CaptureRun) -> CapturedProgram | None:
    """What `run` makes of the step, and afterwards nothing is watched; None as it has it."""
    try:
        return run.program()
    finally:
        run.record.put_back()
        run.numbers.env.stop_asking()
        for wire in run.wires.values():
            wire.forget()


def _check_repeats(run: CaptureRun, other: CaptureRun) -> None:
    """Raise CaptureError if `other`, the same step once more, writes again what `run` wrote.

    What it does not write again is a cache, or a value that the step always sets.
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
    """Note as guards of a program what its step has read, as it was before the step."""
    run.undo()
    program.guards = run.guards()
    for write in run.writes:
        write.redo()
    program.writes = run.writes
