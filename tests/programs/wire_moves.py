"""Moves between two layouts, and what each rank holds after one."""

from __future__ import annotations

import torch

from partita import comm
from partita.layout import Layout, Mesh
from partita.redistribute import Move

# (kind, axes, before, after): what a layout leaves open (the mesh) the tests below choose.
MOVES = [
    ("all_gather", "dp", "[4@dp, 3]", "[4, 3]"),
    ("all_gather", "dp", "[5@dp, 3]", "[5, 3]"),
    ("all_gather", "dp", "[1@dp, 2]", "[1, 2]"),
    ("all_gather", "dp", "[0@dp, 2]", "[0, 2]"),
    ("all_gather", "dp", "[4@dp]", "[4] {inv dp}"),
    ("all_gather", "tp", "[3, 6@tp]", "[3, 6]"),
    ("all_gather", "tp", "[3, 5@tp]", "[3, 5]"),
    ("all_gather", "tp", "[2, 1@tp, 2]", "[2, 1, 2]"),
    ("all_gather", "tp", "[5@dp, 5@tp]", "[5@dp, 5]"),
    ("all_gather", "tp", "[5@tp, 2] {sum dp}", "[5, 2] {sum dp}"),
    ("all_gather", "tp", "[7@(dp tp)]", "[7@dp]"),
    ("all_gather", "tp", "[2@(dp tp), 2]", "[2@dp, 2]"),
    ("all_gather", "dp tp", "[12@(dp tp), 2]", "[12, 2]"),
    ("all_gather", "tp dp", "[12@(tp dp), 2]", "[12, 2]"),
    ("all_gather", "dp tp", "[7@(dp tp), 2]", "[7, 2]"),
    ("all_gather", "dp tp", "[2@(dp tp), 2]", "[2, 2]"),
    ("all_gather", "tp dp", "[7@(tp dp), 2]", "[7, 2]"),
    ("all_gather", "tp dp", "[2, 7@(tp dp)]", "[2, 7]"),
    ("all_gather", "dp tp", "[4@dp, 6@tp]", "[4, 6]"),
    ("all_gather", "dp tp", "[3@dp, 5@tp]", "[3, 5]"),
    ("all_gather", "dp tp", "[5@tp, 3@dp]", "[5, 3] {inv dp, inv tp}"),
    ("reduce_scatter", "dp", "[4, 3] {sum dp}", "[4@dp, 3]"),
    ("reduce_scatter", "dp", "[5, 3] {sum dp}", "[5@dp, 3]"),
    ("reduce_scatter", "dp", "[1, 3] {max dp}", "[1@dp, 3]"),
    ("reduce_scatter", "dp", "[0, 3] {sum dp}", "[0@dp, 3]"),
    ("reduce_scatter", "tp", "[3, 6] {min tp}", "[3, 6@tp]"),
    ("reduce_scatter", "tp", "[3, 5] {sum tp}", "[3, 5@tp]"),
    ("reduce_scatter", "tp", "[7@dp, 2] {sum tp}", "[7@(dp tp), 2]"),
    ("reduce_scatter", "dp tp", "[12] {sum dp, sum tp}", "[12@(dp tp)]"),
    ("reduce_scatter", "tp dp", "[7] {sum dp, sum tp}", "[7@(tp dp)]"),
    ("reduce_scatter", "dp tp", "[3, 5] {sum dp, sum tp}", "[3@dp, 5@tp]"),
    ("all_reduce", "dp", "[3, 2] {sum dp}", "[3, 2]"),
    ("all_reduce", "dp", "[] {sum dp}", "[] {inv dp}"),
    ("all_reduce", "dp", "[0] {max dp}", "[0]"),
    ("all_reduce", "tp", "[5@dp] {max tp}", "[5@dp]"),
    ("all_reduce", "tp", "[1@dp] {min tp}", "[1@dp]"),
    ("all_reduce", "dp tp", "[3] {sum dp, sum tp}", "[3]"),
    ("all_reduce", "tp dp", "[3] {max dp, max tp}", "[3] {inv dp, inv tp}"),
    ("all_to_all", "dp", "[4@dp, 4]", "[4, 4@dp]"),
    ("all_to_all", "dp", "[5, 3@dp]", "[5@dp, 3]"),
    ("all_to_all", "tp", "[2, 5@tp, 1]", "[2, 5, 1@tp]"),
    ("all_to_all", "dp", "[0@dp, 4]", "[0, 4@dp]"),
    ("all_to_all", "tp", "[5@(dp tp), 3]", "[5@dp, 3@tp]"),
    ("all_to_all", "dp tp", "[5@(dp tp), 7]", "[5, 7@(tp dp)]"),
    ("all_to_all", "dp tp", "[5@dp, 3@tp]", "[5@tp, 3@dp]"),
    ("all_to_all", "dp tp", "[7@(dp tp)]", "[7@(tp dp)]"),
    ("slice", "dp", "[4, 3]", "[4@dp, 3]"),
    ("slice", "dp", "[5, 3] {inv dp}", "[5@dp, 3]"),
    ("slice", "tp", "[1, 3]", "[1@tp, 3]"),
    ("slice", "dp tp", "[3, 7]", "[3, 7@(tp dp)]"),
    ("slice", "tp", "[7@dp]", "[7@(dp tp)]"),
    ("place", "dp", "[4@dp, 3]", "[4, 3] {sum dp}"),
    ("place", "tp", "[3, 5@tp]", "[3, 5] {max tp}"),
    ("place", "tp", "[1@tp, 2]", "[1, 2] {min tp}"),
    ("place", "tp dp", "[7@(tp dp)]", "[7] {sum dp, sum tp}"),
    ("place", "tp", "[7@(dp tp)]", "[7@dp] {sum tp}"),
    ("mask", "dp", "[3, 2]", "[3, 2] {sum dp}"),
    ("mask", "tp", "[5@dp] {inv tp}", "[5@dp] {sum tp}"),
    ("mask", "dp tp", "[3] {inv tp}", "[3] {sum dp, sum tp}"),
    ("mask", "tp", "[3]", "[3] {max tp}"),
    ("retype", "dp", "[3, 2]", "[3, 2] {inv dp}"),
    ("retype", "tp", "[5@dp] {inv tp}", "[5@dp]"),
]


