"""Does ZeRO train programs that others wrote as one process does?

Each program runs on one process in float64 and on two ranks in every stage. Loss, every gradient
and every parameter agree after each step, and nothing stays gathered.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import partita as pt
from partita.parallel.fsdp_group import ZeroState
from partita.tensor.tensor_state import saving_hooks
from tests.programs.zero_states import zero_state

STAGES = (0, 1, 2, 3)
STEPS = 3


def value(t):
    if t is None:
        return None
    t = t.detach()
    return (t.full_tensor() if isinstance(t, pt.DTensor) else t).clone()


def gathered_state(model):
    """What `zero` made of a model whose parameters it gathers; None of any other."""
    state = zero_state(model)
    return state if isinstance(state, ZeroState) else None


def train(model, step_of, batch, make):
    """Loss, gradients and parameters of each step, read where the model holds its parameters."""
    optimizer = make(model.parameters())
    said = []
    for i in range(STEPS):
        optimizer.zero_grad()
        with pt.ledger() as ledger:
            loss = step_of(model, batch, i)
        assert not ledger.count("kept")  # no graph holds what was gathered
        found = {"loss": value(loss)}
        for n, p in model.named_parameters():
            assert isinstance(p, nn.Parameter), n
            found[f"gradient of {n}"] = value(p.grad)
        optimizer.step()
        found |= {n: value(p) for n, p in model.named_parameters()}
        said.append(found)
        assert not (gathered := gathered_state(model)) or gathered.alive == 0
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


# -- gradients of what is no argument of a block ---------------------------------------------------

COMPUTED_OF_A_PROMPT = {
    "mul": lambda x, p, w: x + p * w,
    "matmul": lambda x, p, w: x + p @ w,
    "linear": lambda x, p, w: x + nn.functional.linear(p, w),
    "view": lambda x, p, w: x + p @ w.t(),
    "cast": lambda x, p, w: x + (p.to(torch.complex128) @ w.to(torch.complex128)).real,
}


class Frozen(nn.Module):
    """A frozen block that reads a tensor with a gradient: out of an object, or of its own list."""

    def __init__(self, read):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.read, self.given = COMPUTED_OF_A_PROMPT[read], []

    def forward(self, x, box=None):
        return self.read(x, self.given.pop() if box is None else box.prompt, self.weight)


class Box:
    def __init__(self, prompt):
        self.prompt = prompt


class Prompted(nn.Module):
    def __init__(self, read, boxed, tuned, layers=3):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(4, 4))
        self.boxed, self.tuned = boxed, tuned
        self.layers = nn.ModuleList(Frozen(read) for _ in range(layers))
        if tuned:  # another weight of the same block is trained
            for layer in self.layers:
                layer.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        for layer in self.layers:
            prompt = self.prompt * 1
            if not self.boxed:
                layer.given.append(prompt)
            x = layer(x, Box(prompt)) if self.boxed else layer(x)
            x = x + layer.bias if self.tuned else x
        return x


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("read", COMPUTED_OF_A_PROMPT)
def test_a_frozen_block_reads_a_trained_tensor_that_is_no_argument_of_it(read, boxed, tuned):
    def step_of(model, x, _):
        loss = backward(model(x).square().mean())
        with torch.no_grad():
            model(x)
        return loss

    agree(lambda: Prompted(read, boxed, tuned), step_of, batch_of(2, 4, 4), stages=(3,))


def test_frozen_blocks_that_read_a_trained_tensor_are_gathered_one_after_another():
    def run(mesh):
        model = pt.zero(built(lambda: Prompted("matmul", False, False, 6)), mesh)
        x = pt.distribute_tensor(batch_of(2, 4, 4), mesh, [pt.Shard(0)])
        for _ in range(2):
            loss = model(x).square().mean()
            zero_state(model).peak = 0
            loss.backward()
        return zero_state(model).peak, zero_state(model).groups[-1].largest_nbytes

    with pt.ranks(dp=2) as world:
        for peak, of_block in world.run(run):
            assert peak <= 3 * of_block  # two of the six, and the prompt


@pytest.mark.parametrize("tuned", [nn.Module.parameters, lambda _: []], ids=["all", "none"])
def test_a_backward_pass_for_inputs_alone_gathers_one_block_after_another(tuned):
    def run(mesh):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]).requires_grad_(False)
        for p in tuned(model):
            p.requires_grad_()
        pt.zero(model, mesh)
        x = pt.distribute_tensor(batch_of(2, 4), mesh, [pt.Shard(0)]).requires_grad_()
        loss = model(x.to(torch.float32)).square().mean()
        zero_state(model).peak = 0
        torch.autograd.grad(loss, x)
        return zero_state(model).peak, zero_state(model).groups[-1].largest_nbytes

    with pt.ranks(dp=2) as world:
        for peak, of_block in world.run(run):
            assert peak <= 3 * of_block  # of the six


class Toggled(nn.Module):
    """A block that computes with gradients, whoever calls it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.enable_grad():
            return self.linear(x)


