"""Are ranks that bring different things told so, all of them, at the first place where they do?"""

from __future__ import annotations

import tracemalloc
import weakref
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import partita as pt
from partita import LayoutError, Partial, Replicate, Shard
from partita.comm import wire_of
from partita.comm.agreement import AgreedKeys

T = torch.arange(32.0).view(8, 4)


def each_rank(fn, **axes):
    """What each rank returns, or the error that it is told."""

    def body(mesh):
        try:
            return fn(mesh)
        except LayoutError as error:
            return error

    with pt.ranks(**axes) as world:
        return world.run(body)


def refused(fn, *said, **axes):
    results = each_rank(fn, **axes)
    assert all(isinstance(r, LayoutError) for r in results), results
    assert len({str(r) for r in results}) == 1
    for text in said:
        assert text in str(results[0])
    return results[0]


# -- shapes ----------------------------------------------------------------------------------------


def test_uneven_rows_without_a_shape_are_refused_with_the_shape_that_they_make():
    rows = [3, 3, 3, 1]

    def body(mesh, **shape):
        mine = torch.full((rows[mesh.get_rank()], 2), float(mesh.get_rank()))
        return pt.DTensor.from_local(mine, mesh, [Shard(0)], **shape).mean().item()

    error = refused(body, "rank 0  [12@dp, 2]", "rank 3  [4@dp, 2]", dp=4)
    shape = eval(error.fixes[0].write.removeprefix("shape="))
    expected = torch.cat([torch.full((n, 2), float(r)) for r, n in enumerate(rows)]).mean()
    assert each_rank(lambda mesh: body(mesh, shape=shape), dp=4) == [expected] * 4


@pytest.mark.parametrize("placement", [Replicate(), Partial()], ids=str)
def test_whole_values_and_shares_of_other_shapes_are_refused(placement):
    def body(mesh):
        return pt.DTensor.from_local(torch.ones(2 + mesh.get_rank()), mesh, [placement])

    refused(body, "rank 0", "rank 1", dp=2)


def test_a_later_piece_of_another_shape_at_the_same_line_is_found():
    def body(mesh):
        for step in range(3):
            last = step == 2 and mesh.get_rank() == 1
            x = pt.DTensor.from_local(torch.ones(1 if last else 3, 2), mesh, [Shard(0)])
        return x.sum().item()

    refused(body, "shapes of pieces", "all_reduce", dp=2)


def test_one_rank_that_wants_a_gradient_is_refused():
    def body(mesh):
        t = torch.ones(2, 2, requires_grad=mesh.get_rank() == 0)
        return pt.DTensor.from_local(t, mesh, [Shard(0)])

    refused(body, "with a gradient", dp=2)


# -- batches ---------------------------------------------------------------------------------------


def test_each_ranks_own_batch_is_not_taken_for_the_whole_one():
    def body(mesh):
        return pt.distribute_batch({"x": T + mesh.get_rank()}, mesh)

    error = refused(body, "have not read the same batch", dp=2)
    assert error.fixes[0].write == 'each_rank_has="piece"'


