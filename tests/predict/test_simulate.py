"""Are predicted times, bytes and memory those that the formulas, ledgers and schedules give?"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import partita as pt
from partita.bench.published import RUNS, tune_matmul
from partita.graph.memory import scheduled
from partita.layout import LayoutError
from partita.predict.calibrate import machine_toml
from partita.predict.machine import (
    Link,
    Machine,
    MachineError,
    MeasuredCurve,
    collective_bytes,
    collective_seconds,
    load_machine,
    shipped_machines,
)
from partita.predict.simulate import capture_model, count_flops, simulate_program
from partita.predict.strategy import MODELS, ModelShape, Strategy, StrategyError

MACHINES = Path(__file__).parents[2] / "partita/predict/machines"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1024])
@pytest.mark.parametrize(
    ("kind", "messages", "share"),
    [
        ("all_gather", lambda n: n - 1, lambda n: (n - 1) / n),
        ("reduce_scatter", lambda n: n - 1, lambda n: (n - 1) / n),
        ("all_reduce", lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
        ("all_to_all", lambda n: n - 1, lambda n: (n - 1) / n),
        ("send", lambda n: int(n > 1), lambda n: int(n > 1)),
    ],
)
def test_with_unit_latency_and_bandwidth_a_time_is_the_ring_formula(kind, messages, share, ranks):
    whole = 840.0 * 2**20  # so many bytes that rings are quicker than trees, of all-reduces too
    sent = collective_bytes(kind, ranks, whole)
    assert sent == pytest.approx(share(ranks) * whole, rel=1e-12)
    assert collective_seconds(kind, ranks, sent, Link(1.0, 1.0)) == messages(ranks) + sent


@pytest.mark.parametrize(("ranks", "levels"), [(2, 1), (3, 2), (8, 3), (1023, 10), (1024, 10)])
def test_an_all_reduce_of_few_bytes_goes_up_trees_and_down_again(ranks, levels):
    sent = collective_bytes("all_reduce", ranks, 1.0)
    slow = Link(1000.0, 1.0)  # so that messages cost more than bytes
    ring = 2 * (ranks - 1) * 1000 + sent
    expected = min(ring, 2 * levels * 1000 + 2.0)
    assert collective_seconds("all_reduce", ranks, sent, slow) == pytest.approx(expected, rel=1e-12)
    assert (expected < ring) == (ranks > 3)
    gathered = collective_seconds("all_gather", ranks, sent, slow)
    assert gathered == (ranks - 1) * 1000 + sent  # no tree: what is gathered differs


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_gather_of_many_hosts_is_not_as_slow_as_a_ring_of_them(kind):
    slow = Link(1000.0, 1.0)  # so that messages cost more than bytes
    sent = collective_bytes(kind, 1024, 1024.0)
    ring = collective_seconds(kind, 1024, sent, slow)
    assert ring == 1023 * 1000.0 + sent
    found = collective_seconds(kind, 1024, sent, slow, each_on_its_host=True)
    assert found == pytest.approx((10 + 1024 / 5) * 1000.0 + sent / 0.75)
    # Many bytes go as fast along a ring, whose bandwidth is whole.
    many = collective_bytes(kind, 8, 1e9)
    alone = collective_seconds(kind, 8, many, slow, each_on_its_host=True)
    assert alone == collective_seconds(kind, 8, many, slow)


@pytest.mark.parametrize(
    ("axes", "mesh", "is_alone"),
    [
        (("dp",), {"dp": 16, "tp": 8}, True),
        (("dp",), {"dp": 16, "tp": 16}, True),  # rank 0 of a ring's hosts, or rank 8
        (("dp",), {"dp": 16, "tp": 4}, False),
        (("dp",), {"dp": 16}, False),
        (("tp",), {"dp": 16, "tp": 8}, False),
        (("dp", "tp"), {"dp": 16, "tp": 8}, False),
        (("dp",), {"dp": 16, "tp": 6}, False),
    ],
)
def test_who_has_a_host_to_himself_is_seen_by_the_mesh(axes, mesh, is_alone):
    assert load_machine("h100").is_each_on_its_host(axes, mesh) is is_alone
    given = dataclasses.replace(load_machine("h100"), links={" ".join(axes): Link(1.0, 1.0)})
    assert not given.is_each_on_its_host(axes, mesh)


def test_a_kind_of_collective_that_is_not_is_refused():
    with pytest.raises(ValueError, match="no collective 'gossip'"):
        collective_seconds("gossip", 4, 1.0, Link(1.0, 1.0))


# -- machines --------------------------------------------------------------------------------------


def test_the_shipped_machines_are_read_and_name_their_sources():
    assert shipped_machines() == ["a100", "h100", "h200"]
    for name in shipped_machines():
        assert "nvidia.com" in load_machine(name).source
    assert load_machine("h100").flops["bfloat16"] == 989e12
    assert load_machine("h100").host == Link(2e-6, 450e9)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("fuses = true\n", "", "fuses is missing"),
        ("fuses = true", "fuses = true\ncolour = 1", "colour is not known"),
        ('"450 GB/s"', '"450 GB"', "host.bandwidth is '450 GB', not an amount of bytes per second"),
        ('seconds = "2 us"', 'seconds = "-2 us"', "kernel_seconds is '-2 us': seconds are above 0"),
        ("matmul = 0.75", "matmul = 75", "efficiency.matmul is 75, not a part of a peak"),
        ("ranks_per_host = 8", "ranks_per_host = 0", "ranks_per_host is 0"),
        ('"80 GB"', "true", "memory_bytes is True, not an amount of bytes"),
        ('"80 GB"', '"8.0.0 GB"', "memory_bytes is '8.0.0 GB', which has no number"),
        ("[host]", "[hosts]", "host is missing"),
        ("fuses = true", "fuses = ", "Invalid"),
        ("bfloat16 =", "bf16 =", "flops.bf16 is not a dtype of torch"),
        ("\nfloat16 = ", "\nhalf = ", "flops.half is not a dtype of torch"),
        ("[host]", "[kernels.gemm]\namounts=[0]\nseconds=[1]\n[host]", "kernels.gemm is not known"),
        (
            "[host]",
            "[collectives.all_gather-x]\namounts=[0]\nseconds=[1]\n[host]",
            "collectives.all_gather-x is not known",
        ),
        (
            "[host]",
            "[collectives.gossip-4]\namounts=[0]\nseconds=[1]\n[host]",
            "collectives.gossip-4 is not known",
        ),
        ("[host]", "[links.dp]\nlatency = 1\n[host]", "links.dp.bandwidth is missing"),
        ("[host]", "[links]\ndp = 1\n[host]", "links.dp is a table"),
    ],
)
def test_a_wrong_machine_file_is_one_error_that_names_the_key(old, new, says, tmp_path):
    text = (MACHINES / "h100.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(MachineError, match=says) as caught:
        load_machine(path)
    assert str(path) in str(caught.value)


def test_a_machine_that_is_not_there_is_an_error_that_names_those_that_are():
    with pytest.raises(MachineError, match="a100, h100, h200"):
        load_machine("h1000")


CURVES = """straggling = "5 %"

