"""Do gradients under ZeRO change, and call hooks, as those of one process do?"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partita as pt
from tests.programs.zero_stages import STAGES, X, Y, gradients_of, loss_of, mlp, run, whole

# -- gradients that are changed after several backward passes --------------------------------------

CHANGES = {
    "clamp_": lambda p: p.grad.clamp_(-0.01, 0.01),
    "sign_": lambda p: p.grad.sign_(),
    "add_": lambda p: p.grad.add_(p),
    "copy_": lambda p: p.grad.copy_(p),
    "mul_": lambda p: p.grad.mul_(0.5),
    "index": lambda p: p.grad.__setitem__(0, 0.5),
    "data": lambda p: p.grad.data.mul_(0.5),
    "pow_": lambda p: p.grad.pow_(2),
    "masked_fill_": lambda p: p.grad.masked_fill_(p.grad > 0, 0.25),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_of_two_backward_passes_is_changed_in_place(change, stage):
    def program(model, spread, _):
        for x in (X, Y):
            loss_of(model, spread(x)).backward()
        with torch.no_grad():
            for p in model.parameters():
                CHANGES[change](p)
        return gradients_of(model)

    run(program, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_the_program_holds_stay_those_of_the_parameters(stage):
    def program(model, spread, _):
        loss_of(model, spread(X)).backward()
        held = [p.grad for p in model.parameters()]
        loss_of(model, spread(Y)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        same = [g is p.grad for g, p in zip(held, model.parameters(), strict=True)]
        with torch.no_grad():
            for p in model.parameters():
                g = p.grad
                g.clamp_(-0.01, 0.01)
                same.append(g is p.grad)
        return gradients_of(model), same

    run(program, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("clip", [pt.clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_gradients_with_a_history_are_clipped(clip, stage):
    def program(model, spread, _):
        loss_of(model, spread(X)).backward(create_graph=True)
        norm = clip(model.parameters(), 0.05)
        before = gradients_of(model)
        for p in model.parameters():
            p.grad = p.grad.detach()
        loss_of(model, spread(Y)).backward()
        return whole(norm), before, gradients_of(model)

    run(program, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_shares_are_added_to_a_gradient_that_was_reduced_while_its_parameter_was_frozen(stage):
    def program(model, spread, _):
        loss_of(model, spread(X)).backward()
        model.requires_grad_(False)
        pt.reduce_gradients(model.parameters())
        model.requires_grad_(True)
        loss_of(model, spread(Y)).backward()
        return gradients_of(model)

    run(program, stage)


# -- hooks -----------------------------------------------------------------------------------------


def halve(p):
    p.grad.mul_(0.5)


def clamp(p):
    p.grad.clamp_(-0.01, 0.01)


def hook_node(p):
    """A hook before the node that accumulates the gradient; its handle, which keeps the node."""
    node = p.view_as(p).grad_fn.next_functions[0][0]
    handle = node.register_prehook(lambda grads: (grads[0].clamp(-0.01, 0.01),))
    return SimpleNamespace(node=node, remove=handle.remove)


HOOKS = {
    "hook": lambda p: p.register_hook(lambda g: g.clamp(-0.01, 0.01)),
    "hook of the node": hook_node,
    "halving": lambda p: p.register_post_accumulate_grad_hook(halve),
    "clamping": lambda p: p.register_post_accumulate_grad_hook(clamp),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("when", ["before", "between", "removed"])
def test_hooks_run_once_in_each_backward_pass_under_no_sync(when, hook, stage):
    def program(model, spread, no_sync):
        handles = []
        if when != "between":
            handles = [HOOKS[hook](p) for p in model.parameters()]
        with no_sync(model):
            loss_of(model, spread(X)).backward()
        if when == "between":
            handles = [HOOKS[hook](p) for p in model.parameters()]
        if when == "removed":
            for handle in handles:
                handle.remove()
        with no_sync(model):
            loss_of(model, spread(Y)).backward()
        loss_of(model, spread(X)).backward()
        return gradients_of(model)

    run(program, stage)


def test_gradients_kept_under_no_sync_are_sent_with_those_of_the_next_pass():
    def body(mesh, kept):
        model = pt.zero(mlp(), mesh, stage=3)
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        with pt.ledger() as log:
            with pt.no_sync(model):
                for _ in range(kept):
                    loss_of(model, x).backward()
            loss_of(model, x).backward()
        return log.count("reduce_scatter"), [p.grad.full_tensor() for p in model.parameters()]

    with pt.ranks(dp=2) as world:
        count, grads = world.run(body, 2)[0]
        assert count == world.run(body, 0)[0][0] > 0
    model = mlp()
    for _ in range(3):
        loss_of(model, X).backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(grad, p.grad)


def returned(model, x):
    loss = model(x).square().sum()
    return [whole(g) for g in torch.autograd.grad(loss, list(model.parameters())[:3])]


def added_to_one(model, x):
    model(x).square().sum().backward(inputs=[model[0][0].weight])


def returned_of_input(model, x):
    loss = model(x.requires_grad_()).square().sum()
    return [whole(g) for g in torch.autograd.grad(loss, [x])]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("other", [returned, added_to_one, returned_of_input])
def test_a_backward_that_adds_to_no_gradients_leaves_what_no_sync_keeps(other, inside, stage):
    def program(model, spread, no_sync):
        with no_sync(model):
            loss_of(model, spread(X)).backward()
            found = other(model, spread(Y)) if inside else None
        found = found if inside else other(model, spread(Y))
        loss_of(model, spread(X)).backward()
        return found, gradients_of(model), returned(model, spread(X))

    run(program, stage)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = mlp(), nn.Linear(4, 4).double()

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("early", [False, True])
def test_no_hook_runs_where_no_gradient_came(early, stage):
    called = []

    def note(name, x):
        called.append(name)
        return x

    def hang_hooks(model):
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: note(f"{name} before", g * 2))
            p.register_post_accumulate_grad_hook(lambda p, name=name: note(f"{name} after", None))
        return model

    def program(model, spread, no_sync):
        if not early:
            hang_hooks(model)
        for p in model.parameters():  # an older gradient
            p.grad = torch.ones_like(p)
        loss_of(model, spread(X)).backward()
        return gradients_of(model)

    run(program, stage, ranks=1, make=lambda: hang_hooks(Unused()) if early else Unused())
    assert sorted(called) == sorted(called[: len(called) // 2] * 2)
    assert called
    assert not any("unused" in name for name in called)


@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_of_several_tensors_runs_where_some_have_no_gradient(stage):
    def program(model, spread, _):
        counts = []
        torch.autograd.graph.register_multi_grad_hook(
            [*model.parameters()], lambda grads: counts.append(sum(g is not None for g in grads))
        )
        loss_of(model, spread(X)).backward()
        return counts

    run(program, stage, make=Unused)


@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_step_in_hooks_though_a_scalar_parameter_steps_first(stage):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = mlp()
            self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x) * self.scale)

    def program(model, spread, _):
        optimizers = {p: torch.optim.Adam([p], 0.1) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        losses = []
        for x in (X, Y, X):
            loss = loss_of(model, spread(x))
            loss.backward()
            losses.append(whole(loss))
        return losses, [whole(p) for p in model.parameters()]

    run(program, stage, make=Scaled)


@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_of_several_tensors_runs_where_a_parameter_has_one_row(stage):
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.bias = nn.Parameter(torch.ones(1, 4, dtype=torch.float64))

        def forward(self, x):
            return self.inner(x) + self.bias

    def program(model, spread, _):
        counts = []
        torch.autograd.graph.register_multi_grad_hook(
            [*model.parameters()], lambda grads: counts.append([g is not None for g in grads])
        )
        loss_of(model, spread(X)).backward()
        return counts

    run(program, stage, make=Biased)


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_see_the_gradients_of_a_nested_backward_pass_and_of_the_one_around_it_apart(stage):
    """A reentrant checkpoint runs a backward pass of its own within the other."""

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = mlp(3)

        def forward(self, x):
            x = self.blocks[0](x)
            x = checkpoint(self.blocks[1], x, use_reentrant=True)
            return self.blocks[2](self.blocks[1](x * 0.5))

    def program(model, spread, _):
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.002, 0.002))
        for x in (X, Y):
            loss_of(model, spread(x)).backward()
        return gradients_of(model)

    run(program, stage, make=Again)


class Twice(nn.Module):
    """A block that is called twice, and a loss of its first call alone."""

    def __init__(self):
        super().__init__()
        self.blocks = mlp(2)

    def forward(self, x):
        self.h = self.blocks[0](x)
        self.side = self.h.square().mean()
        return self.blocks[0](self.blocks[1](self.h))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("loss", ["side", "whole"])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_hook_takes_gradients_of_the_forward_that_the_pass_around_it_is_of(
    loss, history, fails, stage
):
    def program(model, spread, _):
        out = model(spread(X))
        whole_loss, inner = out.square().mean(), []

        def hook(grad):
            if inner:
                if fails and inner == [None]:
                    raise ZeroDivisionError
                return
            inner.append(None)
            chosen = model.side if loss == "side" else whole_loss
            options = {"retain_graph": True, "create_graph": history, "allow_unused": True}
            try:
                inner[:] = torch.autograd.grad(chosen, [*model.parameters()], **options)
            except ZeroDivisionError:
                inner[:] = [None, None]

        model.h.register_hook(hook)
        whole_loss.backward(retain_graph=True, create_graph=history)
        whole_loss.backward()
        return gradients_of(model), [whole(g) for g in inner]

    run(program, stage, ranks=2, make=Twice)


@pytest.mark.parametrize("stage", STAGES)
def test_a_nested_backward_that_raises_leaves_the_gradients_of_the_pass_around_it(stage):
    def program(model, spread, _):
        loss, begun = model(spread(X)).square().mean(), []

        def hook(grad):
            begun.append(grad)
            if len(begun) == 2:
                raise ZeroDivisionError
            if len(begun) == 1:
                with pytest.raises(ZeroDivisionError):
                    loss.backward(retain_graph=True)

        model.h.register_hook(hook)
        # Not `.grad`: what a pass that raised has added there depends on when it was added.
        return [
            whole(g) for g in torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        ]

    run(program, stage, ranks=2, make=Twice)


# -- memory that gradients share, and the dtypes in which they are added ---------------------------


class Shift(nn.Module):
    """A block of one weight, whose gradient autograd passes on to its input, too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

    def forward(self, x):
        return x + self.weight[None]


class ShiftTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.blocks = nn.Linear(3, 3).double(), nn.ModuleList([Shift()])

    def forward(self, x):
        return self.blocks[0](self.blocks[0](self.linear(x)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kept", [False, True])
def test_a_gradient_of_a_block_that_is_called_twice_is_added_to_in_other_memory(kept, stage):
    images = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def make():
        torch.manual_seed(0)
        return ShiftTwice()

    def program(model, spread, no_sync):
        x = spread(images).requires_grad_()
        for _ in range(2):
            with no_sync(model) if kept else nullcontext():
                loss_of(model, x).backward()
        return whole(x.grad), gradients_of(model)

    run(program, stage, ranks=2, make=make)  # one row for each rank


@pytest.mark.slow
def test_gradients_that_no_sync_keeps_are_added_in_the_dtype_of_the_sum():
    passes = 300

    def body(mesh):
        torch.manual_seed(0)
        model = pt.zero(nn.Sequential(nn.Linear(4, 4)), mesh, precision=torch.bfloat16)
        x = pt.distribute_tensor(torch.randn(2, 4), mesh, [pt.Shard(0)])
        found = []
        for kept in (True, False):
            model.zero_grad()
            for k in range(passes):
                with pt.no_sync(model) if kept and k + 1 < passes else nullcontext():
                    (model(x).float() * 0.01).sum().backward()
            found.append(gradients_of(model))
        return found

    with pt.ranks(dp=2) as world:
        for kept, sent in world.run(body):
            torch.testing.assert_close(kept, sent, rtol=1e-2, atol=0)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for part in (self.low, self.high):
            x = part(x.to(part.weight.dtype))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_are_cast_after_zero_do_not_narrow_others(stage, compiled):
    def program(model, spread, _):
        for block in model:
            block.low.to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

        run_step = pt.compile(step, backend="graph") if compiled else step
        for _ in range(3):
            run_step(spread(X.float()))
        return [whole(p).double() for block in model for p in block.high.parameters()]

    def make():
        torch.manual_seed(0)
        return nn.Sequential(Mixed(), Mixed())

    truth = program(make(), lambda t: t, None)

    def body(mesh):
        model = pt.zero(make(), mesh, stage=stage)
        return program(model, lambda t: pt.distribute_tensor(t, mesh, [pt.Shard(0)]), None)

    with pt.ranks(dp=2) as world:
        for found in world.run(body):  # gradients in bfloat16 are summed in another order
            torch.testing.assert_close(found, truth, rtol=0, atol=2e-5)


# -- parameters that have no gradient any more, or not on all ranks --------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_no_sync_keeps_stays_when_its_parameter_is_frozen(stage):
    def program(model, spread, no_sync):
        with no_sync(model):
            loss_of(model, spread(X)).backward()
        model[0][0].weight.requires_grad_(False)
        loss_of(model, spread(Y)).backward()
        return gradients_of(model)

    run(program, stage)


class ReadsOnSomeRanks(nn.Module):
    """A block whose local code reads a weight on the first rank alone."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.ones(4, 4).double()) for _ in range(2))

    def forward(self, x):
        parts = [pt.Partial()]
        mine, weight = x.to_local(), self.weight.to_local(grad_placements=parts)
        y = mine @ weight
        if x.device_mesh.get_local_rank() == 0:
            y = y + mine @ self.other.to_local(grad_placements=parts)
        return pt.DTensor.from_local(y, x.device_mesh, x.placements)


@pytest.mark.parametrize("with_history", [False, True])
def test_a_gradient_that_not_all_ranks_have_is_refused_on_all(with_history):
    def program(mesh):
        model = pt.zero(ReadsOnSomeRanks(), mesh)
        loss = loss_of(model, pt.distribute_tensor(X, mesh, [pt.Shard(0)]))
        with pytest.raises(pt.LayoutError, match="gradients of different parameters"):
            loss.backward(create_graph=with_history)

    with pt.ranks(dp=2) as world:
        world.run(program)