def test_batches_of_other_sizes_are_refused_in_a_later_step_too():
    def body(mesh):
        for step in range(3):  # values, which show it too, are not compared in the third call
            x = pt.distribute_batch(T[: 8 - 2 * (step // 2) * mesh.get_rank()], mesh)
        return x.sum().item()

    refused(body, "compares distribute_batch", "all_reduce", dp=2)


def test_ranks_that_share_a_piece_must_have_read_the_same_rows():
    def body(mesh, ranks):
        return pt.distribute_batch(T[ranks(mesh) :: 4][:2], mesh, each_rank_has="piece").shape

    refused(
        lambda mesh: body(mesh, lambda mesh: mesh.get_rank()),
        "ranks 0 and 1 have not read the same rows",
        "DistributedSampler",
        dp=2,
        tp=2,
    )
    good = each_rank(lambda mesh: body(mesh, lambda mesh: mesh.get_local_rank("dp")), dp=2, tp=2)
    assert good == [(4, 4)] * 4


# -- random numbers --------------------------------------------------------------------------------

DRAWS = {
    "dropout of a replicated value": (lambda x: F.dropout(x), [Replicate()]),
    "dropout of a split value": (lambda x: F.dropout(x), [Shard(0)]),
    "init": (lambda x: torch.nn.init.xavier_uniform_(x), [Replicate()]),
    "rand_like": (torch.rand_like, [Replicate()]),
    "bernoulli": (torch.bernoulli, [Shard(0)]),
    "multinomial": (lambda x: torch.multinomial(x, 1), [Replicate()]),
    "randn": (lambda x: pt.randn(4, 4, device_mesh=x.device_mesh), [Replicate()]),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
        [Replicate()],
    ),
}


@pytest.mark.parametrize("what", DRAWS)
def test_generators_that_differ_are_refused_where_they_are_drawn_from(what):
    draw, placements = DRAWS[what]

    def body(mesh, seed):
        torch.manual_seed(seed(mesh.get_rank()))
        draw(pt.distribute_tensor(T[:4] / 32, mesh, placements))
        return True

    refused(lambda mesh: body(mesh, lambda r: 5 + r), "of seed 5", "of seed 6", dp=2)
    assert each_rank(lambda mesh: body(mesh, lambda r: 5), dp=2) == [True, True]


def test_generators_that_nobody_draws_from_may_differ():
    def body(mesh):
        torch.manual_seed(mesh.get_rank())
        x = pt.distribute_tensor(T, mesh, [Shard(0)])
        return F.dropout(x, 0.5, training=False).sum().item()

    assert each_rank(body, dp=2) == [T.sum()] * 2


def test_a_generator_that_parts_later_is_found_at_the_next_place_that_draws():
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [Replicate()])
        F.dropout(x)
        if mesh.get_rank() == 1:
            torch.rand(1)
        F.dropout(x)

    refused(body, "not in the same state", dp=2)


def test_a_rank_without_rows_draws_as_many_numbers_as_the_others():
    def body(mesh):
        x = pt.distribute_tensor(T[:1], mesh, [Shard(0)])
        with pt.random_mode("pieces"):
            F.dropout(x)
        return torch.rand(1).item()

    one, other = each_rank(body, dp=2)
    assert one == other


# -- numbers ---------------------------------------------------------------------------------------


def test_numbers_that_ops_take_are_compared_under_check_ranks():
    def body(mesh, factor):
        x = pt.distribute_tensor(T, mesh, [Shard(0)])
        with pt.check_ranks():
            y = x * 2.0
            y = torch.clamp(y, min=factor(mesh.get_rank()), max=50)
        return y.sum().item()

    refused(lambda mesh: body(mesh, lambda r: 1.0 + r), "clamp", "1.0", "2.0", dp=2)
    whole = torch.clamp(T * 2, min=1.0, max=50).sum().item()
    assert each_rank(lambda mesh: body(mesh, lambda r: 1.0), dp=2) == [whole] * 2


def test_ranks_that_run_other_kept_programs_are_told_under_check_ranks():
    def body(mesh):
        by = {"factor": 1}
        step = pt.compile(lambda x: x * by["factor"], backend="graph")
        x = pt.distribute_tensor(T, mesh, [pt.Shard(0)])
        with pt.check_ranks():
            for by["factor"] in (1, 2, 1):
                assert torch.equal(step(x).full_tensor(), T * by["factor"])
            by["factor"] = 1 + mesh.get_rank()
            step(x)  # no rank captures, and nothing is sent

    for error in each_rank(body, dp=2):
        assert "ranks ask for different things" in str(error)
        assert "rank 1  compiled" in str(error) and "test_agreement.py" in str(error)


def test_a_whole_step_passes_check_ranks():
    def body(mesh):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        pt.distribute_module(model, mesh)
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        with pt.check_ranks():
            for _ in range(2):
                loss = model(pt.distribute_batch(T, mesh)).square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
        return loss.item()

    one, other, third = each_rank(body, dp=3)
    assert one == other == third


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_learning_rates_that_differ_are_refused_at_the_first_step(kind):
    def body(mesh):
        w = torch.nn.Parameter(pt.distribute_tensor(T, mesh, [Replicate()]))
        optimizer = kind([w], lr=0.1 * (1 + mesh.get_rank()))

        def loss():
            total = w.square().sum()
            total.backward()
            return total

        loss()
        optimizer.step(loss)

    refused(body, "the ranks' optimizers have other settings", "lr=0.1", "lr=0.2", dp=2)


@pytest.mark.parametrize("each_rank_has", ["whole", "piece"])
def test_values_of_later_batches_are_compared_too(each_rank_has):
    def body(mesh):
        for number in range(1, 9):
            batch = torch.full((4,), float(number + (mesh.get_rank() if number > 5 else 0)))
            pt.distribute_batch(batch, mesh, each_rank_has=each_rank_has)
            assert number < 8

    said = "same batch" if each_rank_has == "whole" else "same rows"
    with pt.ranks(dp=1, tp=2) as world, pytest.raises(pt.LayoutError, match=f"not read the {said}"):
        world.run(body)


def change_a_rate(optimizer, rank, step):
    if step == 5:
        optimizer.param_groups[0]["lr"] = 0.2 + rank


def change_a_rate_on_one_rank(optimizer, rank, step):
    if step == 5 and rank == 0:
        optimizer.param_groups[0]["lr"] = 0.2


def change_a_rate_for_one_step(optimizer, rank, step):
    optimizer.param_groups[0]["lr"] = 0.5 if (rank, step) == (1, 20) else 0.1 / step


def change_a_tuple_for_one_step(optimizer, rank, step):
    optimizer.param_groups[0]["betas"] = (0.5 if (rank, step) == (1, 20) else 0.9 / step, 0.9)


def change_a_rate_that_is_a_tensor(optimizer, rank, step):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5 + rank if step > 9 else 0.5)


