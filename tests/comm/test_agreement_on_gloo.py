"""Is a value that only some ranks read an error on all of them, whatever the others are doing?"""

from __future__ import annotations

import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import partita as pt
from partita import LayoutError, Replicate, Shard
from partita.comm import begin_graph, end_graph
from partita.comm.waiting import (
    SLICE,
    STUCK,
    Need,
    verdict_of_others,
    wait_longer,
    wait_with_others,
)
from tests.programs.gloo_ranks import run_ranks

HERE = "tests/comm/test_agreement_on_gloo.py"


def mesh_of(rank, n=2):
    return pt.init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))


def heard(fn):
    try:
        return fn()
    except LayoutError as error:
        return str(error)


READS = {
    "item": lambda x: x.item(),
    "print": print,
    "float": float,
    "bool": bool,
    "format": lambda x: f"{x:.3f}",
    "numpy": lambda x: x.numpy(),
}


def reads_alone(rank, read, others):
    x = pt.distribute_tensor(torch.arange(8.0), mesh_of(rank), [Shard(0)])
    large = pt.distribute_tensor(torch.arange(80.0), x.device_mesh, [Shard(0)]) * 2
    loss = x.sum()
    assert loss.item() == 28

    def body():
        if rank == 0:
            READS[read](loss)
        for _ in range(2):
            if others == "waits":
                large.redistribute(placements=[Replicate()])
            elif others == "reads":
                (x * x).sum().item()
            elif others == "computes":
                time.sleep(3)
                large.full_tensor()
        return loss

    return heard(body) if rank == 0 or others != "ends" else "ended"


@pytest.mark.parametrize("read", READS)
def test_a_value_that_one_rank_reads_meets_no_other_read(read):
    for text in run_ranks(reads_alone, 2, read, "reads"):
        assert "ranks ask for different things" in text
        assert f"reads a value ({'print' if read == 'print' else ''}" in text
        assert text.count(HERE) == 3  # here, and where each of the two reads


@pytest.mark.slow
@pytest.mark.parametrize("others", ["waits", "computes"])
def test_a_value_that_one_rank_reads_is_an_error_on_all_whatever_the_others_do(others):
    one, other = run_ranks(reads_alone, 2, "item", others)
    for text in (one, other):
        assert "ranks wait for one another" in text
        assert "rank 0     reads a value (item): float32 scalar {sum dp}, made at" in text
        assert "rank 1     waits in all_" in text and text.count(HERE) == 3


@pytest.mark.slow
def test_a_rank_that_reads_after_the_others_have_ended_is_told_so():
    alone, ended = run_ranks(reads_alone, 2, "item", "ends")
    assert ended == "ended"
    assert "rank 0 waited for rank 1, which has ended" in alone and HERE in alone


def reads_beside_a_graph(rank):
    """The collectives of compiled code wait where no Python of partita's does."""
    x = pt.distribute_tensor(torch.arange(8.0), mesh_of(rank), [Shard(0)])
    loss = x.sum()
    assert loss.item() == 28
    if rank == 0:
        return heard(loss.item)
    begin_graph("step", [0, 1])
    with pytest.raises(RuntimeError), warnings.catch_warnings(record=True):
        functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD))
    end_graph()
    return str(verdict_of_others())


@pytest.mark.slow
def test_a_value_that_is_read_beside_a_compiled_step_is_an_error_on_all():
    for text in run_ranks(reads_beside_a_graph, 2):
        assert "ranks wait for one another" in text
        assert "rank 0     reads a value (item): float32 scalar {sum dp}, made at" in text
        assert "rank 1     runs compiled step, at " + HERE in text


def reads_together(rank):
    mesh = mesh_of(rank)
    torch.manual_seed(0)
    whole = torch.randn(6, 4, dtype=torch.float64)
    x = pt.distribute_tensor(whole, mesh, [Shard(0)])
    small, large = x.sum(), x.repeat(500, 1)
    seen = [small.item(), bool(x.max() > 0), large.numpy().sum(), x.tolist(), str(small)]
    seen.append((x.abs() > 1).any().item())
    plain = whole.sum(), whole.repeat(500, 1)
    wanted = [plain[0].item(), True, plain[1].sum().item(), whole.tolist()]
    return seen, wanted, bool((whole.abs() > 1).any())


def test_values_that_all_ranks_read_are_one_devices():
    for seen, wanted, any_is in run_ranks(reads_together, 2):
        assert seen[0] == pytest.approx(wanted[0], abs=1e-12) and seen[1] is wanted[1]
        assert seen[2] == pytest.approx(wanted[2], abs=1e-9) and seen[3] == wanted[3]
        assert "DTensor" in seen[4] and seen[5] is any_is


