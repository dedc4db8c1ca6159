"""Does a plan fit, and is what its bounds leave out never the best?"""

from __future__ import annotations

import dataclasses
import importlib
import math
import random
import zlib

import pytest
import torch

import partita as pt
from partita.bench.plan import EXAMPLES
from partita.predict import StrategyError
from partita.predict.machine import load_machine
from partita.predict.plan_space import Way, least_bytes, least_seconds, ways_of
from partita.predict.strategy import make_step, shape_of

H100 = load_machine("h100")
SMALL = pt.Strategy(layers=1, context=16)
RANKS, BATCH = 8, 16
GPT = shape_of("gpt")
autoplan = importlib.import_module("partita.predict.autoplan")


def plan(memory=None, **options):
    found = {"batch": BATCH, "strategy": SMALL, "most": 1000} | options
    return pt.autoplan("gpt", RANKS, memory, H100, **found)


def ways():
    return list(ways_of(GPT, RANKS, BATCH, H100, SMALL))


# -- the search, where each way costs between one and three times its bounds -----------------------


@pytest.fixture
def drawn(monkeypatch):
    """Seconds and peak of each way, as a stand-in for simulations."""
    known = {}

    def simulate(model, mesh, machine, *, strategy):
        way = Way(mesh.get("dp", 1), mesh.get("tp", 1), strategy)
        draw = random.Random(zlib.crc32(repr(way).encode()))
        whole = dataclasses.replace(strategy, micro_batches=1)
        seconds = least_seconds(model, dataclasses.replace(way, strategy=whole), machine)
        seconds *= draw.uniform(1, 3) * strategy.micro_batches
        peak = int(least_bytes(model, way) * draw.uniform(1, 3))
        return Drawn(seconds, peak, compute_seconds=seconds, exposed={"dp": 0.0})

    monkeypatch.setattr(autoplan, "simulate", simulate)
    for way in ways():
        search = autoplan.WaySearch(GPT, 1e15, H100, prune=False)
        known[way] = search.price_way(way)[:2]
    return known


@dataclasses.dataclass
class Drawn:
    seconds: float
    peak: int
    compute_seconds: float
    exposed: dict[str, float]


