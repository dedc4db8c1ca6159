"""Does a gradient that somebody holds get what later backward passes add, as torch adds in place?

Ground truth is one device.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import partita as pt


def train_with_held_gradients(model, x):
    """Clamp gradients by a list of them that is made once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    held = [p.grad for p in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            model(x).square().mean().backward()
        for g in held:
            g.clamp_(-0.01, 0.01)
        optimizer.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    return [getattr(p, "full_tensor", p.clone)().detach() for p in model.parameters()]


@pytest.mark.parametrize("stage", [None, 0, 1, 3])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_gradient_that_is_held_through_a_step_stays_the_gradient(stage, axes):
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(8, 5)
    wanted = train_with_held_gradients(copy.deepcopy(model), x)

    def body(mesh):
        part = copy.deepcopy(model)
        if stage is None:
            part = pt.distribute_module(part, mesh)
        else:
            part = pt.zero(part, mesh, "dp", stage=stage)
        rows = [pt.Shard(0), *[pt.Replicate()] * (mesh.ndim - 1)]
        return train_with_held_gradients(part, pt.distribute_tensor(x, mesh, rows))

    with pt.ranks(**axes) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, wanted)
