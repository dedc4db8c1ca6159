"""In the forward of its block under stage 3: is a gathered parameter the same as the shard to which
other references refer, such as an optimizer's?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from tests.programs.zero_stages import whole


class Block(nn.Linear):
    """A layer that calls `before` and `after` within its forward."""

    before = after = staticmethod(lambda *_: None)

    def forward(self, x):
        self.before(self)
        y = super().forward(x)
        more = self.after(self, x)
        return y if more is None else y + more


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(Block(4, 4), nn.Tanh(), Block(4, 3)).double()


class Own(torch.optim.Optimizer):
    """An optimizer that is not torch's."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


# Each function gets the model, a list of references from before, and an optimizer.


def write_references(model, refs, optimizer):
    def before(block):
        with torch.no_grad():
            for p in refs:
                p.mul_(0.5)
            refs[2][1] = 0.25
            torch._foreach_add_(refs, 0.1)

    model[2].before = before


def write_both_in_turn(model, refs, optimizer):
    def before(block):
        with torch.no_grad():
            block.weight.mul_(0.5)
            refs[2].add_(1)
            block.weight[0].sub_(refs[2][1])
            refs[3].copy_(block.bias * 2)
            block.bias.add_(refs[3])

    model[2].before = before


def compute_with_references_after_a_write(model, refs, optimizer):
    def before(block):
        with torch.no_grad():
            block.weight.mul_(0.5)
            block.bias.add_(1)

    model[2].before = before
    model[2].after = lambda block, x: F.linear(x, refs[2], refs[3]) * 2


def write_the_data_of_references(model, refs, optimizer):
    def before(block):
        refs[2].data.mul_(0.5)
        refs[3].data[0] = 1

    model[2].before = before


def write_in_a_pre_hook(model, refs, optimizer):
    def clamp(*_):
        with torch.no_grad():
            for p in refs:
                p.clamp_(-0.3, 0.3)

    model[2].register_forward_pre_hook(clamp)


def load_values(model, refs, optimizer):
    values = {k: v.detach() * 0.5 for k, v in model.state_dict().items()}
    model[2].before = lambda block: model.load_state_dict(values)


def step_and_clear(model, refs, optimizer):
    def before(block):
        optimizer.step()
        optimizer.zero_grad()

    model[2].before = before


def step_between_writes(model, refs, optimizer):
    def before(block):
        with torch.no_grad():
            block.weight.mul_(0.9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            block.weight.mul_(0.9)
            refs[3].add_(0.1)

    model[2].before = before


def change_gradients(model, refs, optimizer):
    def before(block):
        if block.weight.grad is not None:
            torch.nn.utils.clip_grad_norm_(block.parameters(), 0.1)
            block.weight.grad = block.weight.grad * 2
            refs[2].grad.add_(block.weight.grad)
            block.bias.grad = None

    model[2].before = before


def register_hooks(model, refs, optimizer):
    handles = []

    def triple(p):
        p.grad.mul_(3)

    def before(block):
        if not handles:
            handles.append(block.weight.register_hook(lambda g: g * 2))
            block.bias.register_post_accumulate_grad_hook(triple)

    model[2].before = before


def give_other_memory(model, refs, optimizer):
    def before(block):
        block.weight.data = block.weight.data * 0.5

    model[2].before = before
    model[2].after = lambda block, x: F.linear(x, refs[2], refs[3])


PROGRAMS = (
    give_other_memory,
    write_references,
    write_both_in_turn,
    compute_with_references_after_a_write,
    write_the_data_of_references,
    write_in_a_pre_hook,
    load_values,
    step_and_clear,
    step_between_writes,
    change_gradients,
    register_hooks,
)


def train(model, mesh, program, kind, compiles=False):
    refs = [*model.parameters()]
    optimizer = kind(refs, lr=0.1)
    program(model, refs, optimizer)
    torch.manual_seed(1)
    x = torch.randn(5, 4, dtype=torch.float64)
    x = x if mesh is None else pt.distribute_tensor(x, mesh, [pt.Shard(0)])

    def step():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    if compiles:
        step = pt.compile(step, backend="graph")
    losses = [whole(step()) for _ in range(3)]
    grads = [p.grad for p in refs]
    return losses, [whole(p) for p in refs], [None if g is None else whole(g) for g in grads]


@pytest.mark.parametrize("kind", [torch.optim.SGD, Own])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_parameter_is_the_same_by_its_name_and_by_other_references(program, kind):
    truth = train(make_model(), None, program, kind)
    with pt.ranks(dp=3) as world:
        for found in world.run(
            lambda mesh: train(pt.zero(make_model(), mesh, stage=3), mesh, program, kind)
        ):
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("program", [write_both_in_turn, step_between_writes, change_gradients])
def test_a_captured_parameter_is_the_same_by_its_name_and_by_other_references(program):
    truth = train(make_model(), None, program, torch.optim.SGD)
    with pt.ranks(dp=2) as world:
        for found in world.run(
            lambda mesh: train(
                pt.zero(make_model(), mesh, stage=3), mesh, program, torch.optim.SGD, compiles=True
            )
        ):
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


def test_an_optimizer_of_ones_own_that_a_forward_reaches_is_captured():
    """A capture that has not found it yet runs it with real tensors, without meeting ranks."""
    truth = train(make_model(), None, step_and_clear, Own)
    with pt.ranks(dp=2) as world:
        for found in world.run(
            lambda mesh: train(
                pt.zero(make_model(), mesh, stage=3), mesh, step_and_clear, Own, True
            )
        ):
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [pt.Shard(0), pt.Shard(1)])
def test_what_two_axes_split_keeps_its_order(rows):
    def body(mesh):
        layer = nn.Linear(4, 4)
        placements = [pt.Replicate(), rows]
        layer.weight = nn.Parameter(
            pt.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, placements)
        )
        pt.zero(nn.Sequential(layer), mesh, "dp", stage=3)
        weight = layer.weight

        def write(*_):
            with torch.no_grad():
                layer.weight.mul_(2)
            assert torch.equal(whole(weight), whole(layer.weight))

        layer.register_forward_pre_hook(write)
        layer(pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0), pt.Replicate()]))
        return whole(weight)

    with pt.ranks(dp=2, tp=2) as world:
        for found in world.run(body):
            assert torch.equal(found, 2 * torch.arange(16.0).view(4, 4))