def test_pruning_finds_the_best_of_the_whole_space(drawn):
    assert 100 < len(drawn) <= 500
    peaks = sorted(peak for _, peak in drawn.values())
    pruned = 0
    for memory in [peaks[len(peaks) * k // 10] for k in range(10)]:
        best = min(seconds for seconds, peak in drawn.values() if peak <= memory)
        found = plan(memory)
        whole = plan(memory, prune=False)
        assert found.best.seconds == best == whole.best.seconds
        assert [c.seconds for c in found.choices] == [c.seconds for c in whole.choices]
        pruned += found.outcomes["too slow by bound"]
    assert pruned > 0


def test_no_plan_is_above_its_memory_limit(drawn):
    draw = random.Random(0)
    least = min(peak for _, peak in drawn.values())
    planned = 0
    for _ in range(100):
        limit = draw.uniform(0.5 * least, 3 * least)
        try:
            found = plan(limit)
        except StrategyError:
            assert least > limit
            continue
        planned += 1
        assert found.choices and all(c.peak <= limit for c in found.choices)
        assert all(drawn[c.way][1] == c.peak for c in found.choices)
    assert 10 < planned < 100


def test_a_deep_model_that_holds_more_than_its_first_blocks_say_is_left_out(monkeypatch):
    def simulate(model, mesh, machine, *, strategy):
        is_fastest = mesh == {"dp": 8}
        more = 3 if strategy.layers > 2 and is_fastest else 1
        seconds = strategy.layers * (0.5 if is_fastest else 1.0)
        return Drawn(seconds, strategy.layers * 10**8 * more, seconds, {"dp": 0.0})

    monkeypatch.setattr(autoplan, "simulate", simulate)
    deep = dataclasses.replace(SMALL, layers=8)
    found = plan(10**9, strategy=deep, prune=False)
    assert found.outcomes["too big"] > 0
    assert {c.peak for c in found.choices} == {8 * 10**8}


def test_each_way_ends_somehow_and_the_best_five_are_in_order(drawn):
    found = plan()
    outcomes = dict(found.outcomes)
    assert outcomes.pop("too big") == 0
    assert sum(outcomes.values()) == found.space == len(drawn)
    assert len(found.choices) == 5
    assert [c.seconds for c in found.choices] == sorted(c.seconds for c in found.choices)


# -- real simulations ------------------------------------------------------------------------------


@pytest.mark.slow
def test_bounds_are_below_what_a_simulation_finds():
    drawn = random.Random(1).sample(ways(), 4)
    for way in drawn:
        way = dataclasses.replace(way, strategy=dataclasses.replace(way.strategy, micro_batches=1))
        found = pt.simulate("gpt", way.mesh, H100, strategy=way.strategy)
        assert least_seconds(GPT, way, H100) <= found.seconds
        assert least_bytes(GPT, way) <= found.peak


@pytest.mark.slow
def test_a_plan_says_what_wins_why_and_the_code_that_runs_it():
    found = plan(most=2)
    assert len(found.choices) == 2 and found.outcomes["not looked at"] > 0
    said = str(found)
    assert "the runner-up loses" in said and "pt.init_device_mesh" in said


@pytest.mark.parametrize(
    ("model", "plan"), [("gpt", "pt.plans.gpt("), ("mpt-7b", "pt.plans.gpt("), ("own", "plan(")]
)
def test_the_code_names_the_plan_of_the_model(model, plan, monkeypatch):
    shape = EXAMPLES["moe"] if model == "own" else shape_of(model)
    way = Way(1, 2, SMALL)
    monkeypatch.setattr(
        autoplan.WaySearch,
        "run",
        lambda self, ways, most: (autoplan.PlannedWay(way, 1.0, 1, None),),
    )
    found = pt.autoplan(shape, 2, machine=H100, strategy=SMALL)
    assert f"pt.parallelize(model, mesh, {plan}sequence=False))" in found.code


# -- the examples of the bench ---------------------------------------------------------------------


def test_ways_of_a_model_are_those_that_it_has():
    digits = list(ways_of(EXAMPLES["cnn"], 4, 16, H100, pt.Strategy()))
    assert digits and {(way.tp, way.strategy.remat) for way in digits} == {(1, False)}
    experts = list(ways_of(EXAMPLES["moe"], 4, 16, H100, pt.Strategy()))
    assert {way.tp for way in experts} == {1, 2, 4}
    assert not any(way.strategy.sequence or way.strategy.remat for way in experts)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_a_way_that_is_planned_runs_and_sends_what_was_simulated(name):
    tp = EXAMPLES[name].heads > 1
    way = Way(2, 2 if tp else 1, pt.Strategy(zero=2, remat=False, batch=4, precision="float32"))
    simulated = pt.simulate(EXAMPLES[name], way.mesh, H100, strategy=way.strategy)

    def train(mesh):
        torch.manual_seed(0)
        step, args, _ = make_step(EXAMPLES[name], way.mesh, way.strategy, on=mesh)
        compiled = pt.compile(step, backend="graph")
        losses = [compiled(*args).full_tensor().item() for _ in range(3)]
        with pt.ledger() as log:
            compiled(*args)
        sent: dict[str, int] = {}
        for move in log.moves:
            axes = " ".join(move.axes)
            sent[axes] = sent.get(axes, 0) + move.nbytes
        return losses, sent

    with pt.ranks(**way.mesh) as world:
        told = world.run(train)
    for losses, sent in told:
        assert losses[-1] < losses[0]
        assert sent == simulated.nbytes


def test_what_does_not_fit_is_one_error_that_names_the_least_that_it_takes():
    with pytest.raises(StrategyError, match=r"does not fit.*between steps"):
        pt.autoplan("llama3-70b", 8, "10GB")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"model": "llama5"}, "no model 'llama5'"),
        ({"model": "gpt", "memory": "80 cups"}, "no amount of memory"),
        *(
            ({"model": "gpt", "memory": memory}, "no amount of memory")
            for memory in (".", "0", "-1GB", "80 gb of it", 0, -1, math.nan, math.inf)
        ),
        ({"model": "gpt", "ranks": 7, "batch": 3}, "no mesh of 7 ranks"),
        *(
            ({"model": "gpt", what: number}, f"{what} is {number}: a whole number, at least 1")
            for what in ("ranks", "batch", "most")
            for number in (0, -3, 2.5, True)
        ),
    ],
)
def test_a_wrong_question_is_one_clear_error(asked, says):
    with pytest.raises(StrategyError, match=says):
        pt.autoplan(**({"ranks": 2} | asked))
