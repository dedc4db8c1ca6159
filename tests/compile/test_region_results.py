"""What have a region's results beside values: gradients of some, and what is left on them?

Ground truth is the same program without `pt.compile`, on one device.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import partita as pt


class Heads(nn.Module):
    """Results that have a part of their history in common."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.left(h), self.right(h)


class Twins(nn.Module):
    """Results that have none."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return self.left(x), self.right(x)


class ForwardBackwardPair(nn.Module):
    """Results that are views of one value, and others that are made of one of these."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        left, right = self.first(x).chunk(2, -1)
        return left, self.second(torch.cat([right, right], -1))


def train_on_one_result(model, x, wrap=lambda f: f):
    """Gradients of each step, of which each goes backward from another result."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    forward, found = wrap(lambda x: model(x)), []
    for i in range(3):
        forward(x)[i % 2].square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        found.append([g if g is None else getattr(g, "full_tensor", g.clone)() for g in grads])
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", [Heads, Twins, ForwardBackwardPair])
def test_parameters_of_other_results_get_no_gradients(kind, stage):
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()), torch.randn(6, 4)  # one block of ZeRO
    wanted = train_on_one_result(copy.deepcopy(model), x)

    def body(mesh):
        part = pt.zero(copy.deepcopy(model), mesh, stage=stage)
        rows = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        return train_on_one_result(part, rows, lambda f: pt.compile(f, backend="graph"))

    with pt.ranks(dp=2) as world:
        for found in world.run(body):
            assert [[g is None for g in step] for step in found] == [
                [g is None for g in step] for step in wanted
            ]
            there = [[g for step in way for g in step if g is not None] for way in (found, wanted)]
            torch.testing.assert_close(*there)


def compiled(fn):
    return pt.compile(fn, backend="graph")


def value_of(x):
    return getattr(x, "full_tensor", x.clone)()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 5])
def test_a_result_has_the_gradient_that_the_step_left_on_it(rows):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(rows, 4)

    def use(model, x, wrap):
        def step(x):
            x = x.detach().clone().requires_grad_()
            y = model(x)
            y.retain_grad()
            y.square().sum().backward()
            return x, y

        step = wrap(step)
        return [[value_of(t.grad) for t in step(x)] for _ in range(2)]

    def body(mesh):
        part = pt.zero(copy.deepcopy(model), mesh)
        return use(part, pt.distribute_tensor(x, mesh, [pt.Shard(0)]), compiled)

    wanted = use(copy.deepcopy(model), x, lambda f: f)
    torch.testing.assert_close(use(copy.deepcopy(model), x, compiled), wanted)
    with pt.ranks(dp=2) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, wanted)


def test_a_result_whose_gradient_a_region_asks_for_keeps_it():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(6, 4)

    def region(x):
        h = model(x)
        h.retain_grad()
        return h.relu(), h

    def use(run):
        found = []
        for _ in range(2):
            y, h = run(x)
            y.sum().backward()
            found.append(h.grad)
        return found

    torch.testing.assert_close(use(compiled(region)), use(region))


@pytest.mark.parametrize("mark", ["an attribute", "a hook"])
def test_what_a_step_hangs_on_a_result_is_an_error(mark):
    def step(x):
        y = (x * 2).detach().requires_grad_()
        if mark == "a hook":
            y.register_hook(lambda g: g * 2)
        else:
            y.name_of_layer = "last"
        return y

    with pytest.raises(pt.CaptureError, match=mark.replace("an ", "the ")):
        compiled(step)(torch.ones(2))


def test_parts_of_what_a_rematerialized_block_gathered_are_results():
    """Backward reads views of the gathered tensor: it must not wait for the gather again."""
    value = torch.arange(24, dtype=torch.float64).view(6, 4) / 7

    def lines(x, compile_):
        def halves(x):
            y = x * 2
            if isinstance(x, pt.DTensor):
                y = y.redistribute(x.device_mesh, [pt.Replicate()])
            return y[:3], y[3:]

        block = pt.remat(halves)

        def step(x):
            first, second = block(x)
            return first * second

        x.requires_grad_()
        step = compile_(step)
        (step(x) ** 2).sum().backward()
        return x.grad

    truth = lines(value.clone(), lambda f: f)

    def run(mesh):
        return lines(pt.distribute_tensor(value, mesh, [pt.Shard(0)]), compiled).full_tensor()

    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with another"])
def test_a_result_of_a_tensor_that_is_frozen_afterwards_has_no_gradient(others):
    def run(wrap):
        frozen, trained, unused = (torch.full((3,), v, requires_grad=True) for v in (1.0, 2.0, 3.0))

        def step(x):
            first = (x * frozen).sum()
            frozen.requires_grad_(False)
            return (first, (x * trained).sum(), unused) if others else (first, unused)

        results = wrap(step)(torch.ones(3))
        if others:
            (results[0] + results[1]).backward()
        return results[0].detach(), frozen.requires_grad, frozen.grad, trained.grad

    torch.testing.assert_close(run(pt.compile(backend="graph")), run(lambda f: f))


# -- results through which autograd refuses to go backward -----------------------------------------


def logged(x, w):
    q = x.exp()
    q.mul_(100)
    return x.softmax(1) * w, q


def logged_of_a_trunk(x, w):
    h = (x * w).exp()
    q = h.exp()
    q.mul_(100)
    return h * 2, q


def logged_after_a_result(x, w):
    y = x * w
    q = y.exp()
    q.mul_(100)
    return y, q


def written_after_a_result(x, w):
    y = x.exp()
    z = y * w
    y.mul_(2)
    return z, y, x * w


def differentiated(x, w):
    s = (x * x).sum()
    (slope,) = torch.autograd.grad(s, x)
    return (x * w).sin() * slope, s


def gone_backward(x, w):
    loss = (x * w).square().sum()
    loss.backward()
    return (loss,)


def written_alone(x, w):
    h = (x * w).sigmoid()
    h *= 2
    return (h,)


def updated(x, w):
    y = x * w
    with torch.no_grad():
        w.add_(1)
    return (y, x.sin())


def of_a_leaf_of_its_own(x, w):
    made = torch.ones(3, requires_grad=True)
    q = (made * x).exp()
    q.mul_(2)
    return x * w, q


def gradients_enabled_within(x, w):
    with torch.enable_grad():
        q = x.exp()
        q.mul_(2)
        return x * w, q


SPENT = [
    *(logged, logged_of_a_trunk, logged_after_a_result, written_after_a_result, differentiated),
    *(gone_backward, written_alone, updated, of_a_leaf_of_its_own, gradients_enabled_within),
]


def go_backward(run, choose, grad=True):
    """Returns the gradients of chosen results, or the first words of autograd's error."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    w = torch.full((3,), 1.5, dtype=torch.float64, requires_grad=True)
    with torch.set_grad_enabled(grad):
        results = run(x, w)
    assert all(t.requires_grad for t in results)
    loss = x.sum() + sum(t.sum() for t in choose(results))
    try:
        return torch.autograd.grad(loss, [x, w], allow_unused=True)
    except RuntimeError as error:
        return str(error)[:40]


