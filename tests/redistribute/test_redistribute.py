"""Does every plan keep the value, and is its transpose the exact adjoint?

A few lines of numpy stand for all ranks at once and carry each move out from its definition,
knowing nothing of how plans are found. Integers make equality exact.

Every pair of layouts of one to three dimensions on two axes is tried. On three axes there are too
many: a fixed sample, unless PARTITA_ALL_PAIRS=1 (minutes).
"""

from __future__ import annotations

import os
from functools import lru_cache
from itertools import pairwise, permutations, product

import numpy as np
import pytest

from partita.layout import Coordinate, Layout, LayoutError, Mesh
from partita.redistribute import Move, Plan, plan

ALL = os.environ.get("PARTITA_ALL_PAIRS") == "1"

M22 = Mesh(("a", "b"), (2, 2))
M23 = Mesh(("a", "b"), (2, 3))
M222 = Mesh(("a", "b", "c"), (2, 2, 2))

Locals = dict[Coordinate, np.ndarray]

# -- all ranks at once ----------------------------------------------------------------------------

REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def slices(region, outer=None):
    outer = outer or [(0, 0)] * len(region)
    return tuple(slice(s - o, s - o + n) for (s, n), (o, _) in zip(region, outer, strict=True))


def spread(x: np.ndarray, layout: Layout, mesh: Mesh, rng: np.random.Generator) -> Locals:
    """What each rank holds of the value `x`; shares are lopsided and some are negative."""
    pending = {mesh.index(a): op for a, op in layout.partial}
    shares: dict[Coordinate, np.ndarray] = {}
    places = list(product(*(range(mesh.sizes[i]) for i in pending)))
    op = next(iter(pending.values()), "sum")
    holder = places[int(rng.integers(len(places)))]
    for place in places:
        noise = rng.integers(-50, 50, x.shape)
        if op == "sum":
            shares[place] = noise
        else:
            shares[place] = x - abs(noise) if op == "max" else x + abs(noise)
    if op == "sum":
        shares[holder] = x - sum(s for p, s in shares.items() if p != holder)
    else:
        shares[holder] = x.copy()
    return {
        at: shares[tuple(at[i] for i in pending)][slices(layout.local_region(mesh, at))].copy()
        for at in mesh.coordinates()
    }


def value(parts: Locals, layout: Layout, mesh: Mesh) -> np.ndarray:
    """The one value that the ranks hold together; fails where copies differ or a hole is left."""
    pending = dict(layout.partial)
    op = REDUCE[next(iter(pending.values()), "sum")]
    whole: dict[Coordinate, np.ndarray] = {}
    for at in mesh.coordinates():
        assert parts[at].shape == layout.local_shape(mesh, at)
        copy = tuple(
            at[i] if not layout.placement(a).is_shard() and a not in pending else 0
            for i, a in enumerate(mesh.names)
        )
        if any(at[mesh.index(a)] for a in pending):
            continue
        total = parts[at]
        for other in mesh.group(tuple(pending), at):
            if other != at:
                total = op(total, parts[other])
        if copy not in whole:
            whole[copy] = np.full(layout.shape, 10**9)
        region = whole[copy][slices(layout.local_region(mesh, at))]
        assert (region == 10**9).all(), "two ranks hold the same element"
        region[...] = total
    first = next(iter(whole.values()))
    assert all((w == first).all() for w in whole.values()), "copies differ"
    assert (first != 10**9).all(), "nobody holds some element"
    return first


def carry(move: Move, x: Locals, mesh: Mesh) -> Locals:
    """One move on all ranks, from the definition of its kind."""
    before = {at: move.before.local_region(mesh, at) for at in x}
    after = {at: move.after.local_region(mesh, at) for at in x}
    out: Locals = {}
    for at in x:
        group = mesh.group(move.axes, at)
        shape = tuple(n for _, n in after[at])
        if move.kind in ("all_gather", "all_to_all"):
            result, filled = np.zeros(shape, int), np.zeros(shape, int)
            for other in group:
                both = [
                    (max(i, j), max(0, min(i + n, j + m) - max(i, j)))
                    for (i, n), (j, m) in zip(after[at], before[other], strict=True)
                ]
                if all(n for _, n in both):
                    result[slices(both, after[at])] = x[other][slices(both, before[other])]
                    filled[slices(both, after[at])] += 1
            assert (filled == 1).all(), f"{move}: the group does not hold just what is asked"
        elif move.kind in ("all_reduce", "reduce_scatter"):
            whole = x[group[0]]
            for other in group[1:]:
                whole = REDUCE[move.op](whole, x[other])
            result = whole[slices(after[at], before[at])]
        elif move.kind == "slice":
            result = x[at][slices(after[at], before[at])]
        elif move.kind == "place":
            result = np.zeros(shape, int)
            result[slices(before[at], after[at])] = x[at]
        elif move.kind == "mask":
            result = x[at] if at == group[0] else 0 * x[at]
        else:
            assert move.kind == "retype"
            result = x[at]
        assert result.shape == shape, f"{move}: {result.shape} for {shape}"
        out[at] = result.copy()
    return out


def follow(path: Plan, x: Locals, mesh: Mesh) -> Locals:
    for move in path.moves:
        x = carry(move, x, mesh)
    return x


