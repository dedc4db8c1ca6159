"""Gradients that are summed in the memory of the step before are nobody else's values."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import partita as pt
from partita.fsdp import fully_shard


def stepped(model, x):
    """The gradients of one step, summed over the ranks."""
    model.zero_grad()
    model(x).square().sum().backward()
    pt.reduce_gradients(model.parameters())
    return [p.grad for p in model.parameters()]


def local(grads):
    return [g.to_local().clone() for g in grads]


def model_and_rows(mesh, stage):
    torch.manual_seed(0)
    model = pt.zero(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), mesh, stage=stage)
    return model, [pt.distribute_tensor(torch.randn(4, 4), mesh, [pt.Shard(0)]) for _ in range(4)]


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_are_held_keep_their_values(stage):
    def program(mesh):
        model, rows = model_and_rows(mesh, stage)
        held = stepped(model, rows[0])
        view = stepped(model, rows[1])[0].to_local().numpy()
        before = local(held), view.copy()
        new = [local(stepped(model, x)) for x in rows[2:]]
        kept = all(map(torch.equal, local(held), before[0])) and (view == before[1]).all()
        return kept, [g.tolist() for grads in new for g in grads]

    def alone():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        rows = [torch.randn(4, 4) for _ in range(4)]
        found = []
        for x in rows[2:]:
            model.zero_grad()
            model(x).square().sum().backward()
            found += [p.grad.tolist() for p in model.parameters()]
        return found

    with pt.ranks(dp=2) as world:
        for kept, new in world.run(program):
            assert kept
            for got, want in zip(new, alone(), strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(want))


def test_memory_that_nobody_looks_at_serves_again():
    def program(mesh):
        model, rows = model_and_rows(mesh, 0)
        others, found = [], set()
        for x in rows:
            found.add(stepped(model, x)[0].to_local().data_ptr())
            model.zero_grad()
            others += [
                torch.empty(23) for _ in range(8)
            ]  # what is free is taken by as many numbers
        return len(found)

    with pt.ranks(dp=2) as world:
        assert world.run(program) == [1, 1]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "view", [lambda g: g.view(-1), lambda g: g[0], torch.Tensor.detach, lambda g: g.data]
)
def test_a_view_of_a_reduced_gradient_is_as_it_was_on_every_rank(view, stage):
    def program(mesh):
        model, rows = model_and_rows(mesh, stage)
        held = view(stepped(model, rows[0])[0])
        before = held.to_local().clone()
        model(rows[1]).square().sum().backward()
        return torch.equal(held.to_local(), before)

    with pt.ranks(dp=2) as world:
        assert world.run(program) == [True, True]


@pytest.mark.slow
def test_classes_that_a_program_defines_in_a_function_are_freed():
    def define(mesh):
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, g):
                return g * 2

        class Model(nn.Linear):
            pass

        x = pt.distribute_tensor(torch.arange(4.0), mesh, [pt.Shard(0)]).requires_grad_()
        Double.apply(x).sum().backward()
        sharded = fully_shard(Model(4, 4), mesh=mesh)
        assert sharded.__class__ is fully_shard(Model(4, 4), mesh=mesh).__class__
        return weakref.ref(Double), weakref.ref(Model)

    with pt.ranks(dp=2) as world:
        classes = world.run(define)
    gc.collect()
    assert [known() for of_rank in classes for known in of_rank] == [None] * 4
