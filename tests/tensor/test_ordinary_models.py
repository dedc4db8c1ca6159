"""Do ordinary models, their code unmodified, train on many ranks as they do on one device?

One step of each: forward, loss, backward, optimizer. The batch is split unevenly; the parameters
are whole, sharded, or split as in tensor parallelism; dropout is active. Ground truth is the same
model on plain tensors from the same seed, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import partita as pt
from tests.programs.ordinary_models import MODELS

SAMPLES = 5


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# -- one step --------------------------------------------------------------------------------------


@dataclass
class Step:
    """What one step leaves behind: plain, whole tensors by name."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def step(model: nn.Module, batch: tuple[torch.Tensor, ...], whole: Callable[[Any], Any]) -> Step:
    """One step of training. `whole` makes a plain tensor of what may be a DTensor."""
    adam = sum(p.numel() for p in model.parameters()) % 2 == 0
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        if adam
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    )
    torch.manual_seed(7)  # dropout
    loss = model(*batch)
    loss.backward()
    gradients = {
        n: None if p.grad is None else whole(p.grad).clone() for n, p in model.named_parameters()
    }
    optimizer.step()
    return Step(
        whole(loss.detach()).clone(),
        gradients,
        {n: whole(b).clone() for n, b in model.named_buffers()},
        {n: whole(p.detach()).clone() for n, p in model.named_parameters()},
    )


@cache
def on_one_device(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], Step]:
    """The untrained model, its batch, and its step on one device."""
    torch.manual_seed(1)
    case = MODELS[name]
    model, batch = case.make(), case.batch(SAMPLES)
    return model, batch, step(copy.deepcopy(model), batch, lambda x: x)


def compare(ours: Step, truth: Step) -> None:
    torch.testing.assert_close(ours.loss, truth.loss, rtol=1e-10, atol=1e-12)
    for what in ("gradients", "buffers", "parameters"):
        mine, theirs = getattr(ours, what), getattr(truth, what)
        assert mine.keys() == theirs.keys()
        for n, value in theirs.items():
            if value is None:
                assert mine[n] is None, f"{what}: {n} has one"
                continue
            assert mine[n] is not None, f"{what}: {n} has none"
            torch.testing.assert_close(
                mine[n], value, rtol=1e-9, atol=1e-11, msg=lambda m, at=f"{what}: {n}": f"{at}: {m}"
            )


# -- where the parameters live ---------------------------------------------------------------------

Placed = Callable[[str, nn.Module, Any], None]


def place(module: nn.Module, mesh: Any, by_name: Callable[[nn.Module, str], pt.Placement]) -> None:
    """Put each of a module's own parameters where `by_name` says, on the mesh's last axis."""
    others = [pt.Replicate()] * (mesh.ndim - 1)
    for name, p in list(module.named_parameters(recurse=False)):
        if not isinstance(p, pt.DTensor):
            placements = [*others, by_name(module, name)]
            new = pt.distribute_tensor(p.detach(), mesh, placements)
            setattr(module, name, nn.Parameter(new, p.requires_grad))


def sharded(_: str, module: nn.Module, mesh: Any) -> None:
    """Every parameter is cut along its first dimension."""
    place(module, mesh, lambda m, name: pt.Shard(0) if getattr(m, name).ndim else pt.Replicate())


def tensor_parallel() -> Placed:
    """Linears alternate between columns and rows; convolutions and embeddings are split too."""
    seen = {nn.Linear: 0, nn.Embedding: 0}

    def put(_: str, module: nn.Module, mesh: Any) -> None:
        turn = 0
        for kind in seen:
            if isinstance(module, kind):
                turn, seen[kind] = seen[kind] % 2, seen[kind] + 1

        def where(m: nn.Module, name: str) -> pt.Placement:
            if isinstance(m, nn.Linear):
                return (
                    pt.Shard(0)
                    if turn == 0
                    else pt.Shard(1)
                    if name == "weight"
                    else pt.Replicate()
                )
            if isinstance(m, nn.Embedding | nn.EmbeddingBag):
                return pt.Shard(turn)
            if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
                return pt.Shard(0) if name == "weight" else pt.Replicate()
            if isinstance(m, nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase):
                return pt.Shard(0)
            return pt.Replicate()

        place(module, mesh, where)

    return put


MODES: dict[str, tuple[dict[str, int], list[pt.Placement], Callable[[], Placed | None]]] = {
    "batch split over 2": ({"dp": 2}, [pt.Shard(0)], lambda: None),
    "batch split over 3": ({"dp": 3}, [pt.Shard(0)], lambda: None),
    "parameters and batch split over 2": ({"dp": 2}, [pt.Shard(0)], lambda: sharded),
    "parameters and batch split over 3": ({"dp": 3}, [pt.Shard(0)], lambda: sharded),
    "tensor parallel over 2": ({"tp": 2}, [pt.Replicate()], tensor_parallel),
    "tensor parallel over 3": ({"tp": 3}, [pt.Replicate()], tensor_parallel),
    "batch split and tensor parallel, 2x2": (
        {"dp": 2, "tp": 2},
        [pt.Shard(0), pt.Replicate()],
        tensor_parallel,
    ),
}
"""By name: the mesh, where the batch lies on it, and who places the parameters."""


def train(mesh: Any, name: str, mode: str) -> None:
    """One rank's part: the same step, compared with one device's."""
    model, batch, truth = on_one_device(name)
    _, placements, placed = MODES[mode]
    model = pt.distribute_module(copy.deepcopy(model), mesh, placed())
    spread = tuple(pt.distribute_tensor(x, mesh, placements) for x in batch)
    compare(step(model, spread, lambda x: x.full_tensor()), truth)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_one_device(name: str, mode: str) -> None:
    on_one_device(name)
    with pt.ranks(**MODES[mode][0]) as world:
        world.run(train, name, mode)


def test_there_are_at_least_sixteen_models() -> None:
    assert len(MODELS) >= 16
