"""What happens between the calls of equal blocks happens when it does without the fold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.graph.graph_nodes import call_subgraph, note_of
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Block, Saving])
@pytest.mark.parametrize("body", STEPS)
def test_a_step_with_folded_blocks_has_the_bits_of_the_flat_one(body, kind):
    wanted, _ = trained(body, kind, compiled(False))
    found, _ = trained(body, kind, compiled(True))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    eager, _ = trained(body, kind, lambda step: step)
    if body is not drawn_between:
        torch.testing.assert_close(found, eager)


@pytest.mark.slow
@pytest.mark.parametrize("body", [accumulated, clipped_in_place, drawn_between])
def test_blocks_are_folded_whatever_stands_between_them(body):
    _, step = trained(body, Block, compiled(True))
    calls = [n for n in step.program.graph.graph.nodes if n.target is call_subgraph]
    forward = [n.args[0] for n in calls if note_of(n).phase == "forward"]
    assert len(forward) >= BLOCKS and len({*forward}) < len(forward)


# -- several structures ----------------------------------------------------------------------------


class Gated(nn.Module):
    """Its backward reads what it takes."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.up(x) * torch.sigmoid(self.gate(x))


class Force(nn.Module):
    """The gradient of an energy, as in a force field."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        energy = self.down(torch.tanh(self.up(x))).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


class Noisy(Block):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3)


class Holding(Block):
    """It calls another block between its own draws, and does not use the result."""

    def __init__(self, draws=True):
        super().__init__()
        self.draws = draws

    def forward(self, x):
        h = self.up(self.norm(x))
        h = F.dropout(h, 0.3) if self.draws else torch.tanh(h)
        self.seen = self.given(x)
        h = self.down(h)
        return F.dropout(h, 0.3) if self.draws else torch.tanh(h)


class Several(nn.Module):
    """Blocks of two structures."""

    def __init__(self, ones, others):
        super().__init__()
        self.ones, self.others = nn.ModuleList(ones), nn.ModuleList(others)
        self.last = nn.Linear(WIDTH, WIDTH)


def several(one, other, count=5):
    return Several([one() for _ in range(count)], [other() for _ in range(count)])


def clamped_by_the_caller(model, x):
    """The caller writes what the folded blocks of one structure give, which the other reads."""
    for i in (0, 1, 2):
        x = model.ones[i](x)
    for one, other in zip(model.ones[3:], model.others, strict=False):
        y = other(x)
        x.data.clamp_(-0.1, 0.1)
        x = one(y)
    model.last(x).square().mean().backward()


def scaled_by_the_caller(model, x):
    x = model.ones[1](model.ones[0](x))
    for one, other in zip(model.ones[2:], model.others, strict=False):
        y = one(x)
        x = other(y)
        y.data.mul_(0.5)
    model.last(x).square().mean().backward()


def forces_between(model, x):
    for i in (0, 1):
        x = model.ones[i](x)
    for one, other in zip(model.ones[2:], model.others, strict=False):
        x = one(other(x))
    model.last(x).square().mean().backward()


def backward_within_a_loop(model, x):
    """One block goes backward twice, the second time through a block that is folded."""
    for one, other in zip(model.ones[:2], model.others[:2], strict=True):
        one(other(x)).square().mean().backward()
    for one, other in zip(model.ones[2:], model.others[2:], strict=True):
        h = other(x.detach())
        h.sum().backward(retain_graph=True)
        one(h).square().mean().backward()


def blocks_within_blocks(model, x):
    for one in model.ones:
        x = one(x)
    for one, other in zip(model.ones, model.others, strict=True):
        other.given = one
        x = other(x)
    for other in model.others:
        x = x + other.seen
        del other.given
    model.last(x).square().mean().backward()


SEVERAL = {
    "clamped": (Block, Gated, clamped_by_the_caller),
    "scaled": (Block, Gated, scaled_by_the_caller),
    "forces": (Block, Force, forces_between),
    "twice": (Block, Gated, backward_within_a_loop),
    "draws": (Noisy, Holding, blocks_within_blocks),
    "within": (Block, lambda: Holding(draws=False), blocks_within_blocks),
}


def trained_several(one, other, body, compile, count=5):
    torch.manual_seed(0)
    model = several(one, other, count)
    optimizer = sgd(model)

    def step(x):
        optimizer.zero_grad()
        body(model, x)
        optimizer.step()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    run = compile(step)
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH)
    torch.manual_seed(2)
    found = [g for _ in range(2) for g in run(x)]
    return [*found, *(p.detach() for p in model.parameters())], run


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_a_step_whose_structures_are_folded_one_after_another_has_the_bits_of_the_flat_one(name):
    kinds = [Block, Noisy, Gated, Force, Holding]
    wanted, _ = trained_several(*SEVERAL[name], compiled(False))
    found, step = trained_several(*SEVERAL[name], compiled(kinds))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert step.program.blocks.folded  # of the first structure at least
    if name != "draws":
        eager, _ = trained_several(*SEVERAL[name], lambda step: step)
        torch.testing.assert_close(found, eager)


# -- constants -------------------------------------------------------------------------------------


class Constant(Block):
    """It computes with a constant that prints or compares like that of its neighbour."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return super().forward(x) + self.sign(
            torch.full((4, WIDTH), self.value, dtype=self.dtype())
        )

    def dtype(self):
        return torch.complex128 if isinstance(self.value, complex) else torch.float64

    def sign(self, t):
        parts = torch.view_as_real(t).sum(-1) * 0, t.real, t.imag
        return sum(torch.copysign(torch.ones(4, WIDTH), p.float()) for p in parts[1:])


