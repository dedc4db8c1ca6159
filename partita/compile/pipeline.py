"""The pipeline: makes the program for a call, which is the same on all ranks.

The pipeline captures the step, runs the passes, splits a region, and computes the key. Ranks
compare keys before anything is compiled. If one rank fails, the comparison fails on the others, so
that they raise too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from partita.capture.conditions import OverlapCheck
from partita.comm import Wire
from partita.graph.errors import CaptureError, make_budget_too_small_error
from partita.graph.graph_nodes import note_of
from partita.graph.graph_text import (
    agree_on_program,
    canonical_lines,
    digest_lines,
    make_key,
    version_lines,
)
from partita.graph.memory import peak_of, scheduled
from partita.graph.passes import order_passes
from partita.graph.program import StepOptions
from partita.graph.step_forms import CapturedForms, FormSearch
from partita.graph.step_report import changes_of
from partita.graph.subgraphs import inline_subgraphs
from partita.graph.verify import verifies_each_pass, verify
from partita.guards.capture_run import CaptureRequest, capture_step
from partita.guards.captured_program import CapturedProgram
from partita.guards.inputs import tensors_of_call

from .collector import collector_paused
from .region import region_of


def make_program(request: CaptureRequest, options: StepOptions) -> CapturedProgram:
    """Captures a step and returns the program for this call. All ranks must call it.

    Args:
        request: the step, the arguments of the call, and what is known about it.
        options: the options of `pt.compile`.

    Raises:
        CaptureError: the step cannot be captured on some rank.
        LayoutError: the ranks' programs differ.
    """
    state = request.state
    slots = [*state.slots, *state.optimizer_slots()]
    tensors = tensors_of_call(slots, request.args, request.kwargs)

    def capture_forms() -> FormSearch:
        program = capture_step(request)
        program.options = options
        if verifies_each_pass():
            verify(program, "capture")
        if program.replicated_inputs is not None:  # another graph, small
            inline_subgraphs(program.replicated_inputs.precompute.graph.graph)
        if program.numeric_answers is not None:
            inline_subgraphs(program.numeric_answers.graph.graph)
        return FormSearch(CapturedForms(program))

    wires = dict.fromkeys(t._spec.wire for t in tensors if hasattr(t, "_spec"))
    with collector_paused():
        return _finish_program(capture_forms, options.budget, tensors, wires, options)


def compile_within_budget(
    program: CapturedProgram, prepare: Callable[[CapturedProgram], None], tensors: Sequence[Any]
) -> CapturedProgram:
    """Compiles a program. If it needs more memory than its budget, changes it until it fits.

    All ranks must call it. Compiled code may take more memory than the graph: a fused kernel has
    the results of all of its calls at once. A changed program recomputes more.

    Args:
        prepare: a function that compiles a program.
        tensors: the leaves (tensors and numbers) of the call for which the program was made.

    Returns:
        The compiled program.

    Raises:
        CaptureError: the budget is too small; the error names the smallest budget that suffices.
    """
    budget, search, least = program.options.budget, program.budget_search, None
    assert search is not None
    while True:
        prepare(program)
        taken = 0 if budget is None else _find_peak_bytes(program)
        if budget is None or taken <= budget:
            program.budget_search = None  # its reference keeps the next form alive
            return program
        least = taken if least is None else min(least, taken)
        less = peak_of(program) - 1
        try:
            wires = program.wires
            program = _finish_program(lambda: search, less, tensors, wires, program.options)
        except CaptureError:
            raise make_budget_too_small_error(budget, least) from None


def _find_peak_bytes(program: CapturedProgram) -> int:
    """Returns the highest peak of all ranks when a program runs (for a region: of its graph)."""
    taken = peak_of(program) if program.built is None else scheduled(program).peak
    for wire in program.wires:
        taken = max(n for (n,) in wire.gather_ints((taken,), "peaks of memory"))
    return taken


def _finish_program(
    forms: Callable[[], FormSearch],
    limit: int | None,
    tensors: Sequence[Any],
    wires: Iterable[Wire],
    options: StepOptions,
) -> CapturedProgram:
    """Returns the first form of a step whose predicted peak is at most `limit` bytes.

    It is complete: passes and split have run, and ranks have agreed on its key.
    """
    failed, lines, where, captured = None, [], [], None
    try:
        ran = order_passes(options)
        search = forms()
        captured = search.captured
        rewritten = search.first_within(limit)
        assert isinstance(rewritten, CapturedProgram)
        program = region_of(rewritten)
        program.overlap_check, program.captured, program.budget_search = (
            OverlapCheck(program),
            captured,
            search,
        )
        if (error := program.overlap_check.find_error(tensors)) is not None:
            raise error
        lines = [*canonical_lines(program), *version_lines(), *options.key_lines(ran)]
        where = [note_of(n).source for n in program.graph.graph.nodes]
    except Exception as error:  # the other ranks are waiting to compare
        failed, lines = error, [f"error: {error}"]
    for wire in wires:
        agree_on_program(lines, where, wire, lambda: _digest_stages(captured))
    if failed is not None:
        raise failed
    program.key = make_key(lines)
    return program


def _digest_stages(captured: CapturedForms | None) -> list[tuple[str, int]]:
    """Returns (name, digest of the program) after capture and after each pass that runs.

    A pass that raises an error is the end of the list.
    """
    if captured is None:
        return []
    found = [("capture", digest_lines(canonical_lines(captured.inlined())))]
    # Other ranks wait for the digests, and the caller raises the error.
    with suppress(Exception):
        for change in changes_of(captured):
            found.append((change.name, change.digest))
    return found
