"""Ledger replay: what do ledgers, `strict()` and `check_ranks()` learn of a graph that runs?

What they would of the same moves made eagerly: each collective with its bytes, its reason and the
user's line. A graph's are known beforehand, so a run costs nothing where nobody listens.
"""

from __future__ import annotations

from typing import Any

from partita.comm import Record, Wire
from partita.comm.ledger import human
from partita.layout import Fix, LayoutError

from .captured_program import CapturedProgram
from .graph import is_collective
from .node_metadata import Note, note_of
from .program import Program

__all__ = ["list_sent_moves", "tell", "tell_work"]


def list_sent_moves(program: Program) -> list[Record]:
    """The moves that send, in the order in which they begin. A bucket is one."""
    found: dict[Any, Record] = {}
    for i, border in program.entering.items():
        given = program.inputs[i]
        for axes, nbytes in border.moves(given.tensor.element_size()):
            found[given, axes] = Record(
                *("all_gather", axes, nbytes, given.name, "", "padding", border.wire.rank)
            )
    for node in program.graph.graph.nodes:
        if is_collective(node):
            note = note_of(node)
            wire, axes = program.groups[str(node.args[-1])]
            # What is done by several collectives on some backend is one move.
            found.setdefault(
                (note.move, note.phase, note.reason) if note.move else id(note),
                _record_of_note(note, wire, axes),
            )
    return [*found.values()]


def _record_of_note(note: Note, wire: Wire, axes: tuple[str, ...]) -> Record:
    return Record(
        note.kind or "collective",
        note.axes or axes,
        note.nbytes,
        note.op,
        note.source,
        note.reason,
        wire.rank,
        note.before,
        note.after,
    )


def tell(program: Program) -> None:
    """Note what a program is going to carry; of a region, what its forward is.

    Raises:
        LayoutError: it makes an implicit move, and `strict()` forbids it.
    """
    halves = getattr(program, "halves", None)
    program = program if halves is None else halves.forward
    scope = program.scope
    if scope is None or not scope.busy:
        return
    if program.carried is None:
        program.carried = list_sent_moves(program)
    if scope.strict:
        for move in program.carried:
            if move.reason == "implicit":
                raise _make_strict_error(move)
    for log in scope.ledgers:
        log.moves += program.carried


def tell_work(program: CapturedProgram) -> None:
    """Tell the ledgers which matrix products a program is going to do, and who repeats them."""
    assert program.scope is not None
    for log in program.scope.ledgers:
        for op, source, axes, operations in program.work:
            log.note_work(program.wires[0].rank, op, source, axes, operations)


def _make_strict_error(move: Record) -> LayoutError:
    return LayoutError(
        f"{move.op} needs an implicit {move.kind} over {' '.join(move.axes)}, and strict() "
        "forbids it",
        place=move.source,
        operands=(f"{move.before}  would become  {move.after}",) if move.before else (),
        reason="under strict() only what the program asks for is sent, by a graph too",
        fixes=(
            Fix(f"redistribute before {move.op}", f"{move.kind} {human(move.nbytes)}"),
            Fix("leave strict() around the step"),
        ),
    )
