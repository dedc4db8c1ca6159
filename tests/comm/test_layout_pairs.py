"""Is every change of layout exact, in its value and in its gradient?

All pairs of layouts of tensors of 1 to 3 dimensions on 2x2 and 2x3 ranks: split unevenly, down to
empty pieces, by either axis or by both in either order; pending with lopsided shares; whole. The
numbers are small integers, so exact means equal. By default a sample of the pairs, another for each
shape; all 2,500 pairs for each mesh and shape with

    PARTITA_ALL_PAIRS=1 python -m pytest tests/comm/test_layout_pairs.py --timeout 0
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import partita as pt
from partita.comm import wire_of
from partita.layout import (
    Invariant,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from partita.tensor.dtensor import as_dtensor, redistribute_to
from partita.tensor.tensor_state import spec_of

MESHES = {"2x2": {"a": 2, "b": 2}, "2x3": {"a": 2, "b": 3}}
SHAPES = [(7,), (12,), (1,), (5, 3), (6, 4), (1, 7), (3, 5, 2), (4, 6, 12), (1, 1, 7)]
EVERY = 1 if os.environ.get("PARTITA_ALL_PAIRS") else 8


def layouts(shape: tuple[int, ...], mesh: Mesh, pending: str = "sum") -> Iterator[Layout]:
    """Each layout of a tensor of this shape, once."""
    kinds: list[Placement] = [Shard(d) for d in range(len(shape))]
    kinds += [Partial(pending), Replicate(), Invariant()]
    seen = set()
    for order in (mesh.names, mesh.names[::-1]):
        for placements in product(kinds, repeat=mesh.ndim):
            layout = Layout.of(mesh, shape, placements, order)
            if layout not in seen:
                seen.add(layout)
                yield layout


def shares(whole: torch.Tensor, layout: Layout, wire: Any) -> torch.Tensor:
    """What a rank holds of `whole`. Shares are lopsided and of both signs."""
    local = whole
    for axis, op in layout.partial:
        n, i = wire.mesh.size(axis), wire.at[wire.mesh.index(axis)]
        if op == "sum":
            local = local * (2 * n - 1 if i == 0 else -2)
        else:  # the last rank has the most or the least
            local = local - (n - 1 - i) if op == "max" else local + (n - 1 - i)
    for d, (offset, length) in enumerate(layout.local_region(wire.mesh, wire.at)):
        local = local.narrow(d, offset, length)
    return local.clone()


def assembled(pieces: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The value that the ranks' pieces make up; copies must be equal."""
    whole = torch.zeros(layout.shape, dtype=pieces[0].dtype)
    held = dict(zip(mesh.coordinates(), pieces, strict=True))
    for at, piece in held.items():
        first = tuple(
            i if layout.placement(a).is_shard() or layout.placement(a).is_partial() else 0
            for a, i in zip(mesh.names, at, strict=True)
        )
        assert torch.equal(piece, held[first]), f"ranks {at} and {first} differ in {layout}"
        if first == at:
            region = tuple(slice(o, o + n) for o, n in layout.local_region(mesh, at))
            whole[region] += piece
    return whole


def redistributed(x: pt.DTensor, after: Layout) -> pt.DTensor:
    """`x` in `after`; by the public method where its placements say all there is to say."""
    wire = wire_of(x.device_mesh)
    placements = after.placements(wire.mesh)
    if Layout.of(wire.mesh, after.shape, placements) == after:
        return x.redistribute(placements=placements)
    return redistribute_to(x, spec_of(after, wire), "redistribute")


