"""Cancellation of moves: a move followed by its inverse is replaced by its source."""

from __future__ import annotations

from torch import fx

from ..capture.functional_memory import lie_alike
from ..graph_nodes import note_of
from ..program import Program

# An all-gather of which each rank then slices its own piece, and the like. No reduction is undone:
# the sum is not what went in.
_UNDONE_BY = {("all_gather", "slice"), ("all_to_all", "all_to_all")}


def cancel(program: Program) -> str:
    """A move that is followed by its inverse is not made.

    They are found by their layouts: the second takes what the first gives and gives what the
    first took. The first move stays where others read its result.
    """
    parts: dict[int, list[fx.Node]] = {}
    for node in program.graph.graph.nodes:
        if note_of(node).move and node.op == "call_function":
            parts.setdefault(note_of(node).move, []).append(node)
    cancelled = 0
    for move, nodes in parts.items():
        note = note_of(nodes[0])
        taken = _find_move_input(nodes)
        if taken is None:
            continue
        before = note_of(taken)
        first = parts.get(before.move, [])
        if before.move == move or (before.kind, note.kind) not in _UNDONE_BY:
            continue
        source = _find_move_input(first)
        if source is None or (before.before, before.after) != (note.after, note.before):
            continue
        end = nodes[-1]
        if lie_alike(source.meta["val"], end.meta["val"]):
            end.replace_all_uses_with(source)
            cancelled += 1
    return f"{cancelled} pairs of moves cancelled"


def _find_move_input(nodes: list[fx.Node]) -> fx.Node | None:
    """The one tensor that a move takes (what its nodes read and do not make), or None."""
    outside = {a for n in nodes for a in n.all_input_nodes if a not in nodes}
    outside = {a for a in outside if a.meta.get("val") is None or a.meta["val"].ndim}
    return outside.pop() if len(outside) == 1 else None