@pytest.mark.parametrize("stage", STAGES)
def test_the_history_of_a_block_that_enables_gradients_itself_outlives_it(stage):
    batch = batch_of(2, 4)

    def input_gradient(model, x):
        with torch.no_grad():
            out = model(x.requires_grad_())
        (found,) = torch.autograd.grad(out.square().sum(), x)
        return value(found)

    def build():
        return nn.Sequential(Toggled(), Toggled())

    def run(mesh):
        x = pt.distribute_tensor(batch, mesh, [pt.Shard(0)])
        return input_gradient(pt.zero(built(build), mesh, stage=stage), x)

    truth = input_gradient(built(build), batch.clone())
    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, truth)


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
            assert "'blocks.1' was released" in said and "keep w.detach().clone()" in said
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


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_one_region_may_hold_several_blocks(after):
    peaks = []

    def build():
        model = Root(Block, 5)
        return model if after else pt.remat(model)

    def step(model, x, i):
        loss = backward(model(x).square().mean())
        if gathered := gathered_state(model):
            peaks.append(gathered.peak / sum(f.nbytes for f in gathered.groups[0].flats))
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


@pytest.mark.slow
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


class RunAgain(torch.autograd.Function):
    """A call of a module, without a graph, that is made again in backward."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grad)
        return x.grad, None


class OfFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x):
        for part in self.parts:
            x = RunAgain.apply(x, part)
        return x


class OfHooks(nn.Module):
    """It packs tensors in a way of its own, and computes while it unpacks them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x):
        h = self.first(x)

        def pack(t):
            return (t.detach().clone(), t.shape == h.shape)

        def unpack(packed):
            t, is_like_h = packed
            if is_like_h:
                with torch.no_grad():
                    self.second.b(torch.tanh(self.second.a(x.detach())))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.second(h)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OfFunctions, OfHooks])
def test_what_backward_runs_again_of_a_block_finds_its_parameters_gathered(kind):
    def step(model, x, i):
        with pt.ledger() as log:
            out = backward(model(x).square().mean())
        assert not [m for m in log.moves if m.reason == "implicit" and m.kind == "all_gather"]
        return out

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.root = nn.Linear(4, 4), Root(kind)

        def forward(self, x):
            return self.root(self.first(x))

    agree(First, step, batch_of(4, 4))


# -- other parameters each step --------------------------------------------------------------------