[kernels.arithmetic]
amounts = [100, 200, 400]
seconds = [1, 2, 2.5]
[collectives.all_gather-2]
amounts = [0]
seconds = [7]
"""


def read_with(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((MACHINES / "h100.toml").read_text().replace("[flops]", text + "\n[flops]"))
    return load_machine(path)


def test_a_machine_file_may_have_measured_curves(tmp_path):
    machine = read_with(CURVES, tmp_path)
    assert machine.straggling == 0.05
    assert [machine.kernels["arithmetic"].seconds_of(n) for n in (0, 100, 150, 300, 600)] == [
        1, 1, 1.5, 2.25, 3
    ]  # fmt: skip
    assert machine.collectives["all_gather-2"].seconds_of(1e9) == 7
    assert not load_machine("h100").kernels


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[1, 2, 2.5]", "[1, 2]", "kernels.arithmetic must have as many amounts as seconds"),
        ("[1, 2, 2.5]", '[1, 2, "3"]', "kernels.arithmetic.seconds is .* not all of it numbers"),
        ("[100, 200, 400]", "[200, 100, 400]", "must have amounts that rise"),
        ("[7]", "[0]", "collectives.all_gather-2 has seconds that are not above 0"),
        ("[7]", "[7]\nunit = 1", "collectives.all_gather-2.unit is not known"),
        ("[7]", "7", "collectives.all_gather-2.seconds is 7, not of type list"),
        ('"5 %"', '"5 m"', "straggling is '5 m', not an amount of parts"),
    ],
)
def test_a_wrong_curve_is_one_error_that_names_it(old, new, says, tmp_path):
    assert old in CURVES
    with pytest.raises(MachineError, match=says):
        read_with(CURVES.replace(old, new), tmp_path)


def test_a_machine_file_may_say_which_link_an_axis_has(tmp_path):
    links = '[links.dp]\nlatency = "1 s"\nbandwidth = "1 B/s"\n'
    links += '[links."tp dp"]\nlatency = 2\nbandwidth = 3\n'
    machine = read_with(links, tmp_path)
    assert machine.reached_link(("dp",), {"dp": 64}) == Link(1.0, 1.0)
    assert machine.reached_link(("dp", "tp"), {"dp": 8, "tp": 8}) == Link(2.0, 3.0)
    path = tmp_path / "again.toml"
    path.write_text(machine_toml(machine))
    assert load_machine(path).links == machine.links
    plain = load_machine("h100")
    assert machine.reached_link(("tp",), {"tp": 8}) == Link(2e-6, 0.8 * plain.host.bandwidth)


def test_a_ring_goes_over_the_slowest_link_that_it_crosses():
    machine = load_machine("h100")
    assert machine.link_of(("tp",), {"dp": 4, "tp": 8}) is machine.host
    assert machine.link_of(("dp",), {"dp": 4, "tp": 8}) is machine.network
    assert machine.link_of(("dp",), {"dp": 4, "tp": 2}) is machine.host


# -- steps -----------------------------------------------------------------------------------------


def make_train(mesh, stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    pt.zero(model, mesh, "dp", stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    x = pt.distribute_tensor(torch.ones(4, 8), mesh, [pt.Shard(0)])

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return pt.compile(step, backend="graph"), x


UNIT = Machine(
    "units",
    "a test",
    memory_bytes=1e9,
    memory_bandwidth=1.0,
    kernel_seconds=1.0,
    fuses=False,
    ranks_per_host=1,
    flops={"float32": 1.0},
    efficiency={"matmul": 1.0, "attention": 1.0, "memory": 1.0, "link": 1.0},
    host=Link(1.0, 1.0),
    network=Link(1.0, 1.0),
)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_bytes_on_each_axis_are_those_that_the_ledger_of_a_run_counts(stage):
    found = pt.simulate(*_dry(stage), machine=UNIT)

    def train(mesh):
        step, x = make_train(mesh, stage)
        step(x)
        with pt.ledger() as log:
            step(x)
        return log.moves

    with pt.ranks(dp=2) as world:
        moves = world.run(train)[0]
    counted: dict[str, int] = {}
    for move in moves:
        counted[" ".join(move.axes)] = counted.get(" ".join(move.axes), 0) + move.nbytes
    assert found.nbytes == counted
    assert counted["dp"] > 0


@cache
def _dry(stage, dp=2):
    mesh = pt.dry_mesh(dp=dp)
    step, x = make_train(mesh, stage)
    step(x)
    return step, mesh


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_links_of_zero_3_work_as_long_as_its_formula_says(ranks):
    # Rajbhandari et al., arXiv 1910.02054, section 7: each weight is gathered forward and again
    # backward, and each gradient is reduce-scattered; a ring of n ranks sends n - 1 messages of an
    # n-th part of the bytes. Nothing asks for x's gradient, so the first weight is not gathered
    # again, and backward never reads a bias.
    first, second = 4 * (8 * 16 + 16), 4 * (16 * 8 + 8)
    moved = [first, second, 4 * 16 * 8, second, first]
    formula = sum((ranks - 1) * (1.0 + nbytes / ranks) for nbytes in moved)

    found = pt.simulate(*_dry(3, ranks), machine=UNIT)
    assert found.link_seconds == {"dp": formula}
    assert found.nbytes == {"dp": sum((ranks - 1) * nbytes // ranks for nbytes in moved)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_links_of_data_parallelism_work_as_long_as_rings_of_all_reduces(ranks):
    gradients = 4 * (8 * 16 + 16 + 16 * 8 + 8)
    found = pt.simulate(*_dry(0, ranks), machine=UNIT)
    events = [e for e in found.timeline.events if e.stream == "dp"]
    formula = 2 * (ranks - 1) * (len(events) * 1.0 + gradients / ranks)
    assert {e.kind for e in events} == {"all_reduce"}
    assert found.link_seconds == {"dp": formula}


@pytest.mark.parametrize("figures", [(-1.0, 1e9), (float("nan"), 1e9), (0.0, 0.0), (1.0, -1.0)])
def test_a_link_that_cannot_be_is_refused(figures):
    with pytest.raises(MachineError, match=r"a (latency|bandwidth) of"):
        Link(*figures)


def test_a_given_link_is_taken_as_it_is():
    half = dataclasses.replace(
        UNIT,
        efficiency={**UNIT.efficiency, "link": 0.5},
        collectives={"all_gather-4": MeasuredCurve((0.0,), (1e-3,))},
    )
    step, mesh = _dry(3, 4)
    expected = pt.simulate(step, mesh, machine=UNIT).link_seconds
    found = pt.simulate(step, mesh, machine=half, links={"dp": Link(1.0, 1.0)})
    assert found.link_seconds == expected
    of_file = dataclasses.replace(half, links={"dp": Link(1.0, 1.0)})
    assert pt.simulate(step, mesh, machine=of_file).link_seconds == expected
    with pytest.raises(MachineError, match="a link of 'tp': the mesh has the axes dp"):
        pt.simulate(step, mesh, machine=half, links={"tp": Link(1.0, 1.0)})


@pytest.mark.slow
def test_what_was_measured_prices_a_step_and_the_roofline_the_rest():
    curve = MeasuredCurve((0.0,), (3.0,))
    measured = dataclasses.replace(
        UNIT,
        kernels={"arithmetic": curve, "view": curve},
        collectives={"all_gather-2": curve},
        straggling=0.5,
        overlaps=False,
    )
    plain = pt.simulate(*_dry(3), machine=dataclasses.replace(UNIT, overlaps=False))
    found = pt.simulate(*_dry(3), machine=measured)
    before = {event.name: event for event in plain.timeline.events}
    met = 0.0
    for event in found.timeline.events:
        if event.stream == "dp":
            computed = sum(
                e.seconds
                for e in found.timeline.events
                if e.stream == "compute" and met <= e.start < event.start
            )
            assert event.start == pytest.approx(met + computed * 1.5)
            met = event.start + event.seconds
            if event.kind == "all_gather":
                assert event.seconds == 3.0
                continue
        if event.kind in ("matmul", "reduce_scatter"):
            assert event.seconds == before[event.name].seconds


@pytest.mark.slow
def test_where_links_take_the_processor_a_sum_is_waited_for_where_it_is_read():
    # A message lasts 1000 s, a byte 1 s: of a sum the bytes stop the processor, not the messages.
    slow = {"host": Link(1e3, 1.0), "network": Link(1e3, 1.0), "overlaps": False}
    slow["kernel_seconds"] = 1e6  # so that any kernel between issue and wait lasts longer
    machine = dataclasses.replace(UNIT, **slow)
    asked = Strategy(zero=0, remat=False, layers=1, context=16, precision="float32")
    program, *_ = capture_model("gpt", {"dp": 2}, asked)
    found = simulate_program(program, {"dp": 2}, machine)
    kernels = {e.name: e for e in found.events if e.stream == "compute"}
    nodes = [*program.flat().graph.graph.nodes]
    exposed, under_way = 0.0, 0
    for event in (e for e in found.events if e.kind == "all_reduce"):
        at = next(i for i, n in enumerate(nodes) if n.name == event.name)
        (wait,) = nodes[at].users
        meanwhile = [n.name for n in nodes[at : nodes.index(wait)] if n.name in kernels]
        following = next((kernels[n.name] for n in nodes[at:] if n.name in kernels), None)
        stopped = (found.seconds if following is None else following.start) - event.start
        assert stopped == pytest.approx(event.nbytes if meanwhile else event.seconds)
        under_way += bool(meanwhile)
        exposed += 0.0 if meanwhile else event.seconds - event.nbytes
    assert under_way and sum(found.exposed.values()) == pytest.approx(exposed)


def test_a_step_is_done_when_the_slowest_rank_is():
    late = dataclasses.replace(UNIT, overlaps=False, straggling=0.5)
    found = pt.simulate(*_dry(3), machine=late)
    last = max(e.start + e.seconds for e in found.events if e.stream == "dp")
    after = sum(e.seconds for e in found.events if e.stream == "compute" and e.start >= last)
    assert after > 0 and found.seconds == pytest.approx(last + 1.5 * after)


def test_time_is_what_computes_and_what_is_exposed():
    found = pt.simulate(*_dry(3), machine=UNIT)
    assert found.seconds == pytest.approx(found.compute_seconds + sum(found.exposed.values()))
    alone = [e for e in found.timeline.events if e.stream == "compute"]
    assert all(a.start + a.seconds <= b.start + 1e-6 for a, b in itertools.pairwise(alone))


def test_work_is_that_of_the_matrix_products():
    found = pt.simulate(*_dry(0), machine=UNIT)
    # Two rows a rank: each weight is used forward and for its gradient, the second one for x's too.
    assert found.flops == found.model_flops == 2 * 2 * 8 * 16 * (2 + 3)


def test_the_peak_is_that_of_the_schedule_and_its_classes_make_it_up():
    step, mesh = _dry(3)
    blocking = dataclasses.replace(UNIT, overlaps=False)
    found = pt.simulate(step, mesh, blocking)
    assert found.peak == step.memory.total_peak == sum(found.classes.values())
    assert found.classes["weights"] == sum(
        held.nbytes for held in step.memory.held if held.kind == "parameter"
    )


class PartlyUsed(torch.nn.Module):
    """A layer, one that nothing calls, and a buffer that nothing reads."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 16), torch.nn.Linear(8, 32)
        self.register_buffer("table", torch.zeros(5))

    def forward(self, x):
        return self.used(x).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_a_rank_holds_and_no_step_reads_is_in_the_peak(stage):
    mesh = pt.dry_mesh(dp=2)
    with torch.device("meta"):
        model, local = PartlyUsed(), torch.zeros(4, 8)
    pt.zero(model, mesh, stage=stage)
    x = pt.DTensor.from_local(local, mesh, [pt.Shard(0)])
    found = pt.simulate(model, mesh, "h100", [x])
    share = 2 if stage == 3 else 1
    assert found.classes["weights"] == 4 * (8 * 16 + 16 + 8 * 32 + 32) // share + 4 * 5
    # No gradient comes to what is not called, and the optimizer keeps nothing of it.
    state = 2 * 4 * (8 * 16 + 16) // (2 if stage else 1)
    assert state <= found.classes["optimizer"] <= state + 64
    step = pt.compile(lambda x: model(x).detach(), backend="graph")
    assert pt.simulate(step, mesh, "h100", [x]).classes["weights"] == found.classes["weights"]


