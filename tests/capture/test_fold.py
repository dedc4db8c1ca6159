"""What happens between the calls of equal blocks happens when it does without the fold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.compile.graph_nodes import call_section, note_of
from tests.programs import stacks

WIDTH, BLOCKS = 8, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Saving(Block):
    """Its backward reads what it gives."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def written_between(model, optimizer, x):
    """What a block gives is written so that autograd does not notice, before backward reads it."""
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
        x.data.mul_(0.5)
    model.last(x).square().mean().backward()
    optimizer.step()


def written_after_the_next(model, optimizer, x):
    kept = []
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
        kept.append(x)
    for t in kept[:-1]:
        t.data.add_(1.0)
    model.last(x).square().mean().backward()
    optimizer.step()


def weights_written_between(model, optimizer, x):
    loss = model(x).square().mean()
    for block in model.blocks:
        block.down.weight.data.mul_(0.5)
    loss.backward()
    optimizer.step()


def updated_within_backward(model, optimizer, x):
    """Each parameter is updated as soon as its gradient is there."""

    def update(p):
        p.detach().sub_(p.grad, alpha=0.1)

    hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    model(x).square().mean().backward()
    for hook in hooks:
        hook.remove()


def accumulated(model, optimizer, x):
    for part in x.chunk(2):
        model(part).square().mean().backward()
    optimizer.step()


def clipped_in_place(model, optimizer, x):
    model(x).square().mean().backward()
    for p in model.parameters():
        p.grad.clamp_(-0.01, 0.01)
    optimizer.step()


def drawn_between(model, optimizer, x):
    x = model.first(x)
    for block in model.blocks:
        x = F.dropout(block(F.dropout(x, 0.3)), 0.1)
    model.last(x).square().mean().backward()
    optimizer.step()


def within_one_another(model, optimizer, x):
    """The forward of a block that is called again before its first backward."""
    x = model.first(x)
    one = model.blocks[0](x)
    other = model.blocks[1](x + one.detach())
    (one.square().mean() + other.square().mean()).backward(retain_graph=True)
    model.last(model.blocks[2](one + other)).mean().backward()
    optimizer.step()


def hooked_between(model, optimizer, x):
    """A hook computes with the gradient of one block for that of another."""
    seen = []
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
        x.register_hook(lambda g: (seen.append(g), g + 0.1 * sum(t.mean() for t in seen))[1])
    model.last(x).square().mean().backward()
    optimizer.step()


def gradient_in_forward(model, optimizer, x):
    """A loss of the gradient of the blocks' own energy."""
    x = model.first(x).detach().requires_grad_()
    y = x
    for block in model.blocks:
        y = block(y)
    (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (force.square().mean() + model.last(y).square().mean()).backward()
    optimizer.step()


STEPS = [
    *(written_between, written_after_the_next, weights_written_between, updated_within_backward),
    *(accumulated, clipped_in_place, drawn_between, within_one_another, hooked_between),
    gradient_in_forward,
]


def trained(body, kind, compile):
    torch.manual_seed(0)
    model = stacks.Stack((kind() for _ in range(BLOCKS)), WIDTH)
    optimizer = sgd(model)

    def step(x):
        optimizer.zero_grad()
        body(model, optimizer, x)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    run = compile(step)
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH)
    torch.manual_seed(2)
    found = [g for _ in range(3) for g in run(x)]
    return [*found, *(p.detach() for p in model.parameters())], run


def compiled(blocks):
    return lambda step: pt.compile(step, backend="graph", blocks=blocks, sections=True)


@pytest.mark.parametrize("kind", [Block, Saving])
@pytest.mark.parametrize("body", STEPS)
def test_a_step_with_folded_blocks_has_the_bits_of_the_flat_one(body, kind):
    wanted, _ = trained(body, kind, compiled(False))
    found, _ = trained(body, kind, compiled(True))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    eager, _ = trained(body, kind, lambda step: step)
    if body is not drawn_between:
        torch.testing.assert_close(found, eager)


@pytest.mark.parametrize("body", [accumulated, clipped_in_place, drawn_between])
def test_blocks_are_folded_whatever_stands_between_them(body):
    _, step = trained(body, Block, compiled(True))
    calls = [n for n in step.program.graph.graph.nodes if n.target is call_section]
    forward = [n.args[0] for n in calls if note_of(n).phase == "forward"]
    assert len(forward) >= BLOCKS and len({*forward}) < len(forward)
