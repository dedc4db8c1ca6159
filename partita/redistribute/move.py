"""Moves: the steps of a redistribution, what each does to a layout, and what it costs.

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

S is Shard, R Replicate, P Partial, I Invariant. The transpose is the move of the gradient in
backward. It follows from the placements: it goes from the dual of the placement after the move to
the dual of the placement before it. Each pair of placements has one kind; CONTRIBUTING.md says how
to add one.

If several axes split one dimension, only the innermost can stop doing so, and a new one becomes the
innermost. A move over several axes is one collective over all their ranks, even if they split
different dimensions.

Bytes are counted for ring algorithms (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective
Communication Operations in MPICH", section 4), over a group of n ranks:

    all_gather      (n - 1) x shard = (n - 1)/n x whole
    reduce_scatter  (n - 1)/n x whole
    all_reduce      2 (n - 1)/n x whole
    all_to_all      (n - 1)/n x what the rank holds

All sizes are those on the mesh's first rank, which holds the largest shard of an uneven split.

Seconds only serve to compare plans. A collective takes `LATENCY` plus its bytes divided by
`BANDWIDTH`. An all-to-all sends to `AT_ONCE` ranks at a time, and takes `LATENCY` for each such
group. A local copy takes `LAUNCH` plus its bytes divided by `MEMORY`. The constants are round
figures for a node of GPUs.

They need not fit the machine. A choice depends only on the product of latency and bandwidth, about
1 MB. Below it the number of collectives counts, above it the bytes. On a slower machine both are
usually worse, so their product changes little. `OPERATIONS_PER_BYTE` is such a constant, too: the
operations of a matrix product, divided by it, count like bytes sent.
"""

from __future__ import annotations

import math
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
"""The kind of move from one placement to another, by their letters."""

DUAL = {"S": "S", "R": "P", "P": "R", "I": "I"}
"""Maps the letter of a placement to the letter of its dual (`Placement.dual`)."""

LETTERS = {"S": "S", "R": "R", "I": "I", "sum": "P", "max": "P", "min": "P"}
"""Maps the name of a placement in `find_changed_axes` to its letter."""