@pytest.mark.slow
def test_what_kernels_of_a_processor_hold_meanwhile_is_none_of_a_gpus():
    asked = Strategy(zero=3, remat=False, layers=1, context=16)
    program, *_ = capture_model("gpt", {"dp": 2}, asked)
    memory = scheduled(program)
    assert any(b.passing for b in memory.buffers)
    lasting = tuple(b for b in memory.buffers if not b.passing)
    for overlaps, buffers in ((True, lasting), (False, memory.buffers)):
        machine = dataclasses.replace(UNIT, overlaps=overlaps)
        found = simulate_program(program, {"dp": 2}, machine)
        assert found.peak == dataclasses.replace(memory, buffers=buffers).total_peak


@pytest.mark.slow
def test_a_trace_is_what_perfetto_reads(tmp_path):
    found = pt.simulate(*_dry(3), machine=UNIT)
    found.save_trace(tmp_path / "trace.json")
    told = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in told if e["ph"] == "M"} == {"compute", "dp"}
    assert len([e for e in told if e["ph"] == "X"]) == len(found.timeline.events)


# -- named models ----------------------------------------------------------------------------------

SMALL = pt.Strategy(layers=1, context=32)


@pytest.mark.slow
def test_a_named_model_is_simulated_without_memory_with_fused_attention():
    found = pt.simulate("gpt", {"dp": 512, "tp": 2}, "h100", strategy=SMALL)
    assert found.tokens == 512 * 32
    kinds = {event.kind for event in found.timeline.events}
    assert {"attention", "matmul", "all_gather", "reduce_scatter", "all_reduce"} <= kinds
    assert "MFU" in str(found) and "fits" in str(found)
    attention = [event for event in found.events if event.kind == "attention"]
    assert {event.name.removesuffix("_backward") for event in attention} == {
        "_scaled_dot_product_flash_attention"  # of the machine, not of the CPU that captured it
    }
    assert not any("for_cpu" in b.name + b.made_by for b in found.holders)


