"""Equal blocks of a step become calls of one program, and the step computes the same bits."""

import dataclasses
import gc
import re
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import partita as pt
from partita.capture import fold
from partita.capture.block_choice import BlockCalls
from partita.graph.graph_nodes import call_subgraph, note_of, subgraphs_in
from partita.graph.graph_text import canonical_lines
from partita.graph.passes.regather import is_gather, only_moves
from partita.graph.verify import verify
from partita.guards.captured_program import list_sent_moves
from tests.programs import stacks
from tests.programs.steps import squares

WIDTH, BLOCKS = 8, 3


class Block(nn.Module):
    """A layer norm and two linears around what a test puts between them."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.between(self.up(self.norm(x))))

    def between(self, h):
        return F.gelu(h)


class Stack(stacks.Stack):
    def __init__(self, kind, count=BLOCKS):
        super().__init__((kind(i) for i in range(count)), WIDTH)


class Dropping(Block):
    def between(self, h):
        return F.dropout(F.relu(h), 0.25)


class Alternating(Block):
    def between(self, h):
        return F.gelu(h) if self.number % 2 else torch.tanh(h)


class Longer(Block):
    """It begins as the others do, and goes on."""

    def between(self, h):
        h = F.gelu(h)
        return torch.sin(h) if self.number == 2 else h


class Scaled(Block):
    def between(self, h):
        return h * (0.5 + self.number)


class Numbered(Block):
    """Its number is read, and changes nothing that torch is asked."""

    def between(self, h):
        seen = {self.number: h}
        return F.gelu(seen[self.number]) if self.number < 100 else h


class Masked(Block):
    def between(self, h):
        mask = torch.ones(h.shape[-1], h.shape[-1], device=h.device).tril()[0]
        return h.masked_fill(mask == 0, -1.0)


class WritingInside(Block):
    def between(self, h):
        h = h * 2
        h += 1
        return F.relu_(h)


class WritingItsInput(Block):
    def forward(self, x):
        x = super().forward(x)
        x.mul_(0.5)
        return x


class WritingWhatItTakes(Block):
    def forward(self, x):
        x.add_(1.0)
        return super().forward(x)


class Counting(Block):
    def __init__(self, number):
        super().__init__(number)
        self.register_buffer("calls", torch.zeros(()))

    def between(self, h):
        self.calls.add_(1)
        return h * self.calls


class Normed(Block):
    def __init__(self, number):
        super().__init__(number)
        self.batch = nn.BatchNorm1d(2 * WIDTH)

    def between(self, h):
        return self.batch(h)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * grad  # not the derivative: whoever differentiates x * x gives another


class WithFunction(Block):
    def between(self, h):
        return Square.apply(h)


class Hooked(Block):
    def between(self, h):
        if h.requires_grad:
            h.register_hook(lambda grad: grad * (1 + self.number))
        return h


class Clamping(Block):
    def between(self, h):
        with torch.no_grad():
            most = h.amax()
        return h / (1 + most)


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedInside(Block):
    def between(self, h):
        return checkpoint(F.gelu, h, use_reentrant=False)


class AutocastState(Block):
    def between(self, h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(h, self.down.weight).float().repeat(1, 2)


class Casting(Block):
    """Each block casts for itself, and what partita gathers for it is not cast with it."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)

    def between(self, h):
        with torch.autocast("cpu", enabled=False):
            return h.float().tanh() * h


class InDouble(Block):
    def between(self, h):
        return h.to(torch.float64).exp().to(h.dtype)


class Splitting(Block):
    def between(self, h):
        a, b = h.chunk(2, -1)
        return torch.cat([a * torch.sigmoid(b), torch.stack([a, b]).max(0).values], -1)


class DroppingPaths(Block):
    """Each layer drops more rows than the one before it, in the ways of several libraries."""

    def between(self, h):
        keep = 1 - self.number / 8
        if keep == 1:
            return h
        rows = h.new_empty(h.shape[0], 1).bernoulli_(keep).div_(keep)
        return h.div(keep) * (keep + torch.rand(h.shape[0], 1)).floor_() * rows


