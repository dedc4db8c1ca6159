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
from partita.app import Options, options_in
from partita.bench.plan import EXAMPLES
from partita.cli import main
from partita.compile import progress
from partita.predict import Link, ModelShape, StrategyError
from partita.predict.autoplan import least_bytes, least_seconds
from partita.predict.machine import load_machine
from partita.predict.simulate import capture_model, simulate_program
from partita.predict.strategy import Way, make_step, shape_of, train_command, ways_of, write_code

H100 = load_machine("h100")
SMALL = pt.Strategy(layers=1, context=16)
RANKS, BATCH = 8, 16
GPT = shape_of("gpt")
way_search = importlib.import_module("partita.predict.autoplan")


def plan(memory=None, **options):
    found = {"batch": BATCH, "strategy": SMALL, "most": 1000} | options
    return pt.autoplan("gpt", RANKS, memory, H100, **found)


def ways():
    return list(ways_of(GPT, RANKS, BATCH, H100, SMALL))


# -- the search, where each way costs between one and three times its bounds -----------------------


@pytest.fixture
def drawn(monkeypatch):
    """Seconds and peak of each way, as a stand-in for simulations; who keeps more holds more."""
    known = {}

    def simulate(model, mesh, machine, *, strategy):
        way = Way(mesh.get("dp", 1), mesh.get("tp", 1), strategy)
        draw = random.Random(zlib.crc32(repr(way).encode()))
        whole = dataclasses.replace(strategy, micro_batches=1)
        seconds = least_seconds(model, dataclasses.replace(way, strategy=whole), machine)
        seconds *= draw.uniform(1, 3) * strategy.micro_batches
        alike = dataclasses.replace(way, strategy=dataclasses.replace(strategy, zero=0, remat=True))
        draw = random.Random(zlib.crc32(repr(alike).encode()))
        kept = draw.uniform(1, 2) * (1.0 if strategy.remat else draw.uniform(1, 1.5))
        peak = int(least_bytes(model, way) * kept)
        return Drawn(seconds, peak, compute_seconds=seconds, exposed={"dp": 0.0})

    monkeypatch.setattr(way_search, "simulate", simulate)
    for way in ways():
        search = way_search.WaySearch(GPT, 1e15, H100, prune=False)
        known[way] = search.price_way(way)[:2]
    return known