@pytest.mark.parametrize("program", SPENT)
def test_a_result_that_cannot_go_backward_is_an_error_there_and_changes_no_other(program):
    region = compiled(program)
    firsts, lasts, wholes = (
        [
            go_backward(run, choose, program is not gradients_enabled_within)
            for run in (region, program)
        ]
        for choose in (lambda r: r[:1], lambda r: r[-1:], lambda r: r)
    )
    assert isinstance(wholes[1], str)
    for found, wanted in (firsts, lasts, wholes):
        if isinstance(wanted, str):
            assert found == wanted
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


class Gated(nn.Module):
    """A block with a result that is only logged."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        q = self.gate(x).exp()
        q.mul_(3)
        return self.first(x).tanh(), q


def train_before_a_head(block, head, x):
    """Returns the losses of a head after a block."""
    optimizer, losses = torch.optim.SGD([*block.parameters(), *head.parameters()], 0.1), []
    for _ in range(3):
        y, q = block(x)
        assert q.requires_grad
        loss = head(y).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value_of(loss.detach()))
    return losses


def test_a_block_with_a_result_that_cannot_go_backward_is_trained():
    torch.manual_seed(0)
    block, head = Gated(), nn.Linear(4, 1, dtype=torch.float64)
    x = torch.randn(4, 4, dtype=torch.float64)
    wanted = train_before_a_head(copy.deepcopy(block), copy.deepcopy(head), x)

    def body(mesh):
        model = pt.parallelize(nn.Sequential(copy.deepcopy(block), copy.deepcopy(head)), mesh)
        rows = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        return train_before_a_head(compiled(model[0]), model[1], rows)

    with pt.ranks(dp=2) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize("amount", [lambda grad: 1, lambda grad: grad.sum()])
def test_a_hook_that_writes_in_backward_is_refused(amount):
    hits = torch.zeros((), dtype=torch.float64)

    def count(grad):
        hits.add_(amount(grad))

    def region(x):
        y = x.sin() * 2
        y.register_hook(count)
        return y

    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(pt.CaptureError, match=r"a hook, or a backward of the .* writes hits"):
        pt.compile(region, backend="graph")(x)
    assert hits.item() == 0