@pytest.mark.slow
def test_what_holds_and_sends_in_a_named_model_has_the_models_own_lines():
    found = pt.simulate("gpt", "dp=2,tp=2", "h100", strategy=SMALL)
    lines = {event.source.rsplit(":", 1)[0] for event in found.events if event.source}
    assert lines == {"partita/app/models/decoder.py", "partita/app/models/gpt.py",
                     "partita/predict/strategy.py"}  # fmt: skip
    assert any("decoder.py" in holder.source for holder in found.holders)
    costs = found.lines
    assert sum(line.seconds for line in costs) == pytest.approx(found.compute_seconds)
    assert round(sum(line.sent for line in costs)) == sum(found.nbytes.values())
    assert sum(line.held for line in costs) >= sum(buffer.nbytes for buffer in found.holders)
    assert costs[0].source in str(found)
    assert costs[0].source in [name for name, _, _ in found.make_run_facts().figures]


def one_step(mesh):
    layer = pt.parallelize(torch.nn.Linear(4, 4), mesh, None)

    def train_a_layer(x):
        layer(x).sum().backward()

    placements = [pt.Shard(0)] + [pt.Replicate()] * (mesh.ndim - 1)
    return train_a_layer, [pt.DTensor.from_local(torch.zeros(2, 4), mesh, placements)]


WITHOUT_BLOCKS = ModelShape(
    make=lambda layers, context: torch.nn.Linear(4, 4),
    layers=1,
    width=4,
    heads=2,
    groups=2,
    context=4,
    vocab=4,
    plan=dict,
    name="own",
    has_blocks=False,
    has_sequence=False,
)


@pytest.mark.parametrize(
    ("mesh", "options", "says"),
    [
        ({"dp": 64}, {}, "the argument mesh is dp=64, and the step's is dp=2"),
        ({"dp": 2.7}, {}, "dp is 2.7: a whole number"),
        ("dp=two", {}, "cannot read 'dp=two'"),
        ("dp=2", {"tokens": -5}, "tokens is -5"),
        ("dp=2", {"links": {"dp": 1}}, "a link of 'dp' is 1"),
    ],
)
def test_what_does_not_go_with_a_step_is_one_error(mesh, options, says):
    step, args = one_step(pt.dry_mesh(dp=2))
    with pytest.raises((ValueError, LayoutError), match=says):
        pt.simulate(step, mesh, UNIT, args, **options)


