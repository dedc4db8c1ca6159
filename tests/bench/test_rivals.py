"""Is a rival of a bench what its users run: compiled, where it says so, on its own ranks?"""

from __future__ import annotations

import json
import types

import pytest
import torch

from partita import cli
from partita.bench import interleaved, rivals
from partita.bench.place import make_rival_mesh
from partita.bench.zero import Shape, measure_ways, rival_steps
from tests.programs.gloo_ranks import run_ranks

TINY = Shape(layers=2, width=16, heads=2, context=8, batch=2)


@pytest.fixture(autouse=True)
def eager_backend(monkeypatch):
    """Dynamo's graphs count here, not what Inductor makes of them, which takes long."""
    compiled = torch.compile

    def compile_by_dynamo(model, *, options=None, **how):
        return compiled(model, backend="eager", **how)

    monkeypatch.setattr(torch, "compile", compile_by_dynamo)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_rival_without_dynamo_graphs_is_refused():
    rival = rivals.CompiledRival("FSDP2 compiled", lambda: torch.ones(2) + 1)
    with pytest.raises(rivals.NotCompiledError, match=r"FSDP2 compiled: torch.compile made no"):
        rival.compile()


@pytest.mark.slow
def test_a_rival_that_is_compiled_twice_in_a_process_is_refused():
    """The second takes the graphs of the first, which were made for another wrapper."""
    model, batch = TINY.model(), TINY.tokens_of(0, 1)
    for name in ("first", "second"):
        run = torch.compile(model)
        rival = rivals.CompiledRival(name, lambda run=run: run(batch[0]))
        if name == "first":
            rival.compile()
            assert rival.graphs == 1
        else:
            with pytest.raises(rivals.NotCompiledError, match="second"):
                rival.compile()


def test_graph_breaks_are_counted_and_told():
    def step(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    run = torch.compile(step)
    rival = rivals.CompiledRival("broken", lambda: run(torch.ones(2)))
    rival.compile()
    rival.compile()  # as a bench does that measures a step twice
    assert rival.graphs == 2 and sum(rival.breaks.values()) == 1
    assert "broken: 2 Dynamo graphs, 1 breaks" in str(rival)


RIVALS = ("alone", "DDP", "FSDP2", "SimpleFSDP")


def train_rivals(rank, names):
    """Losses of three steps of each rival."""
    plain = torch.compile
    torch.compile = lambda model, *, options=None, **how: plain(model, backend="eager", **how)
    mesh, batch = make_rival_mesh(2), TINY.tokens_of(rank, 2)
    found, graphs = {}, {}
    for name in names:
        torch._dynamo.reset()
        step = rivals.make_rival(name, TINY.model(), batch, mesh)
        losses = []
        if name.endswith(" compiled"):
            step.compile()
            graphs[name] = (step.graphs, step.breaks)
        else:
            step()
        for _ in range(3):
            losses.append(step().item())
        found[name] = losses
    return found, graphs


@pytest.mark.slow
def test_rivals_train_as_one_another_eager_and_compiled():
    names = [f"{kind}{how}" for kind in RIVALS for how in ("", " compiled")]
    told = run_ranks(train_rivals, 2, names)
    for found, graphs in told:
        assert found["alone compiled"] == pytest.approx(found["alone"], rel=1e-5)
        for name in names[2:]:
            assert found[name] == pytest.approx(found["DDP"], rel=1e-5), name
        assert graphs["FSDP2 compiled"] == (2, {})  # all blocks are one, and the loss
        assert graphs["SimpleFSDP compiled"] == (2, {})
        assert graphs["alone compiled"] == (2, {})
        assert graphs["DDP compiled"][0] >= 2


@pytest.mark.slow
def test_a_bench_ends_with_the_message_of_a_rival_that_is_not_compiled():
    with pytest.raises(SystemExit, match=r"broken compiled: torch.compile made no Dynamo graph"):
        interleaved.measure([rival_that_is_eager], 2, 1)


def rival_that_is_eager(rank, ranks):
    return {"broken compiled": rivals.CompiledRival("broken compiled", lambda: None)}


def rivals_that_ran(rank, ranks, shape):
    """Steps of rivals, whose process must have no wire of partita once they ran."""
    steps = rival_steps(["alone", "FSDP2"], rank, ranks, shape)
    for step in steps.values():
        step()
    assert not isinstance(torch.Tensor.__init__, types.FunctionType)  # as a wire makes it
    return steps


@pytest.mark.slow
def test_rivals_take_turns_with_partita_in_processes_that_have_no_mesh_of_it():
    found = measure_ways(("alone", "FSDP2", "partita zero 3"), 2, 2, TINY)
    assert list(found) == ["alone", "FSDP2", "partita zero 3"]
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
    assert list(interleaved.measure([rivals_that_ran], 2, 1, TINY)) == ["alone", "FSDP2"]


@pytest.mark.slow
def test_whole_steps_are_measured_on_a_device_and_told_in_one_table(tmp_path, capsys):
    path = tmp_path / "steps.json"
    ways = ["alone", "fsdp2", "zero3"]
    options = ["--model", "tiny", "--rounds", "1", "--json", str(path)]
    assert cli.main(["bench", "--device", "cpu", "steps", *options, "--ways", *ways]) == 0
    told = json.loads(path.read_text())
    assert list(told["ways"]) == ways and not told["failed"]
    losses = [told["ways"][way]["loss"] for way in ways]
    assert losses == pytest.approx([losses[0]] * 3, rel=0.1)  # on a fake group nothing is summed
    table = capsys.readouterr().out.split("\n\n")[-1]
    assert "| way | ms a step | MFU |" in table and "| partita ZeRO-3 |" in table
