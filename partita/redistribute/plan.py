"""Redistribution plans: the cheapest sequence of moves from one layout to another.

A single move is tried first; nearly all redistributions need just one. Otherwise (or if uneven
shards would be padded so much that two moves send less) a uniform-cost search goes from layout to
layout, one legal move at a time. Four rules keep the search small, and make the moves independent
of the tensor's size:

- An axis that needs no change is not touched. It needs one if its placement changes, or if the axes
  that split its dimension before it change.
- An axis becomes Partial, or is sliced or scattered, only if that is its final placement.
- Partial becomes Shard by reduce-scatter, not by all-reduce and slice. Invariant does not become
  Shard by way of Replicate, which would be the same detour in backward.
- An axis becomes Invariant only if that is its final placement. The exception is a Partial axis
  that can then become Replicate together with an Invariant axis: one all-reduce in backward serves
  both.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, pairwise, product

from partita.layout import Layout, LayoutError, Mesh

from .move import (
    LETTERS,
    Move,
    bytes_sent,
    count_common_axes,
    find_single_move,
    local_numel,
    pads_heavily,
    placement_of_each_axis,
    price_of_move,
    seconds_both_ways,
)

_PLANS_KEPT = 4096
"""Plans in the cache; the least recently used goes first."""


@dataclass(frozen=True)
class Plan:
    """A redistribution as a sequence of moves, each with at most one collective. May be empty.

    Attributes:
        moves: the moves; each starts from the layout with which the previous move ends.
    """

    moves: tuple[Move, ...] = ()
    _transposes: dict[Mesh, Plan] = field(default_factory=dict, compare=False, repr=False)

    def transpose(self, mesh: Mesh) -> Plan:
        """Returns the gradient's redistribution: each move transposed, in reverse order. Cached.

        `mesh` is the mesh of the moves.

        Raises:
            LayoutError: a move reduces a max or a min, which has no gradient.
        """
        found = self._transposes.get(mesh)
        if found is None:
            found = Plan(tuple(move.transpose(mesh) for move in reversed(self.moves)))
            self._transposes[mesh] = found
        return found

    def nbytes(self, mesh: Mesh, itemsize: int) -> int:
        """Returns the bytes that the first rank of `mesh` sends in all moves.

        `itemsize` is the number of bytes per element.
        """
        return sum(bytes_sent(move, mesh, itemsize) for move in self.moves)

    def price(self, mesh: Mesh, itemsize: int = 4) -> float:
        """Returns an estimate of the seconds of all moves on `mesh`, in forward and in backward.

        `itemsize` is the number of bytes per element.
        """
        return sum(price_of_move(move, mesh, itemsize) for move in self.moves)

    def __str__(self) -> str:
        return "\n".join(map(str, self.moves)) or "nothing moves"


@lru_cache(maxsize=_PLANS_KEPT)
def plan(before: Layout, after: Layout, mesh: Mesh, itemsize: int = 4) -> Plan:
    """Returns the cheapest redistribution, forward and backward together. Cached.

    Args:
        before, after: layouts with one global shape, over axes of `mesh`. If `after` has no dtype,
            the moves have the dtype of `before`.
        itemsize: bytes per element.

    Raises:
        LayoutError: the shapes or dtypes differ; an axis is not on the mesh; an axis would have to
            become Partial with max or min; or a layout is Partial with two different reduce ops.
    """
    if before == after:
        return Plan()
    _check_layouts(before, after, mesh)
    if before.dtype != after.dtype:
        after = Layout(after.shape, after.shards, after.partial, after.invariant, before.dtype)
        if before == after:
            return Plan()
    move = find_single_move(before, after, mesh)
    if move is not None and not pads_heavily(move, mesh, itemsize):
        return Plan((move,))
    return Plan(_PlanSearch(before, after, mesh, itemsize).find_path())


def _check_layouts(before: Layout, after: Layout, mesh: Mesh) -> None:
    operands = (f"from {before}", f"to   {after}")
    if before.shape != after.shape:
        raise LayoutError(
            f"a redistribution keeps the shape, and {before.shape} is not {after.shape}",
            operands=operands,
        )
    if after.dtype and before.dtype != after.dtype:
        raise LayoutError(
            f"a redistribution keeps the dtype, and {before.dtype!r} is not {after.dtype!r}",
            operands=operands,
        )
    for layout in (before, after):
        layout.check_axes(mesh)
        if len({op for _, op in layout.partial}) > 1:
            raise LayoutError(
                f"two reduce ops are pending at once in {layout.brief()}",
                operands=operands,
                reason="a maximum of sums is not a sum of maxima, and a layout has no order",
            )
    for axis, op in after.partial:
        if op != "sum" and (axis, op) not in before.partial:
            raise LayoutError(
                f"no move makes a pending {op} on axis {axis} of {before.brief()}",
                operands=operands,
                reason=f"only an op makes a pending {op}; a redistribution makes only sums pending",
            )


Stacks = tuple[tuple[str, ...], ...]
State = tuple[Stacks, tuple[str, ...]]
"""The axes that split each dimension, and for each axis of the mesh "S", "R", "I" or its op."""


class _PlanSearch:
    """A uniform-cost search from `before` to `after` over useful moves."""

    def __init__(self, before: Layout, after: Layout, mesh: Mesh, itemsize: int):
        self.before, self.mesh, self.itemsize = before, mesh, itemsize
        self.start, self.goal = self._state_of_layout(before), self._state_of_layout(after)
        self.goal_of = dict(zip(mesh.names, self.goal[1], strict=True))
        self.sizes: dict[Stacks, int] = {}

    def find_path(self) -> tuple[Move, ...]:
        """Returns the moves of the cheapest path; of equally cheap ones, one with fewest moves."""
        cost_of = {self.start: 0.0}
        came: dict[State, State] = {}
        done: set[State] = set()
        # The count breaks ties in the order of discovery, which is the same on every rank.
        count = 0
        heap: list[tuple[float, int, int, State]] = [(0.0, 0, count, self.start)]
        while heap:
            cost, length, _, state = heapq.heappop(heap)
            if state == self.goal:
                break
            if state in done:
                continue
            done.add(state)
            for way, n, op, there in self._next_steps(state):
                have, got = self._nbytes_of_stacks(state[0]), self._nbytes_of_stacks(there[0])
                total = cost + seconds_both_ways(way, n, have, got, op)
                if there not in cost_of or total < cost_of[there]:
                    cost_of[there], came[there] = total, state
                    count += 1
                    heapq.heappush(heap, (total, length + 1, count, there))
        states = [self.goal]
        while states[-1] != self.start:
            states.append(came[states[-1]])
        layouts = [self._layout_of_state(s) for s in reversed(states)]
        moves = [find_single_move(a, b, self.mesh) for a, b in pairwise(layouts)]
        return tuple(move for move in moves if move is not None)

    def _next_steps(self, state: State) -> Iterator[tuple[str, int, str, State]]:
        """Yields `(letters before and after, ranks, op, next layout)` for each useful move."""
        stacks, places = state
        for place in dict.fromkeys(places):
            for free, base in self._find_movable_axes(state, place):
                targets = [
                    p for p in ("R", "I", "sum") if self._is_useful_target(place, p, free, state)
                ]
                ends = [(p, base) for p in targets]
                if place == "S" or all(self.goal_of[a] == "S" for a in free):
                    ends += [
                        ("S", new) for new in self._arrange_stacks(base, free) if new != stacks
                    ]
                n = math.prod(self.mesh.size(a) for a in free)
                for target, new in ends:
                    way = LETTERS[place] + LETTERS[target]
                    there = tuple(
                        target if a in free else p
                        for a, p in zip(self.mesh.names, places, strict=True)
                    )
                    yield way, n, place if way[0] == "P" else "sum", (new, there)

    def _is_useful_target(
        self, place: str, target: str, free: tuple[str, ...], state: State
    ) -> bool:
        places = state[1]
        goals = [self.goal_of[a] for a in free]
        if target == "sum":
            # A missing share can be zeros only in a sum.
            pure = "max" not in places and "min" not in places
            return place != "sum" and pure and all(goal == "sum" for goal in goals)
        if place == target:
            return False
        if place == "R":
            return all(goal == "I" for goal in goals)
        if target == "I" and "I" not in goals:
            waiting = (
                self.goal_of[a] for a, p in zip(self.mesh.names, places, strict=True) if p == "I"
            )
            return place != "S" and "S" not in goals and "R" in waiting
        return place == "S" or "S" not in goals

    def _find_movable_axes(
        self, state: State, place: str
    ) -> Iterator[tuple[tuple[str, ...], Stacks]]:
        """Yields axes with the placement `place` that may move together, and stacks without them.

        Axes that have their final placement are left out.
        """
        stacks, places = state
        if place != "S":
            here = [
                a
                for a, p in zip(self.mesh.names, places, strict=True)
                if p == place != self.goal_of[a]
            ]
            for length in range(1, len(here) + 1):
                for free in combinations(here, length):
                    yield free, stacks
            return
        cuts = [
            range(count_common_axes(stack, goal), len(stack) + 1)
            for stack, goal in zip(stacks, self.goal[0], strict=True)
        ]
        for cut in product(*cuts):
            free = tuple(a for stack, i in zip(stacks, cut, strict=True) for a in stack[i:])
            if free:
                yield free, tuple(stack[:i] for stack, i in zip(stacks, cut, strict=True))

    def _arrange_stacks(self, base: Stacks, free: tuple[str, ...]) -> Iterator[Stacks]:
        """Yields stacks (axes that split each dimension) with the axes `free` added.

        An axis is added in its final position, if the axes before it are there. The others are
        added behind one stack; each stack is tried.
        """
        stacks = []
        for stack, goal in zip(base, self.goal[0], strict=True):
            if count_common_axes(stack, goal) == len(stack):
                for axis in goal[len(stack) :]:
                    if axis not in free:
                        break
                    stack += (axis,)
            stacks.append(stack)
        left = tuple(a for a in free if not any(a in stack for stack in stacks))
        for dim in range(len(stacks)) if left else (0,):
            yield tuple(stack + left if d == dim else stack for d, stack in enumerate(stacks))

    def _nbytes_of_stacks(self, stacks: Stacks) -> int:
        if stacks not in self.sizes:
            numel = local_numel(self.before.shape, stacks, self.mesh)
            self.sizes[stacks] = numel * self.itemsize
        return self.sizes[stacks]

    def _state_of_layout(self, layout: Layout) -> State:
        place = placement_of_each_axis(layout)
        return layout.shards, tuple(place.get(a, "R") for a in self.mesh.names)

    def _layout_of_state(self, state: State) -> Layout:
        placed = list(zip(self.mesh.names, state[1], strict=True))
        partial = tuple((a, p) for a, p in placed if LETTERS[p] == "P")
        invariant = tuple(a for a, p in placed if p == "I")
        return Layout(self.before.shape, state[0], partial, invariant, self.before.dtype)
