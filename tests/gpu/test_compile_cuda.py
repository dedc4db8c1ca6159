"""Does a compiled step train as an eager one does on GPUs, over NCCL?"""

from __future__ import annotations

import multiprocessing as mp
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from tests.programs.captured_steps import adamw, losses, plain_step, tiny
from tests.programs.zero_training import TOKENS

pytestmark = pytest.mark.gpu


def trained(mesh, stage, backend):
    """Losses of eager and of compiled steps, and the key."""
    found, key = [], ""
    batch = [pt.distribute_tensor(t.cuda(), mesh, [pt.Shard(0)]) for t in TOKENS]
    for compiled in (False, True):
        model = pt.zero(tiny().cuda(), mesh, stage=stage)
        step = plain_step(model, adamw(model.parameters()))
        if compiled:
            step = pt.compile(step, backend=backend)
        found.append(losses(step, batch, 20))
        key = step.key if compiled else ""
    return (*found, key)


def rank_on_nccl(end, store, rank, ranks, stage):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
    end.send(trained(mesh, stage, "inductor"))
    dist.barrier()
    dist.destroy_process_group()
    end.close()
    os._exit(0)


def on_nccl(ranks: int, store: Path, stage: int):
    context = mp.get_context("spawn")
    ends = []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(
            target=rank_on_nccl, args=(theirs, str(store), rank, ranks, stage), daemon=True
        ).start()
        theirs.close()
        ends.append(ours)
    return [end.recv() for end in ends]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_on_nccl_compiles_its_step(stage, tmp_path):
    ((eager, compiled, key),) = on_nccl(1, tmp_path / "store", stage)
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)
    assert len(key) == 64


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_on_devices_of_other_indices_have_one_key_and_the_losses_of_eager(stage, tmp_path):
    first, second = on_nccl(2, tmp_path / "store", stage)
    assert first == second
    eager, compiled, _ = first
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)
