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


def make_small(make: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    return model, make(model.parameters())


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_a_new_optimizer_goes_from_call_to_call(name: str) -> None:
    model, optimizer = make_small(OPTIMIZERS[name])
    step = make_step(model, optimizer)
    wanted = [step(X)["loss"] for _ in range(4)]
    model, optimizer = make_small(OPTIMIZERS[name])
    made = capture(make_step(model, optimizer), (X,), modules=[model], optimizers=[optimizer])
    slots = list_slots([model], [optimizer])
    found = [run(made, slots, X)[0] for _ in range(4)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert len(optimizer.state) == (0 if name == "plain" else 2)


def test_state_that_a_step_does_not_use_is_not_made() -> None:
    model, optimizer = make_small(OPTIMIZERS["Adam"])
    made = capture(lambda x: model(x).sum(), (X,), modules=[model], optimizers=[optimizer])
    assert not optimizer.state
    slots = list_slots([model], [optimizer])
    torch.testing.assert_close(run(made, slots, X)[0], model(X).sum())


def test_a_capture_that_fails_makes_no_state() -> None:
    model, optimizer = make_small(OPTIMIZERS["Adam"])
    step = make_step(model, optimizer)

    def fail(x: torch.Tensor) -> Any:
        return step(x) if x.sum() > 0 else step(-x)

    with pytest.raises(pt.CaptureError, match="reads a value"):
        capture(fail, (X,), modules=[model], optimizers=[optimizer])
    assert not optimizer.state


class Counting(torch.optim.SGD):
    """Makes state in its own way, in its first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("total", torch.zeros_like(p)).add_(p.grad)
                p.sub_(state["total"], alpha=0.1)


def dampened(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize("make", [lambda p: Counting(p, 0.1), dampened])
def test_state_that_only_the_first_step_makes_is_refused(make: Any) -> None:
    model, optimizer = make_small(make)
    step = make_step(model, optimizer)
    with pytest.raises(pt.CaptureError, match="once before the capture"):
        capture(step, (X,), modules=[model], optimizers=[optimizer])
    assert not any(optimizer.state.values())
    step(X)
    made = capture(step, (X,), modules=[model], optimizers=[optimizer])
    slots = list_slots([model], [optimizer])
    found = [run(made, slots, X)[0] for _ in range(2)]
    model, optimizer = make_small(make)
    step = make_step(model, optimizer)
    wanted = [step(X)["loss"] for _ in range(3)]
    torch.testing.assert_close(found, wanted[1:], rtol=0, atol=1e-12)


def keep(model: Any, x: torch.Tensor) -> None:
    model.cache = model(x)


def keep_in_list(model: Any, x: torch.Tensor) -> None:
    model.kept.append(model(x))


def register(model: Any, x: torch.Tensor) -> None:
    model.register_buffer("cache", model(x))


@pytest.mark.parametrize(
    ("leave", "name"), [(keep, "cache"), (keep_in_list, "kept"), (register, "cache")]
)
def test_what_is_left_in_a_module_is_taken_back_and_refused(leave: Any, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2).double())
    inner: Any = model[0]
    inner.kept = kept = [1]

    def step(x: torch.Tensor) -> torch.Tensor:
        leave(inner, x)
        return x * 2

    with pytest.raises(pt.CaptureError, match=rf"in the attribute 0\.{name} of a module"):
        capture(step, (X,), modules=[model])
    assert inner.kept is kept and kept == [1] and not hasattr(inner, "cache")
    inner.cache = None
    if leave is not register:
        with pytest.raises(pt.CaptureError, match=rf"0\.{name}"):
            capture(step, (X,), modules=[model])
        assert inner.cache is None


def test_modules_that_list_their_parameters_are_captured() -> None:
    torch.manual_seed(0)
    model = nn.GRU(4, 3).double()
    made = capture(lambda x: model(x)[0], (X,), modules=[model])
    torch.testing.assert_close(run(made, list_slots([model], []), X)[0], model(X)[0])


def test_a_result_that_is_an_input_is_an_output() -> None:
    model = nn.Linear(4, 2).double()

    def step(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a.add_(b), b, model.weight, a * 2

    made = capture(step, (X.clone(), X), modules=[model])
    verify(made, "capture")
    a, slots = X.clone(), list_slots([model], [])
    found = run(made, slots, a, LATER)
    wanted = [X + LATER, LATER, model.weight, 2 * (X + LATER)]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(a, X + LATER)
    assert made.result.unflatten(found) is not None and len(made.constants) == 4