def pairing(x: Locals, y: Locals, layout: Layout, mesh: Mesh) -> int:
    """<x, y> over all ranks, y the gradient of x; what is Invariant is counted once."""
    once = [mesh.index(a) for a in layout.invariant]
    return sum(int((x[at] * y[at]).sum()) for at in x if not any(at[i] for i in once))


def legal(move: Move, mesh: Mesh) -> bool:
    """Do just its axes change, all in one way, and are they innermost wherever they are shards?"""

    def without(layout):
        shards = tuple(tuple(a for a in s if a not in move.axes) for s in layout.shards)
        partial = tuple(p for p in layout.partial if p[0] not in move.axes)
        invariant = tuple(a for a in layout.invariant if a not in move.axes)
        return shards, partial, invariant

    def innermost(layout):
        return all(b in move.axes for s in layout.shards for a, b in pairwise(s) if a in move.axes)

    def letters(layout):
        return {str(layout.placement(a))[0] for a in move.axes}

    return (
        without(move.before) == without(move.after)
        and innermost(move.before)
        and innermost(move.after)
        and len(letters(move.before)) == len(letters(move.after)) == 1
    )


# -- which layouts there are ----------------------------------------------------------------------


@lru_cache
def layouts(shape: tuple[int, ...], mesh: Mesh, extra: str = "") -> tuple[Layout, ...]:
    """Every layout of `shape`: each axis whole, Invariant, pending or sharded, in every order."""
    choices = ["R", "I", "sum", *range(len(shape)), *([extra] if extra else [])]
    found: dict[Layout, None] = {}
    for chosen in product(choices, repeat=mesh.ndim):
        partial = tuple(
            (a, c) for a, c in zip(mesh.names, chosen, strict=True) if c in ("sum", "max", "min")
        )
        if len({op for _, op in partial}) > 1:
            continue
        invariant = tuple(a for a, c in zip(mesh.names, chosen, strict=True) if c == "I")
        for order in permutations(zip(mesh.names, chosen, strict=True)):
            shards = tuple(tuple(a for a, c in order if c == dim) for dim in range(len(shape)))
            found[Layout(shape, shards, partial, invariant)] = None
    return tuple(found)


def pairs(shape: tuple[int, ...], mesh: Mesh, extra: str = "") -> list[tuple[Layout, Layout]]:
    return [p for p in product(layouts(shape, mesh, extra), repeat=2) if p[0] != p[1]]


def check_value_and_adjoint(before: Layout, after: Layout, mesh: Mesh) -> None:
    rng = np.random.default_rng(0)
    shape = before.shape
    value_x, value_y = rng.integers(-9, 9, shape), rng.integers(-9, 9, shape)
    there = plan(before, after, mesh)
    back = there.transpose(mesh)
    x = spread(value_x, before, mesh, rng)
    y = spread(value_y, after.gradient(mesh), mesh, rng)
    moved_x, moved_y = follow(there, x, mesh), follow(back, y, mesh)
    assert (value(moved_x, after, mesh) == value_x).all()
    assert (value(moved_y, before.gradient(mesh), mesh) == value_y).all()
    assert pairing(moved_x, y, after, mesh) == pairing(x, moved_y, before, mesh)
    for move in there.moves:
        assert legal(move, mesh), str(move)
        assert move.transpose(mesh).transpose(mesh) == move
    assert [m.before for m in there.moves[1:]] == [m.after for m in there.moves[:-1]]


# -- claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [M22, M23], ids=str)
@pytest.mark.parametrize("size", [0, 1, 4, 5, 7, 12])
def test_every_pair_of_layouts_of_a_vector_keeps_value_and_adjoint(size, mesh):
    for before, after in pairs((size,), mesh):
        check_value_and_adjoint(before, after, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [M22, M23], ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 7), (3, 0)], ids=str)
def test_every_pair_of_layouts_of_a_matrix_keeps_value_and_adjoint(shape, mesh):
    for before, after in pairs(shape, mesh):
        check_value_and_adjoint(before, after, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [M22, M23], ids=str)
@pytest.mark.parametrize("shape", [(4, 6, 2), (5, 1, 7)], ids=str)
def test_every_pair_of_layouts_of_three_dimensions_keeps_value_and_adjoint(shape, mesh):
    for before, after in pairs(shape, mesh):
        check_value_and_adjoint(before, after, mesh)


@pytest.mark.slow
def test_layouts_over_three_axes_keep_value_and_adjoint():
    # 97 is prime to the number of ends (158): the sample begins and ends at each layout.
    for before, after in pairs((5, 7), M222)[:: 1 if ALL else 97]:
        check_value_and_adjoint(before, after, M222)


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_pending_maximum_keeps_its_value_and_refuses_a_transpose(op):
    rng = np.random.default_rng(0)
    for before, after in pairs((5, 7), M23, extra=op):
        kept = {a for a, o in before.partial if o == op}
        if not kept or any(o == op and a not in kept for a, o in after.partial):
            continue
        x = rng.integers(-9, 9, before.shape)
        there = plan(before, after, M23)
        moved = follow(there, spread(x, before, M23, rng), M23)
        assert (value(moved, after, M23) == x).all()
        with pytest.raises(LayoutError, match=f"a pending {op} .* has no gradient"):
            there.transpose(M23)