class Weighed(Block):
    """Floats of a layer's own go into calls of many kinds."""

    def between(self, h):
        w = 0.1 * (1 + self.number)
        h = torch.addcmul(h, h, h, value=w) + torch.full((h.shape[-1],), w)
        return torch.where(h > w, h, 3 * w).clamp(-9.0 - w, 9.0 + w) - w


class Counted(Block):
    """Its number as an int is reckoned with, in the ways in which floats take one."""

    def between(self, h):
        n = self.number + 3
        h = (h * n + n * h) / ((h + n).abs() + n) - n
        h = torch.where(h > n, h - n, h).clamp(-n, n).remainder(n) - (n - h)
        return h.clone().mul_(n).masked_fill(h < -n, n) / n


class Turned(Block):
    """Its number is a dimension, an index or a size, and what an int tensor is reckoned with."""

    def between(self, h):
        n = self.number % 2
        steps = torch.arange(h.shape[-1]) * (self.number + 1)
        h = torch.add(h, h.pow(self.number + 3), alpha=self.number)  # which torch reads
        return h.flip(n) + h[n] + h.index_fill(n, torch.tensor([0]), 1.0) + steps.sin()


class DroppingMore(Block):
    """What dropout is given decides what it calls: other rates are other structures."""

    def between(self, h):
        return F.dropout(h, 0.1 * self.number)


PROGRAMS = {
    kind.__name__: kind
    for kind in (
        *(Block, Dropping, Alternating, Longer, Scaled, Numbered, Masked, WritingInside),
        *(WritingItsInput, WritingWhatItTakes, Counting, Normed, WithFunction, Hooked, Clamping),
        *(Checkpointed, CheckpointedInside, AutocastState, InDouble, Splitting, DroppingPaths),
        *(Weighed, DroppingMore, Counted, Turned, Casting),
    )
}


