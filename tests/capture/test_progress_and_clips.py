"""A first call that takes long says so, and a clip of torch's sends as little as partita's."""

from __future__ import annotations

import io
import re
import time
from collections import Counter

import pytest
import torch
from torch import nn

import partita as pt
from partita.compile import progress


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture
def shown(monkeypatch):
    """Captures a step that takes a while, and gives what was written on standard error."""

    def run(is_terminal, after=0.0, section=(1, 1)):
        stream = Stream(is_terminal)
        monkeypatch.setattr(progress, "SHOWN_AFTER", after)
        monkeypatch.setattr(progress, "SHOWN_EVERY", 0.01)
        monkeypatch.setattr(progress.sys, "stderr", stream)

        def wait(program):
            progress.note_section(*section)
            shows = "section" if section[1] > 1 else "partita"
            until = time.monotonic() + 250
            while shows not in stream.getvalue() and not after and time.monotonic() < until:
                time.sleep(0.01)

        def my_step(x):
            return x * 2

        pt.compile(my_step, passes=wait, backend="graph")(torch.ones(2))
        monkeypatch.undo()
        return stream.getvalue()

    return run


def test_a_terminal_shows_what_is_done_and_for_how_long_and_is_left_clear(shown):
    text = shown(is_terminal=True)
    first, *_, last = text.split("\r")[1:]
    assert "my_step" in first and "is captured, 0 s" in first
    assert last == "" and text.split("\r")[-2].strip() == ""


def test_what_is_no_terminal_gets_a_line_at_first_and_one_with_times(shown):
    first, last = shown(is_terminal=False).splitlines()
    assert "my_step" in first and "first call" in first
    assert re.fullmatch(r"partita: .*my_step: captured in \d+\.\d s", last)


def test_a_terminal_shows_which_section_is_compiled(shown):
    assert "is captured (section 2 of 5), 0 s" in shown(is_terminal=True, section=(2, 5))
    assert "section" not in shown(is_terminal=True, section=(1, 1))


def test_a_later_capture_is_called_no_first_call(monkeypatch):
    stream, captures = Stream(False), []
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)

    def wait(program):
        captures.append(program)
        until = time.monotonic() + 250
        while stream.getvalue().count("minutes") < len(captures) and time.monotonic() < until:
            time.sleep(0.01)

    step = pt.compile(lambda x: x * 2, passes=wait, backend="graph")
    monkeypatch.setattr(progress.sys, "stderr", stream)
    for rows in (2, 3):
        step(torch.ones(rows))
    monkeypatch.undo()
    first, _, again, _ = stream.getvalue().splitlines()
    assert "captured in its first call" in first and "captured again" in again


def test_of_what_takes_seconds_nothing_is_shown(shown):
    assert shown(is_terminal=True, after=60.0) == ""


def test_who_listens_to_phases_shows_them_alone(shown):
    heard = []
    with progress.phase_listener(heard.append):
        step = pt.compile(lambda x: x + 1, backend="graph")
        step(torch.ones(2))
    assert heard == ["capture"]


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_clip_of_torchs_in_a_compiled_step_sends_what_ours_sends(stage, norm_type):
    def program(mesh, clip, compiled):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()
        if mesh is not None:
            pt.zero(model, mesh, stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            norm = clip(model.parameters(), 0.01, norm_type)
            optimizer.step()
            return loss, norm

        run = pt.compile(step, backend="graph") if compiled else step
        x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(6, 5)
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        run(x)
        with pt.ledger() as log:
            loss, norm = run(x)
        return loss.item(), float(norm), Counter(move.kind for move in log.moves)

    torchs = nn.utils.clip_grad_norm_
    want = program(None, torchs, False)[:2]
    with pt.ranks(dp=2) as world:
        *got, sent = world.run(lambda mesh: program(mesh, torchs, True))[0]
        *_, by_ours = world.run(lambda mesh: program(mesh, pt.clip_grad_norm_, True))[0]
    assert got == pytest.approx(want, rel=1e-9)
    assert sent == by_ours and sent["all_reduce"] <= 2
