"""A captured step that reads whether `.grad` is None gets the answer of eager in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import partita as pt
from tests.programs.refused import each_rank


def _accumulate_by_hand(model: torch.nn.Linear, loss: torch.Tensor) -> None:
    grads = torch.autograd.grad(loss, [*model.parameters()])
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad if p.grad is None else p.grad * 0.5 + grad


def _write_in_place(model: torch.nn.Linear, loss: torch.Tensor) -> None:
    grads = torch.autograd.grad(loss, [*model.parameters()])
    for p, grad in zip(model.parameters(), grads, strict=True):
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.mul_(0.5).add_(grad)


def _scale_by_answer(model: torch.nn.Linear, loss: torch.Tensor) -> None:
    scale = 1.0 + sum([p.grad is None for p in model.parameters()])
    model.zero_grad()
    (loss * scale).backward()


def _scale_by_count(model: torch.nn.Linear, loss: torch.Tensor) -> None:
    n = sum(getattr(p, "grad", None) is not None for p in model.parameters())
    grads = torch.autograd.grad(loss, [*model.parameters()])
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad * (n + 1)


def _zero_where_present(model: torch.nn.Linear, loss: torch.Tensor) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()
    loss.backward()


_WAYS = [
    _accumulate_by_hand,
    _write_in_place,
    _scale_by_answer,
    _scale_by_count,
    _zero_where_present,
]


def _train(mesh: Any, stage: int, fill: Callable[..., None], compiles: bool) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    if mesh is not None:
        pt.zero(model, mesh, "dp", stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        fill(model, loss)
        optimizer.step()
        return loss

    run = pt.compile(step, backend="graph") if compiles else step
    losses = []
    for i in range(4):
        x = torch.arange(8.0, dtype=torch.float64).reshape(2, 4) * (i + 1) / 8
        x = x if mesh is None else pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        losses.append(run(x).item())
    grads = [p.grad for p in model.parameters()]
    return [losses, *(g.full_tensor() if isinstance(g, pt.DTensor) else g for g in grads)]


@pytest.mark.slow
@pytest.mark.parametrize("fill", _WAYS)
def test_on_one_device(fill: Callable[..., None]) -> None:
    wanted = _train(None, 0, fill, compiles=False)
    torch.testing.assert_close(_train(None, 0, fill, compiles=True), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_under_zero(stage: int) -> None:
    for fill in (_scale_by_answer, _scale_by_count):
        wanted = _train(None, 0, fill, compiles=False)
        for found in each_rank(lambda mesh, fill=fill: _train(mesh, stage, fill, True), dp=2):
            torch.testing.assert_close(found, wanted, msg=lambda text, fill=fill: f"{fill}: {text}")
