"""Does a model whose state is sharded train as on one device, and where are its bytes meanwhile?"""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partita as pt
from tests.programs.zero_states import zero_state
from tests.programs.zero_training import TOKENS, gpt, loss_of, odd, rows, train


def whole(model):
    return {n: p.detach().full_tensor() for n, p in model.named_parameters()}


# -- the same losses -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("build", [gpt, odd])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_stage_gives_bitwise_the_losses_of_plain_data_parallel(ranks, build, make):
    def run(mesh, stage):
        model = pt.zero(build(), mesh, stage=stage)
        return train(model, rows(mesh), steps=4 if ranks < 4 else 50, make=make)

    found = []
    for stage in (0, 1, 2, 3):
        with pt.ranks(dp=ranks) as world:
            per_rank = world.run(run, stage)
        assert all(losses == per_rank[0] for losses in per_rank)
        found.append(per_rank[0])
    assert found[1] == found[0] and found[2] == found[0] and found[3] == found[0]
    single = train(build(), lambda t: t, steps=len(found[0]), make=make)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(single), rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_counts_every_shard_once(stage):
    def run(mesh):
        return train(pt.zero(odd(), mesh, stage=stage), rows(mesh), make=torch.optim.SGD, clip=0.1)

    with pt.ranks(dp=3) as world:
        losses = world.run(run)[0]
    single = train(odd(), lambda t: t, make=torch.optim.SGD, clip=0.1)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(single), rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}, {"tp": 2, "dp": 2}])
def test_it_composes_with_tensor_parallel_weights(stage, axes):
    plan = {
        "*.qkv.weight": {"tp": pt.Shard(0)},
        "*.out.weight": {"tp": pt.Shard(1)},
        "*.up.*": {"tp": pt.Shard(0)},
        "*.down.weight": {"tp": pt.Shard(1)},
    }

    def run(mesh):
        model = pt.parallelize(gpt(), mesh, plan)
        return train(pt.zero(model, mesh, stage=stage), rows(mesh), make=torch.optim.SGD)

    with pt.ranks(**axes) as world:
        losses = world.run(run)[0]
    single = train(gpt(), lambda t: t, make=torch.optim.SGD)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(single), rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_settles_shards_over_the_other_data_axis(stage):
    def run(mesh):
        model = pt.zero(gpt(), mesh, "shard", stage=stage)
        both = [pt.Shard(0), pt.Shard(0)]
        return train(model, lambda t: pt.distribute_tensor(t, mesh, both), make=torch.optim.SGD), [
            p.placements for p in model.parameters()
        ]

    with pt.ranks(copies=2, shard=2) as world:
        losses, placements = world.run(run)[0]
    single = train(gpt(), lambda t: t, make=torch.optim.SGD)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(single), rtol=1e-5, atol=0)
    if stage == 3:
        assert all(p == (pt.Replicate(), pt.Shard(0)) for p in placements)