def reads_late(rank):
    """Rank 1 computes for longer than a rank waits before it tells the others."""
    x = pt.distribute_tensor(torch.arange(8.0), mesh_of(rank), [Shard(0)])
    if rank == 1:
        time.sleep(5)
    value = x.sum().item()
    if rank == 0:
        time.sleep(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return value, x.sum().redistribute(placements=[Replicate()]).item()


@pytest.mark.slow
def test_a_rank_that_is_only_slow_is_waited_for():
    assert run_ranks(reads_late, 2) == [(28.0, 28.0)] * 2


# -- what ranks bring ------------------------------------------------------------------------------


def brings_other_rows(rank, late):
    mesh = mesh_of(rank, 3)

    def body():
        for step in range(3):
            short = rank == 2 and (step == 2 or not late)
            x = pt.DTensor.from_local(torch.ones(1 if short else 3, 2), mesh, [Shard(0)])
            total = (x * 2).sum().redistribute(placements=[Replicate()])
        return total

    return heard(body)


def test_uneven_rows_are_refused_on_every_rank():
    results = run_ranks(brings_other_rows, 3, False)
    assert len(set(results)) == 1
    assert "rank 0  [9@dp, 2]" in results[0] and "rank 2  [3@dp, 2]" in results[0]
    assert "shape=(7, 2)" in results[0] and HERE in results[0]


@pytest.mark.slow
def test_a_last_batch_that_is_uneven_is_refused_where_its_line_was_compared_before():
    for text in run_ranks(brings_other_rows, 3, True):
        assert "ranks ask for different things" in text
        assert "rank 0     moves a value (redistribute): float32 scalar {sum dp}, made at" in text
        assert "rank 2     compares shapes of pieces" in text


def draws_from_other_seeds(rank):
    mesh = mesh_of(rank)
    torch.manual_seed(rank)
    x = pt.distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    return heard(lambda: torch.nn.functional.dropout(x))


def test_other_seeds_are_refused_on_every_rank():
    one, other = run_ranks(draws_from_other_seeds, 2)
    assert one == other and "of seed 0" in one and "of seed 1" in one and HERE in one


def made_by_torch(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = pt.distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)])
    return x.sum().item(), x.device_mesh.size()


def test_a_mesh_that_torch_made_and_its_parts_agree_as_well():
    assert run_ranks(made_by_torch, 4) == [(28.0, 2)] * 4


# -- collectives of torch.distributed --------------------------------------------------------------


def collectives(rank):
    x = pt.distribute_tensor(torch.arange(8.0), mesh_of(rank), [Shard(0)])
    t, group = torch.zeros(8), dist.group.WORLD
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: dist.all_gather([t, t], x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(t, x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, t),
        "all_to_all_single": lambda: dist.all_to_all_single(t, x),
        "send": lambda: dist.send(x, 1 - rank),
        "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank)]),
        "broadcast_object_list": lambda: dist.broadcast_object_list([{"a": [x]}], 0),
        "all_gather_object": lambda: dist.all_gather_object([None, None], {"w": x}),
        "functional all_reduce": lambda: functional.all_reduce(x, "sum", group),
        "functional all_gather_tensor": lambda: functional.all_gather_tensor(x, 0, group),
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(x, "sum", 0, group),
        "functional in place": lambda: torch.ops._c10d_functional.all_reduce_(x, "sum", "0"),
        "differentiable": lambda: functional.all_gather_tensor_autograd(x, 0, group),
    }
    told = {name: str(heard(call)) for name, call in calls.items()}
    piece = x.to_local().clone()
    dist.all_reduce(piece)
    return told, piece, x.full_tensor()


def test_collectives_of_torch_refuse_a_dtensor_and_take_its_piece():
    for told, piece, whole in run_ranks(collectives, 2):
        for name, text in told.items():
            assert "cannot take a DTensor" in text and "to_local()" in text, (name, text)
            assert HERE in text
        assert piece.tolist() == [4, 6, 8, 10] and torch.equal(whole, torch.arange(8.0))


def of_whole_values(rank):
    """What a program does that averages its loss by itself."""
    loss = pt.distribute_tensor(torch.arange(8.0), mesh_of(rank), [Shard(0)]).sum().full_tensor()
    whole = pt.distribute_tensor(loss, mesh_of(rank), [Replicate()])
    summed = functional.all_reduce(whole, "sum", dist.group.WORLD)
    dist.all_reduce(whole)
    return (whole / dist.get_world_size()).item(), summed.item(), loss.item()


@pytest.mark.slow
def test_collectives_of_torch_take_what_every_rank_holds_whole():
    assert run_ranks(of_whole_values, 2) == [(28.0, 56.0, 28.0)] * 2


def in_other_groups(rank):
    for ranks in ([0, 1], [2, 3], [1, 2, 3]):
        dist.new_group(ranks)
    mesh = pt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = pt.distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Replicate()])
    return x.sum().item(), pt.distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]).sum().item()


@pytest.mark.slow
def test_ranks_that_are_in_other_numbers_of_groups_agree():
    assert run_ranks(in_other_groups, 4) == [(28.0, 4.0)] * 4


