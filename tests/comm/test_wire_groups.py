"""Do process groups carry exactly what ranks of one process carry?"""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import partita as pt
from partita import comm
from partita.layout import LayoutError, Mesh
from tests.programs.gloo_ranks import run_ranks
from tests.programs.wire_moves import (
    GATHER,
    assert_ints_and_first,
    assert_right,
    carry_all,
    gather_and_reduce_odd_dtypes,
    ints_and_first,
    move,
    whole,
)


def simulate_on_a_part(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    layer = pt.parallelize(torch.nn.Linear(4, 4), mesh["dp"])

    def step(x):
        layer(x).sum().backward()

    args = [pt.zeros(2, 4, device_mesh=mesh["dp"], placements=[pt.Shard(0)])]
    found = pt.simulate(step, mesh, "h100", args)
    with pytest.raises(ValueError, match="no tensor of the step lies along tp"):
        pt.simulate(step, {"dp": 2, "tp": 1}, "h100", args)
    parts = [mesh, mesh["dp"], mesh["tp"], None, DeviceMesh("cpu", [0, 1])]
    return found.mesh, [comm.is_part_of_mesh(part, mesh) for part in parts]


@pytest.mark.slow
def test_a_mesh_knows_what_was_taken_out_of_it():
    for found in run_ranks(simulate_on_a_part, 2):
        assert found == ({"dp": 2, "tp": 1}, [True, True, True, False, False])


def device_mesh(mesh: Mesh) -> DeviceMesh:
    return init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)


def carry_everything(rank, meshes, dtypes):
    return [[carry_all(device_mesh(mesh), mesh, dtype) for dtype in dtypes] for mesh in meshes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "meshes", "dtypes"),
    [
        (2, [Mesh(("dp",), (2,)), Mesh(("tp", "dp"), (1, 2))], [torch.float32, torch.int16]),
        (4, [Mesh(("dp", "tp"), (2, 2))], [torch.float32, torch.bfloat16]),
        (3, [Mesh(("tp",), (3,))], [torch.float32, torch.int64]),
    ],
)
def test_every_move_gives_each_rank_what_the_layout_says(n, meshes, dtypes):
    per_rank = run_ranks(carry_everything, n, meshes, dtypes)
    for i, mesh in enumerate(meshes):
        for j, dtype in enumerate(dtypes):
            assert_right(mesh, dtype, [results[i][j] for results in per_rank])


def odd_things(rank):
    mesh = device_mesh(Mesh(("dp",), (2,)))
    return gather_and_reduce_odd_dtypes(mesh), ints_and_first(mesh)


def test_odd_dtypes_numbers_and_the_first_ones_tensor():
    results = run_ranks(odd_things, 2)
    assert all(ok for ok, _ in results)
    assert_ints_and_first([ints for _, ints in results])


def shuffled(rank):
    """A mesh that lists its ranks in an order of its own."""
    mesh = DeviceMesh("cpu", [[2, 0], [1, 3]], mesh_dim_names=("dp", "tp"))
    plain = Mesh(("dp", "tp"), (2, 2))
    wire = comm.wire_of(mesh)
    first = wire.from_first(torch.tensor([rank]))
    return wire.at, carry_all(mesh, plain, torch.float32), first.item(), wire.gather_ints((rank,))


@pytest.mark.slow
def test_the_ranks_of_a_mesh_may_come_in_any_order():
    results = run_ranks(shuffled, 4)
    at = {result[0]: result for result in results}
    mesh = Mesh(("dp", "tp"), (2, 2))
    assert_right(mesh, torch.float32, [at[m][1] for m in mesh.coordinates()])
    assert [r[2] for r in results] == [2, 2, 2, 2]
    assert results[0][3] == [(2,), (0,), (1,), (3,)]


def captured_on_shuffled(rank):
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))
    x = pt.distribute_tensor(torch.arange(4.0), mesh, [pt.Shard(0)])
    step = pt.compile(lambda x: x.redistribute(placements=[pt.Replicate()]) * 2, backend="graph")
    try:
        return step(x).to_local().tolist()
    except LayoutError as error:
        return str(error)


@pytest.mark.slow
def test_a_graph_is_refused_on_ranks_in_an_order_of_their_own():
    for found in run_ranks(captured_on_shuffled, 2):
        assert "the ranks of mesh dp=2 are not in order along dp" in found


