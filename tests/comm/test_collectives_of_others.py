"""What do collectives of torch.distributed pay for partita: nothing before there are DTensors."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import batch_isend_irecv as own_batch  # as programs import them: before
from torch.distributed import broadcast as own_broadcast  # there are any DTensors
from torch.distributed import irecv as own_irecv
from torch.distributed import isend as own_isend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import partita as pt
from partita.app.models import GPT
from partita.comm.torch_distributed import COLLECTIVES
from partita.comm.waiting import BEGUN
from tests.programs.gloo_ranks import run_ranks

OURS = os.path.dirname(pt.__file__)
C10D = ("distributed_c10d.py", "c10d_logger.py")


@contextmanager
def frames_of_partita():
    """Count the frames of partita that a collective runs in, or that run within one."""
    found = Counter()

    def is_ours(frame):
        return frame is not None and frame.f_code.co_filename.startswith(OURS)

    def count(frame, event, arg):
        if event != "call":
            return
        if frame.f_code.co_filename.endswith(C10D) and is_ours(frame.f_back):
            found[frame.f_back.f_code.co_name] += 1
        name = frame.f_code.co_name
        while is_ours(frame):
            frame = frame.f_back
            if frame is not None and frame.f_code.co_filename.endswith(C10D):
                found[name] += 1

    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(None)


def calls(rank):
    """A call of each collective that Gloo has, on two ranks."""
    t, pair, other = torch.ones(4), [torch.ones(4), torch.ones(4)], 1 - rank
    two, lists = torch.ones(8), [None, None]
    mine = pair if rank == 0 else None
    return {
        "all_gather": lambda: dist.all_gather(pair, t),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(two, t),
        "all_gather_object": lambda: dist.all_gather_object(lists, rank),
        "all_reduce": lambda: dist.all_reduce(t),
        "all_to_all_single": lambda: dist.all_to_all_single(two, torch.ones(8)),
        "batch_isend_irecv": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, t, other), dist.P2POp(dist.irecv, pair[0], other)]
            )
        ],
        "broadcast": lambda: dist.broadcast(t, 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], 0),
        "gather": lambda: dist.gather(t, mine),
        "gather_object": lambda: dist.gather_object(rank, lists if rank == 0 else None),
        "reduce": lambda: dist.reduce(t, 0),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(t, two),
        "scatter": lambda: dist.scatter(t, mine),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [0, 1]),
        "send and recv": lambda: dist.send(t, 1) if rank == 0 else dist.recv(t, 0),
        "barrier": dist.barrier,
    }


def training(wrap):
    torch.manual_seed(0)
    model = wrap(GPT(layers=2, width=16, heads=2, context=8))
    tokens = torch.randint(0, 256, (2, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    step()
    return step


def count_without_dtensors(rank):
    mesh = init_device_mesh("cpu", (2,))

    def sharded(model):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    programs = calls(rank)
    programs["DDP"] = training(DistributedDataParallel)
    programs["FSDP2"] = training(sharded)
    told = {}
    for name, program in programs.items():
        with frames_of_partita() as found:
            program()
        told[name] = dict(found)
    x = pt.distribute_tensor(torch.ones(4), pt.init_device_mesh("cpu", (2,)), [pt.Shard(0)])
    with frames_of_partita() as found:  # what remains, and that it is counted
        dist.all_reduce(x.to_local())
    return told, dict(found)


@pytest.mark.slow
def test_collectives_run_no_frame_of_partita_before_there_is_a_dtensor():
    for told, with_dtensors in run_ranks(count_without_dtensors, 2):
        # It makes a tensor of a number by torch.tensor, which is no collective.
        assert set(told.pop("scatter_object_list")) <= {"_make_tensor", "_read_nested_values"}
        assert not any(told.values()), told
        assert with_dtensors


def give_dtensors_by_other_names(rank):
    x = pt.distribute_tensor(torch.ones(4), pt.init_device_mesh("cpu", (2,)), [pt.Shard(0)])
    given = {
        "all_reduce": lambda: dist.all_reduce(x.sum()),
        "broadcast": lambda: own_broadcast(x, 0),
        "isend": lambda: own_isend(x, 1 - rank),
        "irecv": lambda: own_irecv(tensor=x, src=1 - rank),
        "batch_isend_irecv": lambda: own_batch([dist.P2POp(own_isend, x, 1 - rank)]),
        "all_gather": lambda: dist.all_gather([x, x], torch.ones(2)),
    }
    told = {}
    for name, call in given.items():
        with pytest.raises(pt.LayoutError) as caught:
            call()
        told[name] = str(caught.value)
    batch = [dist.P2POp(own_isend, torch.ones(2) * rank, 1 - rank)]
    got = torch.zeros(2)
    for work in own_batch([*batch, dist.P2POp(own_irecv, got, 1 - rank)]):
        work.wait()
    return told, got


def test_collectives_that_a_program_imported_before_refuse_a_part_of_a_dtensor():
    for rank, (told, got) in enumerate(run_ranks(give_dtensors_by_other_names, 2)):
        for name, text in told.items():
            assert f"{name} cannot take a DTensor that is not whole on each rank" in text
            assert ("delete the line" in text) == (name == "all_reduce")  # as of a loss
        assert torch.equal(got, torch.full((2,), 1.0 - rank))


def compile_a_collective(rank):
    """Dynamo finds the functional form of a collective by the function itself."""

    def total(x):
        dist.all_reduce(x)
        return x * 2

    found = []
    for make in (lambda: None, lambda: pt.init_device_mesh("cpu", (2,))):
        make()
        torch._dynamo.reset()
        found.append(torch.compile(total, backend="eager", fullgraph=True)(torch.ones(2)))
    return found


@pytest.mark.slow
def test_a_collective_is_compiled_in_one_graph_with_dtensors_and_without():
    for found in run_ranks(compile_a_collective, 2):
        assert [x.tolist() for x in found] == [[4.0, 4.0]] * 2


def test_every_collective_of_this_torch_keeps_its_name_and_signature():
    with pt.ranks(dp=2):
        for name in COLLECTIVES:
            collective = getattr(dist.distributed_c10d, name, None)
            if collective is not None:
                assert collective.__name__ == name
                assert "args" not in inspect.signature(collective).parameters
                assert getattr(dist, name, collective) is collective


@pytest.mark.slow
def test_a_layer_of_a_tensor_subclass_is_made_by_torch_alone_before_there_is_a_dtensor():
    code = (
        "import torch; before = torch.Tensor.__init__; import partita as pt; "
        "assert torch.Tensor.__init__ is before; pt.dry_mesh(dp=2); "
        "assert torch.Tensor.__init__ is not before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pt.ranks(dp=2) as world:

        def body(mesh):
            x = pt.distribute_tensor(torch.ones(4), mesh, [pt.Shard(0)])
            with pytest.raises(pt.LayoutError, match="cannot take a DTensor"):
                torch.FloatTensor(x)
            return nn.Parameter(x).placements

        world.run(body)


def call_collective_of_others(rank):
    pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    group = dist.new_group([0])
    x = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce(x, group=group)
    return sorted(key for key in BEGUN if key.startswith("torch.distributed/"))


def test_a_collective_of_a_group_without_this_rank_counts_for_no_group():
    with_rank, without = run_ranks(call_collective_of_others, 2)
    assert len(with_rank) == 1 and without == []
