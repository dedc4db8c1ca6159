"""Does a compiled step train over uneven shards as an eager one, with one key on all ranks?"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from tests.gloo.launch import run_ranks
from tests.ranks.test_capture_uneven import train


def trains(rank, n, rows, stage, backend):
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
    spread_out = partial(pt.zero, stage=stage)
    eager, *_ = train(mesh, spread_out, rows, False)
    compiled, key, _ = train(mesh, spread_out, rows, backend)
    return eager, compiled, key


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("n", "rows", "stage", "backend"),
    [(3, 5, 3, "inductor"), (2, 5, 2, "inductor"), (4, 5, 3, "graph"), (3, 4, 1, "graph")],
)
def test_uneven_shards_train_on_processes_as_in_eager(n, rows, stage, backend):
    per_rank = run_ranks(trains, n, n, rows, stage, backend, timeout=180)
    for eager, compiled, key in per_rank:
        assert key == per_rank[0][2]
        assert torch.equal(compiled, per_rank[0][1])
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)
    single, *_ = train(None, None, rows, False)
    torch.testing.assert_close(per_rank[0][1], single, rtol=1e-5, atol=1e-7)