def with_momentum(model):
    """An optimizer with state and a short graph: updates of blocks have tests of their own."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)


def made(build, step_of, mesh, blocks, stage=3, calls=3, sections=None):
    """Losses, parameters and the captured step, of a model that `build` makes."""
    torch.manual_seed(0)
    model = build()
    if mesh is not None:
        pt.zero(model, mesh, stage=stage)
    how = {"blocks": blocks, "sections": sections}
    step = pt.compile(step_of(model, with_momentum(model)), backend="graph", **how)
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH)
    if mesh is not None:
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    torch.manual_seed(2)
    losses = [step(x).detach() for _ in range(calls)]
    values = [*losses, *(p.detach() for p in model.state_dict().values())]
    return [v.full_tensor() if isinstance(v, pt.DTensor) else v for v in values], step


def sections_of_forward(step):
    """The sections that the forward of a step calls, and how often in all."""
    calls = [n for n in step.program.graph.graph.nodes if n.target is call_subgraph]
    of = [n.args[0] for n in calls if note_of(n).phase == "forward"]
    return len({*of}), len(of)


def sent_by(step):
    """The moves that a step makes, with their bytes."""
    moves = list_sent_moves(step.program)
    return Counter((m.kind, m.axes, m.nbytes, m.reason) for m in moves)


def lines(step):
    """What the graph computes, in any order.

    Not in it: views, of which blocks have none that show all of a tensor; and where a rank is,
    which is worked out anywhere.
    """
    called = (re.sub(r"%\d+", "%", line) for line in canonical_lines(step.program))
    return Counter(line for line in called if not re.search(r": i64\[\] |aten\.view\.", line))


def check(build, step_of, mesh=None, text=True, **more):
    """A small step is the one without blocks, in its values and as a text; the one in which blocks
    are calls has its values, and sends the same."""
    wanted, flat = made(build, step_of, mesh, False, **more)
    found, step = made(build, step_of, mesh, True, **more)
    as_calls, calling = made(build, step_of, mesh, True, sections=True, **more)
    for one, other, called in zip(wanted, found, as_calls, strict=True):
        assert torch.equal(one, other) and torch.equal(one, called)
    assert sent_by(calling) == sent_by(step)
    verify(calling.program, "the passes")
    assert not text or lines(step) == lines(flat)
    return step


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_is_the_same_with_its_blocks_folded(name):
    check(lambda: Stack(PROGRAMS[name]), squares)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sharded_step_is_the_same_with_its_blocks_folded(name):
    with pt.ranks(dp=2) as world:
        world.run(lambda mesh: check(lambda: Stack(PROGRAMS[name]), squares, mesh) and None)


ONCE = {"Block": 1, "Dropping": 1, "Numbered": 1, "Masked": 1, "WritingInside": 1, "Alternating": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONCE)
def test_equal_blocks_are_of_one_structure(name):
    _, step = made(lambda: Stack(PROGRAMS[name], 4), squares, None, True)
    assert step.program.blocks.structures == ((name, 4 // ONCE[name]),) * ONCE[name]


@pytest.mark.slow
def test_numbers_that_differ_between_blocks_make_no_structures():
    cases = ((Scaled, [6]), (Weighed, [6]), (DroppingPaths, [1, 4, 1]), (Counted, [6]))
    for kind, calls in cases:
        _, step = made(lambda kind=kind: Stack(kind, 6), squares, None, True)
        assert [count for _, count in step.program.blocks.structures] == calls
    _, step = made(lambda: Stack(DroppingMore, 4), squares, None, True)
    assert [count for _, count in step.program.blocks.structures] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["WithFunction", "Hooked"])
def test_what_runs_code_of_the_users_in_backward_is_folded(name):
    _, step = made(lambda: Stack(PROGRAMS[name], 4), squares, None, True, sections=True)
    assert sections_of_forward(step) == (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["WritingWhatItTakes", "Counting", "Normed"])
def test_what_writes_memory_of_others_is_no_call(name):
    check(lambda: Stack(PROGRAMS[name]), squares)
    _, step = made(lambda: Stack(PROGRAMS[name], 4), squares, None, True, sections=True)
    assert sections_of_forward(step) == (0, 0)
    assert step.program.blocks.structures == ((name, 4),)
    assert step.program.blocks.folded == ()
    assert f"{name}: 4 equal calls, left flat (it writes memory from outside)" in step.explain()


@pytest.mark.slow
def test_explain_tells_which_blocks_are_folded_and_why_others_are_not():
    _, step = made(lambda: Stack(Block), squares, None, True)
    small = rf"Block: {BLOCKS} equal calls, left flat \(the step has \d+ calls, fewer than 2800\)"
    assert re.search(small, step.explain())
    _, step = made(lambda: Stack(Block), squares, None, True, sections=False)
    assert f"Block: {BLOCKS} equal calls, left flat (sections=False" in step.explain()
    _, step = made(lambda: PartlyFrozen(Block), squares, None, True, sections=True)
    assert "Block: 1 call, left flat (no other call is equal to it)" in step.explain()
    assert f"Block: {BLOCKS - 1} equal calls, folded into one program" in step.explain()
    assert step.program.blocks.folded == (("Block", BLOCKS - 1),)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["penalized", "twice_backward", "writing", "sparse", "mode"])
def test_explain_says_why_a_block_is_not_folded(name):
    """What may look like a reason, as a mode or a sparse gradient, is none."""
    model, step_of, reason = {
        "penalized": (Stack, penalized, "a result is a view of memory that is written"),
        "twice_backward": (
            Stack,
            twice_backward,
            "nodes outside it use a part of it and compute values for another part",
        ),
        "writing": (WritingData, squares, "what its backward reads is written after its forward"),
        "sparse": (Stack, squares_by_sgd, ""),
        "mode": (Stack, squares, ""),
    }[name]
    kind = {"writing": Sigmoids, "sparse": Looking, "mode": Announced}.get(name, Block)
    mode = OfTheLayer() if name == "mode" else nullcontext()
    with mode:
        step = check(lambda: model(kind), step_of, text=False)
        _, step = made(lambda: model(kind), step_of, None, True, sections=True)
    (calls,) = step.program.blocks.calls
    assert calls == BlockCalls(kind.__name__, BLOCKS, reason)
    how = f"left flat ({reason})" if reason else "folded into one program"
    assert f"{kind.__name__}: {BLOCKS} equal calls, {how}" in step.explain()


@pytest.mark.slow
def test_explain_tells_of_the_form_that_runs_and_of_what_passes_do_within_its_blocks():
    def run(mesh):
        _, step = made(lambda: Stack(Block), squares, mesh, True, sections=True)
        first, *others = step.program.changes
        text = step.explain()
        return first, others, text, len(step.program.graph.graph.nodes)

    with pt.ranks(dp=2) as world:
        first, others, text, nodes = world.run(run)[0]
    assert first.name == "blocks" and first.nodes[1] < first.nodes[0]
    assert f"Block, {BLOCKS} times" in text
    assert "parameters are gathered again for backward" in text.split("dedupe: A")[0]
    assert others[-1].nodes[1] == nodes  # as it runs
    assert f"all together: {first.collectives[0]} -> {others[-1].collectives[1]}" in text


# -- what blocks do besides ------------------------------------------------------------------------


class Telling(Block):
    """It leaves tensors in a list that it is given."""

    def forward(self, x, seen):
        h = self.between(self.up(self.norm(x)))
        seen.append(h)
        seen.append(self.number)
        return x + self.down(h)


class Told(Stack):
    def forward(self, x):
        seen = []
        x = self.first(x)
        for block in self.blocks:
            x = block(x, seen)
        kept = [t for t in seen if isinstance(t, torch.Tensor)]
        return self.last(x) + sum(t.square().mean() for t in kept) + sum(seen[1::2])


@pytest.mark.slow
def test_tensors_that_a_block_leaves_elsewhere_have_their_history():
    step = check(lambda: Told(Telling), squares)
    assert step.program.blocks.structures == (("Telling", BLOCKS),)


@dataclasses.dataclass
class Pair:
    value: torch.Tensor
    other: torch.Tensor


class InPairs(Block):
    def __init__(self, number):
        super().__init__(number)
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair):
        return Pair(super().forward(pair.value), self.side(pair.value))


class Paired(Stack):
    def forward(self, x):
        pair = Pair(self.first(x), None)
        for block in self.blocks:
            pair = block(pair)
        return self.last(pair.value)


@pytest.mark.slow
def test_a_result_that_nobody_reads_gives_its_parameters_no_gradient():
    step = check(lambda: Paired(InPairs), squares)
    assert len(step.program.blocks.structures) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_result_that_nobody_reads_gives_parameters_in_shards_no_gradient(stage):
    """An optimizer that decays weights does so with a gradient of zeros, and not without one."""

    def run(mesh):
        step = check(lambda: Paired(InPairs), squares, mesh, stage=stage)
        return len(step.program.blocks.structures)

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [1, 1]


class PairedAtTheEnd(Paired):
    def forward(self, x):
        pair = Pair(self.first(x), None)
        for block in self.blocks:
            pair = block(pair)
        return self.last(pair.value + pair.other)


@pytest.mark.slow
def test_the_last_block_may_be_read_otherwise_than_the_others():
    check(lambda: PairedAtTheEnd(InPairs), squares)


class Tied(Stack):
    def __init__(self, kind):
        super().__init__(kind)
        self.blocks[1].up = self.blocks[0].up

    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.slow
def test_weights_may_be_shared_and_blocks_called_twice():
    check(lambda: Tied(Block), squares)


class PartlyFrozen(Stack):
    def __init__(self, kind):
        super().__init__(kind)
        self.blocks[0].up.requires_grad_(False)
        self.first.requires_grad_(False)


@pytest.mark.slow
def test_what_trains_in_one_block_may_be_frozen_in_another():
    step = check(lambda: PartlyFrozen(Block), squares)
    assert [n for _, n in step.program.blocks.structures] == [1, BLOCKS - 1]


@pytest.mark.slow
def test_blocks_run_without_gradients_and_with_them():
    def target(model, optimizer):
        def step(x):
            optimizer.zero_grad()
            with torch.no_grad():
                aim = model(x)
            loss = (model(x) - 2 * aim).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    check(lambda: Stack(Block), target)


@pytest.mark.slow
def test_micro_batches_are_calls_of_one_structure():
    def accumulating(model, optimizer):
        def step(x):
            optimizer.zero_grad()
            total = 0.0
            for part in (x, x + 1):
                loss = model(part).square().mean()
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            return total

        return step

    # What adds up in a view is written as other views of the same.
    step = check(lambda: Stack(Block), accumulating, text=False)
    assert step.program.blocks.structures == (("Block", 2 * BLOCKS),)


def twice_backward(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward(retain_graph=True)
        out.abs().sum().backward()
        optimizer.step()
        return out.sum()

    return step


@pytest.mark.slow
def test_two_losses_go_back_through_one_forward():
    check(lambda: Stack(Block), twice_backward, text=False)


def penalized(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        x = x.detach().clone().requires_grad_()
        out = model(x).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out.square() + grad.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.slow
def test_gradients_of_gradients_cross_blocks():
    check(lambda: Stack(Block), penalized)


@pytest.mark.slow
def test_hooks_of_modules_in_blocks_run():
    def build():
        model = Stack(Block)
        for i, block in enumerate(model.blocks):
            block.up.register_forward_hook(lambda m, args, out, i=i: out * (1 + i % 2))
            block.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
            block.register_forward_hook(lambda m, args, out: out - 1)
        return model

    check(build, squares)


@pytest.mark.slow
def test_an_error_in_a_block_is_the_users_own():
    class Failing(Block):
        def between(self, h):
            if self.number == 2:
                raise KeyError("the third")
            return h

    with pytest.raises(KeyError, match="the third"):
        made(lambda: Stack(Failing), squares, None, True)


class Choosy(Block):
    """It asks what it is given."""

    def between(self, h):
        if h.is_contiguous() and h.dtype == torch.float32 and h.requires_grad and h.dim() == 2:
            return F.gelu(h) if h.size(0) == h.shape[0] and len(h) else h
        return h


@pytest.mark.slow
def test_questions_about_tensors_are_answered_as_ever():
    step = check(lambda: Stack(Choosy), squares)
    assert len(step.program.blocks.structures) == 1


class AskingAnArgument(Block):
    """What it asks is an argument of the step: the answer is a condition of the program."""

    def forward(self, x, given):
        x = super().forward(x)
        return x * 2 if given.is_contiguous() else x


class Asking(Stack):
    def forward(self, x):
        given = x
        x = self.first(x)
        for block in self.blocks:
            x = block(x, given)
        return self.last(x)


@pytest.mark.slow
def test_what_a_block_asks_of_an_argument_is_asked_in_each_call():
    torch.manual_seed(0)
    model = Asking(AskingAnArgument)
    eager = model.forward
    step = pt.compile(model, backend="graph", blocks=True)
    x = torch.randn(WIDTH, WIDTH)
    for given in (x, x.t(), x):
        torch.testing.assert_close(step(given), eager(given))
    assert len(step.forward.reasons) == 2


@pytest.mark.slow
def test_blocks_may_be_named():
    def structures(blocks):
        _, step = made(lambda: Stack(Block), squares, None, blocks)
        return step.program.blocks.structures

    found = structures([nn.Linear])
    assert {kind for kind, _ in found} == {"Linear"}
    assert sum(calls for _, calls in found) == 2 + 2 * BLOCKS
    assert max(calls for _, calls in found) == BLOCKS
    assert structures([]) == ()


def test_a_block_is_a_module_or_a_class_of_them():
    with pytest.raises(ValueError, match="a module or a class"):
        pt.compile(lambda: None, blocks=["blocks"])


class CheckpointingStack(Stack):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


@pytest.mark.slow
def test_blocks_may_be_regions_that_are_made_again():
    step = check(lambda: CheckpointingStack(Block), squares)
    assert step.program.blocks.structures == (("Block", BLOCKS),)


class WritingOutside(Stack):
    """What a block gives, and backward reads, is written by the next one's caller."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x += 1
            x.mul_(0.5)
        return self.last(x)