class EndsJustAfterItsTimeWasUp:
    """A collective that a rank looks at while it waits, and which ends before it looks again."""

    def __init__(self, work):
        self.work, self.waits = work, 0

    def wait(self, limit=None):
        self.work.wait()
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return self.waits > 0


def ends_between_two_looks(rank):
    mesh_of(rank)
    x = torch.ones(4)
    work = EndsJustAfterItsTimeWasUp(dist.all_reduce(x, async_op=True))
    wait_longer(work, Need("waits", [0, 1]))
    return x.sum().item(), work.waits


def test_what_ends_just_after_its_time_was_up_has_not_failed():
    assert run_ranks(ends_between_two_looks, 2) == [(8.0, 2)] * 2


def comes_too_late(rank):
    """A job whose time limit is short, and a rank that computes for longer."""
    limit = timedelta(seconds=4)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)  # the public one is of a new job
    x = pt.distribute_tensor(torch.arange(80.0), mesh_of(rank), [Shard(0)]) * 2
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["raised"])
        return None
    with pytest.raises(LayoutError) as caught:
        x.full_tensor()
    store.set("raised", "")
    return str(caught.value)


@pytest.mark.slow
def test_a_time_limit_names_who_waited_where_and_for_whom_that_lives():
    text, _ = run_ranks(comes_too_late, 2)
    assert "rank 0 waited" in text and "s for rank 1, until the time limit" in text
    assert "all_gather over" in text and HERE in text and "timeout=" in text


def goes_on_after_an_error(rank):
    """Rank 1 catches an error of its own between forward and backward, and goes to the next."""
    mesh = mesh_of(rank)
    model = pt.zero(torch.nn.Linear(1, 1, bias=False), mesh, stage=3)
    x = pt.distribute_batch(torch.ones(4, 1), mesh)

    def body():
        for i in range(3):
            loss = model(x).square().mean()
            if rank == 0 or i != 1:
                loss.backward()
        return "trained"

    return heard(body)


@pytest.mark.slow
def test_ranks_in_other_collectives_of_one_group_are_told_so():
    for text in run_ranks(goes_on_after_an_error, 2):
        assert "ranks ask for different things" in text
        assert "rank 0     waits in reduce_scatter over dp" in text
        assert "rank 1     waits in all_gather over dp" in text and text.count(HERE) == 3


def sums_in_another_order(rank):
    """Rank 0 waits for rank 2, that for rank 3, that for rank 1, and that for rank 0."""
    mesh = pt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = [
        pt.DTensor.from_local(torch.ones(4), mesh, [pt.Partial(), Replicate()]),
        pt.DTensor.from_local(torch.ones(4), mesh, [Replicate(), pt.Partial()]),
    ]

    def body():
        for x in values if rank in (0, 3) else reversed(values):
            x.redistribute(mesh, [Replicate(), Replicate()])
        return "summed"

    return heard(body)


@pytest.mark.slow
def test_ranks_that_wait_for_one_another_over_several_groups_are_told_so():
    for text in run_ranks(sums_in_another_order, 4):
        assert "ranks wait for one another" in text
        assert "all_reduce over dp" in text and "all_reduce over tp" in text


def looks_while_the_other_goes_on(rank):
    """Rank 1 goes on between rank 0's question whether it waits and its question for what."""
    store, need = dist.group.WORLD.get_group_store(), Need("waits", [0, 1], dist.group.WORLD)
    if rank == 1:
        wait_with_others(lambda seconds: time.sleep(0.01) or store.check(["seen"]), need)
        store.set("gone on", "")
        return True
    check = dist.Store.check

    def check_and_let_go_on(self, keys):
        found = check(self, keys)
        if found and keys[0].endswith("waits/1"):
            store.set("seen", "")
            store.wait(["gone on"])
        return found

    dist.Store.check = check_and_let_go_on
    wait_with_others(lambda seconds: time.sleep(0.01) or check(store, ["gone on"]), need)
    return check(store, ["seen"])


def test_a_rank_that_goes_on_while_another_looks_what_it_waits_for_keeps_nobody():
    assert run_ranks(looks_while_the_other_goes_on, 2) == [True, True]


def sums_in_two_threads(rank):
    """On each rank one thread computes for a while before the other rank's can go on."""
    meshes = [mesh_of(rank), pt.DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")]
    found = {}

    def work(number):
        mesh = meshes[number]
        x = pt.DTensor.from_local(torch.ones(4), mesh, [pt.Partial()])
        if rank == number:
            time.sleep(SLICE + STUCK + 4)
        found[number] = heard(lambda: x.redistribute(mesh, [Replicate()]).to_local().sum().item())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_threads_that_wait_for_another_rank_s_threads_are_left_to_wait():
    assert run_ranks(sums_in_two_threads, 2) == [{0: 8.0, 1: 8.0}] * 2