def step_on_one_rank(optimizer, rank, step):
    if step == 5 and rank == 0:
        optimizer.step()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_a_rate, "lr=0.2 .*; call 5, since"),
        (change_a_rate_on_one_rank, "compares SGD.step .*lr=0.2 .*; call 5, since"),
        (change_a_rate_for_one_step, "call 66, since the first"),
        (change_a_tuple_for_one_step, "call 66, since the first"),
        (change_a_rate_that_is_a_tensor, "lr=1.5 .*call 65,"),
        (step_on_one_rank, "compares SGD.step .*; call 65, "),
    ],
)
def test_ranks_compare_the_settings_of_optimizers_after_the_first_step_too(change, said):
    def body(mesh):
        w = torch.nn.Parameter(pt.distribute_tensor(T, mesh, [Replicate()]))
        x = pt.distribute_tensor(torch.ones(2, *T.shape), mesh, [Shard(0)])
        optimizer = torch.optim.SGD([w], lr=0.1)
        for step in range(1, 70):
            optimizer.zero_grad()
            (w * x).sum().backward()
            change(optimizer, mesh.get_rank(), step)
            optimizer.step()

    with pt.ranks(dp=2) as world, pytest.raises(pt.LayoutError, match=said):
        world.run(body)


def test_a_setting_that_is_nan_is_equal_on_all_ranks():
    def body(mesh):
        w = torch.nn.Parameter(pt.distribute_tensor(T, mesh, [Replicate()]))
        optimizer = torch.optim.SGD([w], lr=0.1)
        for step in range(1, 4):
            optimizer.param_groups[0]["best"] = float("nan") if step % 2 else mesh.get_rank() * 0.0
            (w * w).sum().backward()
            optimizer.step()
        return w.isfinite().all().item()

    assert each_rank(body, dp=2) == [True, True]


def test_a_schedule_costs_a_comparison_of_settings_in_64_steps(monkeypatch):
    seen = []

    def note(what, mine, *_, **__):
        seen.append(mine)

    monkeypatch.setattr("partita.parallel.optimizer.check_equal_on_ranks", note)

    def body(mesh):
        w = torch.nn.Parameter(pt.distribute_tensor(T, mesh, [Replicate()]))
        optimizer = torch.optim.SGD([w], lr=0.1)
        for step in range(200):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()

    with pt.ranks(dp=2) as world:
        world.run(body)
    assert len(seen) == 2 * (2 + 3)  # in the first step, at the first change, then every 64


def test_numbers_of_a_captured_step_are_compared_in_later_calls_too():
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [Shard(0)])
        step = pt.compile(lambda x, rate: x * rate, backend="graph")
        for call in range(1, 70):
            step(x, 0.1 if call < 20 else 0.2 + mesh.get_rank())
            assert call < 64

    with pt.ranks(dp=2) as world, pytest.raises(pt.LayoutError, match="pass different numbers"):
        world.run(body)


# -- what is saved ---------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["save", "async_save"])
def test_a_value_that_ranks_hold_differently_is_not_saved(save, tmp_path):
    def body(mesh, change):
        w = pt.distribute_tensor(T, mesh, [Shard(0), Replicate()])
        large = pt.distribute_tensor(torch.zeros(1 << 19), mesh, [Replicate(), Replicate()])
        (w if change == "w" else large).to_local().add_(mesh.get_local_rank("tp"))
        outcome = getattr(pt, save)({"w": w, "large": large}, tmp_path / change)
        return outcome if save == "save" else outcome.result()

    for change in ("w", "large"):
        error = refused(
            lambda mesh, change=change: body(mesh, change),
            "the ranks hold different values under one name",
            dp=2,
            tp=2,
        )
        assert error.operands[0].startswith(change) and "(ranks 0 and 1)" in error.operands[0]


