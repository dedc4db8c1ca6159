"""Do optimizer steps, copies and other memory of ZeRO models work as in one process?"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from threading import get_ident

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import partita as pt
from partita.parallel import flat_buffer
from partita.tensor import uneven_pieces
from tests.programs.zero_stages import STAGES, X, Y, gradients_of, loss_of, mlp, run, whole


def parameters_of(model):
    return [whole(p) for p in model.parameters()]


# -- updates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_steps_between_the_forward_and_the_backward_of_another_loss(make, stage):
    def program(model, spread, _):
        optimizers = [make(block.parameters(), 0.1) for block in model]
        for x in (X, Y):
            first = loss_of(model[0], spread(x))
            second = loss_of(model[1], spread(x))
            optimizers[1].zero_grad()
            second.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            first.backward()
            optimizers[0].step()
        return parameters_of(model)

    run(program, stage)


def halve_parameters(optimizer, *_):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.5)


def halve_gradients(optimizer, *_):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("hook", [halve_parameters, halve_gradients])
@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
@pytest.mark.parametrize("captured", [False, True])
def test_hooks_of_all_optimizers_run_before_and_behind_the_step(stage, hook, register, captured):
    def program(model, spread, _):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

        if captured and isinstance(next(model.parameters()), pt.DTensor):
            step = pt.compile(step, backend="graph")
        for x in (X, Y, X):
            step(spread(x))
        return parameters_of(model)

    handle = register(hook)
    try:
        run(program, stage)
    finally:
        handle.remove()


def test_a_step_of_some_parameters_gathers_these_alone():
    def body(mesh):
        model = pt.zero(mlp(), mesh, stage=1)
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
        loss_of(model, x).backward()
        versions = [p._version for p in model[1].parameters()]
        with pt.ledger() as log:
            optimizer.step()
        elements = sum(r.nbytes // 8 for r in log.moves if r.reason == "update")
        return elements, versions == [p._version for p in model[1].parameters()]

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [((4 * 4 + 4) // 2, True)] * 2


# -- state of optimizers ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Rprop])
@pytest.mark.parametrize("after", ["made", "a step"])
def test_the_whole_state_of_one_device_is_loaded(after, make, stage):
    single = mlp()
    optimizer = make(single.parameters())
    loss_of(single, X).backward()
    optimizer.step()
    state = optimizer.state_dict()

    def program(model, spread, _):
        optimizer = make(model.parameters())
        if after == "a step":
            loss_of(model, spread(Y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(copy.deepcopy(state))
        for x in (X, Y):
            loss_of(model, spread(x)).backward()
            optimizer.step()
        return parameters_of(model)

    run(program, stage)


# -- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("frozen", ["all", "some"])
def test_a_frozen_model_is_copied_and_both_are_trained_on(frozen, way, stage):
    def program(model, spread, _):
        loss_of(model, spread(X)).backward()
        (model if frozen == "all" else model[0]).requires_grad_(False)
        other = way(model)
        other.requires_grad_(True)
        for p in other.parameters():
            p.grad = None
        optimizer = torch.optim.Adam(other.parameters(), 0.1)
        for x in (X, Y):
            optimizer.zero_grad()
            loss_of(other, spread(x)).backward()
            optimizer.step()
        model.requires_grad_(True)
        loss_of(model, spread(Y)).backward()
        return gradients_of(model), gradients_of(other), parameters_of(other)

    run(program, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))], ids=["copy", "pickle"]
)
def test_a_block_is_copied_without_its_model_and_both_are_trained_on(way, stage):
    def program(model, spread, _):
        loss_of(model, spread(X)).backward()
        block = way(model[0])
        optimizer = torch.optim.Adam(block.parameters(), 0.1)
        for x in (X, Y):
            optimizer.zero_grad()
            loss_of(block, spread(x)).backward()
            optimizer.step()
        size = len(pickle.dumps(model[1])) / len(pickle.dumps(model))
        model[1] = block  # it may be a part of a model again
        again = copy.deepcopy(model)
        loss_of(again, spread(Y)).backward()
        loss_of(model, spread(Y)).backward()
        return gradients_of(model), gradients_of(again), parameters_of(model), size < 0.8

    run(program, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_in_a_hook_leaves_alone_what_backward_comes_to_later(fused, stage):
    def program(model, spread, _):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)

        def step(p):
            optimizer.step()
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for x in (X, Y):
            loss_of(model, spread(x)).backward()
        return parameters_of(model)

    run(program, stage)


# -- other memory ----------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(2, 5, 3), nn.Linear(5, 4)
        self.double()

    def forward(self, x):
        x = torch.stack([x, x.flip(1)], 1).unsqueeze(-1).expand(-1, -1, -1, 3)
        return self.linear(self.conv(x).mean((2, 3)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("before", [True, False])
def test_a_model_in_channels_last_is_updated(before, stage):
    def program(model, spread, _):
        model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for x in (X, Y, X):
            optimizer.zero_grad()
            loss_of(model, spread(x)).backward()
            optimizer.step()
        return parameters_of(model), model.conv.weight.is_contiguous()

    def make():
        model = Images()
        return model.to(memory_format=torch.channels_last) if before else model

    run(program, stage, ranks=2, make=make)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("hooks", [False, True])
def test_parameters_that_are_swapped_for_others_are_trained_on(hooks, stage):
    def program(model, spread, _):
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        loss_of(model, spread(X)).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None
            other = nn.Parameter((p * 0.5).detach())
            if hooks:
                other.register_hook(lambda g: g * 2)
            torch.utils.swap_tensors(p, other)
        for x in (X, Y):
            loss_of(model, spread(x)).backward()
            optimizer.step()
        return parameters_of(model), gradients_of(model)

    run(program, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_swap_for_a_tensor_laid_out_otherwise_is_refused_before_anything_changes(stage):
    def body(mesh):
        model = pt.zero(mlp(), mesh, stage=stage)
        p = model[0][0].weight
        before = whole(p)
        with pytest.raises(pt.LayoutError, match="laid out otherwise"):
            torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(4, 4, dtype=torch.float64)))
        loss_of(model, pt.distribute_tensor(X, mesh, [pt.Shard(0)])).backward()
        return torch.equal(before, whole(p))

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_blocks_are_checkpointed_by_hooks_of_their_own(stage):
    def program(model, spread, _):
        for block in model:
            checkpoint(block)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in (X, Y):
            optimizer.zero_grad()
            loss_of(model, spread(x)).backward()
            optimizer.step()
        with torch.no_grad():
            last = whole(loss_of(model, spread(X)))
        return last, parameters_of(model)

    run(program, stage, make=lambda: mlp(3))


@pytest.mark.parametrize("stage", STAGES)
def test_blocks_without_weights_in_backward_that_are_called_in_turns_find_an_end(stage):
    """An embedding's backward reads no weight, so none of them is gathered ahead."""

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Embedding(6, 4) for _ in range(2)).double()
            self.last = nn.Linear(4, 4).double()

        def forward(self, x):
            rows = x.abs().mul(3).long().clamp(max=5)
            parts = [self.blocks[i % 2](rows).mean(1) for i in range(4)]
            return self.last(sum(parts))

    def program(model, spread, _):
        loss_of(model, spread(X)).backward()
        return gradients_of(model)

    run(program, stage, make=Turns)