def parts_and_names(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    wire = comm.wire_of(mesh)
    named = device_mesh(Mesh(("dp", "tp"), (2, 2)))
    tp = named["tp"]
    wire_of_tp = comm.wire_of(tp)
    out = wire_of_tp.gather_ints((rank,))
    same = comm.wire_of(tp) is wire_of_tp and comm.wire_of(named) is comm.wire_of(named)
    # A joined group that not every rank of the world makes: only the first row of a 2 by 2 moves.
    row = DeviceMesh("cpu", [[[0, 1]], [[2, 3]]], mesh_dim_names=("pp", "a", "b"))
    joined = move("all_gather", "pp b", "[4@(pp b)]", "[4]")
    got = comm.wire_of(row).carry(joined, torch.tensor([float(rank)]), op="x", reason="explicit")
    return wire.mesh.names, out, same, got.tolist()


def test_parts_of_a_mesh_and_meshes_without_names_have_wires():
    for rank, (names, out, same, got) in enumerate(run_ranks(parts_and_names, 4)):
        assert names == ("dim0", "dim1")
        assert out == ([(0,), (1,)] if rank < 2 else [(2,), (3,)])
        assert same
        assert got == [0, 1, 2, 3]


def outside(rank):
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    try:
        comm.wire_of(mesh)
    except LayoutError as error:
        return str(error)
    return True


def test_a_rank_outside_a_mesh_is_told():
    inside, message = run_ranks(outside, 2)
    assert inside is True
    assert "rank 1 is not part of" in message and "the mesh has the ranks [0]" in message


def made_and_lost(rank, folder):
    wire = comm.wire_of(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    gc.collect()  # nobody but the wire holds the mesh
    again = comm.wire_of(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    other = comm.wire_of(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    dist.destroy_process_group()
    try:
        comm.wire_of(wire.device_mesh)
    except LayoutError as error:
        said = str(error)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    later = comm.wire_of(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return again is wire, other is wire, later is wire, said, later.gather_ints((rank,))


def test_equal_meshes_share_a_wire_as_long_as_the_process_groups_live(tmp_path):
    for again, other, later, said, told in run_ranks(made_and_lost, 2, str(tmp_path)):
        assert again and not other and not later
        assert "has no process groups" in said
        assert told == [(0,), (1,)]


def fails(rank, how):
    if rank == 1 and how == "raises":
        raise KeyError("no such thing")
    while how == "hangs" and rank == 1:
        time.sleep(0.01)
    if how == "dies" and rank == 1:
        os._exit(3)
    return torch.full((2,), rank)


@pytest.mark.slow
def test_the_launcher_names_the_rank_that_raises_dies_or_hangs():
    with pytest.raises(KeyError, match="no such thing") as caught:
        run_ranks(fails, 2, "raises")
    assert "on rank 1 of 2" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="the process died") as caught:
        run_ranks(fails, 2, "dies")
    assert "on rank 1 of 2" in caught.value.__notes__[0]
    with pytest.raises(TimeoutError, match=r"ranks \[.*1\] of 2 had not ended in time"):
        run_ranks(fails, 2, "hangs", timeout=2)


# -- check_ranks ---------------------------------------------------------------------------------


def ask_differently(rank, how):
    mesh = device_mesh(Mesh(("dp", "tp"), (2, 2)))
    wire = comm.wire_of(mesh)
    value = whole(GATHER.before, torch.float32)
    start, length = GATHER.before.local_region(wire.mesh, wire.at)[0]
    x = value.narrow(0, start, length)
    other = move("all_reduce", "tp", "[5@dp, 3] {sum tp}", "[5@dp, 3]")
    try:
        with comm.check_ranks(timeout=20):
            wire.carry(GATHER, x, op="matmul", reason="explicit")
            if rank == 2 and how == "move":
                wire.carry(other, x, op="add", reason="explicit")
            elif rank == 2 and how == "raise":
                raise KeyError("alone")
            elif rank == 2 and how == "leave":
                pass
            elif rank == 2 and how == "line":
                wire.carry(GATHER, x, op="matmul", reason="explicit")
            else:
                wire.carry(GATHER, x, op="matmul", reason="explicit")
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("move", "all_reduce over tp: 5@dp 3 {sum tp} -> 5@dp 3, for add"),
        ("raise", "left check_ranks() with KeyError: 'alone'"),
        ("leave", "left check_ranks() in order"),
        ("line", "test_wire_groups.py"),
    ],
)
def test_under_check_ranks_a_difference_is_an_error_on_every_rank(how, said):
    results = run_ranks(ask_differently, 4, how)
    for rank, (kind, message) in enumerate(results):
        if how == "raise" and rank == 2:
            assert kind == "KeyError"
            continue
        assert kind == "LayoutError"
        assert "ranks ask for different things" in message
        assert "rank 0     all_gather over dp: 5@dp 3 -> 5 3, for matmul" in message
        assert "test_wire_groups.py:" in message
        assert "rank 2" in message and said in message


def agree(rank):
    mesh = device_mesh(Mesh(("dp",), (2,)))
    wire = comm.wire_of(mesh)
    with comm.check_ranks(timeout=20), comm.ledger() as log:
        wire.gather_ints((1,))
        wire.from_first(torch.ones(2))
        length = GATHER.before.local_shape(wire.mesh, wire.at)[0]
        wire.carry(GATHER, torch.ones(length, 3), op="x", reason="explicit")
    return log.count()


def test_under_check_ranks_ranks_that_agree_go_on():
    assert run_ranks(agree, 2) == [1, 1]