# -- collectives of torch.distributed --------------------------------------------------------------


def test_operators_of_torch_distributed_refuse_a_dtensor():
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [Shard(0)])
        return torch.ops._c10d_functional.all_reduce(x, "sum", "0")

    refused(body, "all_reduce cannot take a DTensor", "x.full_tensor()", dp=2)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_ranks_that_use_other_parameters_are_refused_and_the_fix_is_right(late):
    def body(mesh, mended):
        first, second = (
            torch.nn.Parameter(pt.distribute_tensor(T[0] + i, mesh, [Replicate()])) for i in (0, 1)
        )
        x = pt.distribute_tensor(T, mesh, [Shard(0)])
        for step in range(2):
            loss = (x * first).sum()
            if mesh.get_rank() == 0 or (late and step == 0):
                loss = loss + (x * second).sum()
            elif mended:
                loss = loss + 0 * second.sum()
            loss.backward()
            pt.reduce_gradients([first, second])
        return second.grad.full_tensor()

    if not late:
        refused(
            lambda mesh: body(mesh, False),
            "of 2 of 2 parameters: 0: [4], 1: [4]",
            "of 1 of 2 parameters: 0: [4]",
            dp=2,
        )
    else:
        assert all(isinstance(r, LayoutError) for r in each_rank(lambda m: body(m, False), dp=2))
    grads = each_rank(lambda mesh: body(mesh, True), dp=2)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], (T[:4].sum(0) + T[:4].sum(0) + (T[4:].sum(0) if late else 0)))


@pytest.mark.parametrize("when", ["first", "later, under check_ranks"])
def test_numbers_that_a_compiled_step_takes_are_compared(when):
    def body(mesh, factor):
        x = pt.distribute_tensor(T, mesh, [Shard(0)])
        step = pt.compile(lambda x, by: (x * by).sum(), backend="graph")
        if when == "first":
            return step(x, factor(mesh.get_rank())).item()
        assert step(x, 3.0).item() == 3 * T.sum()
        with pt.check_ranks():
            return step(x, factor(mesh.get_rank())).item()

    refused(
        lambda mesh: body(mesh, lambda r: 1.5 + r),
        "different numbers to a step",
        "= 1.5",
        "= 2.5",
        dp=2,
    )
    assert each_rank(lambda mesh: body(mesh, lambda r: 1.5), dp=2) == [1.5 * T.sum()] * 2


def test_under_check_ranks_from_local_refuses_other_values_that_are_taken_for_whole():
    def body(mesh):
        local = torch.ones(3) * mesh.get_local_rank("dp")
        with pt.check_ranks():
            pt.DTensor.from_local(local, mesh, [pt.Partial()])
            with pytest.raises(LayoutError, match="the ranks along dp do not hold the same value"):
                pt.DTensor.from_local(local, mesh, [pt.Replicate()])
            return pt.DTensor.from_local(local * 0, mesh, [pt.Replicate()]).full_tensor()

    with pt.ranks(dp=2) as world:
        assert all(torch.equal(x, torch.zeros(3)) for x in world.run(body))


def test_pieces_that_lie_differently_in_memory_are_found_where_ranks_are_compared():
    def body(mesh):
        held = torch.arange(24.0).view(4, 6)
        place = [pt.Shard(0)]
        gaps = held[:, ::2]
        x = pt.DTensor.from_local(gaps, mesh, place, run_check=True)
        assert x.stride() == (6, 2) and torch.equal(x.full_tensor(), torch.cat([gaps, gaps]))
        x.add_(1)
        assert torch.equal(x.contiguous().full_tensor(), x.full_tensor())
        assert held[0].tolist() == [1, 1, 3, 3, 5, 5]
        alone = gaps if mesh.get_coordinate()[0] else gaps.contiguous()
        for row in (alone[:1], torch.ones(1, 3)):  # of which nothing is told
            pt.DTensor.from_local(row, mesh, place, run_check=True)
        with pytest.raises(pt.LayoutError, match=r"lie differently in memory(?s:.*)contiguous\(\)"):
            pt.DTensor.from_local(alone, mesh, place, run_check=True)

    with pt.ranks(dp=2) as world:
        world.run(body)