@dataclasses.dataclass
class Drawn:
    seconds: float
    peak: int
    compute_seconds: float
    exposed: dict[str, float]


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_what_keeps_more_than_a_way_that_is_too_big_is_not_simulated(drawn):
    peaks = sorted(peak for _, peak in drawn.values())
    found = plan(peaks[len(peaks) // 10])
    assert found.outcomes["need more than a way that is too big"] > 0
    assert found.simulated + found.outcomes["not looked at"] < len(drawn)


def test_the_first_way_that_is_simulated_is_one_that_fits_where_few_do(drawn):
    peaks = sorted(peak for _, peak in drawn.values())
    told = []
    found = plan(peaks[4], most=24, watch=lambda *said: told.append(said))
    assert {choice.peak for choice in found.choices} <= {*peaks[:5]}
    assert [done for done, _, _ in told[: found.simulated]] == [*range(found.simulated)]
    assert all(done <= most <= 24 for done, most, _ in told)


def test_a_plan_that_was_cut_says_how_many_more_there_are(drawn):
    found = plan(most=3)
    assert found.simulated == 3 and found.outcomes["not looked at"] == len(drawn) - 3
    assert f"3 were simulated: with --most {len(drawn)} (most=) all are simulated" in str(found)
    with pytest.raises(
        StrategyError, match=r"does not fit.*holds.*not simulated: 1 were simulated"
    ):
        plan(min(peak for _, peak in drawn.values()) - 1, most=1, prune=False)


def test_each_way_ends_somehow_and_the_best_five_are_in_order(drawn):
    found = plan()
    outcomes = dict(found.outcomes)
    assert outcomes["too big"] == 0
    assert sum(outcomes.values()) == found.space == len(drawn)
    assert len(found.choices) == 5
    assert [c.seconds for c in found.choices] == sorted(c.seconds for c in found.choices)


@pytest.mark.parametrize("memory", [7 * 10**8, 12 * 10**8])
def test_each_further_micro_batch_is_in_the_peak(memory, monkeypatch):
    """A schedule that holds something of each micro-batch until the last."""

    def simulate(model, mesh, machine, *, strategy):
        seconds = strategy.batch * strategy.micro_batches * (1.0 + 1 / strategy.batch)
        peak = strategy.batch * 10**8 + 10**8 * strategy.micro_batches // 2
        return Drawn(seconds, peak * strategy.layers, seconds, {"dp": 0.0})

    monkeypatch.setattr(way_search, "simulate", simulate)
    for layers in (1, 64):
        strategy = dataclasses.replace(SMALL, layers=layers)
        found = pt.autoplan("gpt", 2, memory * layers, H100, batch=32, strategy=strategy, most=999)
        for choice in found.choices:
            exact = simulate(None, None, None, strategy=choice.way.strategy)
            assert choice.peak == exact.peak <= memory * layers
            assert choice.seconds == pytest.approx(exact.seconds)


# -- real simulations ------------------------------------------------------------------------------


@pytest.mark.slow
def test_bounds_are_below_what_a_simulation_finds():
    drawn = random.Random(1).sample(ways(), 2)
    for way in drawn:
        way = dataclasses.replace(way, strategy=dataclasses.replace(way.strategy, micro_batches=1))
        found = pt.simulate("gpt", way.mesh, H100, strategy=way.strategy)
        assert least_seconds(GPT, way, H100) <= found.seconds
        assert least_bytes(GPT, way) <= found.peak


@pytest.mark.slow
def test_a_plan_is_at_most_three_percent_slower_than_the_best_of_all_ways(monkeypatch):
    known = {}
    price = way_search.WaySearch.price_way

    def price_once(self, way):
        if way not in known:
            known[way] = price(self, way)
        return known[way]

    monkeypatch.setattr(way_search.WaySearch, "price_way", price_once)
    whole = pt.autoplan("gpt", 2, 1e12, H100, batch=2, strategy=SMALL, most=99, prune=False)
    assert whole.simulated == whole.space == len(known) > 2 * way_search.MOST
    peaks = sorted(one.peak for one in known.values())
    for memory in [peaks[len(peaks) * k // 12] for k in range(12)]:
        best = min(one.seconds for one in known.values() if one.peak <= memory)
        plan = pt.autoplan("gpt", 2, memory, H100, batch=2, strategy=SMALL)
        assert best <= plan.best.seconds <= 1.03 * best
        assert plan.simulated <= way_search.MOST
        assert sum(plan.outcomes.values()) == plan.space


@pytest.mark.slow
def test_a_search_reports_no_capture_of_its_simulations(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    pt.simulate("gpt", {"dp": 2}, H100, strategy=SMALL)
    assert "is captured in its first call" in capsys.readouterr().err
    pt.autoplan("gpt", 2, machine=H100, strategy=SMALL, most=1)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_plan_says_what_wins_why_and_the_code_that_runs_it():
    found = plan(most=2)
    assert len(found.choices) == 2 and found.outcomes["not looked at"] > 0
    said = str(found)
    assert "the runner-up loses" in said and "pt.init_device_mesh" in said


@pytest.mark.parametrize(
    ("model", "plan"),
    [("gpt", "pt.plans.gpt("), ("mpt-7b", "pt.plans.gpt("), ("own", "shape.plan(")],
)
def test_the_code_names_the_plan_of_the_model(model, plan, monkeypatch):
    shape = EXAMPLES["moe"] if model == "own" else shape_of(model)
    way = Way(1, 2, SMALL)
    monkeypatch.setattr(
        way_search.WaySearch,
        "run",
        lambda self, ways, most: (way_search.PlannedWay(way, 1.0, 1, {}, None),),
    )
    found = pt.autoplan(shape, 2, machine=H100, strategy=SMALL)
    assert f"pt.parallelize(model, mesh, {plan}sequence=False))" in found.code


# -- the examples of the bench ---------------------------------------------------------------------


def test_which_blocks_are_made_again_is_said_of_ways_with_remat_alone():
    ways = ways_of(EXAMPLES["gpt"], 2, 2, H100, pt.Strategy(remat_every=2))
    assert {(way.strategy.remat, way.strategy.remat_every) for way in ways} == {
        (True, 2),
        (False, 1),
    }


def test_ways_of_a_model_are_those_that_it_has():
    digits = list(ways_of(EXAMPLES["cnn"], 4, 16, H100, pt.Strategy()))
    assert digits and {(way.tp, way.strategy.remat) for way in digits} == {(1, False)}
    experts = list(ways_of(EXAMPLES["moe"], 4, 16, H100, pt.Strategy()))
    assert {way.tp for way in experts} == {1, 2, 4}
    assert not any(way.strategy.sequence or way.strategy.remat for way in experts)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_a_way_that_is_planned_runs_and_sends_what_was_simulated(name):
    mesh = {"gpt": (2, 1), "cnn": (2, 1), "llama": (1, 2), "moe": (2, 2)}[name]
    zero = 2 if mesh[0] > 1 else 0
    context = 4 if name == "moe" else None  # a graph has each step of its recurrent layer
    strategy = pt.Strategy(zero, remat=False, batch=4, precision="float32", context=context)
    way = Way(*mesh, strategy)
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
        ({"model": "gpt", "memory": "80 cups"}, "not an amount of memory"),
        *(
            ({"model": "gpt", "memory": memory}, "not an amount of memory")
            for memory in (".", "0", "-1GB", "80 gb of it", 0, -1, math.nan, math.inf)
        ),
        ({"model": "gpt", "ranks": 7, "batch": 3}, "no mesh of 7 ranks"),
        ({"model": None}, "model is None: a name of partita.predict.MODELS, or a ModelShape"),
        ({"model": ["gpt"]}, "model is a list: a name"),
        ({"model": torch.nn.Linear(2, 2)}, "model is a Linear: a name"),
        ({"model": "gpt", "memory": True}, "memory is True: bytes as a number, or text"),
        ({"model": "gpt", "memory": [80]}, "memory is a list: bytes as a number, or text"),
        ({"model": "gpt", "memory": b"80GB"}, "memory is b'80GB': bytes as a number"),
        ({"model": "gpt", "memory": 10**400}, "not an amount of memory"),
        ({"model": "gpt", "ranks": "2"}, "ranks is '2': a whole number"),
        ({"model": "gpt", "ranks": None}, "ranks is None: a whole number"),
        ({"model": "gpt", "batch": torch.ones(2)}, "batch is a Tensor: a whole number"),
        ({"model": "gpt", "strategy": {"layers": 1}}, "strategy is a dict: a pt.Strategy"),
        ({"model": "gpt", "prune": "no"}, "prune is 'no': True or False"),
        ({"model": "gpt", "watch": True}, "watch is True: a function"),
        *(
            (
                {"model": "gpt", "strategy": pt.Strategy(**{what: value})},
                f"{what}={value}, which is",
            )
            for what, value in (
                ("zero", 1),
                ("remat", False),
                ("sequence", True),
                ("batch", 4),
                ("micro_batches", 2),
            )
        ),
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


# -- the program of the winner ---------------------------------------------------------------------

TINY = pt.Strategy(layers=1, context=16, remat=False)
OWN = ("cnn", "llama")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("gpt", Way(2, 2, dataclasses.replace(TINY, zero=1, sequence=True, micro_batches=2))),
        ("gpt", Way(2, 1, dataclasses.replace(TINY, zero=3, remat=True, batch=2))),
        ("gpt", Way(1, 2, dataclasses.replace(TINY, zero=0, precision="float32"))),
        ("cnn", Way(2, 1, pt.Strategy(zero=2, remat=False, batch=4))),
        ("llama", Way(1, 2, dataclasses.replace(TINY, zero=0, sequence=True, micro_batches=2))),
    ],
)
def test_the_printed_program_runs_as_it_stands_and_is_what_was_simulated(name, way):
    shape = EXAMPLES[name] if name in OWN else shape_of(name)
    blocking = dataclasses.replace(H100, overlaps=False)
    simulated = pt.simulate(shape, way.mesh, blocking, strategy=way.strategy)
    program = compile(write_code(shape, way), "plan", "exec")

    def run(mesh):
        names = {"shape": shape} if name in OWN else {}
        with pt.ledger() as log:
            exec(program, names)
        sent: dict[str, int] = {}
        for move in log.moves:
            axes = " ".join(move.axes)
            sent[axes] = sent.get(axes, 0) + move.nbytes
        return sent, names["step"].memory.total_peak, names["loss"].full_tensor().isfinite()

    with pt.ranks(**way.mesh) as world:
        for sent, peak, is_finite in world.run(run):
            assert is_finite and sent == simulated.nbytes and peak == simulated.peak


def test_the_options_of_partita_train_are_those_of_the_way(capsys):
    strategy = dataclasses.replace(
        TINY, zero=2, remat=True, sequence=True, batch=2, micro_batches=4
    )
    command = train_command(GPT, Way(2, 4, strategy))
    assert main([*command.split()[1:], "--print-config"]) == 0
    options = Options(**options_in(capsys.readouterr().out, "the printed options"))
    options.check()
    assert options.mesh == (("dp", 2), ("tp", 4)) and options.batch == 16
    assert (options.accumulate, options.zero, options.sp, options.remat) == (4, 2, True, "blocks")
    assert (options.layers, options.width, options.heads, options.context) == (1, 256, 4, 16)
    assert options.dtype == "bf16" and options.compile
    assert not train_command(shape_of("llama3-8b"), Way(2, 1, TINY))


# -- bounds of one's own models --------------------------------------------------------------------


class OwnBlock(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class OwnModel(torch.nn.Module):
    def __init__(self, layers, kind, width=64):
        super().__init__()
        self.kind = kind
        self.embed, self.head = torch.nn.Embedding(256, width), torch.nn.Linear(width, 256)
        self.blocks = torch.nn.ModuleList(OwnBlock(width) for _ in range(layers))
        self.unused = torch.nn.Linear(width, 64 * width) if kind == "unused" else None
        if kind == "frozen":
            self.blocks.requires_grad_(False)
        if kind == "bfloat16":
            self.bfloat16()

    def forward(self, tokens):
        x = self.embed(tokens)
        y = x.mean(1, keepdim=True) if self.kind == "pooled" else x
        for block in self.blocks:
            y = block(y)
        return self.head(x + y if self.kind == "pooled" else y)


def own_shape(kind, context=32):
    def split(sequence=False):
        return {"blocks.*.up.*": {"tp": pt.Shard(0)}, "blocks.*.down.weight": {"tp": pt.Shard(1)}}

    return ModelShape(
        make=lambda layers, context: OwnModel(layers, kind),
        layers=2,
        width=64,
        heads=4,
        groups=4,
        context=context,
        vocab=256,
        plan=split,
        name=kind,
        has_sequence=False,
        sums=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "frozen", "bfloat16", "pooled", "unused"])
def test_a_bound_is_one_whatever_the_model_is(kind):
    # So slow a processor, and links, that what a bound counts is most of what is simulated.
    slow = dataclasses.replace(H100, flops=dict.fromkeys(H100.flops, 1e9), kernel_seconds=1e-9)
    slow_links = dataclasses.replace(slow, links={"dp": Link(1e-9, 1e5), "tp": Link(1e-9, 1e5)})
    shape = own_shape(kind, context=512 if kind == "pooled" else 32)
    precision = "float32" if kind == "bfloat16" else "bfloat16"
    found = [*ways_of(shape, 2, 4, H100, pt.Strategy(precision=precision))]
    nearest = 0.0
    for way in found[::3]:  # of each stage, with one, two and four micro-batches
        program, _, unread = capture_model(shape, way.mesh, way.strategy)
        for machine in (H100, slow, slow_links):
            simulated = simulate_program(program, way.mesh, machine, unread=unread)
            least = least_seconds(shape, way, machine)
            assert least <= simulated.seconds * (1 + 1e-9)
            nearest = max(nearest, least / simulated.seconds)
            assert least_bytes(shape, way) <= simulated.peak
    assert nearest > 0.5


def test_a_model_that_cannot_run_without_memory_has_bounds_of_its_weights_alone():
    shape = dataclasses.replace(
        own_shape("plain"), loss=lambda result, targets: result.sum().item()
    )
    way = Way(2, 1, pt.Strategy(zero=1, remat=False))
    elements = sum(p.numel() for p in OwnModel(2, "plain").parameters())
    assert least_bytes(shape, way) == 4 * elements
    assert least_bytes(own_shape("plain"), way) == 4 * elements + 8 * elements / 2
    assert least_seconds(shape, way, H100) == 0
