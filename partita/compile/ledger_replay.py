"""Ledger replay: what ledgers, `strict()` and `check_ranks()` are told of a graph that runs.

They get the records that the same moves give in eager: each collective with its bytes, its reason
and the user's line. A graph's moves are known beforehand, so a run costs nothing without listeners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partita.comm import Record, Wire, user_line
from partita.comm.ledger import human
from partita.layout import Fix, LayoutError

from .captured_program import CapturedProgram
from .graph_nodes import Note, is_collective, note_of
from .program import Program

__all__ = ["announce_run", "list_sent_moves", "record_moves"]


def list_sent_moves(program: Program) -> list[Record]:
    """The records of moves that send, in the order in which they begin; one for each bucket."""
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
            # On some backends a move is several collectives.
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


def record_moves(program: Program) -> None:
    """Add the moves of a program, of a region those of its forward, to the ledgers.

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


def announce_run(program: CapturedProgram, title: str, tensors: Sequence[Any]) -> None:
    """Tell ledgers, `strict()` and `check_ranks()` of a program that is going to run.

    Args:
        title: how errors call the step.
        tensors: the leaves of the call.

    Raises:
        LayoutError: `strict()` forbids it, or ranks differ under `check_ranks()`.
    """
    assert program.scope is not None
    if program.scope.check is not None:
        for wire in program.wires:
            wire.check(f"compiled {title} runs {program.key[:16]} at {user_line()}")
        program.compare(tensors)
    record_moves(program.runs)
    _record_work(program)


def _record_work(program: CapturedProgram) -> None:
    """Add a program's matrix products to the ledgers, which count who repeats them."""
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