COLLECTIVES = frozenset(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"))


@dataclass(frozen=True)
class Move:
    """One step of a redistribution, from one layout to another: at most one collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all", which are collectives.
            "slice": keep this rank's piece. "place": put this rank's piece into a tensor of zeros.
            "mask": the first rank of the axes keeps the value, the others get zeros. "retype": only
            the layout changes.
        axes: the mesh axes whose placement changes. Axes that split one dimension are in order,
            outermost first.
        before: the layout of the input.
        after: the layout of the result, which has the same global value.
        op: how Partial values are reduced: "sum", "max" or "min".
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    op: str = "sum"

    @property
    def sends(self) -> bool:
        """True if a move of this kind communicates, when its axes have more than one rank."""
        return self.kind in COLLECTIVES

    @property
    def way(self) -> str:
        """The placements of the moved axes before and after, as letters: "SR" is an all-gather."""
        axis = self.axes[0]
        start = placement_of_each_axis(self.before).get(axis, "R")
        end = placement_of_each_axis(self.after).get(axis, "R")
        return LETTERS[start] + LETTERS[end]

    def transpose(self, mesh: Mesh) -> Move:
        """Returns the move of the gradient in backward, on the same `mesh`.

        It leads from the gradient's layout for `after` to the gradient's layout for `before`.

        Raises:
            LayoutError: a Partial max or min has no gradient.
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
    """Returns the axes whose placement changes in a redistribution.

    A Shard also counts as changed if the axis then splits another dimension. So it does if the list
    of axes that split its dimension changes at this axis or before it.

    Returns:
        `{axis: (placement before, placement after)}`, with placements "S", "R", "I" or a reduce op.
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
    """Returns the move on `mesh` that leads from `before` to `after`; None if it takes several."""
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
    """Returns how many axes are equal at the beginning of two tuples of axes."""
    same = 0
    while same < min(len(stack), len(other)) and stack[same] == other[same]:
        same += 1
    return same


def placement_of_each_axis(layout: Layout) -> dict[str, str]:
    """Returns the placement of each axis in `layout`: "S", "I" or a reduce op.

    Replicate axes are left out.
    """
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


# -- costs -----------------------------------------------------------------------------------------

LATENCY = 20e-6
"""Seconds to start a collective."""
AT_ONCE = 32
"""The number of messages that a rank of an all-to-all sends together; the others wait.

Communication libraries have a few dozen channels for the messages of a rank.
"""
BANDWIDTH = 50e9
"""Bytes per second that one rank sends."""
LAUNCH = 2e-6
"""Seconds to start a local copy."""
MEMORY = 1e12
"""Bytes per second that a local copy reads or writes."""
OPERATIONS_PER_BYTE = 1000
"""Multiplications and additions that a rank makes while it sends a byte.

The figures are from data sheets, in bfloat16; good kernels reach half of the operations. Within a
node it is 1,100 for an H100 (990e12 operations a second, 450e9 bytes a second by NVLink) and 520
for an A100 (312e12, 300e9). Between nodes (50e9 bytes) it is 10,000, so more work can be repeated
before it costs more than a gather. For CPUs of one machine (50e9 operations, 1e9 bytes) it is 50.
"""
RETYPE = 1e-7
"""Seconds of a retype, which does nothing: above 0, so that of two paths the shorter wins."""


def bytes_sent(move: Move, mesh: Mesh, itemsize: int) -> int:
    """Returns the bytes that the first rank sends in a move, with `itemsize` bytes per element."""
    n = math.prod(mesh.size(a) for a in move.axes)
    have = local_numel(move.before.shape, move.before.shards, mesh) * itemsize
    return bytes_of(move.kind, n, have)


def bytes_of(kind: str, n: int, have: int) -> int:
    """Returns the bytes that each of `n` ranks sends in a collective.

    Args:
        kind: the kind of the collective, such as "all_gather".
        have: the bytes that each rank holds before the collective.
    """
    return int(_ring_bytes_sent(kind, n, have))


def seconds_of(nbytes: int) -> float:
    """Returns an estimate of the seconds of a collective in which each rank sends `nbytes`.

    The collective of its gradient is not included.
    """
    return LATENCY + nbytes / BANDWIDTH


def seconds_of_work(operations: float) -> float:
    """Returns an estimate of the seconds of a matrix product on a rank, forward and backward.

    Args:
        operations: multiplications and additions of the forward. Backward has twice as many.
    """
    return 3 * operations / (OPERATIONS_PER_BYTE * BANDWIDTH)


def price_of_move(move: Move, mesh: Mesh, itemsize: int) -> float:
    """Returns an estimate of the seconds of a move on `mesh`, and of its transpose in backward.

    `itemsize` is the number of bytes per element.
    """
    return seconds_both_ways(move.way, *_sizes_of(move, mesh, itemsize), move.op)


def pads_heavily(move: Move, mesh: Mesh, itemsize: int) -> bool:
    """True if a move sends so much padding of uneven shards that several moves might be faster.

    Uneven shards are padded to the size of the largest. Several moves pay off only if the padding
    costs more than the latency of one more collective. `itemsize` is the number of bytes per
    element.
    """
    way = move.way
    kinds = KINDS[way], KINDS[DUAL[way[1]] + DUAL[way[0]]]
    if "all_gather" not in kinds and "reduce_scatter" not in kinds:
        return False
    n, have, got = _sizes_of(move, mesh, itemsize)
    return n * min(have, got) - max(have, got) > LATENCY * BANDWIDTH


def _sizes_of(move: Move, mesh: Mesh, itemsize: int) -> tuple[int, int, int]:
    """Returns a move's number of ranks, and the first rank's bytes before and after it."""
    have, got = (local_numel(m.shape, m.shards, mesh) * itemsize for m in (move.before, move.after))
    return math.prod(mesh.size(a) for a in move.axes), have, got


def local_numel(shape: tuple[int, ...], shards: tuple[tuple[str, ...], ...], mesh: Mesh) -> int:
    """Returns the number of elements in the largest local tensor, which the first rank holds.

    Args:
        shape: the global shape.
        shards: for each dimension the axes that split it.
        mesh: the mesh of the axes.
    """
    numel = 1
    for size, stack in zip(shape, shards, strict=True):
        for axis in stack:
            size = -(-size // mesh.size(axis))
        numel *= size
    return numel


def seconds_both_ways(way: str, n: int, have: float, got: float, op: str = "sum") -> float:
    """Returns an estimate of the seconds of a move in forward, plus its transpose in backward.

    Args:
        way: the letters of the placements before and after, such as "SR".
        n: the number of ranks along all its axes together.
        have: bytes that a rank holds before.
        got: bytes that a rank holds after.
        op: how Partial values are reduced; "max" and "min" have no backward.
    """
    cost = _seconds_one_way(KINDS[way], n, have, got)
    if op == "sum":
        # A gradient has the local shape of its value, so in backward the two sizes are exchanged.
        cost += _seconds_one_way(KINDS[DUAL[way[1]] + DUAL[way[0]]], n, got, have)
    return cost


def estimate_price(before: Layout, after: Layout, mesh: Mesh, itemsize: int = 4) -> float:
    """Returns an estimate of the seconds of a redistribution from `before` to `after` on `mesh`.

    Forward and backward are included. The redistribution is not planned. The estimate equals the
    price of the plan if one move is enough. Otherwise axes with the same change count as one move,
    and moves with small results come first. The order in which axes can really change is ignored.

    Args:
        itemsize: bytes per element.
    """
    moved = find_changed_axes(before, after)
    if not moved:
        return 0.0
    groups: dict[str, int] = {}
    for axis, (start, end) in moved.items():
        way = LETTERS[start] + LETTERS[end]
        groups[way] = groups.get(way, 1) * mesh.size(axis)
    op = before.partial[0][1] if before.partial else "sum"
    have: float = local_numel(before.shape, before.shards, mesh) * itemsize
    last: float = local_numel(after.shape, after.shards, mesh) * itemsize
    total = 0.0
    for way in _SMALLER_FIRST:
        if way in groups:
            n = groups.pop(way)
            got = have
            if not groups:
                got = last
            elif way[0] != way[1]:
                got = have / n if way[1] == "S" else have * n if way[0] == "S" else have
            if way == "PP":  # from one reduce op to another
                total += seconds_both_ways("PR", n, have, got, op) + seconds_both_ways(
                    "RP", n, have, got
                )
            else:
                total += seconds_both_ways(way, n, have, got, op if way[0] == "P" else "sum")
            have = got
    return total


def _ring_bytes_sent(kind: str, n: int, have: float) -> float:
    if kind not in COLLECTIVES or n == 1:
        return 0
    if kind == "all_gather":
        return (n - 1) * have
    times = 2 if kind == "all_reduce" else 1
    return times * (n - 1) * have / n


def _seconds_one_way(kind: str, n: int, have: float, got: float) -> float:
    if kind == "retype":
        return RETYPE
    if kind in COLLECTIVES and n > 1:
        return _seconds_to_start(kind, n) + _ring_bytes_sent(kind, n, have) / BANDWIDTH
    return LAUNCH + max(have, got) / MEMORY


def _seconds_to_start(kind: str, n: int) -> float:
    """Returns the latency of a collective. An all-to-all of many ranks has many small messages."""
    return LATENCY * math.ceil((n - 1) / AT_ONCE) if kind == "all_to_all" else LATENCY


_SMALLER_FIRST = "RS IS PS SS PR PI PP IR RI SR SI SP RP IP".split()