def move(kind: str, axes: str, before: str, after: str) -> Move:
    """A move as the planner would make it."""
    start, end = Layout.parse(before), Layout.parse(after)
    ops = dict(start.partial) | dict(end.partial)
    op = next((ops[a] for a in axes.split() if a in ops), "sum")
    return Move(kind, tuple(axes.split()), start, end, op)


def moves_on(mesh: Mesh) -> list[Move]:
    """The cases that need no other axes than those of `mesh`."""
    return [m for m in (move(*case) for case in MOVES) if uses(m) <= set(mesh.names)]


def uses(move: Move) -> set[str]:
    axes = set(move.axes)
    for layout in (move.before, move.after):
        axes |= {a for dim in layout.shards for a in dim}
        axes |= {a for a, _ in layout.partial} | set(layout.invariant)
    return axes


def whole(layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """The value that the layouts of a move lay out: small integers, exact in every dtype."""
    n = max(1, layout_numel(layout))
    value = torch.arange(n)[: layout_numel(layout)].reshape(layout.shape) % 13 + 10
    return (value % 2 if dtype == torch.bool else value).to(dtype)


def layout_numel(layout: Layout) -> int:
    n = 1
    for size in layout.shape:
        n *= size
    return n


def local(
    layout: Layout,
    mesh: Mesh,
    at: tuple[int, ...],
    dtype: torch.dtype,
    value: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the rank at `at` holds: lopsided shares whose reduction is the value."""
    if value is None:
        value = whole(layout, dtype)
    for i, (start, length) in enumerate(layout.local_region(mesh, at)):
        value = value.narrow(i, start, length)
    ops = dict(layout.partial)
    turn = 0
    for axis in mesh.names:
        if axis in ops:
            turn = turn * mesh.size(axis) + at[mesh.index(axis)]
    n = 1
    for axis in ops:
        n *= mesh.size(axis)
    if ops:
        op = next(iter(ops.values()))
        if dtype == torch.bool:
            keep = turn == n - 1
            value = value if keep else torch.full_like(value, op == "min")
        elif op == "sum":
            # 1, 1, ... and the rest on the last rank
            value = torch.ones_like(value) if turn < n - 1 else value - value.new_tensor(n - 1)
        else:
            away = turn if turn < n - 1 else 0
            last = turn == n - 1
            value = value if last else value - (1 + away) if op == "max" else value + (1 + away)
    return value.contiguous()


def carry_all(device_mesh: object, mesh: Mesh, dtype: torch.dtype) -> list[torch.Tensor]:
    """One rank's results of all cases; also checks what holds on each rank by itself."""
    wire = comm.wire_of(device_mesh)
    results = []
    for move in moves_on(mesh):
        x = local(move.before, mesh, wire.at, dtype)
        if x.is_floating_point() or x.is_complex():
            x.requires_grad_()
        kept, version = x.detach().clone(), x._version
        y = wire.carry(move, x, op="test", reason="explicit")
        assert torch.equal(x.detach(), kept) and x._version == version, move
        assert y is not x, move
        assert y.dtype == dtype, move
        assert tuple(y.shape) == move.after.local_shape(mesh, wire.at), move
        if move.kind != "retype":
            assert not y._is_view(), move
            assert not y.requires_grad, move
            assert y.is_contiguous(), move
            same = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert not (same and y.numel()), move
        results.append(y.detach())
    return results


def assert_right(mesh: Mesh, dtype: torch.dtype, per_rank: list[list[torch.Tensor]]) -> None:
    """Each rank's results are what `after` lays out; shares reduce to the value."""
    for i, move in enumerate(moves_on(mesh)):
        outputs = {at: per_rank[r][i] for r, at in enumerate(mesh.coordinates())}
        ops = dict(move.after.partial)
        pending = tuple(a for a in mesh.names if a in ops)
        for at, out in outputs.items():
            expected = whole(move.after, dtype)
            for dim, (start, length) in enumerate(move.after.local_region(mesh, at)):
                expected = expected.narrow(dim, start, length)
            if pending:
                shares = [outputs[m] for m in mesh.group(pending, at)]
                out = shares[0]
                for share in shares[1:]:
                    op = ops[pending[0]]
                    if dtype == torch.bool:
                        out = out & share if op == "min" else out | share
                    elif op == "sum":
                        out = out + share
                    else:
                        out = (torch.maximum if op == "max" else torch.minimum)(out, share)
            torch.testing.assert_close(
                out, expected, rtol=0, atol=0, msg=lambda m, move=move: f"{move}\n{m}"
            )


def carry_one(device_mesh, move, value, dtype):
    wire = comm.wire_of(device_mesh)
    x = value.to(dtype)
    for i, (start, length) in enumerate(move.before.local_region(wire.mesh, wire.at)):
        x = x.narrow(i, start, length)
    return wire.carry(move, x, op="test", reason="explicit")


GATHER = move("all_gather", "dp", "[5@dp, 3]", "[5, 3]")

ODD_DTYPES = [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.complex128]


def gather_and_reduce_odd_dtypes(device_mesh):
    """Dtypes that backends lack: gathers of each, a sum of complex ones, max and min of bools."""
    wire = comm.wire_of(device_mesh)
    value = torch.arange(15).reshape(5, 3) % 2
    for dtype in ODD_DTYPES:
        out = carry_one(device_mesh, GATHER, value, dtype)
        assert out.dtype == dtype
        assert torch.equal(out.to(torch.complex64), value.to(torch.complex64))
        swap = move("all_to_all", "dp", "[5@dp, 3]", "[5, 3@dp]")
        out = carry_one(device_mesh, swap, value, dtype)
        start, length = swap.after.local_region(wire.mesh, wire.at)[1]
        expected = value.narrow(1, start, length)
        assert torch.equal(out.to(torch.complex64), expected.to(torch.complex64))
    z = torch.tensor([1 + 2j, 3 - 1j]).conj()
    total = move("all_reduce", "dp", "[2] {sum dp}", "[2]")
    out = wire.carry(total, z, op="test", reason="explicit")
    assert torch.equal(out, 2 * z.resolve_conj())
    part = move("reduce_scatter", "dp", "[2] {sum dp}", "[2@dp]")
    out = wire.carry(part, z, op="test", reason="explicit")
    assert torch.equal(out, 2 * z.resolve_conj()[wire.rank : wire.rank + 1])
    flag = torch.tensor([wire.rank == 1, True, False])
    most = move("all_reduce", "dp", "[3] {max dp}", "[3]")
    assert wire.carry(most, flag, op="any", reason="explicit").tolist() == [True, True, False]
    least = move("all_reduce", "dp", "[3] {min dp}", "[3]")
    assert wire.carry(least, flag, op="all", reason="explicit").tolist() == [False, True, False]
    conjugate = torch.tensor([1 + 2j]).conj()
    negative = torch.stack([conjugate.imag] * 3, -1)[:, :3]
    lone = move("all_gather", "dp", "[2@dp, 3]", "[2, 3]")
    assert (
        wire.carry(lone, conjugate.imag.expand(1, 3), op="x", reason="explicit").tolist()
        == [negative.tolist()[0]] * 2
    )
    return True


def ints_and_first(device_mesh):
    """Returns what each rank learns of the others, and asserts its place among them."""
    wire = comm.wire_of(device_mesh)
    ints = wire.gather_ints((wire.rank, -(2**62)))
    mine = torch.full((2, 2), float(wire.rank), requires_grad=True)
    first, second = wire.from_first(mine), wire.from_first(mine.to(torch.int16), src=1)
    assert first.data_ptr() != mine.data_ptr()
    return ints, first, second


def assert_ints_and_first(results):
    for ints, first, second in results:
        assert ints == [(r, -(2**62)) for r in range(len(results))]
        assert torch.equal(first, torch.zeros(2, 2)) and not first.requires_grad
        assert torch.equal(second, torch.ones(2, 2, dtype=torch.int16))
