"""A step that finds another container, object or value where it reads one computes with that.

The programs stand in `programs/exchanged_state.py`. `PARTITA_EXAMPLES` says how many are run.
"""

from __future__ import annotations

import copy
import os
import types
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pt

from ..programs import exchanged_state as programs

SLICES = 4
EXAMPLES = int(os.environ.get("PARTITA_EXAMPLES", "0")) or 32


def outcome(names):
    try:
        want = programs.run(programs.program_of(*names), lambda step: step)
    except Exception:
        return "no program"
    program = programs.program_of(*names)
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = programs.run(program, lambda step: pt.compile(step, backend="graph"))
        except pt.CaptureError as refusal:
            error = str(refusal)
    if programs.find_fakes([*program.roots, program.step]):
        return "leaves a fake tensor"
    if error:
        return "refused" if error.startswith("capture: ") else error
    return "equal" if programs.same(got, want) else "another result"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLICES))
def test_what_is_exchanged_is_seen_or_refused_and_no_fake_tensor_is_left(part):
    chosen = programs.all_programs()[:EXAMPLES][part::SLICES]
    found = {names: outcome(names) for names in chosen}
    assert {n: o for n, o in found.items() if o not in ("equal", "refused", "no program")} == {}
    outcomes = [*found.values()]
    assert outcomes.count("equal") >= 0.7 * (len(chosen) - outcomes.count("no program"))


class Triples(TorchDispatchMode):
    """Triples each product."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is torch.ops.aten.mul.Tensor else out


@pytest.mark.slow
def test_a_mode_that_compiled_code_would_not_hear_is_refused_or_the_step_runs_eagerly():
    def step(x):
        return x.sin() * x

    x = torch.linspace(0, 1, 3)
    refused, eager = pt.compile(step), pt.compile(step, fallback="eager")
    assert torch.allclose(refused(x), step(x))
    assert torch.allclose(eager(x), step(x))
    with Triples():
        want = step(x)
        with pytest.raises(pt.CaptureError, match="within Triples, a TorchDispatchMode"):
            refused(x)
        assert torch.equal(eager(x), want)
    assert torch.allclose(refused(x), step(x))


def test_a_batch_that_is_exchanged_in_each_call_is_an_input_of_one_program():
    torch.manual_seed(0)
    batch = {}
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = pt.compile(step, backend="graph")
    start = copy.deepcopy(model.state_dict())
    data = [{"x": torch.randn(4, 3), "y": torch.randn(4, 1)} for _ in range(5)]
    losses = {}
    for run in (step, compiled):
        model.load_state_dict(start)
        losses[run] = []
        for batch in data:  # noqa: B007 (it is the step's)
            losses[run].append(float(run()))
    assert losses[compiled] == pytest.approx(losses[step], rel=1e-6)
    assert compiled.reasons == ["the first call"]


def test_a_step_that_has_gone_eager_does_not_write_into_the_container_of_another_call():
    holder = types.SimpleNamespace(held={"t": torch.zeros(3)})
    first = holder.held

    def step(x, refuse=False):
        holder.held["t"].add_(x)
        if refuse:
            float(x.sum())
        return holder.held["t"].sum()

    compiled = pt.compile(step, backend="graph", fallback="eager")
    one = torch.ones(3)
    compiled(one)
    compiled(one)
    holder.held = second = {"t": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(one, refuse=True)
    holder.held = first
    assert compiled(one) == 9
    assert torch.equal(second["t"], one)
