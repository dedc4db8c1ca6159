"""Does a plan fit, and is what its bounds leave out never the best?"""

from __future__ import annotations

import dataclasses
import importlib
import random
import zlib

import pytest

import partita as pt
from partita.predict import StrategyError
from partita.predict.machine import load_machine
from partita.predict.plan_space import Way, least_bytes, least_seconds, ways_of

H100 = load_machine("h100")
SMALL = pt.Strategy(layers=1, context=16)
RANKS, BATCH = 8, 16
autoplan = importlib.import_module("partita.predict.autoplan")


def plan(memory=None, **options):
    found = {"batch": BATCH, "strategy": SMALL, "most": 1000} | options
    return pt.autoplan("gpt", RANKS, memory, H100, **found)


def ways():
    return list(ways_of("gpt", RANKS, BATCH, H100, SMALL))


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
        search = autoplan.WaySearch("gpt", 1e15, H100, prune=False)
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
        assert found.best.seconds == best == plan(memory, prune=False).best.seconds
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
        assert least_seconds("gpt", way, H100) <= found.seconds
        assert least_bytes("gpt", way) <= found.peak


@pytest.mark.slow
def test_a_plan_says_what_wins_why_and_the_code_that_runs_it():
    found = plan(most=2)
    assert len(found.choices) == 2 and found.outcomes["not looked at"] > 0
    said = str(found)
    assert "the runner-up loses" in said and "pt.init_device_mesh" in said


def test_what_does_not_fit_is_one_error_that_names_the_least_that_it_takes():
    with pytest.raises(StrategyError, match=r"does not fit.*between steps"):
        pt.autoplan("llama3-70b", 8, "10GB")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"model": "llama5"}, "no model 'llama5'"),
        ({"model": "gpt", "memory": "80 cups"}, "no amount of memory"),
        ({"model": "gpt", "ranks": 7, "batch": 3}, "no mesh of 7 ranks"),
    ],
)
def test_a_wrong_question_is_one_clear_error(asked, says):
    with pytest.raises(StrategyError, match=says):
        pt.autoplan(**({"ranks": 2} | asked))
