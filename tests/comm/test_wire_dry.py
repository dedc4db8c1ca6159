"""Is a dry wire right about shapes, bytes and time, and does the ledger print what it knows?"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

import partita as pt
from partita import comm
from partita.layout import LayoutError, Mesh
from tests.programs.wire_moves import local, move, moves_on

GATHER = move("all_gather", "dp", "[1024@dp, 256]", "[1024, 256]")


@pytest.mark.parametrize("rank", [0, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16], ids=str)
def test_every_move_has_the_shape_that_its_layout_says(rank, dtype):
    mesh = Mesh(("dp", "tp"), (2, 3))
    wire = comm.wire_of(comm.dry_mesh(rank, dp=2, tp=3))
    for one in moves_on(mesh):
        if dtype == torch.bool and dict(one.before.partial):
            continue
        x = local(one.before, mesh, wire.at, dtype)
        y = wire.carry(one, x, op="x", reason="explicit")
        assert tuple(y.shape) == one.after.local_shape(mesh, wire.at) and y.dtype == dtype
        assert torch.equal(y, wire.carry(one, x, op="x", reason="explicit"))


@pytest.mark.parametrize("size", [40_000, 40_001])
def test_a_sum_of_exchanged_shares_is_this_ranks_own(size, monkeypatch):
    # Deterministic algorithms exchange shares, and fill memory that nobody has written with NaN.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    wire = comm.wire_of(comm.dry_mesh(1, backend="gloo", dp=4))
    one = move("all_reduce", "dp", f"[{size}] {{sum dp}}", f"[{size}]")
    x = torch.arange(1.0, size + 1)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(wire.carry(one, x, op="x", reason="explicit"), x)
    finally:
        torch.use_deterministic_algorithms(before)


def test_bytes_and_virtual_time_add_up():
    mesh = comm.dry_mesh(rank=2, latency=1e-6, bandwidth=1e9, dp=4)
    wire = comm.wire_of(mesh)
    with comm.ledger() as log:
        wire.carry(GATHER, torch.zeros(256, 256), op="linear", reason="implicit")
    assert log.bytes == wire.nbytes == 3 * 256 * 256 * 4
    assert wire.seconds == pytest.approx(1e-6 + log.bytes / 1e9)


def test_a_ledger_prints_a_table_and_says_when_it_is_empty():
    wire = comm.wire_of(comm.dry_mesh(dp=4))
    with comm.ledger() as log:
        pass
    assert str(log) == "no moves: nothing was carried" and log.bytes == 0
    with comm.ledger() as log:
        wire.carry(GATHER, torch.zeros(256, 256), op="linear", reason="implicit")
        keep = move("slice", "dp", "[8]", "[8@dp]")
        wire.carry(keep, torch.zeros(8), op="add", reason="implicit")
    head, first, second, total = str(log).splitlines()
    assert head.split() == ["kind", "axes", "bytes", "op", "reason", "source"]
    assert first.split()[:6] == ["all_gather", "dp", "768", "KiB", "linear", "implicit"]
    assert "test_wire_dry.py:" in first
    assert second.split()[:3] == ["slice", "dp", "-"]
    assert total == "2 moves, 768 KiB sent"
    read = json.loads(log.to_json())
    assert read["bytes"] == 768 * 1024 and read["moves"][0]["axes"] == ["dp"]
    assert log.count(reason="implicit") == 2 and log.count("all_gather", reason="explicit") == 0


def test_a_summary_adds_up_the_bytes_and_leaves_out_moves_that_send_nothing():
    wire = comm.wire_of(comm.dry_mesh(dp=4))
    keep = move("slice", "dp", "[8]", "[8@dp]")
    with comm.ledger() as log:
        for op in ("linear", "add", "add"):
            wire.carry(GATHER, torch.zeros(256, 256), op=op, reason="implicit")
        wire.carry(keep, torch.zeros(8), op="mul", reason="explicit")
    head, first, second = log.summary("op").splitlines()
    assert head.split() == ["bytes", "moves", "op"]
    assert first.split() == ["1.5", "MiB", "2", "add"]
    assert second.split() == ["768", "KiB", "1", "linear"]
    assert log.summary("axes", "kind").splitlines()[1].split() == "2.2 MiB 3 dp all_gather".split()
    assert log.summary().splitlines()[0].split() == "bytes moves source kind axes reason".split()


def test_what_is_no_mesh_and_a_rank_that_is_not_there_are_refused():
    with pytest.raises(LayoutError, match="device_mesh is 'cpu', which is not a mesh"):
        comm.wire_of("cpu")
    with pytest.raises(LayoutError, match="rank 8 is not one of the 8 of mesh dp=4 tp=2"):
        pt.dry_mesh(8, dp=4, tp=2)
    with pytest.raises(LayoutError, match="dry_mesh needs at least one axis"):
        pt.dry_mesh()
    with pytest.raises(LayoutError, match="each axis of a mesh needs at least one rank"):
        pt.dry_mesh(dp=0)
    with pytest.raises(LayoutError, match="needs at least one axis"):
        comm.ranks()


def test_a_dry_mesh_answers_as_a_device_mesh_does():
    mesh = pt.dry_mesh(5, dp=2, tp=3)
    assert mesh.shape == (2, 3) and mesh.mesh_dim_names == ("dp", "tp") and mesh.size() == 6
    assert mesh.get_coordinate() == [1, 2] and mesh.get_rank() == 5 and mesh.size("tp") == 3
    assert mesh["tp"].mesh.tolist() == [3, 4, 5] and mesh["dp"].get_local_rank() == 1
    assert mesh.device_type == mesh["tp"].device_type == "cpu"


def test_what_is_made_on_a_dry_mesh_of_meta_tensors_takes_no_memory():
    mesh = pt.dry_mesh(dp=1024, tp=8, device_type="meta")
    x = pt.zeros(1 << 20, 1 << 20, device_mesh=mesh, placements=[pt.Shard(0), pt.Shard(1)])
    assert x.to_local().shape == (1024, 1 << 17) and x.to_local().device.type == "meta"
    assert pt.randn(8192, device_mesh=mesh["dp"], placements=[pt.Shard(0)]).to_local().shape == (8,)


def test_a_dry_rank_sends_what_a_real_one_sends():
    moves = [
        (pt.Shard(0), pt.Replicate()),
        (pt.Shard(1), pt.Replicate()),
        (pt.Partial(), pt.Shard(1)),
        (pt.Partial(), pt.Replicate()),
        (pt.Shard(0), pt.Shard(1)),
    ]

    def sent(mesh):
        with pt.ledger() as log:
            for before, after in moves:
                x = pt.zeros(9, 10, device_mesh=mesh, placements=[before])
                x.redistribute(placements=[after])
        return [(m.kind, m.nbytes) for m in log.moves]

    with pt.ranks(dp=3) as world:
        real = world.run(sent)
    assert [sent(pt.dry_mesh(rank, dp=3)) for rank in range(3)] == real


@pytest.mark.slow
def test_a_dry_step_of_zero_3_is_the_graph_of_real_ranks():
    def nodes(mesh, device):
        torch.manual_seed(0)
        with torch.device(device):
            layers = torch.nn.Linear(6, 7), torch.nn.GELU(), torch.nn.Linear(7, 4)
        model = pt.zero(torch.nn.Sequential(*layers), mesh, stage=3)
        optimizer = torch.optim.AdamW(model.parameters())

        def train(x):
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss

        step = pt.compile(train, backend="graph")
        step(pt.zeros(4, 6, device_mesh=mesh, placements=[pt.Shard(0)]))
        return [str(node.target) for node in step.graph.nodes]

    with pt.ranks(dp=2) as world:
        real, _ = world.run(nodes, "cpu")
    assert nodes(pt.dry_mesh(dp=2), "cpu") == real

    # Of meta tensors a mesh is one of GPUs, where pieces are gathered into place.
    packs = ("all_gather", "cat", "copy_", "slice", "view", "reshape", "wait_tensor", "empty")

    def count_work(names):
        return Counter(n for n in names if not any(f".{what}" in f".{n}" for what in packs))

    gathered = nodes(pt.dry_mesh(dp=2, device_type="meta"), "meta")
    assert "partita.all_gather_pieces.default" in gathered
    assert count_work(gathered) == count_work(real)
