"""Optimizers that a captured step makes, or whose state it deletes or loads, step as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import partita as pt


class OwnStep(optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


OPTIMIZERS = {
    "Adam": optim.Adam,
    "AdamW in lists": lambda p, lr: optim.AdamW(p, lr=lr, foreach=True),
    "Adam, fused": lambda p, lr: optim.Adam(p, lr=lr, fused=True),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "a subclass with its own step": OwnStep,
}


def update(model, x, optimizer):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_with_new(model, x, make):
    return lambda: update(model, x, make(model.parameters(), lr=0.1))


def step_with_new_three_times(model, x, make):
    def step():
        optimizer = make(model.parameters(), lr=0.1)
        update(model, x, optimizer)
        update(model, x, optimizer)
        return update(model, x, optimizer) + len(optimizer.state)

    return step


def step_with_loaded(model, x, make):
    before = make(model.parameters(), lr=0.1)
    update(model, x, before), update(model, x, before)

    def step():
        optimizer = make(model.parameters(), lr=0.1)
        optimizer.load_state_dict(before.state_dict())
        return update(model, x, optimizer)

    return step


def step_with_deleted_state(model, x, make):
    optimizer = make(model.parameters(), lr=0.1)
    update(model, x, optimizer), update(model, x, optimizer)

    def step():
        optimizer.state.clear()
        return update(model, x, optimizer)

    return step


def step_with_closure(model, x, make):
    def step():
        optimizer = make(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        return optimizer.step(closure=closure).detach()

    return step


STEPS = [
    step_with_new,
    step_with_new_three_times,
    step_with_loaded,
    step_with_deleted_state,
    step_with_closure,
]


def losses(steps, kind, compiled, mesh=None, stage=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    model.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    if mesh is not None:
        pt.zero(model, mesh, stage=stage)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    step = steps(model, x, OPTIMIZERS[kind])
    run = pt.compile(step, backend="graph") if compiled else step
    return [run().item() for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_steps_as_in_eager(steps, kind):
    wanted = losses(steps, kind, compiled=False)
    assert losses(steps, kind, compiled=True) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_steps_as_in_eager_under_zero(stage):
    wanted = losses(step_with_new_three_times, "NAdam", compiled=False)
    with pt.ranks(dp=2) as world:
        found = world.run(
            lambda mesh: losses(step_with_new_three_times, "NAdam", True, mesh, stage)
        )
    assert found == [pytest.approx(wanted, rel=1e-12)] * 2
