"""A captured step uses a gradient after it was reduced, as an eager step does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt


def make_model(mesh, stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
    if mesh is not None:
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        pt.parallelize(model, mesh, {}) if stage is None else pt.zero(model, mesh, stage=stage)
    return model, x


def read_kept_gradients(model, x):
    """Backward adds to gradients to which the step has references."""
    model.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    kept = [p.grad for p in model.parameters()]
    model(x).square().sum().backward()
    return [grad * 2 for grad in kept]


def differentiate_reduced_gradients(model, x):
    """Gradients are reduced while they are a part of a graph, which is differentiated then."""
    model.zero_grad()
    model(x).square().mean().backward(create_graph=True)
    pt.reduce_gradients(model.parameters())
    norm = sum(p.grad.square().sum() for p in model.parameters())
    return [norm.detach(), *torch.autograd.grad(norm, list(model.parameters()))]


def run(program, stage, mesh=None):
    model, x = make_model(mesh, stage)

    def step(x):
        return program(model, x)

    step = step if mesh is None else pt.compile(step, backend="graph")
    found = [value for _ in range(2) for value in step(x)]
    return [value.full_tensor() if isinstance(value, pt.DTensor) else value for value in found]


@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize("program", [read_kept_gradients, differentiate_reduced_gradients])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_step_uses_reduced_gradients_as_in_eager(program, stage):
    truth = run(program, stage)
    with pt.ranks(dp=2) as world:
        for found in world.run(lambda mesh: run(program, stage, mesh)):
            torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)
