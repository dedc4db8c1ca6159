"""A captured step uses a gradient after it was reduced, as an eager step does."""

from __future__ import annotations

from contextlib import nullcontext

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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize("program", [read_kept_gradients, differentiate_reduced_gradients])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_step_uses_reduced_gradients_as_in_eager(program, stage):
    truth = run(program, stage)
    with pt.ranks(dp=2) as world:
        for found in world.run(lambda mesh: run(program, stage, mesh)):
            torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)


# -- gradients that exist before the step ----------------------------------------------------------


def clip(a, b, x):
    nn.utils.clip_grad_norm_([a, b], 0.5)


def add_and_return(a, b, x):
    (a * x).sum().backward()
    return a.grad


def read_what_backward_adds_to(a, b, x):
    grad = a.grad
    nn.utils.clip_grad_norm_([a], 0.5)
    (a * x).sum().backward()
    return grad * 2


def add_and_forget(a, b, x):
    (a * x).sum().backward()
    a.grad = None


def exchange(a, b, x):
    a.grad, b.grad = b.grad, a.grad
    (a * x).sum().backward()


def share(a, b, x):
    (a * x).sum().backward()
    nn.utils.clip_grad_norm_([a, b], 0.5)
    b.grad = a.grad


def run_with_gradients(program, mesh=None):
    """Returns values and identities of gradients, of their former objects and of results.

    Gradients exist before the step. In the second call, they are reduced.
    """
    torch.manual_seed(0)
    values = [torch.randn(4, dtype=torch.float64) for _ in range(2)]
    batches = [torch.randn(2, 4, dtype=torch.float64) for _ in range(4)]
    if mesh is not None:
        values = [pt.distribute_tensor(value, mesh, [pt.Replicate()]) for value in values]
        batches = [pt.distribute_tensor(x, mesh, [pt.Shard(0)]) for x in batches]
    a, b = map(nn.Parameter, values)

    def step(x):
        return program(a, b, x)

    step = step if mesh is None else pt.compile(step, backend="graph")
    found, kept = [], []
    for x in batches[1:]:
        if a.grad is None or b.grad is None:
            (a * b * batches[0]).sum().backward()
        if x is batches[2]:
            nn.utils.clip_grad_norm_([a, b], 0.4)
        kept += [a.grad]
        result = step(x)
        kept += [a.grad, b.grad, result]
        objects = [a.grad, b.grad, *kept]
        for one in objects:
            first = next(i for i, other in enumerate(objects) if other is one)
            whole = one.full_tensor() if isinstance(one, pt.DTensor) else one
            found.append((first, None if whole is None else whole.tolist()))
    (a * b * batches[0]).sum().backward()
    return [*found, (a.grad.full_tensor() if mesh is not None else a.grad).tolist()]


@pytest.mark.parametrize(
    "program",
    [clip, add_and_return, read_what_backward_adds_to, add_and_forget, exchange, share],
)
def test_gradients_from_before_a_step_stay_the_objects_that_they_are_in_eager(program):
    truth = run_with_gradients(program)
    with pt.ranks(dp=2) as world:
        for found in world.run(lambda mesh: run_with_gradients(program, mesh)):
            assert [one[0] for one in found[:-1]] == [one[0] for one in truth[:-1]]
            values = [[one[1] or [] for one in part[:-1]] + [part[-1]] for part in (found, truth)]
            for one, other in zip(*values, strict=True):
                assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_captured_update_reads_gradients_that_eager_backward_has_added(stage):
    def train(mesh=None):
        model, x = make_model(mesh, stage)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)

        def update():
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

        update = update if mesh is None else pt.compile(update, backend="graph")
        for _ in range(2):
            with pt.no_sync(model) if mesh is not None else nullcontext():
                model(x).square().mean().backward()
            update()
            model(x).square().mean().backward()
            update()
        model(x).square().mean().backward()
        found = [t for p in model.parameters() for t in (p, p.grad)]
        return [t.full_tensor() if isinstance(t, pt.DTensor) else t for t in found]

    truth = train()
    with pt.ranks(dp=2) as world:
        for found in world.run(train):
            torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)
