"""Parameters that a hook freezes or unfreezes within a step get the gradients of one process."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count, product

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


OWN = ["after the forward", "on a gradient"]
CASES = [*[(0, 1, w) for w in REGISTER], *[(1, 0, w) for w in REGISTER], *[(1, 1, w) for w in OWN]]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("at", "other", "where"), CASES)
def test_gradients_are_those_of_one_process(at, other, where, stage):
    right = train(None, stage, where, at, other)
    with pt.ranks(dp=2) as world:
        for found in world.run(train, stage, where, at, other):
            for step, wanted in zip(found, right, strict=True):
                assert step == pytest.approx(wanted, rel=1e-9)


def spread_over(mesh, model, x):
    """Shards the model by stage 3 and splits the rows of `x`. Nothing for `mesh` None."""
    if mesh is not None:
        pt.zero(model, mesh, stage=3)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    return x.requires_grad_()


def make_three_layers(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3, dtype=D) for _ in "abc"])
    return model, spread_over(mesh, model, torch.randn(4, 3, dtype=D))


def toggle_each(every, changed):
    """Returns a hook that freezes or unfreezes parameters each `every` times that it runs."""
    calls = count(1)

    def toggle(*_):
        if next(calls) % every == 0:
            for p in changed:
                p.requires_grad_(not p.requires_grad)

    return toggle


def train_with_many_calls(mesh, how, other, every, forwards, calls):
    """Trains three blocks, called several times; a hook of the middle one toggles `other`."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(3, 2, dtype=D), nn.Tanh(), nn.Linear(2, 3, dtype=D)) for _ in "abc"
    ]
    model = nn.Sequential(*blocks)
    x = spread_over(mesh, model, torch.randn(5, 3, dtype=D))
    changed, found = list(model[other].parameters()), []
    REGISTER[how](model[1])(toggle_each(every, changed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = 0
        for k in range(forwards):
            h = x * (k + 1)
            for _ in range(calls):
                h = model(h)
            loss = loss + h.square().mean()
        loss.backward()
        grads = [-1.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()]
        found += [float(loss.detach()), *grads, *[p.requires_grad for p in changed]]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("other", [0, 2])
@pytest.mark.parametrize("how", ["in backward", "on a gradient"])
def test_a_gradient_is_added_if_its_parameter_is_trained_when_the_last_part_arrives(how, other):
    wrong = []
    with pt.ranks(dp=2) as world:
        for case in product([1, 2, 3], [1, 2], [1, 2]):
            right = train_with_many_calls(None, how, other, *case)
            for found in world.run(train_with_many_calls, how, other, *case):
                if found != pytest.approx(right, rel=1e-9):
                    wrong.append(case)
    assert not wrong


def freeze(p):
    p.requires_grad_(False)


def train_with_a_second_hook(mesh, asks):
    """The backward of the middle block freezes the last block; a hook of the first unfreezes it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(3, 3, dtype=D) for _ in range(3)]), torch.randn(5, 3).to(D)
    if mesh is not None:
        pt.zero(model, mesh, stage=3)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last, seen = list(model[2].parameters()), []

    def unfreeze(_):
        seen.append([p.requires_grad for p in last])
        for p in last:
            if not (asks and p.requires_grad):
                p.requires_grad_(True)

    model[1].register_full_backward_hook(lambda *_: freeze(last[0]))
    for p in model[0].parameters():
        p.register_post_accumulate_grad_hook(unfreeze)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        seen += [float(loss.detach()), *(p.requires_grad for p in last)]
    return seen


@pytest.mark.parametrize("asks", [False, True])
def test_a_hook_finds_what_an_earlier_one_froze_and_may_unfreeze_it(asks):
    right = train_with_a_second_hook(None, asks)
    assert [False, True] in right
    with pt.ranks(dp=2) as world:
        for found in world.run(train_with_a_second_hook, asks):
            assert [f for f in found if type(f) is not float] == [
                r for r in right if type(r) is not float
            ]
            floats = [f for f in found if type(f) is float]
            assert floats == pytest.approx([r for r in right if type(r) is float], rel=1e-9)


def test_gradients_of_autograd_grad_are_added_to_no_parameter_that_a_hook_froze():
    def body(mesh):
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
        pt.zero(model, mesh, stage=3)
        p = model[2].weight
        handle = model[1].register_full_backward_hook(lambda *_: freeze(p))
        x = pt.distribute_tensor(torch.ones(4, 3), mesh, [pt.Shard(0)])
        loss = model(x).sum()
        (found,) = torch.autograd.grad(loss, [p], retain_graph=True)
        assert p.grad is None
        handle.remove()
        p.requires_grad_(True)
        loss.backward()
        return p.grad.full_tensor().equal(found.full_tensor()), p.requires_grad

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [(True, False)] * 2


def differentiate_with_a_hook(mesh, at, create_graph):
    """Returns the gradient of one parameter, which a hook freezes and unfreezes meanwhile."""
    model, x = make_three_layers(mesh)
    p = model[at].weight
    model[1].register_full_backward_hook(lambda *_: freeze(p) if p.requires_grad else unfreeze(p))
    loss = model(x).square().mean() + model(2 * x).square().mean()
    (g,) = torch.autograd.grad(loss, [p], create_graph=create_graph)
    return float(g.detach().norm()), p.grad is None, p.requires_grad


def unfreeze(p):
    p.requires_grad_(True)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("at", [0, 2])
def test_autograd_grad_gives_the_gradient_of_a_parameter_that_a_hook_froze(at, create_graph):
    right = differentiate_with_a_hook(None, at, create_graph)
    with pt.ranks(dp=2) as world:
        for found in world.run(differentiate_with_a_hook, at, create_graph):
            assert found == pytest.approx(right, rel=1e-9)


def add_all(model, x, loss):
    loss.backward()
    return []


def add_to_inputs(model, x, loss):
    loss.backward(inputs=[x, model[1].weight])
    return [float(x.grad.norm())]


def return_all(model, x, loss):
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return [float(g.norm()) for g in grads]


def accumulate_with_a_hook(mesh, every, at, run_second):
    """Accumulates two passes, the first under `no_sync`; a hook freezes the block `at` in one."""
    model, x = make_three_layers(mesh)
    found = []
    model[1].register_full_backward_hook(toggle_each(every, list(model[at].parameters())))
    for _ in range(3):
        with pt.no_sync(model) if mesh is not None else nullcontext():
            model(x).square().mean().backward()
        found += run_second(model, x, model(2 * x).square().mean())
        found += [-1.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()]
        model.zero_grad()
    return found


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("run_second", [add_all, add_to_inputs, return_all])
def test_a_gradient_that_no_sync_kept_reaches_a_parameter_that_was_frozen_since(
    run_second, at, every
):
    right = accumulate_with_a_hook(None, every, at, run_second)
    with pt.ranks(dp=2) as world:
        for found in world.run(accumulate_with_a_hook, every, at, run_second):
            assert found == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize("freezes", [True, False])
def test_a_block_is_not_frozen_between_its_gradients_of_one_pass_under_no_sync(freezes):
    """The first gradient was kept with those of earlier passes, so it could not be dropped."""

    def run(mesh):
        model, x = make_three_layers(mesh)
        if freezes:
            model[1].register_full_backward_hook(lambda *_: model[2].requires_grad_(False) and None)
        with pt.no_sync(model) if mesh is not None else nullcontext():
            (model(x).square().mean() + model(2 * x).square().mean()).backward()
        return [float(p.grad.norm()) for p in model.parameters()]

    with pt.ranks(dp=2) as world:
        if freezes:
            with pytest.raises(pt.LayoutError, match="in the block '2' between the gradients"):
                world.run(run)
        else:
            assert world.run(run)[0] == pytest.approx(run(None), rel=1e-9)


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


class Hooked(nn.Module):
    """A block that calls `change` in its backward, when the gradient of an inner tensor arrives."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.multiplies, self.change = True, lambda _: None

    def forward(self, x):
        y = self.one(x) if self.multiplies else x + self.one.bias
        y.register_hook(self.change)
        return self.two(y) if self.multiplies else y + self.two.bias


@pytest.mark.parametrize("rows", [4, 1])  # of one row, a rank has none
@pytest.mark.parametrize("where", ["within", "at its end", "between two calls", "reads none"])
@pytest.mark.parametrize("name", ["one.bias", "two.bias"])
def test_a_block_is_neither_frozen_nor_unfrozen_in_its_own_backward(where, rows, name):
    """In one process it depends on whether the gradient of the parameter is complete."""

    def body(mesh):
        block, between = Hooked(), nn.Linear(3, 3)
        block.multiplies = where != "reads none"
        model = nn.Sequential(block, between, *[block] * (where == "between two calls"))
        pt.zero(model, mesh, stage=3, blocks=[block, between])
        p = dict(model.named_parameters())[f"0.{name}"]
        calls = []

        def change(*_):
            calls.append(p.requires_grad_(not p.requires_grad))

        if where in ("within", "reads none"):
            block.change = change
        if where == "at its end":
            block.register_full_backward_hook(change)
        if where == "between two calls":
            between.register_full_backward_hook(change)
        x = pt.distribute_tensor(torch.ones(rows, 3), mesh, [pt.Shard(0)]).requires_grad_()
        with pytest.raises(pt.LayoutError, match="in the backward of its own block") as found:
            model(x).sum().backward()
        assert p.requires_grad and p.grad is None and not calls
        p.requires_grad_(False)
        return str(found.value)

    with pt.ranks(dp=2) as world:
        first, second = world.run(body)
    assert first == second and "test_freezing_in_hooks.py:" in first


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_hook_froze_is_frozen_after_a_pass_that_fails(fails):
    def body(mesh):
        first, middle, last = blocks = [nn.Linear(3, 3) for _ in range(3)]
        model = pt.zero(nn.Sequential(*blocks), mesh, stage=3)
        p = last.weight
        # The others' gradients are added before the backward of a block with hooks of its own.
        first.weight.register_hook(lambda _: None)

        def fail(_):
            if fails:
                raise KeyError("a fault of the program")

        middle.register_full_backward_hook(lambda *_: setattr(p, "requires_grad", False))
        x = pt.distribute_tensor(torch.ones(4, 3), mesh, [pt.Shard(0)]).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(KeyError) if fails else nullcontext():
            model(x).sum().backward()
        return p.requires_grad, fails or p.grad.full_tensor().shape

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [(False, fails or (3, 3))] * 2


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


@pytest.mark.parametrize("freezes", [True, False])
def test_a_block_is_not_frozen_between_its_gradients_of_the_pass_after_no_sync(freezes):
    """The first gradient was added to what `no_sync` kept, so it could not be dropped alone."""

    def run(mesh):
        model, x = make_three_layers(mesh)
        with pt.no_sync(model) if mesh is not None else nullcontext():
            (3 * model(x)).square().mean().backward()
        if freezes:
            model[1].register_full_backward_hook(lambda *_: model[2].requires_grad_(False) and None)
        (model(x).square().mean() + model(2 * x).square().mean()).backward()
        return [float(p.grad.norm()) for p in model.parameters()]

    with pt.ranks(dp=2) as world:
        if freezes:
            with pytest.raises(pt.LayoutError, match="in the block '2' between the gradients"):
                world.run(run)
        else:
            assert world.run(run) == [pytest.approx(run(None), rel=1e-9)] * 2
