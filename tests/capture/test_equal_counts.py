"""Is what an optimizer reckons of its counts reckoned once, and only where they are equal?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import partita as pt

ROWS = torch.linspace(-1, 1, 12).reshape(3, 4)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "Adam that counts within": lambda p: torch.optim.Adam(p, 0.1, capturable=False, amsgrad=True),
    "NAdam, of a product": lambda p: torch.optim.NAdam(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
}


class Training:
    """A model, its optimizer and a step, eager and compiled alike."""

    def __init__(self, layers: int = 2, make: Any = OPTIMIZERS["AdamW"], compiled: bool = True):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        self.optimizer = make(self.model.parameters())
        self.step = pt.compile(self.run, backend="graph") if compiled else self.run

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def count_of(self, i: int) -> torch.Tensor:
        return self.optimizer.state[[*self.model.parameters()][i]]["step"]

    def single_numbers(self) -> int:
        """How many single numbers the update reckons, beside writing them."""
        lines = str(self.step.graph).splitlines()
        update = [line for line in lines if "(update)" in line and "copy_." not in line]
        return sum("f64[]" in line or "f32[]" in line for line in update)

    def check_like(self, eager: Training, rtol: float = 1e-6) -> None:
        for p, q in zip(self.model.parameters(), eager.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=rtol, atol=1e-7)
        for i, p in enumerate(eager.model.parameters()):
            state = self.optimizer.state[[*self.model.parameters()][i]]
            for key, value in eager.optimizer.state[p].items():
                torch.testing.assert_close(state[key], value, rtol=rtol, atol=1e-7)


def make_compiled_and_eager(make: Any = OPTIMIZERS["AdamW"]) -> tuple[Training, Training]:
    return Training(make=make), Training(make=make, compiled=False)


def test_a_deeper_model_reckons_no_more_single_numbers():
    few, many = Training(2), Training(6)
    few.step(ROWS), many.step(ROWS)
    assert many.single_numbers() == few.single_numbers() > 0


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equal_counts_are_what_eager_counts(kind):
    one, eager = make_compiled_and_eager(OPTIMIZERS[kind])
    for _ in range(4):
        torch.testing.assert_close(one.step(ROWS), eager.step(ROWS))
    one.check_like(eager, rtol=1e-5)
    assert len(one.step.programs) == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_counts_that_differ_from_the_beginning_stay_apart(kind):
    one, eager = make_compiled_and_eager(OPTIMIZERS[kind])
    for training in (one, eager):
        training.run(ROWS)
        training.count_of(1).fill_(7)
    for _ in range(3):
        one.step(ROWS), eager.step(ROWS)
    one.check_like(eager, rtol=1e-5)
    assert one.count_of(1) == 10 and one.count_of(0) == 4


@pytest.mark.slow
def test_a_count_that_is_set_between_two_calls_makes_another_program_that_says_why():
    one, eager = make_compiled_and_eager()
    for i in range(6):
        one.step(ROWS), eager.step(ROWS)
        one.check_like(eager)
        if i == 2:
            one.count_of(3).fill_(40), eager.count_of(3).fill_(40)
    assert len(one.step.programs) == 2
    assert "step is 40.0 and" in one.step.reasons[-1]
    assert "step is 3.0, where all 4 such numbers were equal" in one.step.reasons[-1]


@pytest.mark.slow
def test_counts_that_drift_apart_are_not_captured_for_each_drift():
    one, eager = make_compiled_and_eager()
    for i in range(8):
        one.step(ROWS), eager.step(ROWS)
        one.check_like(eager)
        for training in (one, eager):
            training.count_of(i % 4).add_(i)
    assert len(one.step.reasons) == 2


@pytest.mark.slow
def test_a_count_loaded_with_a_state_dict_is_read():
    one, eager = make_compiled_and_eager()
    for training in (one, eager):
        training.step(ROWS)
        state = copy.deepcopy(training.optimizer.state_dict())
        state["state"][2]["step"] = torch.tensor(30.0)
        training.optimizer.load_state_dict(state)
        for _ in range(2):
            training.step(ROWS)
    one.check_like(eager)
    assert one.count_of(2) == 32


@pytest.mark.slow
def test_a_parameter_that_is_left_out_once_lags_behind():
    one, eager = make_compiled_and_eager()
    for i in range(6):
        for training in (one, eager):
            training.model[0].weight.requires_grad_(i != 2)
            training.step(ROWS)
        one.check_like(eager)
    assert one.count_of(0) < one.count_of(1)


SHARED = {
    "step": OPTIMIZERS["AdamW"],
    "exp_avg": OPTIMIZERS["AdamW"],
    "sum": OPTIMIZERS["Adagrad"],
    "momentum_buffer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", SHARED)
def test_state_that_two_parameters_share_is_refused(name):
    one = Training(make=SHARED[name])
    one.step(ROWS)
    first, _, third, _ = one.optimizer.state.values()
    first[name] = third[name]
    with pytest.raises(pt.CaptureError, match="two parameters of an optimizer share one tensor"):
        one.step(ROWS)


def trained_with_an_optimizer_of_ones_own(mesh: Any) -> list[torch.Tensor]:
    """Its numbers are a rank's: how often the rank had a gradient that is not zero."""

    class Counting(torch.optim.Optimizer):
        def __init__(self, params: Any):
            super().__init__(params, {})
            for p in self.param_groups[0]["params"]:
                self.state[p]["step"] = torch.tensor(
                    float(mesh.get_local_rank() if p.ndim == 2 else 0)
                )

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                own = self.state[p]["step"]
                own.add_(p.grad.to_local().ne(0).any())

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    pt.zero(model, mesh, stage=3)
    optimizer = Counting(model.parameters())

    def run(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = pt.compile(run, backend="graph")
    x = pt.distribute_tensor(ROWS, mesh, [pt.Shard(0)])
    for _ in range(2):
        step(x)
    return [s["step"] for s in optimizer.state.values()]


def test_numbers_that_are_a_ranks_own_are_not_taken_for_equal_on_one_rank():
    with pt.ranks(dp=2) as world:
        found = world.run(trained_with_an_optimizer_of_ones_own)
    assert [[float(c) for c in counts] for counts in found] == [[2, 2], [3, 2]]


class MakingNumbers(torch.optim.Optimizer):
    """Its first step makes an equal number for each parameter, its state from then on."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if "scale" not in self.state[p]:
                self.state[p]["scale"] = torch.ones(()) * 3
            p.sub_(p.grad * self.state[p]["scale"])


def test_equal_numbers_that_an_update_makes_lie_apart():
    one, eager = make_compiled_and_eager(MakingNumbers)
    for training in (one, eager):
        training.step(ROWS)
        first, *_ = training.optimizer.state.values()
        first["scale"].zero_()
        training.step(ROWS)
    one.check_like(eager)
    assert [float(s["scale"]) for s in one.optimizer.state.values()] == [0, 3, 3, 3]