@pytest.mark.parametrize("n", [5, 6, 9])
@pytest.mark.parametrize("bias", [False, True], ids=["travels alone", "travels with others"])
def test_rows_that_two_axes_cut_unevenly_are_gathered_in_their_order(n, bias):
    """5 rows on 2 x 2 ranks are 2, 1, 1, 1: ranks in the middle have padding, too."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, n, bias=bias), torch.randn(8, 3)

    def run(mesh):
        model = pt.zero(copy.deepcopy(layer), mesh, ("dp", "cp"))
        out = model(pt.distribute_batch(x, mesh, {"dp": pt.Shard(0), "cp": pt.Shard(0)}))
        out.square().sum().backward()
        return out.full_tensor(), [p.grad.full_tensor() for p in model.parameters()]

    with pt.ranks(dp=2, cp=2) as world:
        out, grads = world.run(run)[0]
    torch.testing.assert_close(out, layer(x), rtol=1e-6, atol=1e-6)
    layer(x).square().sum().backward()
    for grad, p in zip(grads, layer.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-5, atol=1e-5)


# -- gradients of several micro-batches ------------------------------------------------------------


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_add_up(stage, quiet):
    def run(mesh):
        model = pt.zero(gpt(), mesh, stage=stage)
        spread = rows(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for k in range(3):
                part = TOKENS[:, 4 * k : 4 * k + 4]
                with pt.no_sync(model) if quiet and k < 2 else nullcontext():
                    (loss_of(model, *map(spread, part)) / 3).backward()
            with pt.ledger() as log:
                optimizer.step()
        return whole(model), log.count("reduce_scatter") + log.count("all_reduce")

    with pt.ranks(dp=2) as world:
        (parameters, late), _ = world.run(run)
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for k in range(3):
            (loss_of(model, *TOKENS[:, 4 * k : 4 * k + 4]) / 3).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(parameters[name], p.detach(), rtol=1e-5, atol=1e-6)
    assert late == 0, "gradients were on their way before the step"


@pytest.mark.parametrize("stage", [2, 3])
def test_without_sync_nothing_is_sent_but_the_gathers_and_the_step_sends_what_is_left(stage):
    def run(mesh):
        model = pt.zero(gpt(), mesh, stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pt.ledger() as log, pt.no_sync(model):
            loss_of(model, *map(rows(mesh), TOKENS)).backward()
        assert log.count("reduce_scatter") == 0
        optimizer.step()
        return whole(model)

    with pt.ranks(dp=2) as world:
        parameters, _ = world.run(run)
    model = gpt()
    loss_of(model, *TOKENS).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(parameters[name], p.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stage", "cast"), [(0, False), (1, False), (2, False), (3, False), (3, True)]
)
def test_a_parameter_written_between_forward_and_backward_is_an_error(stage, cast):
    def run(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        x = torch.ones(2, 4)
        if stage:
            pt.zero(model, mesh, stage=stage, blocks=["*"])
            x = pt.distribute_batch(x, mesh)
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                loss = model(x).square().mean()
            if step:
                with torch.no_grad():
                    model[1].weight.mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()

    if not stage:  # the truth
        run(None)
        return
    with pt.ranks(dp=2) as world:
        world.run(run)


def test_a_gradient_changed_while_it_is_on_its_way_is_the_one_that_counts():
    def run(mesh):
        model = pt.zero(gpt(), mesh, stage=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, *map(rows(mesh), TOKENS)).backward()
        for p in model.parameters():
            p.grad.mul_(2)
        optimizer.step()
        return whole(model)

    with pt.ranks(dp=2) as world:
        parameters, _ = world.run(run)
    model = gpt()
    (2 * loss_of(model, *TOKENS)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(parameters[name], p.detach(), rtol=1e-5, atol=1e-6)


# -- where the bytes are ---------------------------------------------------------------------------


def test_parameters_gradients_and_state_rest_where_the_stage_says():
    def run(mesh, stage):
        model = pt.zero(gpt(), mesh, stage=stage)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, *map(rows(mesh), TOKENS)).backward()
        pt.reduce_gradients(model.parameters())
        p = model.blocks[0].mlp.up.weight
        gradient = p.grad.placements
        optimizer.step()
        return p.placements, gradient, optimizer.state[p]["exp_avg"].placements

    R, S = (pt.Replicate(),), (pt.Shard(0),)
    for stage, rest in enumerate([(R, R, R), (R, R, S), (R, S, S), (S, S, S)]):
        with pt.ranks(dp=2) as world:
            assert world.run(run, stage) == [rest] * 2


@pytest.mark.slow
def test_each_stage_sends_the_bytes_that_its_table_says():
    def run(mesh, stage):
        model = pt.zero(gpt(), mesh, stage=stage)
        size = sum(p.numel() for p in model.parameters()) * 4
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with pt.ledger() as log:
                loss_of(model, *map(rows(mesh), TOKENS)).backward()
                optimizer.step()
                optimizer.zero_grad()
        big = [m for m in log.moves if m.nbytes > 100]
        return sum(m.nbytes for m in big) / (size / 2)

    sent = []
    for stage in range(4):
        with pt.ranks(dp=2) as world:
            sent.append(world.run(run, stage)[0])
    # An embedding is not gathered again for backward, which does not read it.
    assert sent[:3] == pytest.approx([2, 3, 2], rel=0.01) and 2.5 < sent[3] < 3


def test_at_most_two_blocks_are_gathered_and_none_after_the_step():
    def run(mesh):
        model = pt.zero(gpt(layers=5, width=48), mesh)
        state = zero_state(model)
        block = max(sum(f.nbytes for f in u.flats) for u in state.groups)
        alive = []
        for b in model.blocks:
            b.register_forward_hook(lambda *_: alive.append(state.alive))
        for _ in range(3):
            loss = loss_of(model, *map(rows(mesh), TOKENS))
            assert state.alive == 0, "between forward and backward nothing is gathered"
            loss.backward()
            assert state.alive == 0
        return state.peak, block, max(alive)

    with pt.ranks(dp=2) as world:
        for peak, block, alive in world.run(run):
            assert block < peak <= 2 * block and alive <= 2 * block


def test_a_block_is_gathered_twice_and_reduced_once_in_a_step():
    def run(mesh):
        model = pt.zero(gpt(), mesh)
        for _ in range(2):
            with pt.ledger() as log:
                loss_of(model, *map(rows(mesh), TOKENS)).backward()
        count = {}
        for m in log.moves:
            if m.op.startswith("blocks.") or m.op == "embed":
                count[m.op, m.reason] = count.get((m.op, m.reason), 0) + 1
        return count

    with pt.ranks(dp=2) as world:
        count = world.run(run)[0]
    for i in range(3):
        for reason in ("gather", "regather", "gradient"):
            assert count[f"blocks.{i}", reason] == 1
    assert ("embed", "regather") not in count, "the backward of an embedding reads no weight"


def test_strict_mode_finds_nothing_implicit_in_the_blocks():
    def run(mesh):
        model = pt.zero(gpt(), mesh)
        tokens = rows(mesh)(TOKENS[0])
        with pt.strict():
            out = model(tokens)
            (out * out).sum().backward()
        return True

    with pt.ranks(dp=2) as world:
        assert all(world.run(run))


# -- other ways through a model --------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *args):
        return checkpoint(self.inner, *args, use_reentrant=self.reentrant)


@pytest.mark.parametrize("where", ["around", "within", "around, reentrant", "within, reentrant"])
def test_a_checkpoint_around_or_within_a_block_gathers_it_no_third_time(where):
    def build():
        model = gpt()
        for i, block in enumerate(model.blocks):
            if "around" in where:
                model.blocks[i] = Checkpointed(block, "reentrant" in where)
            else:
                block.mlp = Checkpointed(block.mlp, "reentrant" in where)
        return model

    def run(mesh):
        blocks = ["blocks.*.inner"] if "around" in where else None
        model = build()
        if blocks:
            blocks = [b.inner for b in model.blocks]
        model = pt.zero(model, mesh, blocks=blocks)
        with pt.ledger() as log:
            losses = train(model, rows(mesh), make=torch.optim.SGD)
        gathers = [m for m in log.moves if m.kind == "all_gather" and "blocks.1" in m.op]
        implicit = [m for m in log.moves if m.reason == "implicit" and m.nbytes > 100]
        return losses, len(gathers), implicit, zero_state(model).alive

    with pt.ranks(dp=2) as world:
        losses, gathers, implicit, alive = world.run(run)[0]
    single = train(gpt(), lambda t: t, make=torch.optim.SGD)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(single), rtol=1e-5, atol=0)
    assert not implicit and alive == 0
    if "reentrant" not in where:
        assert gathers == 2 * 4


@pytest.mark.parametrize("first", ["remat", "zero"])
def test_a_block_without_parts_may_be_recomputed_whole(first):
    def run(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
        x = torch.randn(4, 6)
        if mesh is None:
            model(x).square().sum().backward()
            return [p.grad for p in model.parameters()]
        if first == "remat":
            pt.remat(model, blocks=list(model))
        pt.zero(model, mesh, stage=3)
        if first == "zero":
            pt.remat(model, blocks=list(model))
        model(pt.distribute_batch(x, mesh)).square().sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    with pt.ranks(dp=2) as world:
        torch.testing.assert_close(world.run(run)[0], run(None))


def test_a_loss_on_the_side_may_start_backward_within_a_block():
    class Side(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = self.up(x).relu()
            self.side = (h @ self.down.weight.T).square().mean()
            return x + self.down(h)

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(Side() for _ in range(3)))

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

    def backward(model, x):
        model(x)
        sum(layer.side for layer in model).backward()

    def run(mesh):
        model = pt.zero(build(), mesh)
        backward(model, rows(mesh)(x))
        return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None], (
            zero_state(model).alive
        )

    model = build()
    backward(model, x)
    with pt.ranks(dp=2) as world:
        for grads, alive in world.run(run):
            want = [p.grad for p in model.parameters() if p.grad is not None]
            for mine, right in zip(grads, want, strict=True):
                torch.testing.assert_close(mine, right)
            assert alive == 0


def test_one_block_used_twice_and_two_forwards_before_one_backward():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def loss(model, x):
        return model(model(x)).square().sum() + model(2 * x).sum()

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

    def run(mesh):
        model = pt.zero(build(), mesh)
        total = loss(model, rows(mesh)(x))
        total.backward(retain_graph=True)
        total.backward()
        return [p.grad.full_tensor() for p in model.parameters()], zero_state(model).alive

    model = build()
    (2 * loss(model, x)).backward()
    with pt.ranks(dp=3) as world:
        for grads, alive in world.run(run):
            for mine, p in zip(grads, model.parameters(), strict=True):
                torch.testing.assert_close(mine, p.grad)
            assert alive == 0


def test_frozen_parameters_get_none_and_their_blocks_pass_gradients_on():
    def build():
        model = gpt()
        for name, p in model.named_parameters():
            p.requires_grad = "blocks.1" not in name and "qkv" not in name
        return model

    def run(mesh, stage):
        model = pt.zero(build(), mesh, stage=stage)
        loss_of(model, *map(rows(mesh), TOKENS)).backward()
        pt.reduce_gradients(model.parameters())
        grads = {
            n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()
        }
        state = zero_state(model)
        return grads, state.alive if stage == 3 else 0

    model = build()
    loss_of(model, *TOKENS).backward()
    for stage in (1, 2, 3):
        with pt.ranks(dp=2) as world:
            grads, alive = world.run(run, stage)[0]
        assert alive == 0
        for name, p in model.named_parameters():
            if p.grad is None:
                assert grads[name] is None
            else:
                torch.testing.assert_close(grads[name], p.grad, rtol=1e-5, atol=1e-7)


class _DoublesItsInput(nn.Module):
    """A block that writes into its input, and of which a part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x):
        return self.trained(self.frozen(x.mul_(2))) + x