class WritingData(Stack):
    """What a block gives is written so that autograd does not notice."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x.data.mul_(0.5)
        return self.last(x)


@pytest.mark.slow
def test_what_a_block_gives_may_be_written():
    check(lambda: WritingOutside(Block), squares)


class Sigmoids(Block):
    """It saves what it gives."""

    def forward(self, x):
        return torch.sigmoid(super().forward(x))


@pytest.mark.slow
def test_what_backward_reads_may_not_be_written_as_in_eager():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made(lambda: WritingOutside(Sigmoids), squares, None, True)


class Iterating(Block):
    def between(self, h):
        return torch.stack([row * (1 + i) for i, row in enumerate(h)])


class Catching(Stack):
    """A block that fails is gone round."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            try:
                x = block(x)
            except ValueError:
                x = x + 1
        return self.last(x)


class FailingLate(Block):
    def forward(self, x):
        x = F.dropout(super().forward(x), 0.1)
        if self.number == 1:
            raise ValueError
        return x


@pytest.mark.slow
def test_an_error_in_a_block_may_be_caught():
    check(lambda: Catching(FailingLate), squares)


@pytest.mark.slow
def test_rows_of_a_tensor_may_be_gone_through():
    check(lambda: Stack(Iterating), squares)


@pytest.mark.slow
def test_a_block_that_is_split_over_ranks_is_traced_once():
    def train(mesh, blocks):
        torch.manual_seed(0)
        model = Stack(Block)
        plan = {
            "blocks.*.up.weight": {"tp": pt.Shard(0)},
            "blocks.*.up.bias": {"tp": pt.Shard(0)},
            "blocks.*.down.weight": {"tp": pt.Shard(1)},
            "blocks.*.norm": pt.Inputs({"tp": pt.Replicate()}),
            "blocks.*": pt.Outputs({"tp": pt.Shard(0)}),
        }
        pt.parallelize(model, mesh, plan)
        step = pt.compile(squares(model, with_momentum(model)), backend="graph", blocks=blocks)
        torch.manual_seed(1)
        x = torch.randn(4, WIDTH)
        x = pt.distribute_tensor(x, mesh, [pt.Replicate()])
        losses = [step(x).full_tensor().item() for _ in range(3)]
        return losses, lines(step), step.program.blocks

    with pt.ranks(tp=2) as world:
        wanted, flat, _ = world.run(train, False)[0]
        losses, found, blocks = world.run(train, True)[0]
    assert losses == wanted and found == flat
    # The first takes what is whole, the others what is split.
    assert blocks.structures == (("Block", 1), ("Block", BLOCKS - 1))


