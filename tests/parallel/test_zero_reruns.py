"""Does a ZeRO-3 block go on as on one device behind a checkpoint, or behind inference mode?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import partita as pt
from tests.programs.zero_stages import STAGES, X, Y, gradients_of, loss_of, run


class Gated(nn.Module):
    """Computes with a product of its weights, so that only the product is saved if it is frozen."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        weight = self.linear.weight * torch.sigmoid(self.gate.weight.sum())
        return F.linear(x, weight, self.linear.bias)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Gated(), Gated()])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def gated():
    torch.manual_seed(0)
    return Checkpointed().double()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_block_that_was_frozen_between_a_forward_and_its_checkpoint_is_rerun(stage, frozen):
    def program(model, spread, no_sync):
        loss = loss_of(model, spread(X))
        model.blocks[frozen].requires_grad_(False)
        loss_of(model, spread(Y)).backward()
        model.blocks[frozen].requires_grad_(True)
        loss.backward()
        return gradients_of(model)

    run(program, stage, make=gated)


def test_a_checkpoint_of_a_block_that_had_computed_parameters_is_refused_on_all_ranks():
    def program(mesh):
        model = pt.zero(gated(), mesh)
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        values = {name: p * 0.5 for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, values, (x,)).square().mean()
        with pytest.raises(pt.LayoutError, match="would run again with other parameters"):
            loss.backward()
        loss_of(model, x).backward()
        return gradients_of(model)

    truth = gated()
    loss_of(truth, X).backward()
    with pt.ranks(dp=3) as world:
        for found in world.run(program):
            torch.testing.assert_close(found, gradients_of(truth), rtol=1e-10, atol=1e-12)


# -- reads in inference mode -----------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["grad", "zero_grad"])
def test_gradients_that_are_read_or_cleared_in_inference_mode_can_be_added_to(stage, what):
    def program(model, spread, no_sync):
        found = []
        with no_sync(model):
            loss_of(model, spread(X)).backward()
        with torch.inference_mode():
            if what == "grad":
                found += gradients_of(model)
            else:
                model.zero_grad(set_to_none=False)
        loss_of(model, spread(Y)).backward()
        return found + gradients_of(model)

    run(program, stage)