class Padded(Constant):
    def forward(self, x):
        padded = F.pad(super(Constant, self).forward(x), (1, 1), value=self.value)
        return padded[:, 1:-1] + torch.copysign(torch.ones(4, 1), padded[:, :1])


class Filled(Constant):
    def forward(self, x):
        t = torch.full((4, WIDTH), self.value)
        return super(Constant, self).forward(x) + torch.copysign(torch.ones(4, WIDTH), t.float())


class Typed(Constant):
    """Its constant decides the dtype of what it computes."""

    def forward(self, x):
        t = torch.arange(WIDTH).remainder(3).mul(self.value).div(2)
        return super(Constant, self).forward(x) + (t / 3 * 7 + t.element_size()).to(x.dtype)


NAN = float("nan")
ALIKE = [
    (Constant, complex(0.0, 1.0), complex(-0.0, 1.0)),
    (Constant, complex(1.0, 0.0), complex(1.0, -0.0)),
    (Constant, complex(NAN, 1.0), complex(-NAN, 1.0)),
    (Filled, 0.0, -0.0),
    (Filled, NAN, -NAN),
    (Padded, 0.0, -0.0),
    (Padded, 0, -0.0),
    (Typed, 1, 1.0),
    (Typed, True, 1),
    (Typed, True, 1.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "one", "other"), ALIKE)
def test_constants_that_compare_equal_make_other_structures(kind, one, other):
    def run(blocks):
        torch.manual_seed(0)  # results with a history would leave the blocks flat
        blocks_of = nn.ModuleList(kind(v) for v in (one, other, one, other))
        step = pt.compile(
            lambda x: [b(x).detach() for b in blocks_of],
            backend="graph",
            blocks=blocks,
            sections=True,
        )
        torch.manual_seed(1)
        x = torch.randn(4, WIDTH)
        return step(x), [b(x).detach() for b in blocks_of]

    flat, eager = run(False)
    found, _ = run(True)
    for a, b, c in zip(found, flat, eager, strict=True):
        torch.testing.assert_close(b, c, equal_nan=True)
        assert torch.equal(a.nan_to_num(3.0), b.nan_to_num(3.0))