class Owned:
    """An attribute of a parameter, which is freed with it: a weak reference to the parameter itself
    would forbid `swap_tensors`."""


def own(params):
    for p in params:
        p.owned = Owned()
    return [weakref.ref(p.owned) for p in params]


def left(refs):
    gc.collect()
    return sum(ref() is not None for ref in refs)


def train_on(model, x):
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, x).backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_nobody_holds_is_freed(stage):
    def body(mesh):
        model = pt.zero(mlp(), mesh, stage=stage)
        refs = own([*model.parameters()])
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        train_on(model, x)
        copied = copy.deepcopy(model)
        train_on(copied, x)
        del model, copied
        return left(refs)

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [0, 0]


def assign_a_state(model, x):
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    refs = own([*model.parameters()])
    model.load_state_dict(state, assign=True)
    return refs


def put_new_parameters(model, x):
    refs = own([*model.parameters()])
    for block in model:
        for name, p in list(block[0].named_parameters()):
            setattr(block[0], name, nn.Parameter(p.detach().clone()))
    return refs


def call_with_a_copy(model, x):
    copied = copy.deepcopy(model)
    refs = own([*copied.parameters()])
    out = torch.func.functional_call(model, dict(copied.named_parameters()), (x,))
    out.square().mean().backward()
    return refs


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("replace", [assign_a_state, put_new_parameters, call_with_a_copy])
def test_parameters_that_a_program_replaces_are_freed_and_the_new_ones_sharded(replace, stage):
    def body(mesh):
        model = pt.zero(mlp(), mesh, stage=stage)
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        refs = replace(model, x)
        with pt.ledger() as log:
            train_on(model, x)
        return left(refs), [(r.kind, r.nbytes, r.reason) for r in log.moves]

    def untouched(mesh):
        model = pt.zero(mlp(), mesh, stage=stage)
        with pt.ledger() as log:
            train_on(model, pt.distribute_tensor(X, mesh, [pt.Shard(0)]))
        return 0, [(r.kind, r.nbytes, r.reason) for r in log.moves]

    with pt.ranks(dp=2) as world:
        # Sorted: a forward that came before has found which block follows which.
        found, wanted = world.run(body)[0], world.run(untouched)[0]
        assert found[0] == 0 and sorted(found[1]) == sorted(wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_materialize_has_replaced_are_freed(stage):
    def body(mesh):
        model = pt.zero(mlp().to("meta"), mesh, stage=stage)
        before = [weakref.ref(p) for p in model.parameters()]
        pt.materialize(model, device="cpu")
        gc.collect()
        return [p() is None for p in before], all(
            p.device.type == "cpu" for p in model.parameters()
        )

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [([True] * 4, True)] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_that_was_replaced_reports_no_gradient_to_zero(stage):
    """Its hook would have the gradients reduced before those of the model have come."""

    def body(mesh):
        model = pt.zero(mlp().to("meta"), mesh, stage=stage)
        before = [*model.parameters()]
        pt.materialize(model, device="cpu")
        return [len(p._post_accumulate_grad_hooks or ()) for p in before]

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [[0] * 4] * 2


class Scaled(nn.Module):
    """A block that reads its weight in a Function of pieces."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, (g * x).sum(0)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        rows, whole = [pt.Shard(0)], [pt.Replicate()]
        function = pt.local_map(
            self.Product.apply, out_placements=rows, in_placements=(rows, whole)
        )
        return function(x, self.weight)


BLOCKS = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)),
    "no bias": lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.RMSNorm(8), nn.PReLU()),
    "local_map": Scaled,
}


@pytest.mark.parametrize("make", BLOCKS)
@pytest.mark.parametrize("rows", [1, 2])
def test_graphs_hold_no_gathered_weight_where_rows_may_be_missing(make, rows, monkeypatch):
    searched, derived = [], []

    def count(module, name, calls):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args: calls.append(get_ident()) or function(*args)
        )

    # What holds gathered memory has to be looked for among all objects.
    count(flat_buffer, "find_views_of_memory", searched)
    count(uneven_pieces, "differentiate_meta", derived)

    def body(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(*(BLOCKS[make]() for _ in range(3))).double()
        pt.zero(model, mesh, stage=3, blocks=list(model))
        x = pt.distribute_tensor(torch.randn(rows, 8, dtype=torch.float64), mesh, [pt.Shard(0)])
        counts = []
        for _ in range(3):
            model(x).pow(2).sum().backward()
            counts.append(derived.count(get_ident()))  # of this rank
        return counts

    with pt.ranks(dp=2) as world:
        for counts in world.run(body):
            assert counts[0] == counts[2]  # which gradients are missing is known by then
    assert not searched


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_with_a_closure_uses_whole_gradients(stage):
    def train(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        x = torch.randn(5, 3, dtype=torch.float64)
        if mesh is not None:
            pt.zero(model, mesh, stage=stage)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        optimizer = torch.optim.Adafactor(
            model.parameters(), lr=0.05
        )  # its state is like gradients

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return losses

    want = train(None)
    with pt.ranks(dp=2) as world:
        for losses in world.run(train):
            torch.testing.assert_close(losses, want)