class Experts:
    """Two equal experts. A step uses one of them."""

    def __init__(self, mesh, shard, clip=None):
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        shard(self.experts, mesh)
        self.clip, self.x = clip, pt.distribute_tensor(T[:4, :2], mesh, [Shard(0)])
        self.optimizer = torch.optim.SGD(self.experts.parameters(), 1.0)

    def step(self, *used):
        sum(self.experts[i](self.x).sum() for i in used).backward()
        if self.clip is not None:
            self.clip([p for p in self.experts.parameters() if p.grad is not None], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


SHARDED = [partial(pt.zero, stage=stage) for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("shard", [partial(pt.parallelize, plan={}), *SHARDED])
@pytest.mark.parametrize("clip", [None, torch.nn.utils.clip_grad_norm_, pt.clip_grad_norm_])
@pytest.mark.parametrize("before", [[], [0, 1, 0, 1]], ids=["first", "after both were used"])
def test_ranks_that_use_other_experts_are_refused(shard, clip, before):
    def body(mesh):
        model = Experts(mesh, shard, clip)
        for i in before:
            model.step(i)
        model.step(mesh.get_rank())

    assert all(isinstance(error, LayoutError) for error in each_rank(body, dp=2))


@pytest.mark.parametrize("shard", [SHARDED[0], SHARDED[2], SHARDED[3]])
def test_ranks_that_go_backward_through_other_experts_are_refused(shard):
    def body(mesh):
        model = Experts(mesh, shard)
        model.step(0, 1)
        losses = [expert(model.x).sum() for expert in model.experts]
        losses[mesh.get_rank()].backward()
        model.optimizer.step()

    assert all(isinstance(error, LayoutError) for error in each_rank(body, dp=2))


def test_a_loop_compares_nothing_from_its_second_round_on(monkeypatch):
    def body(mesh, shard):
        compared = []
        wire = wire_of(mesh)
        exchange = wire.exchange
        monkeypatch.setattr(
            wire, "exchange", lambda why, *a, **k: compared.append(why) or exchange(why, *a, **k)
        )
        model = Experts(mesh, shard)
        for _ in range(3):
            found = len(compared)
            model.step(0)
            model.step(1)
            for rows in (8, 4):
                pt.distribute_batch(T[:rows], mesh)
        return found, len(compared)

    for shard in (partial(pt.parallelize, plan={}), *SHARDED):
        for early, late in each_rank(lambda mesh, shard=shard: body(mesh, shard), dp=2):
            assert 0 < early == late


def test_ranks_that_pass_other_shapes_after_both_were_passed_are_refused():
    def body(mesh):
        sizes = [2, 4, 2, (4, 2)[mesh.get_rank()]]
        pieces = [pt.DTensor.from_local(T[:n], mesh, [Shard(0)], shape=(2 * n, 4)) for n in sizes]
        return pieces[-1].sum().item()

    assert all(isinstance(error, LayoutError) for error in each_rank(body, dp=2))


def test_ranks_whose_loaders_part_after_both_shapes_were_read_are_refused():
    def body(mesh):
        sizes = [8, 4, 8, (8, 4)[mesh.get_rank()]]
        return [pt.distribute_batch(T[:n], mesh).mean().item() for n in sizes]

    assert all(isinstance(error, LayoutError) for error in each_rank(body, dp=2))


@pytest.mark.parametrize(
    "loop",
    [
        [0],
        [0, 1, 2],
        [0, 0, 0, 1, 1, 1],
        [0, 1, 0, 2],
        ["a", "b", "b", "b"],
        [*range(24)] * 5 + [99],
    ],
    ids=str,
)
def test_what_a_loop_repeats_is_predicted_from_its_third_round_on(loop):
    history = AgreedKeys()
    for turn in range(6):
        missed = [key for key in loop if not history.predicts((key,)) and not history.add((key,))]
        assert turn < 2 or not missed


def test_a_new_object_in_the_memory_of_a_freed_one_is_not_taken_for_it():
    history = AgreedKeys()
    for _ in range(200):
        key = object()
        assert not history.predicts(key)
        history.add(key)
        del key


@pytest.mark.slow
def test_a_series_of_ever_new_keys_stays_small_and_is_predicted_again_later():
    history, alive = AgreedKeys(), weakref.WeakSet()
    for _ in range(5_000):
        key = frozenset([object()])
        alive.add(key)
        history.add(key)
    del key
    assert len(alive) < 5_000
    history.add("a")
    history.add("a")
    assert history.predicts("a") and not history.predicts("b")
    tracemalloc.start()
    try:
        assert all(history.predicts("a") for _ in range(50_000))
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
