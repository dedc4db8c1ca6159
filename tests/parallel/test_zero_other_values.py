"""Does a ZeRO model hold what the program puts into it, clears of it and reads without gradients?

Each program runs in one process in float64 and on two ranks, and gives the same numbers.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import partita as pt


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def full(t):
    t = t.detach()
    return (t.full_tensor() if isinstance(t, pt.DTensor) else t).clone()


def grads(model):
    return [None if p.grad is None else full(p.grad) for p in model.parameters()]


def run(program, stage):
    torch.manual_seed(0)
    start = nn.Sequential(Block(), Block()).double()
    state = {k: v.clone() for k, v in start.state_dict().items()}
    rows = torch.randn(4, 3, dtype=torch.float64)
    truth = program(start, rows, nullcontext)

    def body(mesh):
        model = nn.Sequential(Block(), Block()).double()
        model.load_state_dict(state)
        pt.zero(model, mesh, stage=stage)
        x = pt.distribute_tensor(rows, mesh, [pt.Shard(0)])
        return program(model, x, lambda: pt.no_sync(model))

    with pt.ranks(dp=2) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def evaluated_in_inference_mode(model, x, _):
    with torch.inference_mode():
        before = full(model(x))
    model(x).square().mean().backward()
    with torch.inference_mode():
        model[0].up.weight.mul_(2)
        after = full(model(x))
    return before, grads(model), after


def called_with_scaled_parameters(model, x, _):
    scaled = {name: p * 2 for name, p in model.named_parameters()}
    functional_call(model, scaled, (x,)).square().mean().backward()
    return grads(model)


def called_with_one_other_value(model, x, _):
    weight = model[1].up.weight.detach().clone().requires_grad_()
    loss = functional_call(model, {"1.up.weight": weight}, (x,)).square().mean()
    loss.backward()
    return grads(model), full(weight.grad)


def trained_within_the_step(model, x, _):
    now = dict(model.named_parameters())
    for _ in range(2):
        loss = functional_call(model, now, (x,)).square().mean()
        found = torch.autograd.grad(loss, list(now.values()), create_graph=True)
        now = {n: p - 0.1 * g for (n, p), g in zip(now.items(), found, strict=True)}
    functional_call(model, now, (x,)).square().mean().backward()
    return grads(model)


def untied(model, x, _):
    model[0].up.weight = nn.Parameter(model[0].up.weight.detach() * 2)
    model(x).square().mean().backward()
    return grads(model)


def set_from_one_vector(model, x, _):
    model(x).square().mean().backward()
    model.zero_grad()
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    model(x).square().mean().backward()
    return grads(model), [full(p) for p in model.parameters()]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "program",
    [
        evaluated_in_inference_mode,
        called_with_scaled_parameters,
        called_with_one_other_value,
        trained_within_the_step,
        untied,
        set_from_one_vector,
    ],
)
def test_values_that_are_put_into_a_model_are_used_as_one_process_uses_them(program, stage):
    run(program, stage)


def cleared(clear):
    def program(model, x, no_sync):
        with no_sync():
            model(x).square().mean().backward()
            clear(model)
        model(2 * x).square().mean().backward()
        return grads(model)

    return program


def _delete(model):
    for p in model.parameters():
        p.grad = None


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "clear",
    [nn.Module.zero_grad, lambda m: m.zero_grad(set_to_none=False), _delete],
    ids=["zero_grad", "to zeros", "to None"],
)
def test_gradients_that_are_cleared_before_they_are_sent_do_not_come_back(clear, stage):
    run(cleared(clear), stage)


def clipped(model, x, no_sync):
    with no_sync():
        model(x).square().mean().backward()
        model(2 * x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return full(norm), grads(model)


def clipped_while_a_forward_waits(model, x, _):
    other = model(2 * x)  # its backward is yet to come
    model(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    first = grads(model)
    other.mean().backward()
    return full(norm), first, grads(model)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("program", [clipped, clipped_while_a_forward_waits])
def test_a_gradient_that_is_read_has_what_was_kept_of_it(program, stage):
    run(program, stage)


def exchanged_before_backward(model, x, _):
    loss = model(x).square().mean()
    held = [block.up.weight for block in model]
    for block, weight in zip(model, held, strict=True):
        block.up.weight = nn.Parameter(weight.detach().clone() * 2)
    loss = loss + model(x).square().mean()
    loss.backward()
    return [full(p.grad) for p in held], grads(model)


def exchanged_in_forward(model, x, _):
    """A block is called with its own parameters, and with others, in one forward."""
    params = {n: nn.Parameter(2 * p.detach()) for n, p in model[0].named_parameters()}
    model[0].register_forward_hook(lambda m, args, out: functional_call(model[1], params, (out,)))
    model(x).square().mean().backward()
    return [full(p.grad) for p in params.values()], grads(model)


def called_with_parameters_of_copies(model, x, _):
    """Some of which are trained. The model itself runs, too."""
    found = []
    for trained in (".up.", ".", "no"):
        copied = copy.deepcopy(model)
        params = {n: p.requires_grad_(trained in n) for n, p in copied.named_parameters()}
        for p in params.values():
            p.data.mul_(1.5)
        rows = x.detach().clone().requires_grad_()
        out = functional_call(model, params, (rows,))
        (out * model(x)).sum().backward()
        given = [None if p.grad is None else full(p.grad) for p in params.values()]
        found += [full(rows.grad), given, grads(model)]
    return found


def scaled_copy(model, factor):
    params = dict(copy.deepcopy(model).named_parameters())
    for p in params.values():
        p.data.mul_(factor)
    return params


def two_sets_at_once(model, x, no_sync):
    some, others = scaled_copy(model, 1.1), scaled_copy(model, 0.7)
    for held in (no_sync(), nullcontext()):
        with held:
            out = functional_call(model, some, (functional_call(model, others, (model(x),)),))
            out.square().mean().backward()
    return [full(p.grad) for p in (*some.values(), *others.values())], grads(model)


def differentiated_twice(model, x, _):
    params = scaled_copy(model, 1.1)
    loss = functional_call(model, params, (model(x),)).square().mean()
    wanted = [*params.values(), *model.parameters()]
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return [full(g) for g in first], [full(p.grad) for p in wanted]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "program",
    [
        exchanged_before_backward,
        exchanged_in_forward,
        called_with_parameters_of_copies,
        two_sets_at_once,
        differentiated_twice,
    ],
)
def test_a_gradient_is_that_of_the_parameters_of_its_forward(program, stage):
    run(program, stage)


def test_a_checkpoint_that_would_run_again_with_other_parameters_is_refused():
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def body(mesh):
        model = pt.zero(nn.Sequential(Checkpointed(), Checkpointed()), mesh)
        x = pt.distribute_tensor(torch.ones(4, 3), mesh, [pt.Shard(0)])
        loss = functional_call(model, scaled_copy(model, 1.1), (x,)).sum()
        with pytest.raises(pt.LayoutError, match="again with other parameters than in its forward"):
            loss.backward()

    with pt.ranks(dp=2) as world:
        world.run(body)


def test_ranks_whose_batches_have_other_keys_or_dtypes_raise_one_error():
    def batches(rank):
        yield {"ids": torch.ones(2)} if rank else {"mask": torch.ones(2)}, "whole"
        yield torch.ones(2, dtype=(torch.int32, torch.int64)[rank]), "piece"
        yield [torch.ones(2)] * (1 + rank), "piece"

    def body(mesh):
        said = []
        for batch, has in batches(mesh.get_rank()):
            with pytest.raises(pt.LayoutError, match="rank 1") as caught:
                pt.distribute_batch(batch, mesh, each_rank_has=has)
            said.append(str(caught.value))
        return said

    with pt.ranks(dp=2) as world:
        first, second = world.run(body)
    assert first == second


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_no_sync_keeps_is_added_to_a_reduced_gradient_of_every_axis(stage):
    """A parameter that is whole along `tp` has a Partial gradient there, in stage 3, too."""

    def program(mesh):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 3).double(), torch.randn(4, 4, dtype=torch.float64)
        if mesh is not None:
            pt.zero(model, mesh, axis="dp", stage=stage)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0), pt.Replicate()])
        model(x).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        with nullcontext() if mesh is None else pt.no_sync(model):
            model(x).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        return [*map(full, norms), *grads(model)]

    with pt.ranks(dp=2, tp=2) as world:
        for found in world.run(program):
            torch.testing.assert_close(found, program(None), rtol=1e-12, atol=1e-12)