def test_a_block_with_a_frozen_part_may_write_into_its_input():
    torch.manual_seed(0)
    blocks = nn.ModuleList(_DoublesItsInput() for _ in range(2))
    model, x = nn.Sequential(nn.Linear(4, 4), *blocks), torch.randn(8, 4)

    def run(mesh):
        sharded = pt.zero(copy.deepcopy(model), mesh)
        sharded(rows(mesh)(x)).square().sum().backward()
        assert zero_state(sharded).alive == 0
        return {n: p.grad.full_tensor() for n, p in sharded.named_parameters() if p.requires_grad}

    with pt.ranks(dp=2) as world:
        grads = world.run(run)[0]
    model(x).square().sum().backward()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-5, atol=1e-5)


def test_gradients_by_autograd_grad_are_those_of_the_shards():
    def run(mesh):
        model = pt.zero(gpt(), mesh)
        params = list(model.parameters())
        grads = torch.autograd.grad(loss_of(model, *map(rows(mesh), TOKENS)), params)
        return [g.full_tensor() for g in grads]

    model = gpt()
    want = torch.autograd.grad(loss_of(model, *TOKENS), list(model.parameters()))
    with pt.ranks(dp=2) as world:
        for mine, right in zip(world.run(run)[0], want, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-7)


def test_evaluation_gathers_and_releases_and_builds_no_graph():
    def run(mesh):
        model = pt.zero(gpt(), mesh)
        with torch.no_grad():
            out = model(rows(mesh)(TOKENS[0]))
        return out.full_tensor(), zero_state(model).alive, zero_state(model).peak

    with torch.no_grad():
        want = gpt()(TOKENS[0])
    with pt.ranks(dp=2) as world:
        for out, alive, peak in world.run(run):
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
            assert alive == 0 < peak


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_everything_released_and_usable(where):
    class Boom(Exception):
        pass

    def run(mesh):
        model = pt.zero(gpt(), mesh)
        state, spread = zero_state(model), rows(mesh)
        raised = [True]

        def raise_(*_):
            if raised.pop() if raised else False:
                raise Boom

        if where == "forward":
            model.blocks[1].mlp.register_forward_hook(raise_)
        else:
            model.blocks[1].mlp.register_full_backward_hook(raise_)
        with pytest.raises(Boom):
            loss_of(model, *map(spread, TOKENS)).backward()
        at_rest = all(p.placements == (pt.Shard(0),) for p in model.parameters())
        gone = state.alive == 0 if where == "forward" else True
        model.zero_grad()
        losses = train(model, spread, make=torch.optim.SGD)
        return losses, at_rest or where == "backward", gone, state.alive

    single = train(gpt(), lambda t: t, make=torch.optim.SGD)
    with pt.ranks(dp=2) as world:
        for losses, at_rest, gone, alive in world.run(run):
            assert at_rest and gone and alive == 0
            torch.testing.assert_close(
                torch.tensor(losses), torch.tensor(single), rtol=1e-5, atol=0
            )