@pytest.mark.slow
def test_a_backward_under_other_modes_is_another_trace():
    def run(blocks):
        torch.manual_seed(0)
        model = Stack(Block, 3)

        def step(x, y):
            one, other = model(x).square().mean(), model(y).square().mean()
            with torch.autocast("cpu", torch.bfloat16):
                one.backward()
            first = [p.grad.clone() for p in model.parameters()]
            other.backward()
            return first, [p.grad for p in model.parameters()]

        x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        return pt.compile(step, backend="graph", blocks=blocks)(x, y)

    for one, other in zip(run(True), run(False), strict=True):
        assert all(map(torch.equal, one, other))


class OfTheLayer(TorchFunctionMode):
    """Multiplies what gelu gives by the number of the block that runs."""

    running = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * (OfTheLayer.running + 1) if func is F.gelu else out


class Announced(Block):
    def between(self, h):
        OfTheLayer.running = self.number
        return F.gelu(h)


@pytest.mark.parametrize("is_within", [True, False])
def test_a_mode_that_does_otherwise_in_each_block_hears_each(is_within):
    torch.manual_seed(0)
    model, x = Stack(Announced, 3), torch.randn(4, WIDTH)

    def step(x):
        with OfTheLayer() if is_within else nullcontext():
            return model(x).sum()

    with nullcontext() if is_within else OfTheLayer():
        expected = step(x)
        compiled = pt.compile(step, backend="graph", blocks=True)
        assert torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), expected)
    as_calls = pt.compile(step, backend="graph", blocks=True, sections=True)
    with nullcontext() if is_within else OfTheLayer():
        assert torch.equal(as_calls(x), expected)


