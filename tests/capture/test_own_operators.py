"""Operators of `torch.library` in a captured step: what their schemas say is enough for a graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt
from partita.rules.rule import ON_NEW_RULE, RULES

X, BIAS = torch.sin(torch.arange(5 * 4 * 6.0)).reshape(5, 4, 6), torch.cos(torch.arange(6.0))


@torch.library.custom_op("own_operators::squash", mutates_args=())
def squash(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + bias)


@squash.register_fake
def _(x, bias):
    return torch.empty_like(x)


@torch.library.custom_op("own_operators::squash_backward", mutates_args=())
def squash_backward(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return g * (1 - y * y)


@squash_backward.register_fake
def _(g, y):
    return torch.empty_like(g)


def _backward(ctx, g):
    grad = squash_backward(g.contiguous(), *ctx.saved_tensors)
    return grad, grad.flatten(0, -2).sum(0)


squash.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)


@pytest.fixture
def rule():
    pt.rule("... h, h -> ... h", squash)
    yield
    forget_rule(squash)


def forget_rule(function):
    RULES.pop(function)
    for forget in ON_NEW_RULE:
        forget()


def step(x, bias):
    loss = (squash(x * 2, bias) * x).square().mean()
    return (loss, *torch.autograd.grad(loss, (x, bias)))


def run_captured(mesh, placements, backend):
    x, bias = (
        pt.distribute_tensor(t, mesh, [p]).requires_grad_()
        for t, p in zip((X, BIAS), placements, strict=True)
    )
    fast = pt.compile(step, backend=backend)
    fast(x, bias)
    found = fast(x, bias)
    with pt.ledger() as log:
        eager = step(x, bias)
    assert len(fast.reasons) == 1 and "own_operators.squash_backward" in str(fast.graph)
    return [t.full_tensor() for t in found], [t.full_tensor() for t in eager], log.bytes


R, S = pt.Replicate(), pt.Shard


@pytest.mark.parametrize("placements", [(S(0), R), (S(2), S(0)), (R, R)], ids=str)
@pytest.mark.parametrize("backend", ["graph", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_operator_of_ones_own_is_captured_with_its_gradients(placements, backend, rule):
    truth = step(*[t.clone().requires_grad_() for t in (X, BIAS)])
    with pt.ranks(dp=2) as world:  # uneven pieces of 5 rows
        for found, eager, _ in world.run(run_captured, placements, backend):
            for one, other, wanted in zip(found, eager, truth, strict=True):
                torch.testing.assert_close(one, wanted)
                torch.testing.assert_close(one, other)


def test_without_a_rule_its_operands_are_gathered_in_a_graph_as_in_eager():
    truth = step(*[t.clone().requires_grad_() for t in (X, BIAS)])
    with pt.ranks(dp=2) as world:
        found, _, sent = world.run(run_captured, (S(0), R), "graph")[0]
    assert sent > 0
    for one, wanted in zip(found, truth, strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("backend", ["graph", pytest.param("inductor", marks=pytest.mark.slow)])
def test_on_plain_tensors_it_is_captured_without_a_rule(backend):
    x, bias = (t.clone().requires_grad_() for t in (X, BIAS))
    fast = pt.compile(step, backend=backend)
    for _ in range(2):
        for one, wanted in zip(fast(x, bias), step(x, bias), strict=True):
            torch.testing.assert_close(one, wanted)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x + squash(self.linear(x), self.bias)


@pytest.mark.slow
def test_it_trains_in_blocks_that_are_traced_once_and_sharded(rule):
    def train(mesh, compiled):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(6)])
        pt.zero(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = pt.distribute_batch(X[:4], mesh)

        def update(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = pt.compile(update, backend="graph") if compiled else update
        return [run(x).item() for _ in range(3)], run.explain() if compiled else ""

    with pt.ranks(dp=2) as world:
        eager, _ = world.run(train, False)[0]
        captured, explained = world.run(train, True)[0]
    assert captured == pytest.approx(eager, rel=1e-5)
    assert "Block: 5 equal calls, left flat (the step has " in explained


def test_what_it_gives_is_kept_where_a_region_is_made_again():
    model = nn.Sequential(Block(), Block())
    truth = [g.clone() for g in torch.autograd.grad(model(X).sum(), list(model.parameters()))]
    pt.remat(model)
    fast = pt.compile(
        lambda x: torch.autograd.grad(model(x).sum(), list(model.parameters())), backend="graph"
    )
    for one, wanted in zip(fast(X), truth, strict=True):
        torch.testing.assert_close(one, wanted)
    calls = [n for n in fast.program.graph.graph.nodes if "squash.default" in str(n.target)]
    assert len(calls) == 2


LIBRARY = torch.library.Library("own_operators", "FRAGMENT")
LIBRARY.define("defined(Tensor x) -> Tensor")
LIBRARY.impl("defined", lambda x: x * 3, "CompositeExplicitAutograd")
torch.library.register_fake("own_operators::defined", torch.empty_like, lib=LIBRARY)
defined = torch.ops.own_operators.defined


def test_one_of_which_nobody_says_that_it_is_local_is_captured_with_a_rule():
    with pytest.raises(pt.CaptureError, match="it is not made by torch\\.library\\.custom_op"):
        pt.compile(lambda x: defined(x), backend="graph")(torch.ones(2))
    pt.rule("... -> ...", defined)
    assert pt.compile(lambda x: defined(x), backend="graph")(torch.ones(2)).tolist() == [3, 3]
    forget_rule(defined)


@torch.library.custom_op("own_operators::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("own_operators::tell", mutates_args=())
def tell(x: torch.Tensor) -> None:
    print(x)


@torch.library.custom_op(
    "own_operators::noise", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


tell.register_fake(lambda x: None)
noise.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("operator", "reason"),
    [(double, "it writes x"), (tell, "it returns nothing"), (noise, "it draws random numbers")],
    ids=["writes", "returns nothing", "draws"],
)
def test_one_that_does_more_than_give_new_tensors_is_refused_with_the_reason(operator, reason):
    def step(x):
        y = x * 1
        out = operator(y)
        return y if out is None else out

    with pytest.raises(pt.CaptureError, match="a custom operator") as raised:
        pt.compile(step, backend="graph")(torch.ones(2))
    assert reason in str(raised.value) and "test_own_operators.py" in str(raised.value)
