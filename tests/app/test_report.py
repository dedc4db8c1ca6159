"""Is the report of a run a page that a browser shows without a script error or a network?"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from torch import nn

import partita as pt
from partita.app import Options, make_logs, train
from partita.cli import main
from partita.report import RunFacts, TimelineEvent, read_log, write_report
from partita.report.run_facts import join_short_events

pytest.importorskip("plotly")

OPTIONS = Options(steps=3, batch=4, context=16, layers=1, width=16, heads=2, sample=4)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
NASTY = "<script>document.title='taken'</script><b>"


def run_of(name="first", **more):
    steps = [
        {"step": i, "loss": 5 - i, "seconds": 0.1, "nbytes": 1 << 20, "tokens_per_second": 10.0}
        for i in range(5)
    ]
    memory = {
        "places": ["mm", "relu", "mm_1"],
        "held": {"weights": 1 << 20},
        "live": {"activations": [0, 1 << 20, 0], "gathered": [1 << 20, 0, 0]},
        "holders": [{"name": "relu", "kind": "activations", "source": NASTY, "nbytes": 1 << 20}],
    }
    one = {"name": "regather", "promise": "p", "did": NASTY, "collectives": [3, 2]}
    passes = [one | {"sent": [1 << 20, 2 << 20], "peak": [3 << 20, 1 << 20]}]
    moves = [
        {"source": NASTY, "kind": "all_gather", "axes": "dp", "reason": "gather"}
        | {"nbytes": 1 << 20, "count": 2}
    ]
    layouts = [[NASTY, "f32[8@dp, 16@tp]", "dp=2 tp=2", 128]]
    timeline = [
        TimelineEvent("mm", "compute", 0.0, 0.002, "matmul", "forward", NASTY, 64.0),
        TimelineEvent(NASTY, "dp", 0.001, 0.003, "all_gather", "forward", NASTY, 64.0),
    ]
    told = {"options": {"x": NASTY}, "steps": steps, "layouts": layouts, "moves": moves}
    told |= {"memory": memory, "passes": passes, "sample": NASTY}
    told |= {"timeline": timeline, "timeline_source": NASTY, "figures": [("step", NASTY, NASTY)]}
    return RunFacts(name, **told, **more)


def events_of(run):
    """The events that a log of this run has, by name: each once."""
    holds = {"kind": "matmul", "phase": "forward", "source": "train.py:3", "nbytes": 64.0}
    work = ["mm", "compute", 0.0, 0.002, *holds.values()]
    return {
        "begin": {
            "time": 1.7e9,
            "options": {"mesh": "dp=2", "zero": 3, "layers": 2, "width": 32, "steps": 600},
        },
        "ready": {"parameters": 41600},
        "layouts": {"parameters": run.layouts},
        "step": run.steps[0] | {"mfu": 0.3},
        "moves": {"moves": run.moves},
        "graph": {"memory": run.memory, "passes": run.passes},
        "timeline": {"events": [work, work[:5]], "source": "measured"},
        "sample": {"prompt": "def ", "text": "f"},
        "stopped": {"message": "rank 0 failed: the loss is <nan>"},
    }


EVENTS = events_of(run_of())


def others_of(value):
    """What differs from it in one place: something left out, or another kind of value there."""
    wrong = [None, True, "zz", -1, 10**400, math.nan, [], [1], {}, {"x": 1}, "\ud800"]
    if isinstance(value, dict):
        for name, one in value.items():
            rest = {k: v for k, v in value.items() if k != name}
            yield rest
            yield from ({**rest, name: other} for other in [*others_of(one), *wrong])
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield value[:i] + value[i + 1 :]
            yield from ([*value[:i], other, *value[i + 1 :]] for other in [*others_of(one), *wrong])


def seen_in_browser(path):
    """The page's document when its scripts have run, and what went wrong in them."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--disable-background-networking", "--window-size=1300,2000"]
    command += ["--virtual-time-budget=10000", "--dump-dom", f"file://{path}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
    wrong = [line for line in ran.stderr.splitlines() if "CONSOLE" in line and "rror" in line]
    return ran.stdout, wrong


def test_a_page_asks_nothing_of_the_network_and_escapes_what_it_is_told(tmp_path):
    write_report(tmp_path / "run.html", run_of(NASTY))
    page = (tmp_path / "run.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page)
    assert NASTY not in page  # in figures, too, where it stands in JSON


def test_characters_that_do_something_are_shown_by_name(tmp_path):
    path = tmp_path / "run.html"
    write_report(path, run_of("one"))
    before = {c for c in path.read_text() if not c.isprintable()}
    nasty = "\x07\x9b2J\u202e\x00"
    run = run_of(f"run{nasty}", stopped=nasty, notes=[nasty])
    run.sample = f"a\n\tb{nasty}"
    run.layouts = [[nasty, "f32[8@dp, 16@tp]", "dp=2 tp=2", 128]]
    write_report(path, run)
    page = path.read_text()
    assert {c for c in page if not c.isprintable()} == before | {"\t"}
    assert r"<h1>run\x07\x9b2J\u202e\x00</h1>" in page
    assert "<pre>a\n\tb\\x07" in page  # what the model writes keeps its lines


@pytest.mark.slow
def test_plotly_finds_no_tags_in_names(tmp_path):
    """It reads them in labels: `<stdin>:3` would be shown as `:3`, and a link be a link."""
    path = tmp_path / "run.html"
    write_report(path, run_of(NASTY), run_of("second"))
    for found in re.findall('<script type="application/json">(.*?)</script>', path.read_text()):
        figure = json.loads(found)
        for trace in figure["data"]:
            labels = json.dumps([trace.get(k) for k in ("x", "y", "name", "customdata")])
            assert NASTY not in labels


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_each_figure_without_an_error(tmp_path):
    write_report(tmp_path / "run.html", run_of("first"), run_of("second"))
    shown, wrong = seen_in_browser(tmp_path / "run.html")
    assert wrong == []
    # Loss, and of each run the timeline, memory, moves and passes.
    assert shown.count('class="main-svg"') >= 9
    assert shown.count('class="barlayer') >= 4 and "all-gather" in shown
    assert "<title>first, second</title>" in shown
    for section in (
        "Loss and speed",
        "Timeline of a step",
        "Memory over a step",
        "Bytes by line",
        "Layouts of the",
    ):
        assert section in shown
    assert shown.count('class="partita-layout"') == 2


def test_figures_are_drawn_when_all_columns_stand(tmp_path):
    # A column that is drawn into before the next is read is as wide as the page.
    write_report(tmp_path / "run.html", run_of("first"), run_of("second"))
    body = (tmp_path / "run.html").read_text().partition("<body>")[2]
    assert body.count('class="figure"') == 9
    assert body.count("newPlot(") == 1 and body.index("newPlot(") > body.rindex('class="runs"')
    assert body.index("newPlot(") > body.rindex('class="figure"')


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_each_run_within_its_own_column(tmp_path):
    write_report(tmp_path / "run.html", run_of("first"), run_of("second"))
    shown, _ = seen_in_browser(tmp_path / "run.html")
    # What is before the second of these is as wide as the page.
    columns = "".join(shown.split('<div class="runs">')[2:])
    widths = [int(n) for n in re.findall(r'<svg class="main-svg"[^>]* width="(\d+)"', columns)]
    assert len(widths) >= 8 and min(widths) > 400 and max(widths) <= (1180 - 28) // 2


def trace_in(page):
    """The trace that a page offers."""
    (text,) = re.findall(r'<a download="[^"]*" href="data:application/gzip;base64,([^"]*)"', page)
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_a_page_holds_its_timeline_as_a_trace(tmp_path):
    write_report(tmp_path / "run.html", run_of("a/b"))
    page = (tmp_path / "run.html").read_text()
    told = trace_in(page)["traceEvents"]
    assert [e["args"]["name"] for e in told if e["ph"] == "M"] == ["compute", "dp"]
    assert [(e["ts"], e["dur"]) for e in told if e["ph"] == "X"] == [(0, 2000), (1000, 3000)]
    assert 'download="a-b.json.gz"' in page


@pytest.mark.slow
def test_a_page_says_where_collectives_are_not_those_that_the_step_asks_for(tmp_path):
    def note_of(*kinds):
        run = run_of()
        run.timeline = [TimelineEvent("x", "links", 0.0, 0.1, kind) for kind in kinds]
        write_report(tmp_path / "run.html", run)
        page = (tmp_path / "run.html").read_text()
        return page.partition("named by what the backend runs: ")[2].partition("</p>")[0]

    assert note_of("all_gather") == note_of("matmul") == note_of("all_gather", "all_reduce") == ""
    assert note_of("broadcast") == "broadcast, to do all_gather."


def test_peaks_of_passes_say_that_they_are_above_what_is_held(tmp_path):
    write_report(tmp_path / "run.html", replace(run_of(), figures=[]))
    page = (tmp_path / "run.html").read_text()
    assert "<th>peak above the inputs</th>" in page and "predicted, with what is held" in page


def test_numbers_sizes_and_times_of_a_table_stand_at_the_right(tmp_path):
    rows = [("step", "484 ms", "a roofline"), ("  weights", "487 MiB", ""), ("on", "2 ranks", "")]
    write_report(tmp_path / "run.html", RunFacts("run", figures=rows))
    page = (tmp_path / "run.html").read_text()
    assert '<td class="number">484 ms</td><td>a roofline</td>' in page
    assert '<td>  weights</td><td class="number">487 MiB</td>' in page
    assert "<td>2 ranks</td>" in page


def test_short_events_are_joined_for_a_picture_and_nothing_is_lost():
    short = [
        TimelineEvent(f"k{i}", "compute", i * 1e-3, 1e-3, ("matmul", "other")[i % 3 == 0])
        for i in range(900)
    ]
    long = TimelineEvent("long", "dp", 0.1, 0.5, "all_gather")
    joined = join_short_events([*short, long], 100)
    assert long in joined and len(joined) == 101
    assert sum(e.seconds for e in joined) == pytest.approx(0.9 + 0.5)
    assert {e.kind for e in joined} == {"matmul", "all_gather"}
    assert join_short_events([*short, long], 9000) == sorted([*short, long], key=lambda e: e.start)


def test_what_a_run_does_not_know_is_left_out(tmp_path):
    write_report(tmp_path / "run.html", RunFacts("x", steps=run_of().steps))
    page = (tmp_path / "run.html").read_text()
    assert "Loss and speed" in page and "<h2>Memory" not in page and "<h2>Layouts" not in page


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_training_writes_a_report_of_what_it_did(compile, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"some text to be trained on, again and again\n" * 9)
    options = replace(
        OPTIONS, data=text, mesh=(("dp", 2),), zero=3, compile=compile, log=tmp_path / "run.jsonl"
    )
    options = replace(options, report=tmp_path / "run.html")

    def program(mesh):
        first = mesh.get_rank() == 0
        logs = make_logs(options, lambda event, facts: None) if first else None

        def tell(event, **facts):
            if logs is not None:
                logs.show(event, json.loads(json.dumps(facts)))

        with torch.random.fork_rng():
            train(options, tell, mesh=mesh)
        if logs is not None:
            logs.end()

    with pt.ranks(dp=2) as world:
        world.run(program)
    run = read_log(tmp_path / "run.jsonl")
    assert len(run.steps) == 3 and run.layouts[0][1:3] == ["f32[256@dp, 16]", "dp=2"]
    assert sum(m["nbytes"] for m in run.moves) == run.steps[1]["nbytes"]
    assert any(m["source"] for m in run.moves)
    assert (run.memory is not None) is compile and bool(run.passes) is compile
    page = (tmp_path / "run.html").read_text()
    assert "Layouts of the parameters" in page
    assert ("Memory over a step" in page) is compile
    assert "Timeline of a step" in page
    end = max(e.start + e.seconds for e in run.timeline)
    assert 0 < end < 60 and min(e.start for e in run.timeline) >= 0
    assert "matmul" in {e.kind for e in run.timeline if e.stream == "compute"}
    if not compile:
        phases = [e.kind for e in run.timeline if e.stream == "phase"]
        assert phases == ["forward", "backward", "update"]
        assert {e.phase for e in run.timeline if e.kind == "matmul"} == {"forward", "backward"}


@pytest.mark.slow
def test_a_compiled_step_writes_a_report(tmp_path):
    def program(mesh):
        torch.manual_seed(0)
        model = pt.zero(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), mesh, "dp", stage=3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @pt.compile(backend="graph")
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        with pytest.raises(ValueError, match="not been captured"):
            step.report(tmp_path / "step.html")
        step(pt.ones(4, 8, device_mesh=mesh, placements=[pt.Shard(0)]))
        if mesh.get_rank() == 0:
            step.report(tmp_path / "step.html")
            simulation = pt.simulate(step, mesh, "h100")
            step.report(tmp_path / "simulated.html", timeline=simulation)
            simulation.report(tmp_path / "simulation.html", simulation)

    with pt.ranks(dp=2) as world:
        world.run(program)
    page = (tmp_path / "step.html").read_text()
    for section in ("Memory over a step", "Bytes by line of the program", "What the passes did"):
        assert f"<h2>{section}</h2>" in page
    assert "test_report.py:" in page and "regather" in page
    assert "f32[16@dp, 8] on dp=2" in page
    assert "<h2>Timeline" not in page
    with_timeline = (tmp_path / "simulated.html").read_text()
    assert "<h2>Timeline of a step</h2>" in with_timeline and "regather" in with_timeline
    assert any(
        e.get("args", {}).get("name") == "dp" for e in trace_in(with_timeline)["traceEvents"]
    )
    alone = (tmp_path / "simulation.html").read_text()
    for section in ("Timeline of a step", "Memory over a step", "Bytes by line of the program"):
        assert f"<h2>{section}</h2>" in alone
    assert alone.count("f32[16@dp, 8] on dp=2") == 2  # two side by side


class TestCommand:
    def test_two_logs_stand_side_by_side(self, tmp_path, capsys):
        logs = []
        for name in ("one", "two"):
            logs.append(tmp_path / f"{name}.jsonl")
            lines = [{"event": "step", **step} for step in run_of().steps]
            logs[-1].write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        out = tmp_path / "both.html"
        assert main(["report", *map(str, logs), "--out", str(out)]) == 0
        assert "<h1>one, two</h1>" in out.read_text()

    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"no json\n",
            b"no json",
            b'{"event": "ready"}\n',
            b"[1]\n",
            b"null\n",
            b"[" * 99999,
            b"\xff\xfe\x00",
            b'{"event": "st\n{"event": "sample", "prompt": "", "text": ""}\n',
        ],
        ids=lambda text: repr(text)[:20],
    )
    def test_what_is_no_log_is_an_error(self, text, tmp_path, capsys):
        log = tmp_path / "log.jsonl"
        log.write_bytes(text)
        assert main(["report", str(log), "--out", str(tmp_path / "x.html")]) == 2
        said = capsys.readouterr().err
        assert "log.jsonl" in said
        assert "no step is in this log" in said or "line 1: no event of a log" in said
        assert said.count("\n") == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("event", sorted(EVENTS))
    def test_whatever_an_event_lacks_or_has_instead_is_one_error_with_its_line(
        self, event, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")  # 5 MB a page
        log, out = tmp_path / "run.jsonl", tmp_path / "run.html"
        good = [{"event": name, **facts} for name, facts in EVENTS.items()]
        log.write_text("".join(f"{json.dumps(line)}\n" for line in good))
        assert main(["report", str(log), "--out", str(out)]) == 0
        number = [*EVENTS].index(event)
        for changed in others_of(EVENTS[event]):
            lines = [json.dumps(line) for line in good]
            lines[number] = json.dumps({"event": event, **changed})
            log.write_text("\n".join(lines))
            code, said = main(["report", str(log), "--out", str(out)]), capsys.readouterr().err
            if code == 0 and not said:  # nothing shows that, or it may be so
                continue
            place = f"run.jsonl, line {number + 1}: no event of a log of `partita train --log`: "
            assert code == 2 and place + f'the event "{event}" has ' in said, changed
            assert said.count("\n") == 1, changed

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"loss": None}, '["loss"] = null, where a number belongs'),
            ({"seconds": "a"}, '["seconds"] = "a", where a number belongs'),
            ({"nbytes": 1e999}, '["nbytes"] = Infinity, where a finite number belongs'),
            ({"step": 0.5}, '["step"] = 0.5, where a whole number belongs'),
            ({"loss": True}, '["loss"] = true, where a number belongs'),
        ],
    )
    def test_an_error_says_where_in_an_event_what_belongs(self, changed, said, tmp_path, capsys):
        log = tmp_path / "run.jsonl"
        log.write_text(json.dumps({"event": "step", **EVENTS["step"], **changed}) + "\n")
        assert main(["report", str(log), "--out", str(tmp_path / "x.html")]) == 2
        assert (
            f'line 1: no event of a log of `partita train --log`: the event "step" has {said}'
            in (capsys.readouterr().err)
        )

    def test_a_log_whose_end_is_cut_off_is_read_without_its_last_line(self, tmp_path, capsys):
        log, out = tmp_path / "run.jsonl", tmp_path / "run.html"
        step = json.dumps({"event": "step", **EVENTS["step"]})
        for cut in range(1, len(step)):
            log.write_text(f"{step}\n{step[:cut]}")
            run = read_log(log)
            assert run.notes == [
                f"line 2 of run.jsonl is cut off after {cut} characters, and left out"
            ]
            assert len(run.steps) == 1
        assert main(["report", str(log), "--out", str(out)]) == 0
        assert "partita report: line 2 of run.jsonl is cut off" in capsys.readouterr().err
        assert "Line 2 of run.jsonl is cut off" in out.read_text()
        log.write_text(step)  # only the end of the line is missing
        assert len(read_log(log).steps) == 1 and not read_log(log).notes

    def test_a_line_cut_off_before_a_run_that_goes_on_is_left_out_too(self, tmp_path):
        log = tmp_path / "run.jsonl"
        step, begin = ({"event": name, **EVENTS[name]} for name in ("step", "begin"))
        texts = [json.dumps(step), json.dumps(step)[:20], json.dumps(begin)]
        log.write_text("\n".join([*texts, json.dumps(step | {"step": 1})]))
        run = read_log(log)
        assert [s["step"] for s in run.steps] == [0, 1] and len(run.notes) == 1

    def test_runs_with_logs_of_one_name_are_told_apart(self, tmp_path):
        logs = [tmp_path / folder / "run.jsonl" for folder in ("a/x", "b/x", "b/y")]
        for log in logs:
            log.parent.mkdir(parents=True)
            log.write_text(json.dumps({"event": "step", **EVENTS["step"]}) + "\n")
        out = tmp_path / "all.html"
        assert main(["report", *map(str, [*logs, logs[0]]), "--out", str(out)]) == 0
        assert "<h1>a/x/run, b/x/run, y/run, a/x/run (2)</h1>" in out.read_text()

    def test_a_page_says_what_was_trained_on_what_and_how_it_ended(self, tmp_path):
        log, out = tmp_path / "run.jsonl", tmp_path / "run.html"
        lines = [{"event": name, **EVENTS[name]} for name in ("begin", "step", "stopped")]
        log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert main(["report", str(log), "--out", str(out)]) == 0
        page = out.read_text()
        for said in (
            "dp=2, ZeRO-3",
            "2023-11-14 22:13 UTC",
            "layers 2, width 32",
            "1 of 600: 0 to 0",
        ):
            assert said in page
        assert "The run did not reach its end: rank 0 failed: the loss is &lt;nan&gt;" in page

    @pytest.mark.parametrize(
        ("out", "said"),
        [
            ("no/x.html", "is not a file in an existing folder"),
            (".", "is not a file in an existing folder"),
            ("run.jsonl", "is also an input: name another file"),
        ],
    )
    def test_a_page_that_cannot_be_written_is_refused_before_a_log_is_read(
        self, out, said, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "run.jsonl").write_text("no log")
        assert main(["report", "run.jsonl", "--out", out]) == 2
        assert f"--out: {out} {said}" in capsys.readouterr().err

    @pytest.mark.slow
    def test_a_simulation_writes_a_page(self, tmp_path, capsys):
        out = tmp_path / "gpt.html"
        asked = f"simulate --model gpt --mesh dp=8 --layers 1 --context 32 --report {out}"
        assert main(asked.split()) == 0
        page = out.read_text()
        assert "<h1>gpt on dp=8 of NVIDIA H100" in page and "tokens/s" in page

    def test_without_plotly_no_step_is_simulated(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("partita.report.page.importlib.util.find_spec", lambda name: None)
        assert main(["simulate", "--model=x", "--mesh=dp=2", f"--report={tmp_path / 'x'}"]) == 2
        assert "pip install plotly" in capsys.readouterr().err

    def test_without_plotly_the_error_says_what_to_install(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("partita.report.page.importlib.util.find_spec", lambda name: None)
        assert main(["train", "--report", str(tmp_path / "x.html")]) == 2
        assert "pip install plotly" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "is_drawn"), [("data-parallel", True), ("fsdp.0", True), ("data parallel", False)]
)
def test_a_layout_over_axes_of_any_name_is_shown(name, is_drawn, tmp_path):
    mesh = pt.dry_mesh(**{name: 2})
    model = pt.zero(nn.Linear(8, 8), mesh, stage=3)
    step = pt.compile(lambda x: model(x).square().mean().backward(), backend="graph")
    step(pt.ones(4, 8, device_mesh=mesh, placements=[pt.Shard(0)]))
    step.report(tmp_path / "step.html")
    as_text = f"f32[8@{name}, 8] over {name}=2" in (tmp_path / "step.html").read_text()
    assert as_text != is_drawn
