"""Is what only other functions of a step name (methods, modules of Python) a part of its state?"""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import partita as pt

MODEL = nn.Linear(2, 2)
PARAMETERS = list(MODEL.parameters())
OPTIMIZER = torch.optim.SGD(PARAMETERS, lr=0.1, momentum=0.9)
BEGUN = copy.deepcopy(MODEL.state_dict())
TABLE = torch.ones(2)
LIBRARY = types.ModuleType("a_library")
exec(compile("def clip():\n    return norm(PARAMETERS, 1e-3)", __file__, "exec"), LIBRARY.__dict__)
LIBRARY.PARAMETERS, LIBRARY.norm = PARAMETERS, nn.utils.clip_grad_norm_


class Helper:
    def __init__(self):
        self.scale, self.inside = torch.ones(2), {"bias": torch.ones(2)}


HELPER = Helper()


class Trainer:
    shift = torch.zeros(2)

    def train(self, x):
        MODEL.zero_grad()
        loss = self.loss(x)
        loss.backward()
        found = self.finish()
        OPTIMIZER.step()
        return loss.detach(), found

    def loss(self, x):
        return (MODEL(x) * HELPER.scale + HELPER.inside["bias"] + self.shift).square().sum()

    def finish(self):
        return torch.zeros(())


class ClipsByName(Trainer):
    def finish(self):
        return nn.utils.clip_grad_norm_(PARAMETERS, 1e-3)


class ClipsInALibrary(Trainer):
    def finish(self):
        return LIBRARY.clip()


class CountsGradients(Trainer):
    def finish(self):
        return sum(p.grad is not None for p in PARAMETERS) * torch.ones(())


class ForgetsGradients(Trainer):
    def finish(self):
        for p in PARAMETERS:
            p.grad = None
        return torch.zeros(())


class Averages(Trainer):
    def finish(self):
        torch._foreach_lerp_([p.detach() for p in PARAMETERS], [p.grad for p in PARAMETERS], 0.1)
        with torch.no_grad():
            TABLE.mul_(0.5).add_(PARAMETERS[1])
        return TABLE.clone()


class StepsTwice(Trainer):
    def finish(self):
        OPTIMIZER.step()
        return torch.zeros(())


class Adds(Trainer):
    def finish(self):
        return TABLE.add_(1).sum()


def trained(trainer, **how):
    MODEL.load_state_dict(BEGUN)
    MODEL.zero_grad()
    OPTIMIZER.state.clear()
    TABLE.fill_(1)
    step = pt.compile(trainer.train, **how) if how else trainer.train
    found = [torch.cat([v.flatten() for v in step(torch.ones(3, 2))]) for _ in range(3)]
    return [*found, *(p.detach().clone() for p in PARAMETERS), TABLE.clone()]


KINDS = [
    *(ClipsByName, ClipsInALibrary, CountsGradients, ForgetsGradients, Averages, StepsTwice, Adds)
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_another_method_names_is_state(kind):
    want = trained(kind())
    for found, truth in zip(trained(kind(), backend="graph"), want, strict=True):
        torch.testing.assert_close(found, truth)


def test_what_it_finds_there_is_asked_for_in_each_call():
    step = pt.compile(Trainer().loss, backend="graph")
    x = torch.ones(3, 2)
    for scale, bias, shift in ((1.0, 1.0, 0.0), (2.0, 1.0, 0.0), (2.0, 3.0, 0.0), (2.0, 3.0, 5.0)):
        HELPER.scale.fill_(scale)
        HELPER.inside["bias"] = torch.full((2,), bias)
        Trainer.shift = torch.full((2,), shift)
        torch.testing.assert_close(step(x), Trainer().loss(x))
    assert step.reasons == ["the first call"]


class Keys:
    def __init__(self):
        self.w = nn.Parameter(torch.ones(2))


CHANGES = {
    "a write": lambda w: w.data.mul_(2),
    "a gradient": lambda w: setattr(w, "grad", None),
    "what is trained": lambda w: w.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tensor_that_is_not_found_by_name_changes_as_in_eager(name):
    def run(compiled):
        holder = Keys()
        holder.w.grad = torch.ones(2)
        places = {holder: 1}

        def step(x):
            (found,) = places
            CHANGES[name](found.w)
            return x * 2

        run_step = pt.compile(step, backend="graph") if compiled else step
        for _ in range(2):
            assert torch.equal(run_step(torch.ones(2)), torch.full((2,), 2.0))
        grad = holder.w.grad
        return holder.w.tolist(), None if grad is None else grad.tolist(), holder.w.requires_grad

    assert run(compiled=True) == run(compiled=False)


def test_a_hook_on_a_tensor_that_is_not_found_by_name_is_refused():
    holder = Keys()
    places = {holder: 1}

    def step(x):
        (found,) = places
        found.w.register_hook(lambda g: g)
        return x * 2

    with pytest.raises(pt.CaptureError, match=r"the hooks of a key of places.w \(at .*reached.py"):
        pt.compile(step, backend="graph")(torch.ones(2))
    assert not holder.w._backward_hooks


class Fails(Trainer):
    """What another method names is found though the step cannot be captured."""

    def __init__(self, how):
        self.how = how

    def finish(self):
        made = Helper()
        held = [p.detach() for p in PARAMETERS]

        def inner():  # which names what this run has made
            return made.scale.sum() + held[0].sum() + TABLE.sum()

        found = inner()
        if self.how == "raises":
            raise ZeroDivisionError("the step's own")
        return found if float(found) > 0 else -found


@pytest.mark.parametrize("how", ["raises", "branches"])
def test_a_step_that_fails_is_captured_a_few_times(how, monkeypatch):
    capture, runs = sys.modules["partita.guards.capture_run"], []
    run = capture.trace_once
    monkeypatch.setattr(capture, "trace_once", lambda *given: (runs.append(how), run(*given))[1])
    expected = ZeroDivisionError if how == "raises" else pt.CaptureError
    step = pt.compile(Fails(how).train, backend="graph")
    for _ in range(2):
        with pytest.raises(expected, match="own" if how == "raises" else "reads a value"):
            step(torch.ones(3, 2))
    assert 2 <= len(runs) <= 20
    assert not any(isinstance(v, FakeTensor) for v in (*PARAMETERS, TABLE, HELPER.scale))
