"""Does a compiled step train over uneven shards as an eager one, with one key on all ranks?"""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.testing.allocated_bytes import counted
from tests.programs.gloo_ranks import run_ranks
from tests.programs.uneven_steps import train

pytestmark = pytest.mark.slow


def trains(rank, n, rows, stage, backend):
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
    spread_out = partial(pt.zero, stage=stage)
    eager, *_ = train(mesh, spread_out, rows, False)
    compiled, key, _ = train(mesh, spread_out, rows, backend)
    return eager, compiled, key


@pytest.mark.parametrize(
    ("n", "rows", "stage", "backend"),
    [(3, 5, 3, "inductor"), (2, 5, 2, "inductor"), (4, 5, 3, "graph"), (3, 4, 1, "graph")],
)
def test_uneven_shards_train_on_processes_as_in_eager(n, rows, stage, backend):
    per_rank = run_ranks(trains, n, n, rows, stage, backend)
    for eager, compiled, key in per_rank:
        assert key == per_rank[0][2]
        assert torch.equal(compiled, per_rank[0][1])
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)
    single, *_ = train(None, None, rows, False)
    torch.testing.assert_close(per_rank[0][1], single, rtol=1e-5, atol=1e-7)


def peaks(rank, folder):
    """Counted and predicted, of a step whose moments were made by eager, read from a file of
    torch's, and from a checkpoint."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = pt.zero(nn.Sequential(*(nn.Linear(200, 200, bias=i > 0) for i in range(3))), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    x = pt.distribute_tensor(torch.rand(9, 200), mesh, [pt.Shard(0)])

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    fast, found = pt.compile(step, backend="graph"), []

    def count():
        for _ in range(2):
            fast()
        found.append((counted(fast), fast.memory.peak))

    step()
    count()
    written = io.BytesIO()
    torch.save(optimizer.state_dict(), written)
    written.seek(0)
    optimizer.load_state_dict(torch.load(written))
    count()
    pt.save({"optimizer": optimizer}, folder)
    optimizer = torch.optim.AdamW(model.parameters())
    pt.load({"optimizer": optimizer}, folder)
    count()
    return found


def test_state_that_comes_without_room_is_not_copied_in_each_step(tmp_path):
    for found in run_ranks(peaks, 3, str(tmp_path / "state")):
        assert len(found) == 3
        for have, predicted in found:  # tensors of numbers, 8 bytes each, may serve again
            assert 0 <= predicted - have <= 8 * 8
