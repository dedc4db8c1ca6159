"""Hooks of modules and activations use gradients in backward, under stage 3 as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partita as pt
from tests.programs.zero_stages import whole


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, order, checkpoints):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head, self.order, self.checkpoints = nn.Linear(4, 3), order, checkpoints

    def forward(self, x):
        for i in self.order:
            layer = self.layers[i]
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


# What a hook of the first layer does with the gradients of later blocks.


def read(model, seen, optimizer):
    later = [*model.layers[1].parameters(), *model.head.parameters()]
    seen.append([whole(p.grad) for p in later])


def halve(model, seen, optimizer):
    for p in model.layers[2].parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def clear_and_set(model, seen, optimizer):
    model.head.weight.grad = None
    model.head.bias.grad = torch.ones_like(model.head.bias)


def clip(model, seen, optimizer):
    clipped = [*model.layers[2].parameters(), *model.head.parameters()]
    seen.append(whole(pt.clip_grad_norm_(clipped, 0.01)))


def step(model, seen, optimizer):
    optimizer.step()
    optimizer.zero_grad()


def freeze(model, seen, optimizer):
    read(model, seen, optimizer)
    model.head.requires_grad_(False)


# The backward passes of one step.


def once(model, xs):
    model(xs[0]).square().mean().backward()


def two_forwards(model, xs):
    model.waits = 1  # until both forwards have given the later blocks their gradients
    (model(xs[0]).square().mean() + model(xs[1]).sin().mean()).backward()


def two_losses(model, xs):
    one, other = model(xs[0]).square().mean(), model(xs[1]).sin().mean()
    one.backward()
    other.backward()


def kept(model, xs):
    with pt.no_sync(model):
        model(xs[0]).square().mean().backward()
    model(xs[1]).sin().mean().backward()


def with_graph(model, xs):
    model(xs[0]).square().mean().backward(create_graph=True)


def of_some(model, xs):
    inputs = [model.layers[1].up.weight, model.head.bias]
    model(xs[0]).square().mean().backward(inputs=inputs)


def train(mesh, use, backward, order=(0, 1, 2), checkpoints=False, hooked=False):
    torch.manual_seed(0)
    model = Model(order, checkpoints).double()
    xs = [torch.randn(5, 4, dtype=torch.float64) for _ in range(2)]
    if mesh is not None:
        pt.zero(model, mesh, stage=3)
        xs = [pt.distribute_tensor(x, mesh, [pt.Shard(0)]) for x in xs]
    later = [*model.layers[2].parameters(), *model.head.parameters()]
    optimizer, seen = torch.optim.Adam(later, 0.1), []
    if hooked:
        model.head.weight.register_hook(lambda g: g * 2)
        model.layers[1].down.bias.register_post_accumulate_grad_hook(lambda p: seen.append(1))

    def hook(*_):
        if model.waits == 0:
            use(model, seen, optimizer)
        model.waits = max(0, model.waits - 1)

    model.waits = 0
    model.layers[0].register_full_backward_hook(hook)
    found = []
    for _ in range(2):
        for x in xs:
            x.requires_grad_()  # so that the hook of the first layer runs
        backward(model, xs)
        found += [whole(p.grad) for p in model.parameters()]
        model.requires_grad_(True)
        model.zero_grad()
    return found, seen, [whole(p) for p in model.parameters()]


PROGRAMS = [
    *[{"use": use, "backward": once} for use in (read, halve, clear_and_set, clip, step, freeze)],
    *[{"use": read, "backward": b} for b in (two_forwards, two_losses, kept, with_graph, of_some)],
    {"use": halve, "backward": two_forwards},
    {"use": read, "backward": once, "order": (1, 0, 1, 2)},
    {"use": read, "backward": once, "checkpoints": True},
    {"use": read, "backward": two_forwards, "hooked": True},
]


def _name(program):
    return "-".join(getattr(v, "__name__", str(v)) for v in program.values())


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("program", PROGRAMS, ids=_name)
def test_a_hook_uses_the_gradients_that_one_process_has_added(program, monkeypatch):
    with monkeypatch.context() as plain:  # plain models have no ranks to reduce over
        plain.setattr(pt, "no_sync", lambda _: torch.enable_grad())
        plain.setattr(pt, "clip_grad_norm_", nn.utils.clip_grad_norm_)
        truth = train(None, **program)
    with pt.ranks(dp=3) as world:
        for found in world.run(lambda mesh: train(mesh, **program)):
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


def in_a_penalty(model, x):
    return model(x).sum() + sum(p.square().sum() for p in model.parameters())


def in_a_second_forward(model, x):
    return model(x).sum() + model(x * 2).sum()


def in_a_gradient_penalty(model, x):
    y = model(x)
    (grad,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
    return y.sum() + grad.square().sum()


@pytest.mark.parametrize(
    ("use", "is_refused"),
    [(in_a_penalty, True), (in_a_second_forward, True), (in_a_gradient_penalty, False)],
)
def test_a_gradient_to_which_another_use_of_the_parameter_adds(use, is_refused):
    def body(mesh):
        torch.manual_seed(0)
        layers, seen, x = (nn.Linear(4, 4), nn.Linear(4, 4)), [], torch.ones(5, 4)
        model = nn.Sequential(*layers)
        if mesh is not None:
            pt.zero(model, mesh, stage=3)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])

        def watch(module, args, out):
            out.register_hook(lambda _: seen.append(whole(layers[1].weight.grad)))

        layers[0].register_forward_hook(watch)
        loss = use(model, x.requires_grad_())
        try:
            loss.backward()
        except pt.LayoutError as error:
            return str(error)
        return seen

    truth = body(None)
    with pt.ranks(dp=3) as world:
        found = world.run(body)
    if is_refused:
        assert {*found} == {found[0]} and "a hook uses the gradient of weight" in found[0]
    else:
        for one in found:
            torch.testing.assert_close(one, truth)


@pytest.mark.parametrize("use", ["read", "clear", "step"])
def test_a_hook_of_the_block_itself_is_refused(use):
    def body(mesh):
        layer = nn.Linear(4, 4)
        model = pt.zero(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4)), mesh, stage=3)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)

        def hook(*_):
            if use == "clear":
                layer.weight.grad = None
            elif use == "read":
                assert layer.weight.grad is None
            else:
                optimizer.step()

        layer.register_full_backward_hook(hook)
        x = pt.distribute_tensor(torch.ones(5, 4), mesh, [pt.Shard(0)]).requires_grad_()
        with pytest.raises(pt.LayoutError, match="a hook uses the gradient of weight") as raised:
            model(x).sum().backward()
        layer._backward_hooks.clear()
        model(x).sum().backward()  # the pass that failed has left nothing
        found = whole(layer.weight.grad)
        model.zero_grad()
        model(x).sum().backward()
        return str(raised.value), found, whole(layer.weight.grad)

    with pt.ranks(dp=3) as world:
        (one, *grads), *others = world.run(body)
    assert all(text == one for text, *_ in others) and "post_accumulate" in one
    torch.testing.assert_close(*grads)
