"""Does ZeRO train programs that others wrote as one process does?

Each program runs on one process in float64 and on two ranks in every stage. Loss, every gradient
and every parameter agree after each step, and nothing stays gathered.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partita as pt
from partita.train.zero import zero_state

STAGES = (0, 1, 2, 3)
STEPS = 3


def value(t):
    if t is None:
        return None
    t = t.detach()
    return (t.full_tensor() if isinstance(t, pt.DTensor) else t).clone()


def train(model, step_of, batch, make):
    """Loss, gradients and parameters of each step, read where the model holds its parameters."""
    optimizer = make(model.parameters())
    said = []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = step_of(model, batch, i)
        found = {"loss": value(loss)}
        for n, p in model.named_parameters():
            assert isinstance(p, nn.Parameter), n
            found[f"gradient of {n}"] = value(p.grad)
        optimizer.step()
        found |= {n: value(p) for n, p in model.named_parameters()}
        said.append(found)
        if "_zero" in model.__dict__ and hasattr(zero_state(model), "alive"):
            assert zero_state(model).alive == 0
    return said


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def batch_of(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def built(build):
    torch.manual_seed(0)
    return build().double()


def agree(build, step_of, batch, stages=STAGES, make=sgd, prepare=None, **ranks):
    """Hold each stage against one process."""
    one = train(built(build), step_of, batch, make)

    def run(mesh, stage):
        model = pt.zero(built(build), mesh, stage=stage)
        if prepare is not None:
            prepare(model)
        rows = [pt.Shard(0) if a == "dp" else pt.Replicate() for a in mesh.mesh_dim_names]
        return train(model, step_of, pt.distribute_tensor(batch, mesh, rows), make)

    with pt.ranks(**(ranks or {"dp": 2})) as world:
        for stage in stages:
            for said in world.run(run, stage):
                compare(one, said, f"stage {stage}")


def compare(one, said, where):
    for i, (expected, found) in enumerate(zip(one, said, strict=True)):
        assert expected.keys() == found.keys()
        for what, x in expected.items():
            y = found[what]
            assert (x is None) == (y is None), f"{where}, step {i}: {what} is {y}"
            if x is not None:
                said_of = f"{where}, step {i}: {what}: ".__add__
                torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9, msg=said_of)


def backward(loss):
    loss.backward()
    return loss


# -- what a block returns --------------------------------------------------------------------------


class Biased(nn.Module):
    """A block in the manner of T5: it hands on a bias that its first one makes."""

    def __init__(self, makes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = nn.Embedding(3, 4) if makes else None

    def forward(self, x, bias=None):
        if bias is None:
            bias = self.table.weight.sum(0)
        return x + torch.tanh(self.linear(x) + bias), bias


class HandsOn(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.blocks = nn.ModuleList(Biased(i == 0) for i in range(4))
        if frozen:
            for block in list(self.blocks)[1:]:
                block.linear.weight.requires_grad_(False)
            self.blocks[2].requires_grad_(False)

    def forward(self, x):
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x, bias


@pytest.mark.parametrize("frozen", [False, True])
def test_a_block_may_return_what_it_was_given(frozen):
    def step(model, x, i):
        y, bias = model(x)
        return backward(y.square().mean() + bias.square().sum())

    agree(lambda: HandsOn(frozen), step, batch_of(4, 4))


def test_a_block_may_return_what_an_earlier_block_left_on_it():
    class Reads(Biased):
        def forward(self, x, bias=None):
            x, _ = super().forward(x, self.shared[0] if self.shared else None)
            return x, _

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Reads(i == 0) for i in range(3))

        def forward(self, x):
            shared = []
            for block in self.blocks:
                block.shared = shared
                x, bias = block(x)
                shared[:] = [bias]
            return x

    agree(Model, lambda m, x, i: backward(m(x).square().mean()), batch_of(4, 4))


def test_a_backward_pass_that_never_comes_to_the_parameters_leaves_nothing_gathered():
    def step(model, x, i):
        x = x.detach().requires_grad_()
        y, _ = model(x)
        (g,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        return backward((y * g.detach()).mean())

    agree(HandsOn, step, batch_of(4, 4))


# -- what outlives a block -------------------------------------------------------------------------


class Keeps(nn.Module):
    """A block that keeps views of its weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        w = self.linear.weight
        self.kept = [w, w.t(), w.detach(), w[1:], w.view(-1)]
        return x + self.linear(x)