def there_and_back(
    mesh: Any, pairs: list[tuple[Layout, Layout]], value: torch.Tensor, gradient: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """What this rank holds, for each pair, of the moved value and of the gradient coming back."""
    wire = wire_of(mesh)
    results = []
    for before, after in pairs:
        graded = all(op == "sum" for _, op in before.partial)
        x = as_dtensor(shares(value, before, wire), spec_of(before, wire)).requires_grad_(graded)
        y = redistributed(x, after)
        assert replace(y.layout_over_mesh, dtype=after.dtype) == after and y.shape == value.shape
        if not graded:
            results.append((y.to_local(), None))
            continue
        dual = spec_of(after, wire).gradient
        y.backward(as_dtensor(shares(gradient, dual.layout, wire), dual))
        grad = spec_of(before, wire).gradient.layout
        assert replace(x.grad.layout_over_mesh, dtype=grad.dtype) == grad
        results.append((y.detach().to_local(), x.grad.to_local()))
    return results


def check(axes: dict[str, int], pairs: list[tuple[Layout, Layout]]) -> None:
    shape = pairs[0][0].shape
    value = torch.randint(-9, 10, shape).double()
    gradient = torch.randint(-9, 10, shape).double()
    with pt.ranks(**axes) as world:
        per_rank = world.run(there_and_back, pairs, value, gradient)
    for i, (before, after) in enumerate(pairs):
        got = assembled([r[i][0] for r in per_rank], after, world.mesh)
        assert torch.equal(got, value), f"{before} -> {after}"
        if per_rank[0][i][1] is not None:
            back = assembled([r[i][1] for r in per_rank], before.gradient(world.mesh), world.mesh)
            assert torch.equal(back, gradient), f"the gradient of {before} -> {after}"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_pair_of_layouts_keeps_the_value_and_its_gradient(
    shape: tuple[int, ...], mesh: str
) -> None:
    axes = MESHES[mesh]
    every = list(layouts(shape, Mesh(tuple(axes), tuple(axes.values()))))
    pairs = list(product(every, every))
    check(axes, pairs[SHAPES.index(shape) % EVERY :: EVERY])


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_pending_maximum_or_minimum_arrives_anywhere(mesh: str, op: str) -> None:
    axes = MESHES[mesh]
    for shape in ((7,), (5, 3)):
        both = Mesh(tuple(axes), tuple(axes.values()))
        starts = [x for x in layouts(shape, both, op) if x.partial]
        pairs = list(product(starts, layouts(shape, both)))
        check(axes, pairs[::EVERY])


# -- joined collectives ----------------------------------------------------------------------------

ONE = [
    ([Partial(), Partial()], [Replicate(), Replicate()], "all_reduce"),
    ([Partial(), Partial()], [Invariant(), Invariant()], "all_reduce"),
    ([Shard(0), Shard(0)], [Replicate(), Replicate()], "all_gather"),
    ([Shard(0), Shard(1)], [Replicate(), Replicate()], "all_gather"),
    ([Shard(0), Shard(1)], [Invariant(), Invariant()], "all_gather"),
    ([Partial(), Partial()], [Shard(0), Shard(0)], "reduce_scatter"),
    ([Partial(), Partial()], [Shard(1), Shard(0)], "reduce_scatter"),
    ([Shard(0), Shard(0)], [Shard(1), Shard(1)], "all_to_all"),
]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("before", "after", "kind"), ONE, ids=lambda x: str(x))
def test_one_collective_does_the_work_of_both_axes(
    before: list[Placement], after: list[Placement], kind: str, mesh: str
) -> None:
    def run(handle: Any) -> list[str]:
        x = pt.zeros(5, 7, device_mesh=handle, placements=before)
        with pt.ledger() as log:
            x.redistribute(placements=after)
        return [m.kind for m in log.moves if m.nbytes]

    with pt.ranks(**MESHES[mesh]) as world:
        assert world.run(run) == [[kind]] * world.mesh.size()


@pytest.mark.parametrize("mesh", MESHES)
def test_what_one_gather_joined_one_reduce_scatter_parts_in_backward(mesh: str) -> None:
    def run(handle: Any) -> list[str]:
        x = pt.zeros(5, 7, device_mesh=handle, placements=[Shard(0), Shard(1)]).requires_grad_()
        y = x.redistribute(placements=[Replicate(), Replicate()])
        with pt.ledger() as log:
            y.sum().backward()
        return [m.kind for m in log.moves if m.nbytes]

    with pt.ranks(**MESHES[mesh]) as world:
        assert world.run(run) == [["reduce_scatter"]] * world.mesh.size()


def test_a_pending_maximum_has_no_gradient_and_says_so() -> None:
    def run(mesh: Any) -> None:
        wire = wire_of(mesh)
        layout = Layout((4,), partial=(("a", "max"),))
        x = as_dtensor(torch.ones(4), spec_of(layout, wire)).requires_grad_()
        y = x.redistribute(placements=[Replicate(), Replicate()])
        with pytest.raises((LayoutError, ValueError), match="max"):
            y.sum().backward()

    with pt.ranks(a=2, b=2) as world:
        world.run(run)