class Drops(nn.Module):
    """Each step leaves out another layer, and uses one of two experts in a block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Part() for _ in range(3))
        self.experts = nn.ModuleDict({k: nn.Linear(4, 4) for k in "ab"})

    def forward(self, x, i):
        for k, block in enumerate(self.blocks):
            if k != i % 3:
                x = block(x)
        return x + self.experts["ab"[i % 2]](x)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("to_none", [True, False])
def test_each_step_may_use_other_parameters(to_none, make):
    def step(model, x, i):
        for p in model.parameters():
            if i and p.grad is not None and not to_none:
                p.grad.zero_()
        return backward(model(x, i).square().mean())

    agree(Drops, step, batch_of(4, 4), make=make)


def test_a_gan_trains_its_two_halves_in_turn():
    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.halves = nn.ModuleList([Part(), nn.Linear(4, 1)])

        def forward(self, x, part):
            return self.halves[part](x)

    def step(model, x, i):
        fake = model(x, 0)
        backward(model(fake.detach(), 1).square().mean() - model(x, 1).mean())
        return backward(model(fake, 1).mean())

    agree(Gan, step, batch_of(4, 4))


@pytest.mark.slow
def test_gradients_of_two_passes_that_use_other_parameters_add_up():
    def step(model, x, i):
        backward(model(x, i).square().mean())
        return backward(model(x * 2, i + 1).square().mean())

    agree(Drops, step, batch_of(4, 4))


# -- double backward -------------------------------------------------------------------------------


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4)

    def forward(self, x):
        return x + self.b(torch.nn.functional.gelu(self.a(self.norm(x)))) * self.b.weight.mean()


def penalty_of_inputs(model, x, i):
    x = x.detach().requires_grad_()
    y = model(x)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return backward(y.mean() + (g.norm(dim=-1) - 1).square().mean())


def penalty_of_parameters(model, x, i):
    y = model(x)
    params = [p for p in model.parameters() if p.ndim > 1]
    grads = torch.autograd.grad(y.square().mean(), params, create_graph=True)
    return backward(y.mean() + sum(g.square().sum() for g in grads))


def penalty_of_grads(model, x, i):
    y = model(x)
    y.square().mean().backward(create_graph=True)
    return backward(y.mean() + sum(p.grad.square().sum() for p in model.parameters()))


def penalty_of_the_penalty(model, x, i):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    return backward(h.square().mean())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    "step", [penalty_of_inputs, penalty_of_parameters, penalty_of_grads, penalty_of_the_penalty]
)
def test_a_gradient_may_be_differentiated_again(step):
    agree(lambda: Root(Smooth), step, batch_of(4, 4))
    assert saving_hooks() is None


# -- the parameter stays the object that it is -----------------------------------------------------


class Known(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)
        self.tied = self.first

    def forward(self, x):
        return self.second(torch.tanh(self.tied(x)))


def shards(name, module, mesh):
    for key, p in list(module.named_parameters(recurse=False)):
        value = pt.distribute_tensor(p.detach(), mesh, [pt.Shard(0)])
        module.register_parameter(key, nn.Parameter(value, p.requires_grad))


MOVES = {
    **{f"stage {k}": partial(pt.zero, stage=k) for k in STAGES},
    "distribute_module": pt.distribute_module,
    "distribute_module, sharded": lambda model, mesh: pt.distribute_module(model, mesh, shards),
    "parallelize": lambda model, mesh: pt.parallelize(
        model, mesh, {"*.weight": {"dp": pt.Shard(0)}}
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_an_optimizer_hooks_and_gradients_from_before_a_model_was_spread_go_on(move):
    hung = not move.startswith("parallelize")  # which refuses gradients and hooks

    def run(mesh):
        model, seen = built(Known), []
        optimizer = adamw(model.parameters())
        objects = list(model.parameters())
        model.first.bias.note = "mine"
        x = batch_of(4, 3)
        backward(model(x).square().mean())
        optimizer.step()
        if hung:
            p = model.first.weight
            p.register_hook(lambda g: (seen.append(value(g.norm())), g * 0.5)[1])
            p.register_post_accumulate_grad_hook(lambda p: seen.append(value(p.grad.norm())))
            backward(model(x).mean())
        else:
            optimizer.zero_grad()
        if mesh is not None:
            MOVES[move](model, mesh)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        for _ in range(2):
            backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert all(p is q for p, q in zip(model.parameters(), objects, strict=True))
        assert model.tied.weight is model.first.weight and model.first.bias.note == "mine"
        return [*seen, *map(value, model.parameters())]

    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, run(None), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_an_optimizer_from_before_a_model_was_spread_trains_it_in_a_compiled_step():
    def run(mesh):
        model = built(Known)
        optimizer = adamw(model.parameters())
        x = batch_of(4, 3)
        if mesh is not None:
            pt.zero(model, mesh, stage=3)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])

        def step(x):
            optimizer.zero_grad()
            loss = backward(model(x).square().mean())
            optimizer.step()
            return loss

        if mesh is not None:
            step = pt.compile(step, backend="graph")
        return [value(step(x)) for _ in range(3)] + list(map(value, model.parameters()))

    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, run(None), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}])
def test_rows_that_several_axes_cut_unevenly_go_where_the_layout_says(mesh):
    def build():
        return nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2))

    def run(mesh, stage):
        model = pt.zero(built(build), mesh, ("dp", "tp"), stage=stage)
        x = pt.distribute_tensor(batch_of(4, 3), mesh, [pt.Shard(0), pt.Shard(0)])
        return train(model, lambda m, x, i: backward(m(x).square().mean()), x, adamw)

    one = train(built(build), lambda m, x, i: backward(m(x).square().mean()), batch_of(4, 3), adamw)
    with pt.ranks(**mesh) as world:
        for stage in (1, 3):
            compare(one, world.run(run, stage)[-1], f"stage {stage}")


@pytest.mark.parametrize("last", [{}, {"4.*": {"tp": pt.Shard(0)}}])
def test_a_rank_of_another_axis_that_has_no_features_makes_the_same_moves(last):
    def build():
        wide = nn.Sequential(nn.Linear(3, 2), nn.GELU(), nn.Linear(2, 4, bias=False))
        return nn.Sequential(*wide, nn.Tanh(), nn.Linear(4, 2))

    def run(mesh):
        plan = {"0.*": {"tp": pt.Shard(0)}, "2.weight": {"tp": pt.Shard(1)}, **last}
        model = pt.zero(pt.parallelize(built(build), mesh, plan), mesh, "dp")
        x = pt.distribute_tensor(batch_of(4, 3), mesh, [pt.Shard(0), pt.Replicate()])
        return train(model, lambda m, x, i: backward(m(x).square().mean()), x, adamw)

    one = train(built(build), lambda m, x, i: backward(m(x).square().mean()), batch_of(4, 3), adamw)
    with pt.ranks(dp=2, tp=3) as world:
        for found in world.run(run):
            compare(one, found, "features of two ranks of three")


def test_what_a_block_needed_in_another_layout_goes_with_what_was_gathered():
    def run(mesh):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
        model = pt.parallelize(model, mesh, {"0.weight": {"tp": pt.Shard(1)}})
        pt.zero(model, mesh, "dp")
        x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0), pt.Replicate()])
        seen = []
        model[2].register_forward_pre_hook(lambda m, *_: seen.append(weakref.ref(m.weight)))
        with pt.ledger() as log:
            model(x).sum().backward()
        return [one() is None for one in seen], log.count("kept")

    with pt.ranks(dp=2, tp=2) as world:
        assert world.run(run) == [([True], 0)] * 4


# -- copies, dtypes, parts -------------------------------------------------------------------------


def steps_of(model, x, optimizer=None, n=2):
    optimizer = optimizer or adamw(model.parameters())
    for _ in range(n):
        optimizer.zero_grad()
        backward(model(x).square().mean())
        optimizer.step()
    return list(map(value, model.parameters()))


def teacher(model, x):
    optimizer = adamw(model.parameters())
    ema = copy.deepcopy(model)
    first = steps_of(model, x, optimizer)
    with torch.no_grad():
        for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
            mean.lerp_(p, 0.5)
    kept = list(map(value, ema.parameters()))
    # Each trains by itself from here, and neither changes the other.
    return first + kept + steps_of(ema, x) + steps_of(model, x, optimizer)


def average(model, x):
    optimizer = adamw(model.parameters())
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        steps_of(model, x, optimizer, 1)
        mean.update_parameters(model)
    return [*map(value, mean.parameters()), value(mean(x).mean())]


def saved_and_read(model, x):
    steps_of(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return steps_of(torch.load(file, weights_only=False), x)


def to_double(model, x):
    steps_of(model.float(), x.float())
    return steps_of(model.double(), x)


def adafactor(model, x):
    return steps_of(model, x, torch.optim.Adafactor(model.parameters(), lr=0.1), 3)


def scaled(model, x):
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales = []
    for scale in (1, 1e308, 1):  # the second overflows
        optimizer.zero_grad()
        scaler.scale(model(x * scale).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [16.0, 8.0, 16.0]
    return list(map(value, model.parameters()))


AROUND = (teacher, average, saved_and_read, to_double, adafactor, scaled)


@pytest.mark.slow
@pytest.mark.parametrize("program", AROUND, ids=lambda f: f.__name__)
def test_what_programs_do_around_a_model(program):
    def run(mesh, stage=None):
        model, x = built(lambda: Root(Part)), batch_of(4, 4)
        if mesh is not None:
            model = pt.zero(model, mesh, stage=stage)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        return program(model, x)

    # Float32 is in it where a model is made double.
    near = 1e-6 if program is to_double else 1e-9
    with pt.ranks(dp=2) as world:
        for stage in STAGES:
            for found in world.run(run, stage):
                torch.testing.assert_close(found, run(None), rtol=near, atol=near)


@pytest.mark.parametrize("stage", STAGES)
def test_modules_may_be_sharded_one_by_one_and_the_model_last(stage):
    def run(mesh):
        model = built(lambda: Root(Part, 3))
        for block in list(model.blocks)[:2]:
            pt.zero(block, mesh, stage=stage)
        pt.zero(model, mesh, stage=stage)
        x = pt.distribute_tensor(batch_of(4, 4), mesh, [pt.Shard(0)])
        hung = sum(len(m._forward_pre_hooks) for m in model.modules())
        return train(model, lambda m, x, i: backward(m(x).square().mean()), x, adamw), hung

    def alone(mesh):
        model = pt.zero(
            built(lambda: Root(Part, 3)), mesh, stage=stage, blocks=["blocks.0", "blocks.1"]
        )
        return sum(len(m._forward_pre_hooks) for m in model.modules())

    one = train(
        built(lambda: Root(Part, 3)),
        lambda m, x, i: backward(m(x).square().mean()),
        batch_of(4, 4),
        adamw,
    )
    with pt.ranks(dp=2) as world:
        said, hung = world.run(run)[0]
        assert hung == world.run(alone)[0]
    compare(one, said, f"stage {stage}")


def test_a_part_of_what_is_sharded_another_way_and_a_sub_mesh_are_refused():
    def run(mesh):
        said = []
        model = pt.zero(built(lambda: Root(Part)), mesh, "dp")
        other = built(lambda: Root(Part))
        pt.zero(other.blocks[0], mesh, "dp", stage=2)
        tp = pt.parallelize(built(lambda: Root(Part)), mesh["tp"])
        for shard in (
            lambda: pt.zero(model.blocks[0], mesh, "dp"),
            lambda: pt.zero(other, mesh, "dp"),
            lambda: pt.zero(tp, mesh["dp"]),
        ):
            with pytest.raises(pt.LayoutError) as error:
                shard()
            said.append(str(error.value))
        return said

    with pt.ranks(dp=2, tp=2) as world:
        within, otherwise, elsewhere = world.run(run)[0]
    assert "is sharded already, with another module that holds it" in within
    assert "a Part in the model was sharded with other options" in otherwise
    assert "blocks.0.a.weight is on another mesh" in elsewhere
    assert "zero(model, mesh, 'dp')" in elsewhere


def test_a_mesh_of_one_axis_needs_no_name_of_it():
    def run(mesh):
        return [p.placements for p in pt.zero(nn.Linear(4, 4), mesh).parameters()]

    with pt.ranks(dim0=2) as world:
        assert world.run(run) == [[(pt.Shard(0),)] * 2] * 2


# -- a compiled part of a model --------------------------------------------------------------------


def test_what_a_compiled_part_computes_and_nobody_uses_has_no_gradient():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x), self.idle(x)

    def run(mesh):
        model, x = built(Two), batch_of(4, 4)
        part = model
        if mesh is not None:
            pt.distribute_module(model, mesh)
            part, x = (
                pt.compile(model, backend="graph"),
                pt.distribute_tensor(x, mesh, [pt.Shard(0)]),
            )
        optimizer = adamw(model.parameters())  # which decays what has a gradient of zeros
        for i in range(3):
            optimizer.zero_grad()
            y, z = part(x)
            backward((z if i == 1 else y).square().mean())
            optimizer.step()
        return [*map(value, model.parameters()), *(value(p.grad) for p in model.parameters())]

    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, run(None), rtol=1e-9, atol=1e-9)


# -- what a forward writes into its weights --------------------------------------------------------


class Writes(nn.Module):
    how = "data"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.out = nn.Linear(5, 4)

    def forward(self, x):
        w = self.linear.weight
        with torch.no_grad():
            if self.how == "data":
                w.data.clamp_(-0.2, 0.2)
            elif self.how == "operator":
                w *= 0.9
            elif self.how == "row":
                w[0].mul_(0.9)
            else:
                w.copy_(w / w.norm(dim=1, keepdim=True))
        return x + self.out(self.linear(x))


@pytest.mark.parametrize("how", ["data", "operator", "row", "copy"])
def test_what_a_forward_writes_into_its_weight_stays(how):
    class Here(Writes):
        pass

    Here.how = how
    agree(lambda: Root(Here), lambda m, x, i: backward(m(x).square().mean()), batch_of(4, 4))


def test_a_weight_that_is_written_after_it_was_saved_is_an_error_in_backward():
    class Late(Writes):
        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                self.linear.weight.mul_(0.9)
            return x + self.out(y)

    def run(mesh, stage=None):
        model, x = built(lambda: Root(Late)), batch_of(4, 4)
        if mesh is not None:
            pt.zero(model, mesh, stage=stage)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x).sum().backward()
        return True

    run(None)
    with pt.ranks(dp=2) as world:
        assert all(all(world.run(run, stage)) for stage in (0, 3))


def test_a_weight_that_is_written_in_fewer_digits_than_its_shards_have_is_an_error():
    def run(mesh):
        model = pt.zero(Root(Writes), mesh, precision=torch.bfloat16)
        with pytest.raises(pt.LayoutError, match="weight of a Linear") as error:
            model(pt.distribute_tensor(batch_of(4, 4).float(), mesh, [pt.Shard(0)]))
        return "gathered as torch.bfloat16" in str(error.value)

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [True, True]


def test_no_sync_of_a_model_without_zero_changes_nothing():
    def run(mesh):
        model, x = built(lambda: Root(Part)), batch_of(4, 4)
        if mesh is not None:
            pt.distribute_module(model, mesh)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        optimizer = adamw(model.parameters())
        for i in range(4):
            with pt.no_sync(model) if i % 2 == 0 else nullcontext():
                backward(model(x * (i + 1)).square().mean())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        return list(map(value, model.parameters()))

    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, run(None), rtol=1e-9, atol=1e-9)


# -- modules that are not as they were, or not yet -------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_a_lazy_module_is_named_before_it_has_parameters(stage):
    def body(mesh):
        model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2), nn.LazyBatchNorm1d())
        for name, place in {
            "zero": lambda: pt.zero(model, mesh, stage=stage),
            "distribute_module": lambda: pt.distribute_module(model, mesh),
            "full_state_dict": lambda: pt.full_state_dict(model),
        }.items():
            with pytest.raises(pt.LayoutError, match=rf"{name}: 1\.weight has no shape yet"):
                place()
        with pytest.raises((pt.LayoutError, ValueError), match=r"2\.running_mean has no shape yet"):
            pt.parallelize(model, mesh)
        model(torch.ones(2, 4))
        pt.zero(model, mesh, stage=stage)(pt.distribute_batch(torch.ones(4, 4), mesh))

    with pt.ranks(dp=2) as world:
        world.run(body)


def pruned(layer):
    nn.utils.prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize("change", [nn.utils.parametrizations.weight_norm, pruned])
def test_a_weight_that_zero_has_sharded_and_that_is_no_longer_there_is_named(change):
    def body(mesh):
        model = pt.zero(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh)
        change(model[0])
        with pytest.raises(pt.LayoutError, match="no longer has the parameter weight"):
            model(pt.distribute_batch(torch.ones(4, 4), mesh))

    with pt.ranks(dp=2) as world:
        world.run(body)


class Counting(nn.Module):
    """Counts its calls in a buffer, which another module may share, and scales by it."""

    def __init__(self, count=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4) if count is None else count)

    def forward(self, x):
        with torch.no_grad():
            self.count.add_(1)
        return self.linear(x) * self.count


def at_once(put, first, second, mesh):
    put(nn.Sequential(first, second), mesh)


def one_after_the_other(put, first, second, mesh):
    put(first, mesh)
    put(second, mesh)


@pytest.mark.parametrize("way", [at_once, one_after_the_other])
@pytest.mark.parametrize(
    "put",
    [
        lambda m, mesh: pt.zero(m, mesh, stage=3),
        lambda m, mesh: pt.zero(m, mesh, stage=1),
        lambda m, mesh: pt.parallelize(m, mesh, {}),
        lambda m, mesh: pt.distribute_module(m, mesh),
    ],
    ids=["zero 3", "zero 1", "parallelize", "distribute_module"],
)
def test_a_buffer_that_modules_share_stays_one(put, way):
    def run(mesh):
        first = Counting()
        second = Counting(first.count)
        second.register_buffer("again", first.count, persistent=False)
        way(put, first, second, mesh)
        second(first(pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)])))
        assert first.count is second.count is second.again
        assert first.count.full_tensor().tolist() == [2.0] * 4

    with pt.ranks(dp=2) as world:
        world.run(run)


class GivesDefaults(nn.Module):
    """Takes and gives dictionaries that are not made of their items alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given):
        assert given["missing"] == []
        found = collections.defaultdict(list)
        found["y"] = self.linear(given["x"])
        return found