# -- whether, and what is printed ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("count", "traced"), [(5, ()), (6, (("Block", 6),))])
def test_six_blocks_that_are_alike_are_traced_once_unless_one_says_otherwise(count, traced):
    _, step = made(lambda: Stack(Block, count), squares, None, None, calls=1)
    assert step.program.blocks.structures == traced
    _, step = made(lambda: Stack(Block, count), squares, None, False, calls=1)
    assert step.program.blocks.structures == ()


@pytest.mark.slow
def test_a_graph_prints_once_what_repeats_itself():
    texts = {}
    for count in (8, 16):
        _, step = made(lambda count=count: Stack(Block, count), squares, None, None, calls=1)
        lines, every = str(step.graph).splitlines(), step.graph.to_string().splitlines()
        said = [int(line.split("(")[1].split()[0]) for line in lines if line.startswith("... ")]
        assert len(every) == len(step.graph.nodes) + 1
        assert len(lines) - len(said) + sum(said) == len(every) and lines[-1] == every[-1]
        assert set(lines) - set(every) == {line for line in lines if line.startswith("... ")}
        texts[count] = len(lines)
    assert texts[16] <= texts[8] + 8


class TellingWithin(Block):
    """It also gives what the rest of it is made of, as attention gives its weights."""

    def forward(self, x):
        h = F.gelu(self.up(self.norm(x)))
        return x + self.down(h), h


