"""`capture` by itself, over declared state: the program does what the function does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import partita as pt
from partita.capture.tracer import capture, list_slots
from partita.graph.slots import Slot
from partita.graph.verify import verify
from tests.programs.zero_stages import whole

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
LATER = X.flip(0) * 0.5


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
    ).double()


def make_step(model: nn.Module, optimizer: Any) -> Any:
    def step(x: torch.Tensor) -> dict[str, Any]:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach(), "count": len(x)}

    return step


def run(program: Any, slots: list[Slot], *args: Any) -> list[torch.Tensor]:
    return [*program.run_graph([*(slot.value for slot in slots), *args])]


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_training_step_over_declared_state_is_the_step(make: Any, stage: int | None) -> None:
    model = make_model()
    optimizer = make(model.parameters(), lr=0.1)
    step = make_step(model, optimizer)
    expected = [step(x)["loss"] for x in (X, X, LATER)]

    def program(mesh: Any) -> Any:
        mine = make_model()
        if stage is not None:
            pt.zero(mine, mesh, stage=stage)
        place = pt.distribute_tensor if stage is not None else lambda x, *_: x
        x, later = (place(t, mesh, [pt.Shard(0)]) for t in (X, LATER))
        optimizer = make(mine.parameters(), lr=0.1)
        step = make_step(mine, optimizer)
        losses = [step(x)["loss"]]  # which makes the optimizer's state
        slots = list_slots([mine], [optimizer])
        before = [slot.value.detach().clone() for slot in slots]
        made = capture(step, (x,), modules=[mine], optimizers=[optimizer])
        verify(made, "capture")
        for slot, value in zip(slots, before, strict=True):  # the capture has run nothing
            assert torch.equal(whole(slot.value), whole(value))
        assert made.constants[1] == 6
        for given in (x, later):
            out = run(made, slots, given)
            ((loss, spec),) = (
                (value, output.spec)
                for value, output in zip(out, made.outputs, strict=True)
                if output.kind == "result"
            )
            if spec is not None:
                loss = pt.DTensor.from_local(loss, mesh, [p for _, p in spec.by_axis()])
            losses.append(loss)
        return [whole(v) for v in losses], [whole(p) for p in mine.parameters()]

    with pt.ranks(dp=2) as world:
        for losses, parameters in world.run(program):
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
            torch.testing.assert_close(
                parameters, [p.detach() for p in model.parameters()], rtol=0, atol=1e-9
            )


def test_a_tensor_in_a_slot_is_state_that_the_function_writes() -> None:
    held = {"total": torch.zeros(4, dtype=torch.float64)}

    def add(x: torch.Tensor) -> torch.Tensor:
        held["total"].add_(x.sum(0))
        return held["total"] * 2

    slots = [Slot("total", "value", held, "total")]
    made = capture(add, (X,), slots=slots)
    assert not held["total"].any()
    for times in (1, 2):
        (found,) = run(made, slots, X)
        torch.testing.assert_close(found, X.sum(0) * 2 * times)
        torch.testing.assert_close(held["total"], X.sum(0) * times)


OTHER = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        (lambda x: x + OTHER, (X,), "is not among its inputs"),
        (lambda x: x if x.sum() > 0 else -x, (X,), "reads a value"),
        (lambda x, name: x, (X, "a name"), r"argument\[1\] is a str"),
        (lambda x: {"x": x, "of": object()}, (X,), "a result is a object"),
    ],
)
def test_all_else_is_an_error(function: Any, args: Any, said: str) -> None:
    with pytest.raises(pt.CaptureError, match=said):
        capture(function, args)
