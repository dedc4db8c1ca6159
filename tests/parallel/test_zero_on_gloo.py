"""Does sharded training on real process groups give what it gives on ranks of one process?"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.testing.allocated_bytes import counted
from tests.programs.gloo_ranks import run_ranks
from tests.programs.zero_states import zero_state as state_of
from tests.programs.zero_training import TOKENS, Odd, gpt, loss_of, odd, rows, train

BUILD = {"gpt": gpt, "odd": odd}


def mesh_of(**axes):
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def every_stage(rank, ranks, build, steps, ordered):
    torch.use_deterministic_algorithms(ordered)
    mesh = mesh_of(dp=ranks)
    found = []
    for stage in (0, 1, 2, 3):
        model = pt.zero(BUILD[build](), mesh, stage=stage)
        found.append(train(model, rows(mesh), steps=steps))
        if stage == 3:
            assert state_of(model).alive == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "build", "steps", "ordered"),
    [(2, "gpt", 50, False), (3, "odd", 12, True), (4, "gpt", 8, True)],
)
def test_the_losses_of_every_stage_are_bitwise_equal(ranks, build, steps, ordered):
    per_rank = run_ranks(every_stage, ranks, ranks, build, steps, ordered)
    assert all(found == per_rank[0] for found in per_rank)
    zero, *others = per_rank[0]
    assert all(losses == zero for losses in others)
    single = train(BUILD[build](), lambda t: t, steps=steps)
    worst = max(abs(a - b) / b for a, b in zip(zero, single, strict=True))
    assert worst <= 1e-5


@pytest.mark.slow
def test_where_sums_are_in_no_order_the_losses_of_every_stage_agree():
    per_rank = run_ranks(every_stage, 4, 4, "gpt", 8, False)
    assert all(found == per_rank[0] for found in per_rank)  # all ranks have one sum's bits
    single = torch.tensor(train(gpt(), lambda t: t, steps=8))
    for losses in per_rank[0]:
        torch.testing.assert_close(torch.tensor(losses), single, rtol=1e-5, atol=0)


def sum_of_four(rank):
    """The sums of one share a rank, by an all-reduce and by a reduce-scatter, in two ways."""
    mesh = mesh_of(dp=4)
    share = torch.randn(4096, 16, generator=torch.Generator().manual_seed(rank)) * 10**rank
    found = []
    for ordered in (True, False):
        torch.use_deterministic_algorithms(ordered)
        x = pt.DTensor.from_local(share, mesh, [pt.Partial()])
        whole = x.redistribute(placements=[pt.Replicate()]).to_local()
        rows = x.redistribute(placements=[pt.Shard(0)]).full_tensor()
        found.append((whole, rows))
    return share, found


@pytest.mark.slow
def test_deterministic_sums_are_in_rank_order_in_every_collective():
    shares, found = zip(*run_ranks(sum_of_four, 4), strict=True)
    in_order = ((shares[0] + shares[1]) + shares[2]) + shares[3]
    for ordered, fast in found:
        assert torch.equal(ordered[0], in_order) and torch.equal(ordered[1], in_order)
        assert torch.equal(fast[0], found[0][1][0])  # on every rank the same bits
        torch.testing.assert_close(fast[0], in_order, rtol=1e-5, atol=1e-3)


def broken_off(rank):
    """One backward raises on every rank while gathers and reductions are under way."""
    mesh = mesh_of(dp=2)
    model = pt.zero(gpt(), mesh)
    state, spread = state_of(model), rows(mesh)

    def raise_(*_):
        handle.remove()
        raise ValueError("in the middle")

    handle = model.blocks[1].mlp.register_full_backward_hook(raise_)
    with pytest.raises(ValueError, match="in the middle"):
        loss_of(model, *map(spread, TOKENS)).backward()
    assert state.alive == 0
    assert all(p.placements == (pt.Shard(0),) for p in model.parameters())
    model.zero_grad()
    return train(model, spread, make=torch.optim.SGD)


@pytest.mark.slow
def test_after_a_backward_that_broke_off_the_next_step_is_right():
    single = train(gpt(), lambda t: t, make=torch.optim.SGD)
    for losses in run_ranks(broken_off, 2):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(single), rtol=1e-5, atol=0)


def hybrid(rank):
    mesh = mesh_of(copies=2, shard=2)
    model = pt.zero(Odd(), mesh, "shard", precision=torch.bfloat16)
    model.load_state_dict(
        {n: pt.distribute_tensor(p, mesh) for n, p in odd().state_dict().items()}, assign=False
    )
    both = [pt.Shard(0), pt.Shard(0)]
    return train(model, lambda t: pt.distribute_tensor(t, mesh, both), make=torch.optim.SGD)


@pytest.mark.slow
def test_hybrid_sharding_in_bfloat16_follows_one_device():
    single = train(odd(), lambda t: t, make=torch.optim.SGD)
    for losses in run_ranks(hybrid, 4):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(single), rtol=0.05, atol=0)


def peaks(rank, widths):
    """Of a model of eight Linears of each width: the most bytes of a step, in layers."""
    mesh, found = mesh_of(dp=2), []
    for width in widths:
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(8)]
        model = pt.zero(torch.nn.Sequential(*layers), mesh)
        x = pt.DTensor.from_local(torch.ones(4, width), mesh, [pt.Shard(0)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(model=model, x=x, optimizer=optimizer):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()

        step()
        found.append(counted(step) / (4 * width**2))
    return found


@pytest.mark.slow
def test_a_step_holds_three_layers_whether_or_not_they_split_evenly():
    # A weight, its gradient, and half again on its way and of the layer before; no copy of a shard.
    for even, uneven in run_ranks(peaks, 2, (512, 511)):
        assert even < 3.3 and uneven < 3.3
