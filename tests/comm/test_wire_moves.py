"""Does each kind of move give every rank what the layouts say, on ranks of one process?

`tests/comm/test_wire_groups.py` runs the same cases on process groups.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from partita import comm
from partita.layout import Invariant, Layout, Mesh, Partial, Replicate, Shard
from partita.redistribute import plan
from tests.programs.wire_moves import (
    GATHER,
    assert_ints_and_first,
    assert_right,
    carry_all,
    gather_and_reduce_odd_dtypes,
    ints_and_first,
    local,
    move,
    whole,
)

MESHES = [
    Mesh(("dp",), (2,)),
    Mesh(("dp",), (3,)),
    Mesh(("tp",), (1,)),
    Mesh(("dp", "tp"), (2, 2)),
    Mesh(("dp", "tp"), (2, 3)),
    Mesh(("tp", "dp"), (3, 2)),
    Mesh(("dp", "tp"), (1, 3)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_move_gives_each_rank_what_the_layout_says(mesh):
    world = comm.ranks(**dict(zip(mesh.names, mesh.sizes, strict=True)))
    assert_right(mesh, torch.float32, world.run(carry_all, mesh, torch.float32))


DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_move_keeps_every_dtype(dtype):
    mesh = Mesh(("dp", "tp"), (2, 2))
    assert_right(mesh, dtype, comm.ranks(dp=2, tp=2).run(carry_all, mesh, dtype))


def test_dtypes_that_a_backend_lacks_travel_all_the_same():
    assert comm.ranks(dp=2).run(gather_and_reduce_odd_dtypes) == [True, True]


def test_the_input_may_have_any_strides():
    def body(device_mesh):
        wire = comm.wire_of(device_mesh)
        value = torch.arange(30.0).reshape(3, 10)[:, ::2].t()  # 5 by 3
        start, length = GATHER.before.local_region(wire.mesh, wire.at)[0]
        return torch.equal(
            wire.carry(GATHER, value.narrow(0, start, length), op="x", reason="explicit"), value
        )

    assert all(comm.ranks(dp=2).run(body))


def test_ranks_learn_each_others_numbers_and_the_first_ones_tensor():
    assert_ints_and_first(comm.ranks(dp=2, tp=3).run(ints_and_first))


def test_a_rank_knows_its_place_along_any_axes():
    def body(mesh):
        wire = comm.wire_of(mesh)
        return wire.index("dp"), wire.index(("dp", "tp")), wire.index(("tp", "dp"))

    results = comm.ranks(dp=2, tp=3).run(body)
    assert results[5] == (1, 5, 5)
    assert results[1] == (0, 1, 2)


def test_an_even_gather_on_dim_0_is_the_collective_and_nothing_more(monkeypatch):
    seen = []

    def body(mesh):
        wire = comm.wire_of(mesh)
        x = torch.ones(2, 3)
        run = wire.run_collective
        monkeypatch.setattr(
            wire, "run_collective", lambda out, x, *a: (seen.append((out, x)), run(out, x, *a))
        )
        even = move("all_gather", "dp", "[4@dp, 3]", "[4, 3]")
        y = wire.carry(even, x, op="x", reason="explicit")
        return any(o is y and i is x for o, i in seen)

    assert comm.ranks(dp=2).run(body) == [True, True]


def test_a_move_that_one_collective_cannot_make_is_refused():
    def body(mesh):
        wire = comm.wire_of(mesh)
        outer = move("all_gather", "dp", "[8@(dp tp)]", "[8@tp]")
        with pytest.raises(ValueError, match="one all_gather over dp cannot make 8@tp of 8@"):
            wire.carry(outer, torch.zeros(2), op="x", reason="explicit")
        with pytest.raises(ValueError, match="no axis 'pp' on mesh dp=2 tp=2"):
            bad = move("slice", "pp", "[8]", "[8@pp]")
            wire.carry(bad, torch.zeros(8), op="x", reason="explicit")
        with pytest.raises(ValueError, match=r"add: rank \d holds \(7,\) where the layout 8 gives"):
            ok = move("slice", "dp", "[8]", "[8@dp]")
            wire.carry(ok, torch.zeros(7), op="add", reason="explicit")

    comm.ranks(dp=2, tp=2).run(body)


# -- whole plans ---------------------------------------------------------------------------------


def layouts_of(shape: tuple[int, ...], mesh: Mesh) -> list[Layout]:
    """Every layout with sums on two axes, in both orders where they split one dimension."""
    choices = [Replicate(), Invariant(), Partial(), *(Shard(d) for d in range(len(shape)))]
    found = []
    for pair in product(choices, repeat=mesh.ndim):
        for order in (mesh.names, mesh.names[::-1]):
            found.append(Layout.of(mesh, shape, pair, order))
    return list(dict.fromkeys(found))


def paired(value: Layout, mesh: Mesh, at: tuple[int, ...], x: torch.Tensor, g: torch.Tensor) -> int:
    """This rank's part of the product of a value and a gradient: of an invariant one counts."""
    once = all(at[mesh.index(a)] == 0 for a in value.invariant)
    return int((x * g).sum()) if once else 0


def carry_pairs(device_mesh, mesh, pairs):
    wire = comm.wire_of(device_mesh)
    out = []
    for before, after in pairs:
        forward = plan(before, after, mesh)
        x = y = local(before, mesh, wire.at, torch.float64)
        for step in forward.moves:
            y = wire.carry(step, y, op="test", reason="explicit")
        other = (whole(before, torch.float64) * 7 + 3) % 11
        g = h = local(after.gradient(mesh), mesh, wire.at, torch.float64, other)
        for step in forward.transpose(mesh).moves:
            h = wire.carry(step, h, op="test", reason="gradient")
        there, here = paired(after, mesh, wire.at, y, g), paired(before, mesh, wire.at, x, h)
        out.append((y, there, here))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        (Mesh(("dp", "tp"), (2, 2)), (5, 3)),
        (Mesh(("dp", "tp"), (2, 3)), (7,)),
        (Mesh(("dp", "tp"), (2, 3)), (1, 5)),
    ],
    ids=str,
)
def test_between_any_two_layouts_the_value_is_kept_and_the_transpose_is_the_adjoint(mesh, shape):
    layouts = layouts_of(shape, mesh)
    pairs = [(a, b) for a in layouts for b in layouts]
    world = comm.ranks(**dict(zip(mesh.names, mesh.sizes, strict=True)))
    per_rank = world.run(carry_pairs, mesh, pairs)
    for i, (before, after) in enumerate(pairs):
        outputs = {at: per_rank[r][i][0] for r, at in enumerate(mesh.coordinates())}
        pending = tuple(a for a, _ in after.partial)
        for at in mesh.coordinates():
            out = sum(outputs[m] for m in mesh.group(pending, at))
            expected = whole(after, torch.float64)
            for dim, (start, length) in enumerate(after.local_region(mesh, at)):
                expected = expected.narrow(dim, start, length)
            assert torch.equal(out, expected), f"{before} -> {after} at {at}"
        there, here = (sum(results[i][k] for results in per_rank) for k in (1, 2))
        assert there == here, f"{before} -> {after}: {there} is not {here}"
