"""Moves: what one collective, or one local copy, does to a layout, and what undoes it in backward.

| kind           | on each of its axes | sends | its transpose                        |
|----------------|---------------------|-------|--------------------------------------|
| all_gather     | S -> R, S -> I      | yes   | reduce_scatter P -> S, slice I -> S  |
| reduce_scatter | P -> S              | yes   | all_gather S -> R                    |
| all_reduce     | P -> R, P -> I      | yes   | all_reduce P -> R, retype I -> R     |
| all_to_all     | S -> S'             | yes   | all_to_all S' -> S                   |
| slice          | R -> S, I -> S      | no    | place S -> P, all_gather S -> I      |
| place          | S -> P              | no    | slice R -> S                         |
| mask           | R -> P, I -> P      | no    | mask R -> P, retype R -> I           |
| retype         | R -> I, I -> R      | no    | mask I -> P, all_reduce P -> I       |

The last column is no second table: a transpose goes from the dual of where the move ends to the
dual of where it begins, and `KINDS` names what does that. The axes that split one dimension are a
stack, so that only the innermost ones can leave it and a new one comes innermost. A move over
several axes is one collective over all their ranks, whichever dimensions those split: each rank
puts the pieces in their places, or cuts them out, by itself.

A new kind is a line of `KINDS`; `cost` says what it sends, and `comm.move_steps` (for padded shards
`comm.trace`) what a rank does of it. Where it is a collective, transports learn that.
"""

from __future__ import annotations

from dataclasses import dataclass

from partita.layout import Layout, LayoutError, Mesh

KINDS = {
    "SR": "all_gather",
    "SI": "all_gather",
    "PS": "reduce_scatter",
    "PR": "all_reduce",
    "PI": "all_reduce",
    "SS": "all_to_all",
    "RS": "slice",
    "IS": "slice",
    "SP": "place",
    "RP": "mask",
    "IP": "mask",
    "RI": "retype",
    "IR": "retype",
}
"""What takes an axis from one placement (by its letter) to another."""

DUAL = {"S": "S", "R": "P", "P": "R", "I": "I"}
"""`Placement.dual()`, by letter."""

LETTERS = {"S": "S", "R": "R", "I": "I", "sum": "P", "max": "P", "min": "P"}
"""The letter of a placement, by what `find_changed_axes` calls it."""

COLLECTIVES = frozenset(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"))


@dataclass(frozen=True)
class Move:
    """One step from layout to layout: at most one collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice" (keep this rank's
            piece), "place" (this rank's piece among zeros), "mask" (the first rank of the axes
            keeps the value, the others hold zeros) or "retype" (nothing happens).
        axes: the mesh axes that change, outermost first where they split one dimension.
        before: the layout that the move takes.
        after: the layout that it gives: the same value.
        op: how shares are reduced: "sum", "max" or "min".
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    op: str = "sum"

    @property
    def sends(self) -> bool:
        """Do bytes leave a rank (where the axes have more than one)?"""
        return self.kind in COLLECTIVES

    @property
    def way(self) -> str:
        """The letters of the placements that its axes have before and after, such as "SR"."""
        axis = self.axes[0]
        start = placement_of_each_axis(self.before).get(axis, "R")
        end = placement_of_each_axis(self.after).get(axis, "R")
        return LETTERS[start] + LETTERS[end]

    def transpose(self, mesh: Mesh) -> Move:
        """The exact adjoint: takes the gradient of `after` and gives the gradient of `before`.

        Raises:
            LayoutError: a pending maximum or minimum has no gradient.
        """
        way = self.way
        kind = KINDS[DUAL[way[1]] + DUAL[way[0]]]
        before = _gradient_of_layout(self.after, mesh, self)
        after = _gradient_of_layout(self.before, mesh, self)
        return Move(kind, self.axes, before, after)

    def __str__(self) -> str:
        """`all_gather over dp tp: 8@(dp tp) 16 -> 8 16`."""
        op = f" ({self.op})" if self.op != "sum" else ""
        over = " ".join(self.axes)
        return f"{self.kind}{op} over {over}: {self.before.brief()} -> {self.after.brief()}"


def find_changed_axes(before: Layout, after: Layout) -> dict[str, tuple[str, str]]:
    """For each axis that must move, what it does before and after.

    That is "S", "R", "I" or a reduce op. An axis that stays a shard must move too where it is not
    in the common outer part of its dimension's two stacks.
    """
    start, end = placement_of_each_axis(before), placement_of_each_axis(after)
    out = {}
    for old, new in zip(before.shards, after.shards, strict=True):
        if old != new:
            same = count_common_axes(old, new)
            for axis in old[same:] + new[same:]:
                out[axis] = (start.get(axis, "R"), end.get(axis, "R"))
    for axis, here in start.items():
        there = end.get(axis, "R")
        if here != there:
            out[axis] = (here, there)
    for axis, there in end.items():
        if axis not in start:
            out[axis] = ("R", there)
    return out


def find_single_move(before: Layout, after: Layout, mesh: Mesh) -> Move | None:
    """The one move from `before` to `after`, if one does it: none is cheaper but by its padding."""
    moved = find_changed_axes(before, after)
    start, end = next(iter(moved.values()))
    way = f"{LETTERS[start]}{LETTERS[end]}"
    if way not in KINDS or any(pair != (start, end) for pair in moved.values()):
        return None
    if way[0] == "S" or way[1] == "S":
        dims = [(o, n) for o, n in zip(before.shards, after.shards, strict=True) if o != n]
        stacks = [old if way[0] == "S" else new for old, new in dims]
        axes = tuple(a for stack in stacks for a in stack if a in moved)
    else:
        axes = tuple(a for a in mesh.names if a in moved)
    op = start if way[0] == "P" else end if way[1] == "P" else "sum"
    return Move(KINDS[way], axes, before, after, op)


def count_common_axes(stack: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many axes, from the outermost, two stacks have in common."""
    same = 0
    while same < min(len(stack), len(other)) and stack[same] == other[same]:
        same += 1
    return same


def placement_of_each_axis(layout: Layout) -> dict[str, str]:
    """What each axis that it mentions does: "S", "I" or a reduce op."""
    out = dict(layout.partial)
    for stack in layout.shards:
        for axis in stack:
            out[axis] = "S"
    for axis in layout.invariant:
        out[axis] = "I"
    return out


def _gradient_of_layout(layout: Layout, mesh: Mesh, move: Move) -> Layout:
    for axis, op in layout.partial:
        if op != "sum":
            raise LayoutError(
                f"{move.kind} has no transpose: a pending {op} (on axis {axis}) has no gradient",
                operands=(str(move),),
                reason=f"which share holds the {op} is not known before the shares are reduced",
            )
    return layout.gradient(mesh)