@pytest.mark.slow
def test_graphs_models_and_states_are_collected():
    import weakref

    def run(mesh):
        model = pt.zero(gpt(), mesh)
        outs = []
        for _ in range(3):
            out = model(rows(mesh)(TOKENS[0]))
            outs.append(weakref.ref(out))
            (out * out).sum().backward()
            del out
        gc.collect()
        left = sum(o() is not None for o in outs)
        gone = weakref.ref(model.blocks[0].mlp.up.weight)
        del model
        gc.collect()
        return left, gone() is None

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [(0, True)] * 2


# -- precision -------------------------------------------------------------------------------------


def test_in_bfloat16_parameters_travel_and_compute_narrow_and_rest_and_sum_wide():
    precision = pt.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)

    def run(mesh):
        model = pt.zero(gpt(), mesh, precision=precision)
        seen = []
        model.blocks[0].mlp.up.register_forward_hook(
            lambda m, args, out: seen.append((m.weight.dtype, out.dtype))
        )
        with pt.ledger() as log:
            losses = train(model, rows(mesh), steps=2, make=torch.optim.SGD)
        p = model.blocks[0].mlp.up.weight
        sent = {m.op: m.nbytes for m in log.moves if m.kind in ("all_gather", "reduce_scatter")}
        return losses, seen[0], p.dtype, p.grad.dtype, sent["blocks.0"]

    with pt.ranks(dp=2) as world:
        losses, seen, dtype, grad_dtype, sent = world.run(run)[0]
    block = sum(p.numel() for p in gpt().blocks[0].parameters())
    assert seen == (torch.bfloat16, torch.bfloat16)
    assert dtype == grad_dtype == torch.float32
    assert sent == 2 * block // 2
    single = train(gpt(), lambda t: t, steps=2, make=torch.optim.SGD)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(single), rtol=0.02, atol=0)