class TestTheMeshOfAStep:
    def test_each_axis_that_is_said_is_one_that_its_tensors_lie_on(self):
        step, args = one_step(pt.dry_mesh(dp=2))
        for mesh in ({"dp": 2, "tp": 4}, "tp=4,dp=2", pt.dry_mesh(dp=2, tp=4)):
            with pytest.raises(ValueError, match=r"no tensor of the step lies along tp: .* dp=2"):
                pt.simulate(step, mesh, UNIT, args)

    def test_its_axes_are_said_in_their_order_which_tells_neighbours(self):
        step, args = one_step(pt.dry_mesh(dp=2, tp=3))
        with pytest.raises(ValueError, match="mesh is tp=3,dp=2, and the step's is dp=2,tp=3"):
            pt.simulate(step, "tp=3,dp=2", UNIT, args)
        assert pt.simulate(step, "dp=2,tp=3", UNIT, args).mesh == {"dp": 2, "tp": 3}

    def test_a_step_without_dtensors_is_of_one_rank(self):
        layer = torch.nn.Linear(4, 4)

        def step(x):
            layer(x).sum().backward()

        with pytest.raises(ValueError, match="no tensor of the step lies on a mesh"):
            pt.simulate(step, {"dp": 2}, UNIT, [torch.zeros(2, 4)])
        found = pt.simulate(step, None, UNIT, [torch.zeros(2, 4)])
        assert found.mesh == {} and found.seconds > 0

    def test_parts_of_the_mesh_that_is_given_are_its_own(self):
        whole = pt.dry_mesh(dp=2, tp=4)
        for part in (whole["dp"], whole["dp", "tp"]["dp"], whole["tp", "dp"]["dp"]):
            step, args = one_step(part)
            found, alone = (pt.simulate(step, mesh, UNIT, args) for mesh in (whole, part))
            assert found.mesh == {"dp": 2, "tp": 4} and alone.mesh == {"dp": 2}
            assert found.seconds == alone.seconds and found.nbytes == alone.nbytes
            with pytest.raises(ValueError, match="the mesh object that contains it"):
                pt.simulate(step, {"dp": 2, "tp": 4}, UNIT, args)

    def test_parts_that_have_all_axes_together_are_on_all_of_them(self):
        whole = pt.dry_mesh(dp=2, tp=2)
        layers = [pt.parallelize(torch.nn.Linear(4, 4), whole[axis], None) for axis in ("dp", "tp")]

        def step(x, y):
            layers[0](x).sum().backward()
            layers[1](y).sum().backward()

        args = [pt.zeros(2, 4, device_mesh=whole[axis]) for axis in ("dp", "tp")]
        assert pt.simulate(step, "dp=2,tp=2", UNIT, args).mesh == {"dp": 2, "tp": 2}


def test_a_step_is_called_by_its_name_and_one_that_does_nothing_costs_nothing():
    step, args = one_step(pt.dry_mesh(dp=2))
    assert pt.simulate(step, "dp=2", UNIT, args).title.startswith("train_a_layer on dp=2")
    found = pt.simulate(lambda x: x, "dp=2", UNIT, args, tokens=5)
    assert found.seconds == found.mfu == 0 and found.tokens_per_second is None and str(found)
    with pytest.raises(ValueError, match="the model has no parameters"):
        pt.simulate(torch.nn.ReLU(), "dp=2", UNIT, args)
    frozen = torch.nn.Linear(4, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="none of the model's parameters requires a gradient"):
        pt.simulate(frozen, "dp=2", UNIT, args)


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, (1, 2)])
def test_a_model_that_gives_no_tensor_gives_no_loss(given):
    class Silent(torch.nn.Linear):
        def forward(self, x):
            super().forward(x)
            return given

    mesh = pt.dry_mesh(dp=2)
    model = pt.parallelize(Silent(4, 4), mesh)
    x = pt.zeros(2, 4, device_mesh=mesh, placements=[pt.Shard(0)])
    with pytest.raises(StrategyError, match=r"the model returns (None|a tuple), not its loss"):
        pt.simulate(model, mesh, UNIT, [x])


def test_a_compiled_step_without_arguments_need_not_have_run():
    step, args = one_step(pt.dry_mesh(dp=2))
    compiled = pt.compile(lambda: step(args[0]))
    assert pt.simulate(compiled, "dp=2", UNIT).seconds > 0


def test_a_machine_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((MACHINES / "h100.toml").read_text(), encoding="utf-8-sig")
    assert load_machine(path) == load_machine("h100")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"args": [torch.zeros(2)]}, "args have no effect on a model .*batch=.*context="),
        ({"tokens": 64}, "tokens has no effect on a model that is simulated by its name"),
        (
            {"strategy": pt.Strategy(zero=1), "mesh": "tp=2"},
            "zero=1 has no effect: .* mesh is tp=2",
        ),
        ({"strategy": pt.Strategy(sequence=True)}, "sequence=True has no effect: .* is dp=2"),
        (
            {"strategy": pt.Strategy(sequence=True), "mesh": "dp=2,tp=1"},
            "sequence=True has no effect: sequences are split over tp",
        ),
        (
            {"strategy": pt.Strategy(remat=False, remat_every=2)},
            "remat_every=2 has no effect: remat is False",
        ),
        (
            {"strategy": pt.Strategy(remat_every=2), "step_or_model": WITHOUT_BLOCKS},
            "remat_every=2 has no effect: own says has_blocks=False",
        ),
        (
            {
                "strategy": pt.Strategy(sequence=True, remat=False),
                "step_or_model": WITHOUT_BLOCKS,
                "mesh": "tp=2",
            },
            "sequence=True has no effect: own says has_sequence=False",
        ),
        ({"step_or_model": one_step, "strategy": SMALL}, "strategy has no effect on one_step"),
        (
            {"step_or_model": torch.nn.Linear(2, 2), "strategy": SMALL},
            "strategy has no effect on Linear, which is spread already",
        ),
    ],
)
def test_an_argument_that_has_no_effect_is_refused(asked, says):
    with pytest.raises(StrategyError, match=says):
        pt.simulate(**({"step_or_model": "gpt", "mesh": "dp=2"} | asked))


def make_nothing():
    pass


def make_rows(x):
    yield x


