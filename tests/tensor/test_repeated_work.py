"""Does the ledger say where ranks repeat each other's work, at no cost where there is none?"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partita as pt
from partita import Replicate, Shard
from partita.comm import wire_of
from partita.tensor.plan import OPS, CallPlan
from tests.programs.split_attention import double, losses
from tests.programs.steps import squares

R = Replicate()


def spread(mesh, *shape, placements):
    return pt.distribute_tensor(torch.ones(*shape), mesh, placements)


def half_and_half(mesh):
    x = spread(mesh, 8, 16, placements=[Shard(0), R])
    whole = spread(mesh, 16, 16, placements=[R, R])
    columns = spread(mesh, 16, 16, placements=[R, Shard(0)])
    with pt.ledger() as log:
        for _ in range(2):
            F.linear(x, whole)
            F.linear(x, columns)
    return log


def test_work_that_is_repeated_is_named_with_its_share():
    with pt.ranks(dp=2, tp=2) as world:
        for log in world.run(half_and_half):
            (work,) = log.repeated
            assert (work.op, work.axes) == ("linear", ("tp",))
            # All of it on each rank along tp, and half of what is spread.
            assert work.share == pytest.approx(2 / 3)
            assert "test_repeated_work.py" in work.source
            assert "repeated by each rank along tp: linear at" in str(log)
            assert "67% of the operations" in str(log)
            assert json.loads(log.to_json())["repeated"][0]["axes"] == ["tp"]


def test_a_ledger_around_all_ranks_says_it_once():
    with pt.ranks(dp=2, tp=2) as world, pt.ledger() as log:
        world.run(half_and_half)
    (work,) = log.repeated
    assert work.share == pytest.approx(2 / 3)


def test_what_is_spread_or_little_is_not_named():
    def run(mesh):
        x = spread(mesh, 64, 64, placements=[Shard(0)])
        w = spread(mesh, 64, 64, placements=[R])
        few = spread(mesh, 4, 4, placements=[R])
        with pt.ledger() as log:
            x @ w
            few @ few  # 1 part of 2,048
        return log.repeated, str(log)

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [([], "no moves: nothing was carried")] * 2


def test_each_place_has_a_line_of_its_own_and_the_largest_is_the_first():
    def run(mesh):
        x, y = (spread(mesh, n, 8, 8, placements=[R]) for n in (1, 3))
        w = spread(mesh, 8, 8, placements=[R])
        with pt.ledger() as log:
            x @ w
            y @ w
        lines = [int(work.source.split(":")[-1]) for work in log.repeated]
        return lines[0] - lines[1], [work.share for work in log.repeated]

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [(1, [0.75, 0.25])] * 2


def test_a_call_knows_of_ledgers_only_while_one_is_open():
    def run(mesh):
        x = spread(mesh, 8, 8, placements=[R])
        x @ x
        own = wire_of(mesh)
        calls = [p for op in OPS.values() for p in op.plans.values() if isinstance(p, CallPlan)]
        plans = [p for p in calls if p.work and p.wire is own]
        assert plans
        before = [p.kernel for p in plans]
        with pt.ledger() as outer:
            with pt.ledger() as inner:
                x @ x
            during = [p.kernel for p in plans]
        after = [p.kernel for p in plans]
        x @ x
        assert before == after and all(a is not b for a, b in zip(before, during, strict=True))
        return len(outer.repeated), len(inner.repeated)

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [(1, 1)] * 2


def test_what_is_recomputed_counts_once():
    def run(mesh, again):
        x = spread(mesh, 8, 8, placements=[R]).requires_grad_()
        y = spread(mesh, 8, 8, placements=[Shard(0)])

        def block(x):
            return (x @ x).relu()

        with pt.ledger() as log:
            (pt.remat(block) if again else block)(x).sum().backward()
            y @ y.detach().redistribute(placements=[R])
        return [work.share for work in log.repeated]

    with pt.ranks(dp=2) as world:
        assert world.run(run, True) == world.run(run, False) == [[pytest.approx(2 / 3)]] * 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x).relu()


def train(mesh, plan, way):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), Layer())
    pt.parallelize(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = spread(mesh, 8, 16, placements=[R])

    step = squares(model, optimizer)
    run = step if way is None else pt.compile(step, backend="graph", **way)
    run(x)
    with pt.ledger() as log:
        run(x)
    return [(work.op, work.axes, work.share, work.source.split("/")[-1]) for work in log.repeated]


@pytest.mark.slow
@pytest.mark.parametrize("way", [{}, {"blocks": True}], ids=["as it runs", "blocks traced once"])
def test_a_captured_step_says_what_the_eager_one_does(way):
    with pt.ranks(tp=2) as world:
        plan = {"0.inner.*": {"tp": Shard(0)}}
        eager, fast = world.run(train, plan, None), world.run(train, plan, way)
    assert eager == fast
    ((op, axes, share, _),) = eager[0]
    assert (op, axes, share) == ("linear", ("tp",), 0.5)  # two layers half, and one whole


@pytest.mark.slow
def test_work_within_blocks_that_are_traced_once_is_said():
    def run(mesh):
        found = []
        for way in ("eager", "blocks"):
            _, _, step = losses(mesh, way)
            x = pt.distribute_tensor(double(4, 8, 8), mesh, [Shard(0), R])
            step(x)
            with pt.ledger() as log:
                step(x)
            found.append([(w.op, w.axes, w.share) for w in log.repeated])
        return found, len(step.program.blocks.structures)

    with pt.ranks(dp=1, cp=2) as world:
        for (eager, once), structures in world.run(run):
            assert structures and once == eager
