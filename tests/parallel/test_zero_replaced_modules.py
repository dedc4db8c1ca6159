"""Does a captured step of ZeRO-3 go on when a module of a block is another?

Ground truth is the same program without `pt.compile`, on one device.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import partita as pt


def train(model, x, wrap):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step, losses = wrap(step), []
    for i in range(4):
        if i == 2:
            model[0][1] = nn.Identity()
        losses.append(step(x).item())
    return losses


@pytest.mark.slow
def test_a_module_of_a_block_that_is_taken_out_is_gathered_no_more():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    wanted = train(copy.deepcopy(model), x, lambda f: f)

    def body(mesh):
        part = pt.zero(copy.deepcopy(model), mesh, stage=3)
        rows = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        return train(part, rows, lambda f: pt.compile(f, backend="graph"))

    with pt.ranks(dp=2) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_plain_parameter_in_a_block_is_refused_by_the_op_that_uses_it(compiled):
    def forward(mesh):
        model = pt.zero(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), mesh)
        model[0].weight = nn.Parameter(torch.ones(4, 3))
        run = pt.compile(model.__call__, backend="graph") if compiled else model
        run(pt.distribute_tensor(torch.ones(4, 3), mesh, [pt.Shard(0)]))

    error = "linear: a plain tensor that requires grad stands next to a DTensor"
    with pt.ranks(dp=2) as world, pytest.raises(pt.LayoutError, match=error):
        world.run(forward)