def retained(model, x):
    within = []
    for block in model:
        x, h = block(x)
        h.retain_grad()
        within.append(h)
    x.square().sum().backward()
    return [h.grad for h in within]


def asked_for(model, x):
    x, h = model[0](x)
    for block in model[1:]:
        x, _ = block(x)
    return list(torch.autograd.grad(x.square().sum(), [h]))


def hooked(model, x):
    total = 0
    for block in model:
        x, h = block(x)
        h.register_hook(lambda g: g / 2)
        total = total + h.mean()
    weights = [block.up.weight for block in model]
    return list(torch.autograd.grad(x.square().sum() + total, weights))


def hooked_in_vain(model, x):
    for block in model:
        x, h = block(x)
        h.register_hook(lambda g: g / 2)
    return list(torch.autograd.grad(h.sum(), [model[-1].up.weight]))


def added(model, x):
    total = 0
    for block in model:
        x, h = block(x)
        total = total + h.square().mean()
    weights = [block.up.weight for block in model]
    return list(torch.autograd.grad(x.square().sum() + total, weights))


@pytest.mark.slow
@pytest.mark.parametrize("ask", [retained, asked_for, hooked, hooked_in_vain, added])
def test_the_gradient_of_one_of_several_results_is_what_it_is_in_eager(ask):
    torch.manual_seed(0)
    model, x = nn.ModuleList(TellingWithin(i) for i in range(BLOCKS)), torch.randn(4, WIDTH)
    expected = ask(model, x)
    for sections in (None, True):
        step = pt.compile(lambda: ask(model, x), backend="graph", blocks=True, sections=sections)
        assert all(map(torch.equal, expected, step()))


