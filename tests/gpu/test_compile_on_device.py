"""Does a compiled step train as an eager one does, on whichever device there is?"""

from __future__ import annotations

import pytest
import torch

import partita as pt
from tests.gloo.launch import run_ranks
from tests.programs.captured_steps import adamw, losses, plain_step, tiny
from tests.programs.zero_training import TOKENS

pytestmark = pytest.mark.slow


def train_both_ways(rank, ranks, device, stage, backend):
    """Losses of eager and of compiled steps, and the key."""
    mesh = pt.init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))
    found, key = [], ""
    batch = [pt.distribute_tensor(t.to(device), mesh, [pt.Shard(0)]) for t in TOKENS]
    for compiled in (False, True):
        model = pt.zero(tiny().to(device), mesh, stage=stage)
        step = plain_step(model, adamw(model.parameters()))
        if compiled:
            step = pt.compile(step, backend=backend)
        found.append(losses(step, batch, 20))
        key = step.key if compiled else ""
    return (*found, key)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["graph", "inductor"])
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_have_one_key_and_the_losses_of_eager(stage, backend, place):
    asked = (place.ranks, place.device, stage, backend)
    per_rank = run_ranks(train_both_ways, place.ranks, *asked, timeout=280, device=place.device)
    eager, compiled, key = per_rank[0]
    assert all(one == per_rank[0] for one in per_rank)  # whichever number its device has
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)
    assert len(key) == 64
