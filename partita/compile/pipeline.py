"""How is a program made for a call, the same on all ranks: captured, rewritten, agreed on?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from partita.comm import Wire

from .capture.answers import Guesses
from .capture.block_choice import BlockChoice
from .capture.capture import capture
from .capture.state import State, tensors_of_call
from .captured_program import CapturedProgram
from .errors import CaptureError, cannot_be_kept
from .graph import canonical
from .key import agree, digest_of, key_of, versions
from .memory.storages import memory_of, scheduled
from .node_metadata import note_of
from .pass_report import AsCaptured, changes_of
from .passes import Passes, in_order, run_passes
from .phases import begin_phase
from .region import region_of
from .sharing import Sharing
from .verify import verifies_each_pass, verify

__all__ = ["kept_within", "make_program"]


def make_program(
    step: Callable[..., Any],
    args: Any,
    kwargs: Any,
    state: State,
    guesses: Guesses,
    *,
    without: Iterable[str],
    passes: Passes,
    options: Iterable[str],
    budget: int | None = None,
    blocks: BlockChoice,
    counts_apart: bool = False,
) -> CapturedProgram:
    """The program of the call `step(*args, **kwargs)`. Every rank calls this.

    Args:
        state: what the step reaches.
        guesses: answers to what torch asks of values in it.
        options: what of how it is going to be compiled makes another program of it.
        budget: the most bytes that it may take above its inputs.
        blocks: which modules are traced once for all that are built alike.
        counts_apart: what optimizers count is not taken for equal where it is.

    Raises:
        CaptureError: it cannot be captured, on any rank.
        LayoutError: the ranks' programs differ.
    """
    begin_phase("capture")
    slots = [*state.slots, *state.optimizer_slots()]
    tensors = tensors_of_call(slots, args, kwargs)

    def capture_program() -> CapturedProgram:
        program = capture(step, args, kwargs, state, guesses, blocks, counts_apart)
        program.budget, program.without, program.passes = budget, tuple(without), passes
        if verifies_each_pass():
            verify(program, "capture")
        program.captured = AsCaptured(program)
        return program

    wires = dict.fromkeys(t._spec.wire for t in tensors if hasattr(t, "_spec"))
    said = (*options, f"budget {budget}")
    with _collector_paused():
        return _finish_program(capture_program, tensors, wires, without, passes, said)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Within, Python does not look for cycles.

    A graph grows by thousands of nodes that are all alive. The more there are, the longer each look
    at all of them takes: it would be a third of a first step, and more the deeper the model is.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            _take_for_old()
            gc.enable()


def _take_for_old() -> None:
    """Have Python take all that is there for old, which it is: else the next thing that is made
    would have it look at each node three times, once for each generation."""
    if not gc.get_freeze_count():  # else somebody has frozen what is his
        gc.freeze()
        gc.unfreeze()


def kept_within(
    program: CapturedProgram,
    prepare: Callable[[CapturedProgram], None],
    tensors: Sequence[Any],
    *,
    without: Iterable[str],
    passes: Passes,
    options: Iterable[str],
) -> CapturedProgram:
    """A program that is ready to run and takes no more than its budget. Every rank calls this.

    That is `program`, unless what is compiled of it takes more than its graph would: a kernel that
    does the work of many calls has what all of them make there at once. Then more is made again.

    Args:
        prepare: has what runs a program.
        tensors: those of the call for which it was made.
        without, passes, options: as for `make_program`.

    Raises:
        CaptureError: a budget that cannot be kept; it tells the least that can.
    """
    budget, given, least = program.budget, program.captured, None
    while True:
        prepare(program)
        if budget is None:
            return program
        taken = _find_peak_bytes(program)
        if taken <= budget:
            return program
        least = taken if least is None else min(least, taken)
        less = memory_of(program).peak - 1

        def rebuild_with_budget(less: int = less) -> CapturedProgram:
            assert given is not None
            tighter = given.program()
            tighter.budget, tighter.captured = less, given
            return tighter

        try:
            said = (*options, f"budget {budget}")
            program = _finish_program(
                rebuild_with_budget, tensors, program.wires, without, passes, said
            )
        except CaptureError:
            raise cannot_be_kept(budget, least) from None
        program.budget = budget


def _find_peak_bytes(program: CapturedProgram) -> int:
    """Bytes that compiled code takes at most, on any rank; of what runs otherwise 0."""
    if program.built is None:
        return 0
    taken = scheduled(program).peak
    for wire in program.wires:
        taken = max(n for (n,) in wire.gather_ints((taken,)))
    return taken


def _finish_program(
    make: Callable[[], CapturedProgram],
    tensors: Sequence[Any],
    wires: Iterable[Wire],
    without: Iterable[str],
    passes: Passes,
    said: Sequence[str],
) -> CapturedProgram:
    """What `make` has captured, rewritten by the passes, and agreed on."""
    failed, lines, where, as_captured = None, [], [], None
    try:
        ran = list(in_order(passes, without))
        program = make()
        as_captured = program.captured
        run_passes(program, without, passes)
        program = region_of(program)
        program.sharing, program.captured = Sharing(program), as_captured
        if (error := program.sharing.find_error(tensors)) is not None:
            raise error
        lines = [*canonical(program), *versions(), *said[:-1], f"passes {ran}", said[-1]]
        where = [note_of(n).source for n in program.graph.graph.nodes]
    except Exception as error:  # the other ranks are waiting to compare
        failed, lines = error, [f"error: {error}"]
    for wire in wires:
        agree(lines, where, wire, lambda: _digest_stages(as_captured, without, passes))
    if failed is not None:
        raise failed
    program.key = key_of(lines)
    return program


def _digest_stages(
    captured: AsCaptured[CapturedProgram] | None, without: Iterable[str], passes: Passes
) -> list[tuple[str, int]]:
    """Capture and each pass, with a digest of what each makes; as far as one comes."""
    if captured is None:
        return []
    found = [("capture", digest_of(canonical(captured.program())))]
    with suppress(Exception):  # the other ranks are waiting, and it was raised before
        found += [(c.name, c.digest) for c in changes_of(captured, without, passes)]
    return found
