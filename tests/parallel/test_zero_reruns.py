"""Does a ZeRO-3 block go on as on one device behind a checkpoint, or behind inference mode?"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import partita as pt
from tests.programs.zero_stages import STAGES, X, Y, gradients_of, loss_of, run, whole


class Gated(nn.Module):
    """Computes with a product of its weights, so that only the product is saved if it is frozen."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        weight = self.linear.weight * torch.sigmoid(self.gate.weight.sum())
        return F.linear(x, weight, self.linear.bias)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Gated(), Gated()])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def gated():
    torch.manual_seed(0)
    return Checkpointed().double()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_block_that_was_frozen_between_a_forward_and_its_checkpoint_is_rerun(stage, frozen):
    def program(model, spread, no_sync):
        loss = loss_of(model, spread(X))
        model.blocks[frozen].requires_grad_(False)
        loss_of(model, spread(Y)).backward()
        model.blocks[frozen].requires_grad_(True)
        loss.backward()
        return gradients_of(model)

    run(program, stage, make=gated)


def test_a_checkpoint_of_a_block_that_had_computed_parameters_is_refused_on_all_ranks():
    def program(mesh):
        model = pt.zero(gated(), mesh)
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        values = {name: p * 0.5 for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, values, (x,)).square().mean()
        with pytest.raises(pt.LayoutError, match="would run again with other parameters"):
            loss.backward()
        loss_of(model, x).backward()
        return gradients_of(model)

    truth = gated()
    loss_of(truth, X).backward()
    with pt.ranks(dp=3) as world:
        for found in world.run(program):
            torch.testing.assert_close(found, gradients_of(truth), rtol=1e-10, atol=1e-12)


class Rerun(nn.Module):
    """Its blocks run again in backward, each in the way `kind`."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Gated(), Gated()])
        if kind == "hook":
            for block in self.blocks:
                composable_checkpoint(block)

    def run_block(self, block, x):
        if self.kind == "remat":
            return pt.remat(block)(x)
        if self.kind == "hook":
            return block(x)
        return checkpoint(block, x, use_reentrant=self.kind == "reentrant")

    def forward(self, x):
        if self.kind == "nested":
            return checkpoint(self.run_all, x, use_reentrant=False)
        return self.run_all(x)

    def run_all(self, x):
        for block in self.blocks:
            x = self.run_block(block, x)
        return x


KINDS = ("not reentrant", "reentrant", "nested", "hook", "remat")


def make_rerun(kind):
    torch.manual_seed(0)
    return Rerun(kind).double()


def student_and_teacher(before):
    def program(model, spread, no_sync):
        x = spread(X.clone()).requires_grad_()
        values = {name: p.detach() * 0.9 for name, p in model.named_parameters()}

        def teach():
            with torch.no_grad():
                return functional_call(model, values, (x,))

        target = teach() if before else None
        found = model(x)
        if target is None:
            target = teach()
        (found - target).square().mean().backward()
        return [*gradients_of(model), whole(x.grad)]

    return program


def another_with_gradients(order):
    """Both forwards may go backward, and the one of the model's own parameters does."""

    def program(model, spread, no_sync):
        x = spread(X.clone()).requires_grad_()
        losses = []
        for own in order:
            scaled = {name: p * 0.5 for name, p in model.named_parameters()}
            out = model(x) if own else functional_call(model, scaled, (x,))
            losses += [out.square().mean()] if own else []
        sum(losses).backward()
        return [*gradients_of(model), whole(x.grad)]

    return program


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "program",
    [
        student_and_teacher(before=True),
        student_and_teacher(before=False),
        another_with_gradients([True, False]),
        another_with_gradients([False, True]),
        another_with_gradients([False, True, False, True]),
    ],
    ids=["teacher first", "student first", "own first", "own last", "own twice"],
)
def test_a_rerun_is_of_its_own_forward(program, kind, stage):
    run(program, stage, ranks=2, make=partial(make_rerun, kind))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["not reentrant", "nested", "hook"])
def test_a_bias_that_is_frozen_after_the_forward_changes_nothing_for_the_others(kind, stage):
    def program(model, spread, no_sync):
        x = spread(X.clone()).requires_grad_()
        for _ in range(2):
            loss = model(x).square().mean()
            for block in model.blocks:
                block.linear.bias.requires_grad_(False)
            loss.backward()
            model.blocks[1].linear.bias.requires_grad_(True)
        return [*gradients_of(model), whole(x.grad)]

    run(program, stage, ranks=2, make=partial(make_rerun, kind))