async def fetch_rows(x):
    return x


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"step_or_model": None}, "step_or_model is None: a step, a module, the name"),
        ({"step_or_model": torch.zeros(2)}, "step_or_model is a Tensor: a step"),
        ({"step_or_model": torch.nn.Linear}, "step_or_model is the class Linear: a step"),
        ({"step_or_model": make_rows}, "make_rows is a generator or a coroutine function"),
        ({"step_or_model": fetch_rows}, "fetch_rows is a generator or a coroutine function"),
        ({"step_or_model": pt.compile(make_rows)}, "make_rows is a generator"),
        ({"mesh": 8}, "mesh is 8: a mesh, "),
        ({"mesh": [("dp", 2)]}, "mesh is a list: a mesh, "),
        ({"mesh": {0: 2}}, "an axis of the mesh is 0: a name"),
        ({"mesh": {"dp": "2"}}, "dp is '2': a whole number"),
        ({"mesh": {"dp": None}}, "dp is None: a whole number"),
        ({"machine": None}, "machine is None: the name of a shipped one"),
        ({"machine": {"name": "mine"}}, "machine is a dict: the name"),
        ({"machine": b"h100"}, "machine is b'h100': the name"),
        ({"machine": "a" * 5000}, "no machine 'aaaa"),
        ({"machine": "h100\0"}, "no machine 'h100"),
        (
            {"step_or_model": one_step, "args": torch.zeros(3)},
            "args is a Tensor: a list or a tuple",
        ),
        ({"step_or_model": one_step, "args": None}, "args is None: a list or a tuple"),
        ({"step_or_model": one_step, "args": (x for x in [1])}, "args is a generator: a list"),
        ({"step_or_model": make_nothing, "args": [1]}, "args do not fit make_nothing: too many"),
        ({"step_or_model": torch.nn.Linear(2, 2)}, "args do not fit Linear: missing .* 'input'"),
        ({"step_or_model": pt.compile(one_step)}, "args do not fit .*one_step: missing .* 'mesh'"),
        ({"strategy": pt.Strategy(batch=2**60)}, "more than a tensor can hold"),
        ({"strategy": pt.Strategy(context=10**30)}, "more than a tensor can hold"),
        ({"step_or_model": "gpt" * 99}, "no model 'gptgpt.*gpt…: gpt, "),
        ({"links": {"dp dp": Link(1.0, 1.0)}}, "a link of 'dp dp' names an axis twice"),
        ({"strategy": {"zero": 1}}, "strategy is a dict: a pt.Strategy"),
        ({"strategy": "zero"}, "strategy is 'zero': a pt.Strategy"),
        ({"step_or_model": one_step, "tokens": "many"}, "tokens is 'many': a whole number"),
        ({"links": Link(1.0, 1.0)}, "links is a Link: a link by axes"),
        ({"links": [("dp", 1)]}, "links is a list: a link by axes"),
        ({"links": {0: Link(1.0, 1.0)}}, "a link of 0: axes as text"),
        ({"links": {"dp": "2us,1GB/s"}}, "a link of 'dp' is '2us,1GB/s': write Link"),
        (
            {"links": {"dp tp": Link(1.0, 1.0), "tp dp": Link(1.0, 1.0)}, "mesh": "dp=2,tp=2"},
            "links has two for the axes 'tp dp'",
        ),
    ],
)
def test_an_argument_of_another_type_is_one_error_that_names_it(asked, says):
    with pytest.raises((StrategyError, MachineError), match=says):
        pt.simulate(**({"step_or_model": "gpt", "mesh": "dp=2"} | asked))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"precision": torch.bfloat16}, "precision is torch.bfloat16: 'bfloat16' or 'float32'"),
        ({"precision": None}, "precision is None: 'bfloat16' or 'float32'"),
        ({"zero": "3"}, "zero is '3': a stage, 0 to 3"),
        ({"zero": True}, "zero is True: a stage"),
        ({"zero": 1.0}, "zero is 1.0: a stage"),
        ({"remat": "no"}, "remat is 'no': True or False"),
        ({"sequence": 1}, "sequence is 1: True or False"),
        ({"context": "64"}, "context is '64': a whole number"),
        ({"batch": torch.tensor(2)}, "batch is a Tensor: a whole number"),
    ],
)
def test_a_strategy_with_what_is_of_another_type_is_never_made(given, says):
    with pytest.raises(StrategyError, match=says):
        pt.Strategy(**given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"make": torch.nn.Linear(2, 2), "layers": 0}, "layers is 0"),
        ({"make": None}, "make is None: a function of layers and context"),
        ({"plan": {}}, "plan is a dict: a function that takes sequence="),
        ({"heads": 1.5}, "heads is 1.5: a whole number"),
        ({"sums": -1}, "sums is -1: a whole number, at least 0"),
        ({"loss": "mse"}, "loss is 'mse': a function"),
        ({"has_blocks": 0}, "has_blocks is 0: True or False"),
        ({"name": 3}, "name is 3: a text"),
    ],
)
def test_a_shape_with_what_is_of_another_type_is_never_made(given, says):
    with pytest.raises(StrategyError, match=says):
        dataclasses.replace(WITHOUT_BLOCKS, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"memory_bytes": "80GB"}, "memory_bytes is '80GB': a number"),
        ({"kernel_seconds": -1}, "kernel_seconds is -1: a number, at least 0"),
        ({"flops": {}}, "flops names no dtype"),
        ({"flops": {"float32": "1 TFLOP/s"}}, r"flops\['float32'\] is '1 TFLOP/s': a number"),
        ({"flops": {torch.float32: 1.0}}, "a key of flops is a dtype: a text"),
        ({"efficiency": {"matmul": 0.5}}, "efficiency has no 'attention'"),
        ({"links": {"dp": 3}}, r"links\['dp'\] is 3: a Link"),
        ({"host": None}, "host is None: a Link"),
        ({"ranks_per_host": 0}, "ranks_per_host is 0: a whole number"),
        ({"fuses": "yes"}, "fuses is 'yes': True or False"),
    ],
)
def test_a_machine_with_what_is_of_another_type_is_never_made(given, says):
    with pytest.raises(MachineError, match=says):
        dataclasses.replace(UNIT, **given)