def test_a_parameter_that_the_forward_replaces_stays_replaced():
    def body(mesh):
        torch.manual_seed(0)
        layer = Block(4, 4)

        def after(block, x):
            block.weight = nn.Parameter(block.weight.detach() * 0.9)

        layer.after = after
        x = torch.ones(5, 4)
        if mesh is not None:
            pt.zero(nn.Sequential(layer), mesh, stage=3)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        losses = [whole(layer(x).square().sum()) for _ in range(3)]
        return losses, whole(layer.weight)

    truth = body(None)
    with pt.ranks(dp=3) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("older", [lambda p: p.data, lambda p: p.detach().view(-1)])
def test_a_write_through_a_view_from_before_the_forward_is_refused(older):
    def body(mesh):
        model = pt.zero(make_model(), mesh, stage=3)
        view = older(model[2].bias)
        model[2].before = lambda block: view.mul_(0.5)
        x = pt.distribute_tensor(torch.ones(5, 4, dtype=torch.float64), mesh, [pt.Shard(0)])
        with pytest.raises(pt.LayoutError, match=r"bias of a Block .* was written in the block's"):
            model(x)
        model[2].before = lambda block: None
        return whole(model(x)), whole(model[2].bias), [p.is_leaf for p in model.parameters()]

    plain = make_model()
    with torch.no_grad():
        plain[2].bias.mul_(0.5)
    truth = (
        plain(torch.ones(5, 4, dtype=torch.float64)).detach(),
        plain[2].bias.detach(),
        [True] * 4,
    )
    with pt.ranks(dp=3) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, truth)


def test_a_view_of_a_reference_follows_the_parameter_after_the_forward():
    def body(mesh):
        model = make_model() if mesh is None else pt.zero(make_model(), mesh, stage=3)
        bias, views = model[2].bias, []

        def before(block):
            views.append(bias.detach().view(-1))
            with torch.no_grad():
                block.bias.add_(1)

        model[2].before = before
        x = torch.ones(5, 4, dtype=torch.float64)
        model(x if mesh is None else pt.distribute_tensor(x, mesh, [pt.Shard(0)]))
        seen = [whole(views[0] * 1)]
        views[0].mul_(0.5)
        seen.append(whole(bias))
        with torch.no_grad():
            bias.add_(2)
        return [*seen, whole(views[0] * 1)]

    truth = body(None)
    for ranks in (1, 2):
        with pt.ranks(dp=ranks) as world:
            for found in world.run(body):
                torch.testing.assert_close(found, truth)
