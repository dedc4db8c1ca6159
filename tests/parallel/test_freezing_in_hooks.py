"""Parameters that a hook freezes or unfreezes within a step get the gradients of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt

D = torch.float64
REGISTER = {
    "before the forward": lambda block: block.register_forward_pre_hook,
    "after the forward": lambda block: block.register_forward_hook,
    "in backward": lambda block: block.register_full_backward_hook,
    "on a gradient": lambda block: block[0].weight.register_hook,
}


def train(mesh, stage, where, at, other):
    """Trains two blocks; a hook of block `at` freezes or unfreezes block `other` in each step."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(3, 2, dtype=D), nn.Tanh(), nn.Linear(2, 3, dtype=D)) for _ in "ab"
    ]
    model, x = nn.Sequential(*blocks), torch.randn(5, 3, dtype=D)
    if mesh is not None:
        pt.zero(model, mesh, stage=stage)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    x.requires_grad_()
    changed = list(model[other].parameters())

    def change(*_):
        for p in changed:
            p.requires_grad_(not p.requires_grad)

    REGISTER[where](model[at])(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        grads = [-1.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()]
        found.append([float(loss.detach()), *grads, *[p.requires_grad for p in changed]])
        optimizer.step()
        optimizer.zero_grad()
    return found


OWN = ["after the forward", "in backward", "on a gradient"]
CASES = [*[(0, 1, w) for w in REGISTER], *[(1, 0, w) for w in REGISTER], *[(1, 1, w) for w in OWN]]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("at", "other", "where"), CASES)
def test_gradients_are_those_of_one_process(at, other, where, stage):
    right = train(None, stage, where, at, other)
    with pt.ranks(dp=2) as world:
        for found in world.run(train, stage, where, at, other):
            for step, wanted in zip(found, right, strict=True):
                assert step == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("read", [lambda model: list(model.parameters()), None])
def test_a_block_is_neither_frozen_nor_unfrozen_in_its_own_forward(read):
    def body(mesh):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].requires_grad_(read is not None)
        pt.zero(model, mesh, stage=3)
        held = list(model[1].parameters())

        def change(block, _):
            for p in held if read is None else read(block):
                p.requires_grad = not p.requires_grad

        model[1].register_forward_pre_hook(change)
        model(pt.distribute_tensor(torch.ones(4, 3), mesh, [pt.Shard(0)]))

    with pt.ranks(dp=2) as world, pytest.raises(pt.LayoutError, match="of its own block") as found:
        world.run(body)
    assert "test_freezing_in_hooks.py:" in str(found.value) and "stage=2" in str(found.value)


def test_what_a_parameter_has_already_may_be_set_in_its_forward():
    class Layer(nn.Linear):
        def forward(self, x):
            self.weight.requires_grad = True
            return super().forward(x.requires_grad_(False)).requires_grad_()

    def body(mesh):
        model = pt.zero(Layer(4, 4), mesh, stage=3)
        x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)])
        model(x).sum().backward()
        return model.weight.grad.full_tensor().tolist()

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [[[4.0] * 4] * 4] * 2
