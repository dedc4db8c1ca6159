"""How is a program made for a call, the same on all ranks: captured, rewritten, agreed on?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .capture import capture
from .explained import AsCaptured
from .graph import canonical
from .key import agree, digest_of, key_of, versions
from .notes import note_of
from .passes import Passes, in_order, run_passes
from .program import Program
from .region import region_of
from .sharing import Sharing
from .state import State, tensors_of_call
from .verify import verify

__all__ = ["make_program"]


def make_program(
    step: Callable[..., Any],
    args: Any,
    kwargs: Any,
    state: State,
    *,
    without: Iterable[str],
    passes: Passes,
    options: Iterable[str],
    budget: int | None = None,
) -> Program:
    """The program of the call `step(*args, **kwargs)`. Every rank calls this.

    Args:
        state: what the step reaches.
        options: what of how it is going to be compiled makes another program of it.
        budget: the most bytes that it may take above its inputs.

    Raises:
        CaptureError: it cannot be captured, on any rank.
        LayoutError: the ranks' programs differ.
    """
    slots = [*state.slots, *state.optimizer_slots()]
    tensors = tensors_of_call(slots, args, kwargs)
    wires = dict.fromkeys(t._spec.wire for t in tensors if hasattr(t, "_spec"))
    failed, lines, where, stages = None, [], [], []
    try:
        ran = list(in_order(passes, without))
        program = capture(step, args, kwargs, state)
        program.budget, program.without = budget, tuple(without)
        verify(program, "capture")
        captured, as_captured = digest_of(canonical(program)), AsCaptured(program)
        program.changes = run_passes(program, without, passes)
        program = region_of(program)
        program.sharing, program.captured = Sharing(program), as_captured
        if (error := program.sharing.refused(tensors)) is not None:
            raise error
        stages = [("capture", captured), *((c.name, c.digest) for c in program.changes)]
        lines = [*canonical(program), *versions(), *options, f"passes {ran}", f"budget {budget}"]
        where = [note_of(n).source for n in program.graph.graph.nodes]
    except Exception as error:  # the other ranks are waiting to compare
        failed, lines = error, [f"error: {error}"]
    for wire in wires:
        agree(lines, where, wire, stages)
    if failed is not None:
        raise failed
    program.key = key_of(lines)
    return program
