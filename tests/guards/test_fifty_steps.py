"""How many captures do fifty steps take whose Python numbers change in each?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import partita as pt

STEPS = 50
x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)


def make_schedule(make):
    return lambda optimizer: make(optimizer).step


def change_decay(optimizer):
    counted = iter(range(STEPS))

    def change():
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * (next(counted) + 1)

    return change


def end_decay(optimizer):
    counted = iter(range(STEPS))

    def change():
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.1 if next(counted) < 20 else 0.0

    return change


def change_nothing(optimizer):
    return lambda: None


def change_eps(optimizer):
    counted = iter(range(STEPS))

    def change():
        optimizer.param_groups[0]["eps"] = 1e-8 * (next(counted) + 2)

    return change


T, Of = torch.optim, lr_scheduler
COUNTS = {  # optimizer, its options, what changes between steps, captures
    "one cycle": (
        T.AdamW, {}, make_schedule(lambda o: Of.OneCycleLR(o, 0.1, total_steps=60)), 1,
    ),
    "cyclic": (
        T.SGD, {"momentum": 0.9}, make_schedule(lambda o: Of.CyclicLR(o, 0.01, 0.1, 5)), 1,
    ),
    "weight decay": (T.AdamW, {}, change_decay, 1),
    "eps of an optimizer": (T.AdamW, {}, change_eps, 1),
    "momentum": (T.SGD, {"momentum": 0.9}, change_nothing, 1),
    "decay that leaves zero": (T.SGD, {"weight_decay": 0.1}, end_decay, 2),
    "dampening": (T.SGD, {"momentum": 0.9, "dampening": 0.5}, change_nothing, 2),
}  # fmt: skip


def train(name, compiled):
    make, options, changing, _ = COUNTS[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False).double()
    optimizer = make(model.parameters(), lr=0.01, **options)
    change = changing(optimizer)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = pt.compile(step, backend="graph") if compiled else step
    losses = []
    for _ in range(STEPS):
        losses.append(fast(x))
        change()
    return [*losses, model.weight.detach()], getattr(fast, "reasons", [])


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_fifty_steps_of_a_schedule_take_as_many_captures_as_torch_branches(name):
    found, reasons = train(name, compiled=True)
    want, _ = train(name, compiled=False)
    assert len(reasons) == COUNTS[name][-1], reasons
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


class Average:
    def __init__(self):
        self.slow, self.decay = torch.zeros_like(x), 0.5

    def update(self, x):
        self.slow.mul_(self.decay).add_(x, alpha=1 - self.decay)
        return self.slow.clone()


def test_fifty_steps_of_an_average_whose_decay_changes_take_one_capture():
    one, other = Average(), Average()
    fast = pt.compile(lambda x: one.update(x), backend="graph")
    for call in range(STEPS):
        one.decay = other.decay = 1 - 1 / (call + 2)
        torch.testing.assert_close(fast(x + call), other.update(x + call))
    assert fast.reasons == ["the first call"]


def test_fifty_steps_of_a_float_that_is_given_take_one_capture():
    def step(x, a):
        return x * a + a**2, a / 2

    fast = pt.compile(step, backend="graph")
    for call in range(STEPS):
        torch.testing.assert_close(fast(x, 0.1 * call), step(x, 0.1 * call))
    assert fast.reasons == ["the first call"]


ONLY_NUMBERS = {
    "eps": lambda x, a: F.layer_norm(x, (4,), eps=a),
    "p": lambda x, a: torch.linalg.vector_norm(x, a),
}


@pytest.mark.parametrize("name", ONLY_NUMBERS)
def test_what_an_op_takes_as_a_python_number_alone_makes_another_capture_and_is_named(name):
    step = ONLY_NUMBERS[name]
    fast = pt.compile(step, backend="graph", keep=3)
    for a in (0.1, 0.2, 0.1, 0.2):
        torch.testing.assert_close(fast(x, a), step(x, a))
    first, second = fast.reasons
    assert first == "the first call"
    assert "argument[1]: 0.1 became 0.2" in second and "read as a number" in second