class Root(nn.Module):
    def __init__(self, block, n=2):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(n))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


READS = {
    "an op": lambda w: w * 2,
    "a function": lambda w: torch.nn.functional.linear(torch.ones(w.ndim), w),
    "the other operand": lambda w: torch.ones(4, 4) + w,
    "its value": lambda w: w.sum().item(),
    "the whole": lambda w: w.full_tensor(),
    "its piece": lambda w: w.to_local(),
    "NumPy": lambda w: w.detach().numpy(),
    "print": lambda w: str(w),
}


@pytest.mark.parametrize("read", READS)
def test_a_view_of_a_weight_that_is_kept_beyond_its_block_names_the_weight_when_it_is_read(read):
    def run(mesh):
        model = pt.zero(built(lambda: Root(Keeps)), mesh)
        x = pt.distribute_tensor(batch_of(4, 4), mesh, [pt.Shard(0)])
        model(x).square().mean().backward()
        for w in model.blocks[1].kept:
            with pytest.raises(pt.LayoutError, match="weight of a Linear") as error:
                READS[read](w)
            said = str(error.value)
            assert "'blocks.1' is released" in said and "keep w.detach().clone()" in said
        return zero_state(model).alive

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [0, 0]


def test_memory_that_a_plain_view_keeps_stays_and_the_ledger_says_so():
    class Exports(Keeps):
        def forward(self, x):
            w = self.linear.weight.detach().to_local()
            self.kept, self.value = (w, w.numpy()), w.clone()
            return x + self.linear(x)

    def run(mesh):
        model = pt.zero(built(lambda: Root(Exports)), mesh)
        x = pt.distribute_tensor(batch_of(4, 4), mesh, [pt.Shard(0)])
        optimizer = sgd(model.parameters())
        for _ in range(3):
            with pt.ledger() as ledger:
                backward(model(x).square().mean())
            optimizer.step()
            for block in model.blocks:
                for kept in block.kept:
                    assert torch.equal(torch.as_tensor(kept), block.value)
        return zero_state(model).alive, {m.op for m in ledger.moves if m.kind == "kept"}

    with pt.ranks(dp=2) as world:
        alive, kept = world.run(run)[0]
    assert alive == 0
    assert kept == {"blocks.0: 192 B of a view", "blocks.1: 192 B of a view"}


# -- run again -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return x + self.norm(self.b(torch.tanh(self.a(x))))


@pytest.mark.parametrize("after", [False, True])
def test_one_region_may_hold_several_blocks(after):
    peaks = []

    def build():
        model = Root(Block, 5)
        return model if after else pt.remat(model)

    def step(model, x, i):
        loss = backward(model(x).square().mean())
        units = getattr(model.__dict__.get("_zero"), "units", None)
        if units:
            peaks.append(zero_state(model).peak / sum(f.nbytes for f in units[0].flats))
        return loss

    agree(build, step, batch_of(4, 4), prepare=pt.remat if after else None)
    assert 0 < max(peaks) <= 2


class Part(nn.Module):
    """A part of a block; its mask is sharded and has no gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4)

    def forward(self, x, mask=None):
        h = self.norm(x)
        return x + self.b(torch.tanh(self.a(h if mask is None else h * mask)))


class Checkpointed(nn.Module):
    how = "positional"
    reentrant = False

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x):
        mask = (x > 0).to(x.dtype)
        for part in self.parts:
            call = partial(checkpoint, part.__call__, use_reentrant=self.reentrant)
            if self.how == "keyword":
                x = call(x, mask=mask)
            elif self.how == "within":
                x = checkpoint(lambda x, part=part: part(x, mask), x, use_reentrant=self.reentrant)
            else:
                x = call(x, mask)
        return x


@pytest.mark.parametrize("shape", [(4, 4), (4, 3, 4)])
@pytest.mark.parametrize("how", ["positional", "keyword", "within"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_may_stand_in_a_block(reentrant, how, shape):
    if reentrant and how == "keyword":  # which torch refuses
        return

    class Here(Checkpointed):
        pass

    Here.how, Here.reentrant = how, reentrant

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.root = nn.Linear(4, 4), Root(Here)

        def forward(self, x):
            return self.root(self.first(x))

    agree(First, lambda m, x, i: backward(m(x).square().mean()), batch_of(*shape))