class Distilled(nn.Module):
    """Its checkpoint calls the block with its own and with other values."""

    def __init__(self, reentrant, teacher_first):
        super().__init__()
        self.reentrant, self.teacher_first = reentrant, teacher_first
        self.block = nn.Sequential(Gated())

    def compare(self, x):
        values = {name: p * 0.9 for name, p in self.block.named_parameters()}
        calls = [lambda: functional_call(self.block, values, (x,)), lambda: self.block(x)]
        one, other = (call() for call in (calls if self.teacher_first else calls[::-1]))
        return one - 2 * other

    def forward(self, x):
        return checkpoint(self.compare, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("teacher_first", [False, True])
def test_a_checkpoint_calls_a_block_with_its_own_and_with_other_values(reentrant, teacher_first):
    def program(model, spread, no_sync):
        x = spread(X.clone()).requires_grad_()
        model(x).square().mean().backward()
        return [*gradients_of(model), whole(x.grad)]

    def make():
        torch.manual_seed(0)
        return Distilled(reentrant, teacher_first).double()

    run(program, 3, ranks=2, make=make)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", ["", "before", "after"])
def test_the_rerun_of_a_forward_with_other_values_is_refused_whatever_ran_since(kind, own):
    def program(mesh):
        model = pt.zero(make_rerun(kind), mesh)
        x = pt.distribute_tensor(X.clone(), mesh, [pt.Shard(0)]).requires_grad_()
        if own == "before":
            model(x)
        values = {name: p * 0.5 for name, p in model.named_parameters()}
        loss = functional_call(model, values, (x,)).square().mean()
        if own == "after":
            model(x)
        with pytest.raises(pt.LayoutError, match="other parameters"):
            loss.backward()

    with pt.ranks(dp=2) as world:
        world.run(program)


# -- reads in inference mode -----------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["grad", "zero_grad"])
def test_gradients_that_are_read_or_cleared_in_inference_mode_can_be_added_to(stage, what):
    def program(model, spread, no_sync):
        found = []
        with no_sync(model):
            loss_of(model, spread(X)).backward()
        with torch.inference_mode():
            if what == "grad":
                found += gradients_of(model)
            else:
                model.zero_grad(set_to_none=False)
        loss_of(model, spread(Y)).backward()
        return found + gradients_of(model)

    run(program, stage)


# -- blocks that do not always read their parameters -----------------------------------------------


class Skipping(nn.Module):
    """A block that may return without its weight; the weight has the shape of its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self, x, skips=False):
        return x * 1.5 if skips else torch.tanh(torch.tanh(x) @ self.weight)


class SkippingInTurn(nn.Module):
    def __init__(self, all_run_again):
        super().__init__()
        self.blocks = nn.ModuleList([Skipping(), Skipping()])
        self.all_run_again = all_run_again

    def forward(self, x):
        for block in self.blocks:
            run_again = partial(checkpoint, block, use_reentrant=False)
            x = run_again(x) + (run_again if self.all_run_again else block)(x, True)
        return x


@pytest.mark.parametrize("all_run_again", [False, True])
def test_a_forward_that_reads_no_parameter_changes_nothing_for_the_rerun_of_another(all_run_again):
    def make():
        torch.manual_seed(0)
        return SkippingInTurn(all_run_again).double()

    def program(model, spread, no_sync):
        loss_of(model, spread(X[:4, :2])).backward()
        return gradients_of(model)

    run(program, 3, ranks=2, make=make)


class Part(nn.Linear):
    """Runs again in backward, and writes its parameters each time."""

    def forward(self, x):
        if self.where == "within":
            return checkpoint(self.compute, x, use_reentrant=self.reentrant)
        return self.compute(x)

    def compute(self, x):
        with torch.no_grad():
            self.write(self)
        return super().forward(x).tanh()


class Around(nn.Sequential):
    def forward(self, x):
        part, last = self
        if part.where == "a part":
            return last(checkpoint(part, x, use_reentrant=part.reentrant))
        return last(part(x))


class WrittenInReruns(nn.Module):
    def __init__(self, where, reentrant):
        super().__init__()
        self.where, self.reentrant = where, reentrant
        # The first block is a layer. The second contains a layer.
        self.blocks = nn.ModuleList([Part(4, 4), Around(Part(4, 4), nn.Linear(4, 4))])
        self.parts = self.blocks[0], self.blocks[1][0]
        for part in self.parts:
            part.where, part.reentrant = where, reentrant
            part.write = lambda part: None

    def forward(self, x):
        for block in self.blocks:
            if self.where == "around":
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return x


def written_in_reruns(where, reentrant):
    torch.manual_seed(0)
    return WrittenInReruns(where, reentrant).double()


def write_in_turn(part):
    part.weight.mul_(0.7)
    part.refs[0].add_(part.weight * 0.1)
    part.refs[1].data.add_(1)
    part.bias.data.mul_(0.5)


def train_two_steps(model, spread):
    found = []
    for _ in range(2):
        x = spread(X.clone()).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        found += [whole(loss), whole(x.grad), *gradients_of(model)]
        found += [whole(p) for p in model.parameters()]
    return found


@pytest.mark.parametrize("where", ["around", "within", "a part"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda part: torch._foreach_mul_(part.refs, 0.7),
        lambda part: part.refs[0].data.mul_(0.7),
        write_in_turn,
    ],
    ids=["references", "data", "in turn"],
)
def test_a_parameter_that_a_rerun_writes_is_the_same_by_other_references(write, where, reentrant):
    def program(model, spread, no_sync):
        for part in model.parts:
            part.refs, part.write = [*part.parameters()], write
        return train_two_steps(model, spread)

    # Three ranks: a wrapper of one rank's empty or short piece must not decide what all gather.
    run(program, 3, make=partial(written_in_reruns, where, reentrant))


@pytest.mark.parametrize("where, reentrant", [("around", False), ("a part", True)])
def test_a_hook_in_backward_writes_a_parameter_of_a_block_that_runs_again(where, reentrant):
    def program(model, spread, no_sync):
        def write(part):
            with torch.no_grad():
                part.bias.data.mul_(0.5)
                part.bias.add_(0.5)

        def register(part, _, out):
            if out.requires_grad:
                out.register_hook(lambda g: write(part))

        for part in model.parts:
            part.register_forward_hook(register)
        return train_two_steps(model, spread)

    run(program, 3, make=partial(written_in_reruns, where, reentrant))