def test_dictionaries_with_defaults_are_cast_at_the_border_of_a_module():
    def run(mesh):
        precision = pt.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
        model = pt.zero(GivesDefaults(), mesh, stage=3, precision=precision)
        given = collections.defaultdict(list)
        given["x"] = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)])
        found = model(given)
        assert type(found) is collections.defaultdict and found["more"] == []
        assert found["y"].dtype == torch.float32

    with pt.ranks(dp=2) as world:
        world.run(run)


class _UnevenAfterNorm(nn.Module):
    """A norm, which is small, before weights whose columns the ranks of tp share unevenly."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 31, bias=False)
        self.down = nn.Linear(31, 64, bias=False)

    def forward(self, x):
        hidden = self.up(self.first(x))
        scale = hidden.sum()
        return self.down(hidden) + self.norm(x) * 1e-3 * scale


def test_ranks_agree_on_which_blocks_are_small():
    def run(mesh):
        torch.manual_seed(0)
        model, alone = _UnevenAfterNorm(), _UnevenAfterNorm()
        alone.load_state_dict(model.state_dict())
        split = {"up.weight": {"tp": pt.Shard(0)}, "down.weight": {"tp": pt.Shard(1)}}
        pt.parallelize(model, mesh, split)
        pt.zero(model, mesh, "dp", stage=3, blocks=["first", "norm", "up", "down"])
        x = torch.randn(8, 64)
        spread = pt.distribute_tensor(x, mesh, [pt.Shard(0), pt.Replicate()])
        for _ in range(2):
            loss = model(spread).square().mean()
            loss.backward()
            assert torch.allclose(loss.full_tensor(), alone(x).square().mean())

    with pt.ranks(dp=2, tp=2) as world:
        world.run(run)


class _Noting(nn.Module):
    """Notes in backward how its weight lies; may redistribute, by Functions of partita's own."""

    def __init__(self, moves):
        super().__init__()
        self.linear, self.moves, self.seen = nn.Linear(8, 8), moves, []

    def forward(self, x):
        y = self.linear(x.softmax(0) if self.moves else x)
        y.register_hook(lambda gradient: self.seen.append(self.linear.weight.layout_over_mesh))
        return torch.tanh(y)