def stepped(blocks, **options):
    model = Stack(Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, pt.compile(step, backend="graph", blocks=blocks, **options)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_a_model_that_nobody_has_is_gone_with_its_step(blocks):
    model, step = stepped(blocks)
    step(torch.ones(4, WIDTH))
    known = [weakref.ref(p) for p in model.parameters()]
    del model, step
    gc.collect()
    assert not any(p() is not None for p in known)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_captures_that_were_dropped_leave_nothing(blocks):
    _, step = stepped(blocks, keep=1)

    def left_by(rows):
        for n in rows:
            step(torch.ones(n, WIDTH))
        while gc.collect():  # what C++ held of what was found is found in another look
            pass
        return sum(issubclass(type(x), FakeTensor) for x in gc.get_objects())

    first = left_by(range(2, 8))
    assert left_by(range(8, 14)) <= first


class Scaled(Block):
    """Floats of a layer's own go into calls that round alike with a tensor in their place."""

    def between(self, h):
        w = 0.1 * (1 + self.number)
        return torch.where(h > w, h * w, 3 * w).clamp(-9.0 - w) - h / (1 - w / 2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sections"), [(Scaled, 1), (Weighed, 0)])
def test_floats_that_differ_between_blocks_are_inputs_where_no_bit_depends_on_it(kind, sections):
    check(lambda: Stack(kind), squares)
    _, calling = made(lambda: Stack(kind), squares, None, True, sections=True)
    assert sections_of_forward(calling)[0] == sections


class Factored(Block):
    """A float of a layer's own is added with a factor, which kernels round once."""

    def between(self, h):
        return torch.add(h, 0.1 * (1 + self.number), alpha=3)


class Gated(Block):
    """A number in bfloat16 is multiplied by a float of the layer's own, which is not rounded."""

    def __init__(self, number):
        super().__init__(number)
        self.gate = nn.Parameter(torch.tensor(1.7, dtype=torch.bfloat16))

    def between(self, h):
        return h * (self.gate * (0.1 * (1 + self.number)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Factored, Gated])
def test_floats_that_a_tensor_would_round_otherwise_are_no_inputs(kind):
    check(lambda: Stack(kind), squares)


class Sined(Block):
    def between(self, h):
        return torch.sin(h)


class Mixed(nn.Module):
    """Two structures, by turns."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(3))
        self.others = nn.ModuleList(Sined(i) for i in range(3))

    def forward(self, x):
        for block, other in zip(self.blocks, self.others, strict=True):
            x = other(block(x))
        return x


@pytest.mark.slow
def test_a_structure_that_has_to_be_inlined_leaves_the_others_calls(monkeypatch):
    wanted, _ = made(Mixed, squares, None, False)
    usual = fold.functionalize_graph

    def refuse_sines(graph, *more):
        if any("aten.sin" in str(n.target) for n in graph.graph.nodes):
            raise fold.UnsureOfWrites
        return usual(graph, *more)

    for refused, calls_of_forward in ((False, 5), (True, 2)):
        if refused:
            monkeypatch.setattr(fold, "functionalize_graph", refuse_sines)
        found, step = made(Mixed, squares, None, True, sections=True)
        assert all(map(torch.equal, found, wanted))
        calls = [n for n in step.program.graph.graph.nodes if n.target is call_subgraph]
        # The first block goes back to no gradient of its input: it has no equal.
        assert sum(note_of(n).phase == "forward" for n in calls) == calls_of_forward
        assert len(step.program.blocks.structures) == 3


class Looking(Block):
    """The gradient of its table is sparse."""

    def __init__(self, number):
        super().__init__(number)
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def forward(self, x):
        return super().forward(x) + self.table((x.detach() > 0).long()).sum(1)


def squares_by_sgd(model, _):
    return squares(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.slow
def test_blocks_with_sparse_gradients_are_the_same():
    step_of = squares_by_sgd
    wanted, _ = made(lambda: Stack(Looking), step_of, None, False)
    for sections in (None, True):
        found, _ = made(lambda: Stack(Looking), step_of, None, True, sections=sections)
        assert all(map(torch.equal, found, wanted))


class Twice(Block):
    """What backward reads was made by equal calls, which share one fake."""

    def between(self, h):
        a, b = torch.sin(h) * 2, torch.sin(h + 1) * 2
        return a * b + torch.cos(b) * a


def test_a_section_tells_its_inputs_apart():
    _, step = made(lambda: Stack(Twice), squares, None, True, sections=True)
    for section in subgraphs_in(step.program.graph.graph):
        given = section.example()
        assert len({x.untyped_storage()._cdata for x in given}) == len(given)


class NormedByHand(nn.Module):
    """A norm that needs no weight, so that it may run before the block is gathered."""

    def __init__(self, number: int):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return x + self.down(F.relu(self.up(normed.to(x.dtype))))


def gathers_while_computing(mesh):
    """For each gather in the forward of a step in which blocks stay calls: is anything computed
    while it is under way?"""
    model = pt.zero(Stack(NormedByHand, 5), mesh, stage=3, precision=torch.bfloat16)
    train = squares(model, torch.optim.AdamW(model.parameters()))
    step = pt.compile(train, backend="graph", blocks=True, sections=True)
    step(pt.distribute_tensor(torch.ones(64, WIDTH), mesh, [pt.Shard(0)]))
    nodes = [*step.program.graph.graph.nodes]
    found = []
    for start, gather in enumerate(nodes):
        if is_gather(gather) and note_of(gather).phase == "forward":
            end = min(nodes.index(user) for user in gather.users)
            found.append(not all(map(only_moves, nodes[start + 1 : end])))
    return found


@pytest.mark.slow
def test_a_block_that_stays_a_call_is_gathered_while_the_one_before_computes():
    with pt.ranks(dp=2) as world:
        of_first, *others = world.run(gathers_while_computing)[0]
    assert not of_first
    assert len(others) == 6
    assert all(others)