def test_shares_in_bfloat16_are_summed_in_float32():
    """256 + 1 + 1 + 1 + 1 is 256 in bfloat16, rank by rank."""

    def run(mesh):
        model = nn.Sequential(nn.Linear(1, 4, bias=False))
        pt.zero(model, mesh, precision=torch.bfloat16)
        first = mesh.get_local_rank() == 0
        x = torch.full((1, 1), 256.0 if first else 1.0)
        out = model(pt.DTensor.from_local(x, mesh, [pt.Shard(0)]))
        out.sum().backward()
        return model[0].weight.grad.full_tensor()

    with pt.ranks(dp=5) as world:
        assert world.run(run)[0].flatten().tolist() == [260.0] * 4


class OtherKinds(nn.Module):
    """A block whose first parameters are no real floating-point ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.numbers = nn.Parameter(torch.tensor([1000, 1001, 999_999, 7]), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * (self.numbers % 10) + (x * self.turn).imag


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_narrow_precision_leaves_integers_and_complex_parameters_as_they_are(compiled):
    def program(model, x):
        def step(x):
            model(x).float().square().mean().backward()

        (pt.compile(step, backend="graph") if compiled else step)(x)
        return model[0].turn.grad, model[0].linear.weight.grad

    x = torch.randn(2, 4)
    truth = program(nn.Sequential(OtherKinds()), x)

    def run(mesh):
        model = pt.zero(nn.Sequential(OtherKinds()), mesh, precision=torch.bfloat16)
        return [g.full_tensor() for g in program(model, rows(mesh)(x))]

    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, [*truth], rtol=0.02, atol=0.02)


# -- what cannot be --------------------------------------------------------------------------------


def test_bad_requests_are_refused_on_every_rank():
    def run(mesh):
        errors = []
        for ask in (
            lambda: pt.zero(gpt(), mesh, "pp"),
            lambda: pt.zero(gpt(), mesh, stage=4),
            lambda: pt.zero(gpt(), mesh, blocks=["layers.*"]),
            lambda: pt.zero(gpt(), mesh, blocks=["blocks.0", "blocks.0.mlp"]),
            lambda: pt.zero(pt.parallelize(gpt(), mesh, {"*": {"dp": pt.Shard(0)}}), mesh),
            lambda: pt.zero(pt.zero(gpt(), mesh), mesh),
        ):
            with pytest.raises((ValueError, pt.LayoutError)) as caught:
                ask()
            errors.append(str(caught.value))
        return errors

    with pt.ranks(dp=2) as world:
        first, second = world.run(run)
    assert first == second
    for text, word in zip(
        first, ("pp", "stage 4", "layers", "within", "already", "already"), strict=True
    ):
        assert word in text


def test_a_copy_of_a_model_is_one_of_its_own_only_before_it_is_sharded():
    def run(mesh):
        model = gpt()
        twin = copy.deepcopy(model)
        return train(pt.zero(model, mesh), rows(mesh)) == train(pt.zero(twin, mesh), rows(mesh))

    with pt.ranks(dp=2) as world:
        assert all(world.run(run))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_block_may_have_no_elements(stage):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty, self.layer = nn.Parameter(torch.zeros(0, 3)), nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) + self.empty.sum()

    def step(mesh=None):
        torch.manual_seed(0)
        model, x = Model(), torch.arange(12.0).view(4, 3)
        if mesh is not None:
            pt.zero(model, mesh, stage=stage)
            x = pt.distribute_batch(x, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().mean().backward()
        optimizer.step()
        weight = model.layer.weight
        return weight.detach() if mesh is None else weight.full_tensor().detach()

    with pt.ranks(dp=3) as world:
        for found in world.run(step):
            torch.testing.assert_close(found, step())