def test_what_a_shape_makes_is_a_module_and_has_the_blocks_that_it_says():
    shape = dataclasses.replace(WITHOUT_BLOCKS, make=lambda layers, context: None)
    with pytest.raises(StrategyError, match="what make gives is None: a module"):
        pt.simulate(shape, {"dp": 2})
    shape = dataclasses.replace(WITHOUT_BLOCKS, has_blocks=True)
    with pytest.raises(StrategyError, match="own has no `blocks` to be recomputed"):
        pt.simulate(shape, {"dp": 2})


def test_a_name_that_a_table_shows_is_one_line_and_moves_no_cursor(tmp_path):
    step, args = one_step(pt.dry_mesh(dp=2))
    step.__name__ = "step\x1b[2J\nfree"
    machine = dataclasses.replace(UNIT, name="mine\x1b[31m")
    found = pt.simulate(step, "dp=2", machine, args)
    assert "\x1b" not in str(found) and r"step\x1b[2J\nfree on dp=2 of mine\x1b[31m" in str(found)
    path = tmp_path / "page.html"
    found.report(path)
    page = path.read_text()
    assert "\x1b[2J" not in page and r"<h1>step\x1b[2J" in page
    with pytest.raises(ValueError, match="each of the others is None: a Simulation"):
        found.report(path, None)


@pytest.mark.parametrize(
    ("model", "mesh", "strategy", "says"),
    [
        ("llama4", {"dp": 2}, SMALL, "no model 'llama4': gpt"),
        ("gpt", {"tp": 3}, SMALL, "tp=3 does not divide the 4 heads of gpt"),
        ("gpt", {"pp": 2}, SMALL, "pp=2 is not an axis"),
        ("gpt", {}, SMALL, "at least one axis"),
        ("gpt", {"dp": 2}, pt.Strategy(zero=4), "stages 0 to 3, not 4"),
        ("gpt", {"dp": 2}, pt.Strategy(precision="int8"), "precision is 'int8'"),
    ],
)
def test_what_cannot_be_simulated_is_one_clear_error(model, mesh, strategy, says):
    with pytest.raises(ValueError, match=says):
        pt.simulate(model, mesh, "h100", strategy=strategy)


@pytest.mark.parametrize("what", ["batch", "micro_batches", "remat_every", "context", "layers"])
@pytest.mark.parametrize("count", [0, -2, 1.5, True])
def test_a_strategy_with_what_is_no_count_is_never_made(what, count):
    with pytest.raises(ValueError, match=f"{what} is {count}: a whole number, at least 1"):
        pt.Strategy(**{what: count})


@pytest.mark.slow
def test_the_command_prints_the_table(capsys):
    from partita.cli import main

    asked = "simulate --model gpt --mesh dp=8 --layers 1 --context 32"
    assert main(asked.split()) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert main(f"{asked} --link dp=1s,1GB/s".split()) == 0
    assert "exposed dp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("simulate --model gpt --mesh tp=3", "does not divide"),
        ("simulate --model gpt --mesh dp=0", "dp=0 in the mesh 'dp=0' has no rank"),
        ("simulate --model gpt --mesh dp=\N{SUPERSCRIPT TWO}", "cannot read"),
        ("simulate --model gpt --mesh dp=99999999999999999999", "ranks is too large"),
        (
            "simulate --model gpt --mesh dp=2 --trace nowhere/x.json",
            "is not a file in an existing folder",
        ),
        ("simulate --model gpt --mesh dp=2 --link dp=1s", "'dp=1s' is not a link: write dp=10us"),
        ("simulate --model gpt --mesh dp=2 --link dp=1s,1s", "dp.bandwidth is '1s', not an amount"),
        ("simulate --model gpt --mesh dp=2 --link pp=1s,1B/s", "a link of 'pp': the mesh has"),
        ("simulate --model gpt --mesh tp=2 --zero 3", "--zero has no effect on tp=2"),
        ("simulate --model gpt --mesh dp=2 --sequence", "sequence=True has no effect"),
        ("simulate --model gpt --mesh dp=2 --link dp=1s,1B/s --link dp=2s,1B/s", "is given two"),
        ("explain torch.exp(f32[4]) --mesh rank=2", "no axis is called 'rank' here"),
        ("explain torch.exp(f32[4]) --mesh dp=2,latency=2", "no axis is called 'latency' here"),
        ("simulate --model gpt --mesh dp=2 --batch 99999999999999999998", "than a tensor can hold"),
        ("simulate --model gpt --mesh dp=2 --batch 3", "--batch 3 does not divide into 1 micro"),
        ("simulate --model gpt --mesh tp=2,dp=2 --batch 6 --micro-batches 2", "--batch 8 does"),
        ("calibrate --ranks 99999999", "--ranks 99999999: at least 1, at most"),
        ("calibrate --device cuda", "--device cuda: this torch is built without CUDA"),
        ("plan --model gpt --ranks 2 --memory 80", "80 is without a unit"),
        ("calibrate --out nowhere/x.toml", "is not a file in an existing folder"),
    ],
)
def test_a_wrong_command_is_one_line_at_once(asked, says, capsys):
    from partita.cli import main

    assert main(asked.split()) == 2
    told = capsys.readouterr()
    assert says in told.err and not told.out


@pytest.mark.slow
def test_a_batch_is_that_of_all_ranks_in_every_command(capsys):
    from partita.cli import main

    def tokens(*options):
        main(["simulate", "--model", "gpt", "--layers", "1", "--context", "32", *options])
        return re.search(r"([\d,]+) a step, all ranks together", capsys.readouterr().out)[1]

    assert tokens("--mesh", "dp=2", "--batch", "8") == tokens("--mesh", "dp=4", "--batch", "8")
    assert tokens("--mesh", "dp=2", "--batch", "8", "--micro-batches", "2") == f"{8 * 32}"


def test_a_ring_within_a_host_takes_its_link_only_where_every_such_ring_does():
    machine = load_machine("h100")
    assert machine.ranks_per_host == 8
    assert machine.link_of(["tp"], {"dp": 4, "tp": 8}) is machine.host
    assert machine.link_of(["tp"], {"dp": 4, "tp": 6}) is machine.network  # ranks 6 to 11
    assert machine.link_of(["tp"], {"tp": 6}) is machine.host
    assert machine.link_of(["dp"], {"dp": 2, "tp": 4}) is machine.host
    assert machine.link_of(["dp"], {"dp": 4, "tp": 4}) is not machine.host


