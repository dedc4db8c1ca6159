"""Do the logs of `partita train` hear of each step, and does training go on without them?"""

from __future__ import annotations

import io
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from partita.app import Options, make_logs, train
from partita.app.logs import LiveProgress, Progress
from partita.app.trainer import build_model
from partita.cli import main
from partita.report import read_log, write_report

OPTIONS = Options(steps=3, batch=2, context=16, layers=1, width=16, heads=2, sample=4)


@pytest.fixture
def run(tmp_path):
    """Trains under the logs of some options; gives what else was told."""
    text = tmp_path / "text"
    text.write_bytes(b"some text to be trained on, again and again\n" * 9)
    told = []

    def run(**more):
        options = replace(OPTIONS, data=text, **more)
        logs = make_logs(options, lambda event, facts: told.append((event, facts)))
        train(options, lambda event, **facts: logs.show(event, facts))
        logs.end()
        return told

    return run


def lines_of(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_has_a_json_object_for_each_step(run, tmp_path):
    told = run(log=tmp_path / "run.jsonl")
    lines = lines_of(tmp_path / "run.jsonl")
    assert [line["event"] for line in lines] == ["begin", "ready", *["step"] * 3, "sample"]
    assert lines[0]["options"]["width"] == 16 and lines[0]["options"]["steps"] == 3
    steps = [line for line in lines if line["event"] == "step"]
    shown = [facts for event, facts in told if event == "step"]
    assert [s["loss"] for s in steps] == [s["loss"] for s in shown]
    for step in steps:
        assert step["tokens_per_second"] == pytest.approx(32 / step["seconds"], abs=0.1)
        assert step["time"] > 1e9 and "nbytes" in step


def test_operations_of_a_step_are_those_of_its_matrix_products():
    options = replace(OPTIONS, layers=2, accumulate=2)
    model = build_model(options, None)
    tokens = torch.zeros(options.batch, options.context, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    # The plain kernel multiplies what causal attention leaves out, too: half of it.
    left_out = 6 * options.layers * options.width * options.context * tokens.numel()
    assert counter.get_total_flops() == options.flops_of_step + left_out


@pytest.mark.parametrize("kind", [Progress, LiveProgress])
@pytest.mark.parametrize("slow", [{0}, {1}, {0, 1}, {5}, {10, 11}], ids=str)
def test_steps_that_compile_do_not_count_in_how_fast_a_run_is(kind, slow):
    out = io.StringIO()
    progress = kind(steps=12, tokens=256, mesh="dp=2", out=out)
    facts = {"parameters": 1, "bytes": 1, "files": 1, "source": "x", "threads": 1, "first": 0}
    progress.show("ready", facts)
    for step in range(12):
        seconds = 110.0 if step in slow else 0.0128
        facts = {"step": step, "loss": 1.0, "seconds": seconds, "nbytes": 1, "memory": 1}
        progress.show("step", facts)
    progress.stop()
    assert "20,000 tokens/s" in progress.figures_of(1.0, 1, 1)
    assert "tokens/s: the median of the last 10 steps" in " ".join(out.getvalue().split())


@pytest.mark.parametrize("kind", [Progress, LiveProgress])
def test_progress_shows_what_part_of_the_peak_a_step_reaches(kind):
    def said(**more):
        out = io.StringIO()
        progress = kind(steps=1, tokens=8, mesh="dp=2", out=out, **more)
        facts = {"parameters": 1, "bytes": 1, "files": 1, "source": "x", "threads": 1, "first": 0}
        progress.show("ready", facts)
        progress.show("step", {"step": 0, "loss": 1.0, "seconds": 2.0, "nbytes": 1, "memory": 1})
        return progress.figures_of(1.0, 1, 3 * 2**30)

    assert "MFU 25.0%" in said(least_seconds=0.5)
    assert "MFU" not in said() and "3.0 GiB held" in said()


def test_a_log_and_a_report_have_the_part_of_the_peak(tmp_path):
    options = replace(OPTIONS, log=tmp_path / "run.jsonl")
    logs = make_logs(options, lambda event, facts: None, least_seconds=0.5)
    for step in range(3):
        logs.show("step", {"step": step, "loss": 1.0, "seconds": 2.0, "nbytes": 1})
    logs.end()
    assert [s["mfu"] for s in lines_of(options.log) if s["event"] == "step"] == [0.25] * 3
    pytest.importorskip("plotly")
    write_report(tmp_path / "run.html", read_log(options.log))
    page = (tmp_path / "run.html").read_text()
    assert "MFU, median" in page and "25.0%" in page


def test_a_machine_that_is_not_known_is_refused_before_any_rank_starts(capsys):
    assert main(["train", "--machine", "h1000"]) == 2
    assert "no machine 'h1000'" in capsys.readouterr().err


def test_a_run_that_goes_on_goes_on_in_its_log(run, tmp_path):
    path, folder = tmp_path / "run.jsonl", tmp_path / "kept"
    run(log=path, save=folder, steps=2)
    run(log=path, save=folder, steps=3, resume=True)
    steps = [line["step"] for line in lines_of(path) if line["event"] == "step"]
    assert steps == [0, 1, 2]


def test_a_run_that_goes_on_begins_on_a_line_of_its_own(run, tmp_path):
    path, folder = tmp_path / "run.jsonl", tmp_path / "kept"
    run(log=path, save=folder, steps=2)
    whole = path.read_text()
    for cut, count in (("", 0), ('{"event": "step", "tim', 1), (whole.splitlines()[-1], 0)):
        path.write_text(whole + cut)
        run(log=path, save=folder, steps=3, resume=True)
        begun = [line for line in path.read_text().splitlines() if '"begin"' in line]
        assert len(begun) == 2 and all(line.startswith('{"event": "begin"') for line in begun)
        found = read_log(path)
        assert [s["step"] for s in found.steps][:2] == [0, 1] and len(found.notes) == count


@pytest.mark.slow
def test_the_report_of_a_run_that_goes_on_has_the_steps_before(run, tmp_path):
    pytest.importorskip("plotly")
    path, folder, page = tmp_path / "run.jsonl", tmp_path / "kept", tmp_path / "run.html"
    run(log=path, save=folder, steps=2)
    run(log=path, save=folder, steps=4, resume=True, report=page)
    assert ">4</td>" in page.read_text() and "2 to 3" not in page.read_text()
    path.write_text("no log")
    run(log=path, save=folder, steps=5, resume=True, report=page)
    assert "1 of 5: 4 to 4" in page.read_text()


def test_a_log_and_a_report_say_why_a_run_ended_before_its_last_step(tmp_path):
    pytest.importorskip("plotly")
    options = replace(OPTIONS, log=tmp_path / "run.jsonl", report=tmp_path / "run.html")
    told = []
    logs = make_logs(options, lambda event, facts: told.append(event))
    logs.show("step", {"step": 0, "loss": 1.0, "seconds": 2.0, "nbytes": 1})
    logs.show("job", {"message": "rank 0 failed: the loss of step 1 is nan"})
    assert told == ["step", "job"]
    # At once: under torchrun nobody asks for the end of a rank that failed.
    last = lines_of(options.log)[-1]
    assert (last["event"], last["message"]) == (
        "stopped",
        "rank 0 failed: the loss of step 1 is nan",
    )
    said = "The run did not reach its end: rank 0 failed: the loss of step 1 is nan"
    assert said in options.report.read_text()
    write_report(tmp_path / "again.html", read_log(options.log))
    assert said in (tmp_path / "again.html").read_text()
    logs.end()
    assert lines_of(options.log)[-1] == last


def test_a_job_that_ends_before_a_run_begins_leaves_the_log_that_was_there(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("what another run has told")
    make_logs(replace(OPTIONS, log=path), lambda event, facts: None).show("job", {"message": "x"})
    assert path.read_text() == "what another run has told"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_run_whose_log_is_not_whole_says_so_in_its_exit_code(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(b"some text to be trained on, again and again\n" * 9)
    few = "--ranks 1 --steps 2 --layers 1 --width 16 --heads 2 --context 16 --batch 2 --sample 0"
    assert main(["train", *few.split(), "--data", str(text), "--log", "/dev/full"]) == 1
    said = capsys.readouterr().out
    assert "--log /dev/full is left out from here on: OSError" in said and "step 1" in said


class Calls:
    """Notes each call of whatever is asked of it: a fake of a library's public names."""

    def __init__(self, name="", notes=None):
        self._name, self.notes = name, [] if notes is None else notes

    def __getattr__(self, name):
        return type(self)(f"{self._name}.{name}".lstrip("."), self.notes)

    def __call__(self, *args, **kwargs):
        self.notes.append((self._name, args, kwargs))
        return Calls(f"{self._name}()", self.notes)

    def named(self, name):
        return [(args, kwargs) for called, args, kwargs in self.notes if called == name]


def test_tensorboard_is_given_scalars_and_text_as_it_is(run, tmp_path, monkeypatch):
    board = Calls()
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    told = run(tensorboard=tmp_path / "board")
    assert board.named("SummaryWriter") == [((str(tmp_path / "board"),), {})]
    losses = [a[1:] for a, _ in board.named("SummaryWriter().add_scalar") if a[0] == "loss"]
    assert losses == [(f["loss"], f["step"]) for e, f in told if e == "step"]
    (_, sample) = (args for args, _ in board.named("SummaryWriter().add_text"))
    assert sample[0] == "sample" and all(line.startswith("    ") for line in sample[1].split("\n"))
    assert board.notes[-1][0] == "SummaryWriter().close"


def test_weights_and_biases_is_given_figures_by_step(run, monkeypatch):
    wandb = Calls()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run(wandb="project")
    ((_, begun),) = wandb.named("init")
    assert begun["project"] == "project" and begun["config"]["width"] == 16
    logged = wandb.named("init().log")
    assert [kwargs["step"] for _, kwargs in logged] == [0, 1, 2]
    assert {"loss", "tokens_per_second", "bytes_sent"} <= logged[0][0][0].keys()
    assert wandb.notes[-1][0] == "init().finish"


def test_mlflow_is_given_parameters_and_metrics(run, monkeypatch):
    mlflow = Calls()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    run(mlflow="experiment")
    assert mlflow.named("set_experiment") == [(("experiment",), {})]
    assert mlflow.named("log_params")[0][0][0]["steps"] == 3
    assert [kwargs["step"] for _, kwargs in mlflow.named("log_metrics")] == [0, 1, 2]
    assert mlflow.notes[-1][0] == "end_run"


def test_a_log_that_fails_is_left_out_and_training_goes_on(run, monkeypatch, tmp_path):
    class Broken(Calls):
        def __call__(self, *args, **kwargs):
            raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", Broken())
    told = run(wandb="project", log=tmp_path / "run.jsonl")
    notes = [facts["message"] for event, facts in told if event == "note"]
    assert notes == ["--wandb project is left out from here on: OSError: no network"]
    assert len(lines_of(tmp_path / "run.jsonl")) == 6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--wandb", "x"), "--wandb needs wandb, which is not installed"),
        (("--mlflow", "x"), "--mlflow needs mlflow, which is not installed"),
        (("--log", "/nowhere/at/all"), "--log: /nowhere/at/all is not a file"),
    ],
)
def test_what_cannot_be_logged_to_is_an_error_before_a_rank_starts(
    given, said, capsys, monkeypatch
):
    monkeypatch.setattr("partita.app.logs.importlib.util.find_spec", lambda name: None)
    assert main(["train", *given]) == 2
    assert said in capsys.readouterr().err


WORK = {
    "train": ("train", "partita.cli.launch"),
    "simulate": ("simulate --model gpt --mesh dp=2", "partita.cli.simulate"),
    "calibrate": ("calibrate", "partita.cli.calibrate"),
    "report": ("report x.jsonl", "partita.cli.read_logs"),
}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("train", "--log"),
        ("train", "--report"),
        ("simulate", "--trace"),
        ("simulate", "--report"),
        ("calibrate", "--out"),
        ("report", "--out"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command, option, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("plotly")
    words, work = WORK[command]

    def begun(*args, **kwargs):
        raise AssertionError("the work has begun")

    monkeypatch.setattr(work, begun)
    monkeypatch.chdir(tmp_path)
    for path, said in (
        ("no/x", "is not a file in an existing folder"),
        (".", "is not a file in an existing folder"),
    ):
        assert main([*words.split(), option, path]) == 2
        assert f"partita {command}: {option}: {path} {said}" in capsys.readouterr().err
    monkeypatch.setattr("partita.report.page.os.access", lambda path, mode: False)
    assert main([*words.split(), option, "x"]) == 2
    assert f"{option}: x may not be written" in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["compile", "ops", "zero"])
def test_a_file_of_a_bench_that_cannot_be_written_is_refused_before_it_measures(
    bench, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", bench, "--json", "no/x.json"])
    said = capsys.readouterr().err
    assert "argument --json: no/x.json is not a file in an existing folder" in said


@pytest.mark.parametrize("words", ["train --log x --report x", "simulate --trace x --report ./x"])
def test_two_files_that_are_one_are_refused(words, tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    also = ["--model", "gpt", "--mesh", "dp=2"] if words.startswith("simulate") else []
    assert main([*words.split(), *also]) == 2
    assert "x is also the output of --" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save", "--tensorboard"])
def test_a_folder_that_cannot_be_is_refused(option, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["train", option, "file"]) == 2
    assert f"{option}: file is no folder" in capsys.readouterr().err
    assert main(["train", option, "file/in/it"]) == 2
    assert f"{option}: file/in/it is in no folder: " in capsys.readouterr().err
    monkeypatch.setattr("partita.report.page.os.access", lambda path, mode: False)
    assert main(["train", option, "new/folder"]) == 2
    assert "this user may not create files" in capsys.readouterr().err


def test_a_simulation_is_printed_also_where_its_files_cannot_be_written(
    tmp_path, monkeypatch, capsys
):
    class Found:
        fits = True

        def __str__(self):
            return "what it costs"

        def save_trace(self, path):
            raise OSError("no space left")

    monkeypatch.setattr("partita.cli.simulate", lambda *a, **k: Found())
    asked = f"simulate --model gpt --mesh dp=2 --trace {tmp_path / 'x.json'}"
    assert main(asked.split()) == 2
    shown = capsys.readouterr()
    assert "what it costs" in shown.out and "no space left" in shown.err


@pytest.mark.parametrize("kind", [Progress, LiveProgress])
def test_what_the_model_writes_is_shown_as_it_is(kind):
    out = io.StringIO()
    progress = kind(steps=1, tokens=8, mesh="one rank", out=out)
    progress.show("sample", {"prompt": "def ", "text": "[red]x[/red] [/nothing] \x1b[31m :smile:"})
    assert "def [red]x[/red] [/nothing] \\x1b[31m :smile:" in out.getvalue()