def test_a_move_within_a_block_is_nothing_that_may_run_again():
    def run(mesh):
        blocks = [_Noting(moves) for moves in (False, True)]
        pt.zero(model := nn.Sequential(nn.Linear(8, 8), *blocks), mesh, stage=3)
        x = pt.distribute_tensor(torch.rand(4, 8), mesh, [pt.Shard(0)])
        model(x).square().mean().backward()
        return [block.seen for block in blocks]

    with pt.ranks(dp=2) as world:
        for plain, moved in world.run(run):
            assert plain == moved and len(plain) == 1


def _train_with(spread, meddle):
    """Losses of two steps; `meddle(model)` is called once, in the backward of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x = torch.rand(4, 4)
    if spread is not None:
        pt.zero(model, spread, stage=3)
        x = pt.distribute_tensor(x, spread, [pt.Shard(0)])
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    handle = model[1].register_full_backward_hook(lambda *_: meddle(model) and None)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        handle.remove()
        losses.append(loss.item())
    losses += [p.grad.full_tensor() if spread is not None else p.grad for p in model.parameters()]
    return losses


def _halve(model):
    with torch.no_grad():
        model[1].weight.data.mul_(0.5)


@pytest.mark.parametrize(
    "meddle",
    [_halve, lambda model: copy.deepcopy(model[0]), copy.deepcopy],
    ids=["writes a weight", "copies a block", "copies the model"],
)
def test_what_a_full_backward_hook_does_is_done(meddle):
    wanted = _train_with(None, meddle)
    for size in (1, 2):
        with pt.ranks(dp=size) as world:
            for found in world.run(_train_with, meddle):
                for one, other in zip(found, wanted, strict=True):
                    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_copied_model_has_no_gradients_as_torchs_parameters(stage):
    def run(mesh):
        model = nn.Linear(4, 4)
        if stage is None:
            pt.parallelize(model, mesh)
        else:
            pt.zero(model, mesh, stage=stage)
        x = pt.distribute_tensor(torch.rand(4, 4), mesh, [pt.Shard(0)])
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        return [p.grad for p in copy.deepcopy(model).parameters()]

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [[None, None]] * 2


def test_a_precision_of_another_type_is_refused():
    def program(mesh):
        with pytest.raises(TypeError, match="as precision, not 'bf16'"):
            pt.zero(nn.Linear(2, 2), mesh, precision="bf16")

    with pt.ranks(dp=2) as world:
        world.run(program)


@dataclasses.dataclass
class Notes:
    last: torch.Tensor | None
    all: list[torch.Tensor]


class NotingBlock(nn.Module):
    """A block that writes into what it is given: a list, a dict and a dataclass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, found, named, notes):
        h = torch.tanh(self.linear(x))
        found.append(h)
        named.pop("input", None)
        named[len(named)] = found[0]
        notes.all.append(h)
        notes.last = h
        return h


class NotingModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NotingBlock() for _ in range(3))

    def forward(self, x):
        found, named, notes = [], {"input": x * 1}, Notes(None, [])
        kept = notes.all
        for block in self.blocks:
            x = block(x, found, named, notes)
        assert all(t is found[0] for t in named.values()) and kept is notes.all
        assert notes.last is x
        return torch.stack([*found, *named.values(), *notes.all, notes.last]).sum(0)


@pytest.mark.parametrize("kind", ["frozen", "cast", "trained"])
def test_a_block_may_write_into_the_containers_that_it_is_given(kind):
    def run(mesh):
        torch.manual_seed(0)
        model = NotingModel().double()
        x = torch.randn(4, 4, dtype=torch.float64)
        if mesh is not None:
            precision = torch.float32 if kind == "cast" else None
            pt.zero(model, mesh, stage=3, precision=precision)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        if kind == "frozen":
            model.blocks[1].linear.weight.requires_grad_(False)
        model(x).square().mean().backward()
        return [value(p.grad) for p in model.parameters()]

    truth = run(None)
    rtol = 1e-5 if kind == "cast" else 1e-10
    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, truth, rtol=rtol, atol=rtol)


class RepeatingBlock(nn.Module):
    """A block that gets one list twice, and runs itself, by names alone, with another list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, found, also, again=True):
        if again:
            self(x=x, found=[x], also=[x], again=False)
            assert found is also
        also.append(torch.tanh(self.linear(x)))
        found.append(also[-1] * 2)
        return found[-1]


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("by_names", [False, True])
def test_a_frozen_block_writes_into_one_list_that_it_is_given_twice(by_names, has_hook):
    def run(mesh):
        torch.manual_seed(0)
        model = nn.ModuleList([RepeatingBlock()]).double()
        block, x = model[0], torch.randn(4, 4, dtype=torch.float64)
        if mesh is not None:
            pt.zero(model, mesh, stage=3, blocks=["0"])
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        block.linear.bias.requires_grad_(False)
        if has_hook:
            block.register_forward_pre_hook(lambda _, args: (*args,))
        h = x.requires_grad_() * 1
        found, alive = [h * 3], weakref.ref(h)
        (block(x=h, found=found, also=found) if by_names else block(h, found, found)).sum()
        torch.stack(found).square().mean().backward()
        del h
        return len(found), alive() is None, value(x.grad), value(block.linear.weight.grad)

    truth = run(None)
    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-10)


class WritingBlock(nn.Module):
    def __init__(self, writes):
        super().__init__()
        self.linear, self.writes = nn.Linear(4, 4), writes

    def forward(self, x):
        if self.writes:
            x.mul_(2)
        return torch.tanh(self.linear(x))


class ViewingModel(nn.Module):
    """A model that gives a block some rows of a tensor that it has written since."""

    def __init__(self, writes):
        super().__init__()
        self.blocks = nn.ModuleList([WritingBlock(False), WritingBlock(writes)])

    def forward(self, x):
        h = self.blocks[0](x) * 1
        rows = h[1:3]
        h.mul_(2)
        return self.blocks[1](rows).sum() + h.square().sum()


@pytest.mark.parametrize("writes", [False, True])
def test_a_frozen_block_reads_and_writes_a_view_whose_layout_had_to_change(writes):
    def run(mesh):
        torch.manual_seed(0)
        model = ViewingModel(writes).double()
        x = torch.randn(6, 4, dtype=torch.float64)
        if mesh is not None:
            pt.zero(model, mesh, stage=3)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        model.blocks[1].linear.weight.requires_grad_(False)
        model(x).backward()
        return [value(p.grad) for p in model.parameters()]

    truth = run(None)
    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-10)
