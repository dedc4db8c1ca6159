"""Does a compiled step train as an eager one does, on whichever device there is?"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import partita as pt
from partita.comm.device import Device
from tests.programs.captured_steps import adamw, losses, plain_step, tiny
from tests.programs.gloo_ranks import run_ranks
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
            step = pt.compile(step, backend=backend, cuda_graphs=False)
        found.append(losses(step, batch, 20))
        key = step.key if compiled else ""
    return (*found, key)


@pytest.mark.parametrize("backend", ["graph", "inductor"])
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_have_one_key_and_the_losses_of_eager(stage, backend, place):
    asked = (place.ranks, place.device, stage, backend)
    per_rank = run_ranks(train_both_ways, place.ranks, *asked, device=place.device)
    eager, compiled, key = per_rank[0]
    assert all(one == per_rank[0] for one in per_rank)  # whichever number its device has
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)
    assert len(key) == 64


def train_recorded(rank, ranks, device, stage, backend):
    """Losses of eager steps and of recorded ones, at a rate that changes; what is recorded."""
    mesh = pt.init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))
    batch = [pt.distribute_tensor(t.to(device), mesh, [pt.Shard(0)]) for t in TOKENS]
    found, reason = [], ""
    for recorded in (False, True):
        model = pt.zero(tiny().to(device), mesh, stage=stage)
        optimizer = adamw(model.parameters())
        step = plain_step(model, optimizer)
        if recorded:
            step = pt.compile(step, backend=backend, cuda_graphs=True)
        losses = []
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for i in range(10):
                optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
                losses.append(step(*batch))  # read at the end: none is written over
        found.append([loss.item() for loss in losses])
        reason = " ".join(str(w.message) for w in heard if "CUDA graphs" in str(w.message))
    return (*found, step.is_recorded, len(step.reasons), reason)


@pytest.mark.parametrize("backend", ["graph", "inductor"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_in_a_cuda_graph_has_the_losses_of_eager(stage, backend, place, record_property):
    asked = (place.ranks, place.device, stage, backend)
    per_rank = run_ranks(train_recorded, place.ranks, *asked, device=place.device)
    record_property(f"ZeRO-{stage}, {backend}, in a CUDA graph", str(per_rank[0][2]))
    for eager, recorded, is_recorded, captures, reason in per_rank:
        torch.testing.assert_close(recorded, eager, rtol=1e-5, atol=0)
        assert captures == 1
        assert is_recorded != place.is_host
        assert ("its tensors are on cpu" in reason) == place.is_host


def draw_after_a_refusal(rank, ranks, device):
    """Calls a step that waits for the device, which CUDA does not record; then draws."""

    @torch.library.custom_op("partita_tests::finish", mutates_args=())
    def finish(x: torch.Tensor) -> torch.Tensor:
        Device(x.device.type).finish()
        return x.clone()

    finish.register_fake(torch.empty_like)
    x = torch.ones(1000, device=device)
    step = pt.compile(lambda x: F.dropout(finish(x), 0.5), backend="graph")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = [step(x).count_nonzero().item() for _ in range(4)]
    kept.append(F.dropout(x, 0.5).count_nonzero().item())
    return kept, step.is_recorded, step.why_not_recorded


def test_a_step_that_cuda_refuses_to_record_runs_without_and_draws(place):
    asked = (place.ranks, place.device)
    per_rank = run_ranks(draw_after_a_refusal, *asked[:1], *asked, device=place.device)
    for kept, is_recorded, reason in per_rank:
        assert all(400 < count < 600 for count in kept) and len({*kept}) > 1
        assert not is_recorded and reason