@pytest.mark.parametrize(
    ("axes", "mesh", "rings"),
    [
        (["dp"], {"dp": 64}, 8),
        (["dp"], {"dp": 16, "tp": 4}, 2),
        (["dp"], {"dp": 16, "tp": 8}, 1),
        (["dp", "tp"], {"dp": 16, "tp": 8}, 8),
        (["dp"], {"dp": 4, "pp": 4, "tp": 2}, 1),
        (["pp"], {"dp": 4, "pp": 8, "tp": 2}, 4),
        (["dp"], {"dp": 12}, 1),  # four of them on the second host
        (["tp"], {"dp": 4, "tp": 6}, 1),
    ],
)
def test_each_rank_of_a_host_sends_by_its_own_port_to_the_next_host(axes, mesh, rings):
    machine = load_machine("a100")
    found = machine.link_of(axes, mesh)
    assert found == Link(machine.network.latency, rings * machine.network.bandwidth)
    fast = dataclasses.replace(machine, network=machine.host)
    assert fast.link_of(axes, mesh).bandwidth == machine.host.bandwidth  # it passes the host, too


def test_causal_attention_is_told_by_its_argument_alone():
    graph = torch.fx.Graph()
    like = torch.empty(1, 2, 16, 8, device="meta")
    nodes = [graph.placeholder(name) for name in "qkv"]
    for node in nodes:
        node.meta["val"] = like
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    whole = graph.call_function(efficient, (*nodes, None, True))
    causal = graph.call_function(efficient, (*nodes, None, True, 0.0, True))
    assert count_flops(whole) == 4 * 2 * 16 * 16 * 8 == 2 * count_flops(causal)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_a_further_micro_batch_of_a_split_sequence_holds_no_more_than_its_arguments(mesh):
    stage = 1 if "dp" in mesh else 0
    how = Strategy(zero=stage, sequence=True, remat=False, layers=1, context=32)
    held = []
    for many in (2, 3):
        strategy = dataclasses.replace(how, micro_batches=many)
        found = pt.simulate("gpt", mesh, "h100", strategy=strategy)
        held.append(found.peak - found.classes["arguments"])
    assert held[1] <= held[0] + 4096  # sums of losses, and a gradient of a norm under way


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_are_simulated_at_each_stage(stage):
    found = [
        pt.simulate(
            "gpt",
            {"dp": 2},
            "h100",
            strategy=Strategy(zero=stage, micro_batches=many, layers=1, context=32),
        )
        for many in (1, 2)
    ]
    assert found[1].seconds > found[0].seconds


@pytest.mark.parametrize(
    ("model", "parameters", "off"),
    [  # of the models' own pages; MPT's head is its embedding, and its layers have no biases
        ("llama2-13b", 13_015_864_320, 0),
        ("llama2-70b", 68_976_648_192, 0),
        ("llama3-8b", 8_030_261_248, 0),
        ("llama3-70b", 70_553_706_496, 0),
        ("mpt-7b", 6_658_859_008, 0.04),
        ("mpt-13b", 12_853_954_560, 0.03),
    ],
)
def test_a_named_model_has_the_parameters_of_the_published_one(model, parameters, off):
    shape = MODELS[model]
    with torch.device("meta"):
        module = shape.make(shape.layers, shape.context)
    assert sum(p.numel() for p in module.parameters()) == pytest.approx(parameters, rel=off)


@pytest.mark.slow
def test_of_every_second_block_half_is_made_again():
    def simulate(**how):
        strategy = Strategy(layers=2, context=32, **how)
        return pt.simulate("gpt", {"dp": 2}, "h100", strategy=strategy)

    made_again = [
        found.flops - found.model_flops
        for found in (simulate(), simulate(remat_every=2), simulate(remat=False))
    ]
    assert made_again[0] == 2 * made_again[1] > made_again[2] == 0


def test_efficiency_is_tuned_until_a_step_lasts_as_long_as_it_did():
    def seconds_of(machine):
        return 2.0 + 3.0 / machine.efficiency["matmul"]

    found = tune_matmul(UNIT, seconds_of, 8.0)
    assert found.efficiency["matmul"] == pytest.approx(0.5, rel=1e-3)
    assert found.efficiency["link"] == UNIT.efficiency["link"]
    with pytest.raises(ValueError, match="no efficiency"):
        tune_matmul(UNIT, seconds_of, 4.0)


def test_published_runs_are_of_named_models_and_say_where_they_stand():
    for machine, runs in RUNS.items():
        assert machine in shipped_machines() and len(runs) >= 3
        for run in runs:
            assert run.model in MODELS and run.source.startswith("github.com")


def test_a_capture_alone_tells_no_ledger_and_leaves_what_the_step_writes():
    class Counter:
        calls = 0

    counter = Counter()

    def body(mesh):
        x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)])

        def step(x):
            counter.calls = "ran"
            return x.sum().redistribute(placements=[pt.Replicate()])

        compiled = pt.compile(step, backend="graph")
        with pt.ledger() as log:
            compiled.capture(x)
        return log.bytes

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [0, 0]
    assert counter.calls == 0


def test_a_step_on_a_part_of_a_mesh_is_priced_by_what_lies_between_its_ranks_on_the_mesh():
    """Ranks of dp that are eight apart are on other hosts; as neighbours they share one."""

    def simulated(mesh, part):
        with torch.device("meta"):
            model = torch.nn.Linear(256, 256)
            local = torch.zeros(8, 256)
        pt.zero(model, part, "dp", stage=3)
        x = pt.DTensor.from_local(local, part, [pt.Shard(0)])

        def step(x):
            model(x).square().mean().backward()

        return pt.simulate(step, mesh, "h100", [x]).link_seconds["dp"]

    mesh = pt.dry_mesh(dp=2, tp=8)
    apart, near = simulated(mesh, mesh["dp"]), simulated(mesh["dp"], mesh["dp"])
    whole = pt.dry_mesh(dp=2)
    assert apart > 2 * near == 2 * simulated(whole, whole)
