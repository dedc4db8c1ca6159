"""Does a move cost as much on few ranks as on many, and is it right on any number?"""

from __future__ import annotations

import gc
import sys
from itertools import product

import pytest
import torch

import partita as pt
from partita import comm
from partita.layout import Layout
from partita.redistribute import plan

R, P = pt.Replicate(), pt.Partial()
S0, S1, S2 = pt.Shard(0), pt.Shard(1), pt.Shard(2)
LINE = [
    *((S0, R), (S1, R), (S2, R), (R, S0), (R, S1), (P, S0), (P, S1), (P, S2), (P, R), (R, P)),
    *((S0, P), (S1, P), (S0, S1), (S1, S0), (S1, S2), (S2, S1)),
]
GRID = [
    *(((S0, S0), (R, R)), ((S1, S1), (R, R)), ((S0, S1), (R, R)), ((S1, S0), (R, S0))),
    *(((P, P), (S0, S1)), ((P, P), (S1, S1)), ((S1, P), (S0, S0)), ((S0, S0), (S1, S1))),
    *(((S0, S1), (S1, S0)), ((S1, S0), (S0, S0)), ((S0, S2), (S2, S1)), ((R, R), (S1, S1))),
]
RESTACKS = [
    *(((S1, S0), (R, S0)), ((S1, P), (S0, S0)), ((S0, S1), (S1, S0)), ((S1, S0), (S0, S0))),
    ((S0, S2), (S2, S1)),
]
"""Of these, those in which a rank has something in common with some ranks only, or with as many as
there are: eager, it takes as many steps as there are such ranks."""
MOVES = [((a,), (b,)) for a, b in LINE] + GRID
"""From which placements to which, on a mesh of one axis or of two."""
NAMES = [f"{'-'.join(map(str, a))} to {'-'.join(map(str, b))}" for a, b in MOVES]


def on_dry_ranks(places, scale, size):
    """A tensor on the meta device, laid out over 8 (or 4 x 2) times `scale` ranks."""
    axes = {"dp": 8 * scale} if len(places) == 1 else {"dp": 4 * scale, "tp": 2}
    mesh = pt.dry_mesh(**axes)
    shape = torch.Size((size, size, size))
    layout = Layout.of(comm.wire_of(mesh).mesh, shape, places)
    local = torch.empty(
        layout.local_shape(comm.wire_of(mesh).mesh, (0,) * mesh.ndim), device="meta"
    )
    stride = torch.empty(shape, device="meta").stride()
    return pt.DTensor.from_local(local, mesh, places, shape=shape, stride=stride)


def moves_of(x, after):
    """What is carried, which the number of ranks may change: uneven pieces are not padded much."""
    mesh = comm.wire_of(x.device_mesh).mesh
    before = Layout.of(mesh, x.shape, x.placements)
    return plan(before, Layout.of(mesh, x.shape, after), mesh).moves


def steps_of(run):
    """How many calls, of Python and of C, `run` makes."""
    count = 0
    gc.disable()  # what is thrown away is not counted

    def heard(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(heard)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("size", [4096, 4101])
@pytest.mark.parametrize(("before", "after"), MOVES, ids=NAMES)
def test_a_captured_move_is_as_many_nodes_on_512_ranks_as_on_8(before, after, size):
    def nodes(scale):
        x = on_dry_ranks(before, scale, size)
        step = pt.compile(lambda x: x.redistribute(placements=after), backend="graph")
        y = step(x)
        assert y.shape == x.shape and y.placements == tuple(after)
        assert max(len(str(node.args)) for node in step.graph.nodes) < 300  # and no long lists
        return len(step.graph.nodes), moves_of(x, after)

    (few, moves), (many, others) = nodes(1), nodes(64)
    assert few == many if moves == others else many < 40 * len(others)


@pytest.mark.parametrize("size", [4096, 4101])
@pytest.mark.parametrize(("before", "after"), [m for m in MOVES if m not in RESTACKS])
def test_a_move_is_as_many_python_steps_on_512_ranks_as_on_8(before, after, size):
    def steps(scale):
        x = on_dry_ranks(before, scale, size)
        moves = moves_of(x, after)
        first = steps_of(lambda: x.redistribute(placements=after))  # prepared
        return first, steps_of(lambda: x.redistribute(placements=after)), moves

    steps(2)
    few, many = steps(1), steps(64)
    if few[2] == many[2]:
        assert many[0] <= 1.2 * few[0] and many[1] <= 1.05 * few[1], (few, many)


# -- values ----------------------------------------------------------------------------------------


def moved_both_ways(mesh, moves, shapes, captured):
    """Every move of every shape, its value and its gradient, against those of one device."""
    cases = list(product(shapes, moves))
    values = [torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) for shape, _ in cases]
    weights = [(value * 7 + 3) % 11 for value in values]
    xs = [pt.distribute_tensor(v, mesh, a) for v, (_, (a, _)) in zip(values, cases, strict=True)]
    held = [pt.distribute_tensor(w, mesh, [R] * mesh.ndim) for w in weights]
    for x in xs:
        x.requires_grad_()

    def step(xs, held):
        ys = [x.redistribute(placements=b) for x, (_, (_, b)) in zip(xs, cases, strict=True)]
        sum((y * w).sum() for y, w in zip(ys, held, strict=True)).backward()
        return [y.detach() for y in ys], [x.grad for x in xs]

    run = pt.compile(step, backend="graph") if captured else step
    ys, grads = run(xs, held)
    for case, y, grad, value, weight in zip(cases, ys, grads, values, weights, strict=True):
        assert y.placements == tuple(case[1][1]), case
        assert torch.equal(y.full_tensor(), value), case
        assert torch.equal(grad.full_tensor(), weight), case


SHAPES = [(12, 24, 4), (7, 5, 3), (1, 4, 2), (5, 1, 9)]
MESHES = [{"dp": 2}, {"dp": 3}, {"dp": 4}, {"dp": 2, "tp": 3}]


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_each_move_gives_the_value_and_the_gradient_of_one_device(axes):
    with pt.ranks(**axes) as world:
        moves = [m for m in MOVES if len(m[0]) == len(axes)]
        world.run(moved_both_ways, moves, SHAPES, False)


CAPTURED = [
    *(
        ({"dp": 2}, (12, 24, 4), LINE),
        ({"dp": 3}, (7, 5, 1), LINE),
        ({"dp": 4}, (8, 8, 8), LINE[:4]),
    ),
    *(({"dp": 2, "tp": 3}, (7, 5, 1), GRID[:4]), ({"dp": 2, "tp": 2}, (6, 12, 6), GRID[4:8])),
    *(({"dp": 3, "tp": 2}, (7, 5, 3), GRID[8:10]),),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "shape", "moves"), CAPTURED)
def test_each_captured_move_gives_the_value_and_the_gradient_of_one_device(axes, shape, moves):
    moves = [m if isinstance(m[0], tuple) else ((m[0],), (m[1],)) for m in moves]
    with pt.ranks(**axes) as world:
        world.run(moved_both_ways, moves, [shape], True)
