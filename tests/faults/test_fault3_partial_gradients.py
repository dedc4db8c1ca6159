"""A Partial gradient is reduced once, and an op that takes it reads what is there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

X = torch.arange(12.0, dtype=torch.float64).view(4, 3)

# Each op takes the gradient of one parameter twice, or more often.
OPS = {
    "mul": lambda w, b: w.grad * w.grad,
    "mul by name": lambda w, b: torch.mul(input=w.grad, other=w.grad),
    "mul in place": lambda w, b: w.grad.mul_(w.grad),
    "mul into out": lambda w, b: torch.mul(w.grad, w.grad, out=torch.empty_like(w.grad)),
    "div": lambda w, b: w.grad / w.grad,
    "addcmul": lambda w, b: torch.addcmul(w.grad, w.grad, w.grad),
    "einsum": lambda w, b: torch.einsum("ij,ij->", w.grad, w.grad),
    "linear": lambda w, b: F.linear(w.grad, w.grad),
    "dot": lambda w, b: b.grad.dot(b.grad),
    "outer": lambda w, b: torch.outer(b.grad, b.grad),
    "foreach": lambda w, b: torch._foreach_mul([w.grad], [w.grad])[0],
    "of two": lambda w, b: w.grad.sum(1) * b.grad + w.grad @ w.grad.T @ b.grad,
}


def whole(t):
    return (t.full_tensor() if isinstance(t, pt.DTensor) else t).detach().clone()


def make_layer():
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def use_gradients(layer, x, use):
    """Returns what `use` returns twice after a backward pass, and the gradients."""
    layer(x).square().mean().backward()
    results = [use(layer.weight, layer.bias) for _ in range(2)]
    return [whole(t) for t in (*results, layer.weight.grad, layer.bias.grad)]


def use_in_hook(layer, x, use):
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad * p.grad)))
    layer(x).square().mean().backward()
    return seen


def use_in_step(layer, x, use):
    def step(x):
        layer.zero_grad()
        layer(x).square().mean().backward()
        return use(layer.weight, layer.bias)

    if isinstance(layer.weight, pt.DTensor):
        step = pt.compile(step, backend="graph")
    return [whole(step(x)) for _ in range(2)]


@pytest.mark.parametrize("stage", [0, 2, 3, None])
@pytest.mark.parametrize("run", [use_gradients, use_in_hook, use_in_step])
def test_an_op_may_take_a_gradient_twice(run, stage):
    ops = OPS if run is use_gradients else dict.fromkeys(["mul"], OPS["mul"])
    wanted = {name: run(make_layer(), X, use) for name, use in ops.items()}

    def program(mesh):
        for name, use in ops.items():
            layer = make_layer()
            if stage is None:
                pt.distribute_module(layer, mesh)
            else:
                pt.zero(layer, mesh, stage=stage)
            found = run(layer, pt.distribute_batch(X, mesh), use)
            torch.testing.assert_close(found, wanted[name], rtol=1e-9, atol=1e-9)

    with pt.ranks(dp=3) as world:
        world.run(program)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_the_program_reads_is_sent_once(stage):
    def program(mesh, reads):
        model = pt.zero(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), mesh, stage=stage)
        x = pt.distribute_tensor(torch.ones(4, 8), mesh, [pt.Shard(0)])
        with pt.ledger() as log:
            model(x).sum().backward()
            for p in model.parameters():
                reads(p)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return log.bytes

    def sent(reads):
        with pt.ranks(dp=2) as world:
            return world.run(lambda mesh: program(mesh, reads))[0]

    nothing = sent(lambda p: None)
    assert nothing == sent(lambda p: p.grad.placements)
    assert nothing == sent(lambda p: p.grad.mul_(2))
    nbytes, norms = 4 * (8 * 8 + 8) * 4, 4 * 8
    if stage < 3:  # an all-reduce, or a reduce-scatter and the norms of the pieces
        assert nothing == (nbytes if stage < 2 else nbytes // 2 + norms)
