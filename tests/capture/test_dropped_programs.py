"""A program that a compiled step drops leaves nothing of its trace behind."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import partita as pt
from partita.comm import TraceWire
from partita.compile import collector
from partita.compile.collector import OldObjects
from partita.tensor.plan import CallPlan
from tests.programs.steps import squares

KINDS = (FakeTensor, fx.Node, TraceWire, CallPlan)


class _Config:
    name = ""


def _count_after_each_capture(mesh, captures):
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))
    pt.zero(model, mesh, axis="dp", stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    config = _Config()

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if config.name == "never":
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss

    compiled = pt.compile(step, keep=2)
    x = pt.distribute_tensor(torch.randn(7, 5), mesh, [pt.Shard(0)])
    counts = []
    for i in range(captures):
        config.name = str(i)
        compiled(x)
        gc.collect()
        counts.append(Counter(kind for o in gc.get_objects() for kind in KINDS if type(o) is kind))
    assert len(compiled.reasons) == captures
    return counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is captured at each call")
def test_captures_that_follow_one_another_keep_as_much_as_two():
    pt.cache_clear()
    with pt.ranks(dp=1) as world:
        (counts,) = world.run(_count_after_each_capture, 8)
    assert counts[1][FakeTensor] > 50  # two programs are kept, with their traces
    assert counts[-1][TraceWire] <= counts[3][TraceWire]
    for kind in KINDS:
        assert counts[-1][kind] <= counts[3][kind] + 2, (kind, [c[kind] for c in counts])


@pytest.mark.slow
def test_dropped_programs_are_collected_though_nobody_calls_the_collector(monkeypatch):
    """A capture moves all objects to the oldest generation, where Python rarely collects."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(8)))

    def capture():
        step = pt.compile(squares(model, torch.optim.AdamW(model.parameters())), backend="graph")
        step(torch.ones(2, 4))
        return weakref.ref(step.program)

    gc.collect()
    # As in a process with few objects, so that two captures are as many.
    collections = gc.get_stats()[2]["collections"]
    monkeypatch.setattr(collector, "OLD_OBJECTS", OldObjects(0, collections, total=10_000))
    first = capture()
    assert first() is not None
    capture(), capture()
    assert first() is None
