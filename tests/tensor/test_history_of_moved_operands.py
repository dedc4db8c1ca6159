"""The gradient of an operand that ops need moved goes where its history says at each use."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import nn

import partita as pt
from partita import Invariant, Partial, Replicate, Shard

EXAMPLES = int(os.environ.get("PARTITA_EXAMPLES", "0")) or 40
F64 = torch.float64


def _whole(t):
    return t.full_tensor() if isinstance(t, pt.DTensor) else t


# -- random changes of what decides a history ------------------------------------------------------

STEPS = [
    "total = total + (x * y).sum()",
    "total = total + torch.where(z > 0, x, z).sum()",
    "total = total + (x + y).square().sum() + (x + z).sum()",
    "with torch.no_grad(): total = total + torch.where(z > 0, x, z).sum()",
    "leaf.requires_grad_(False)",
    "leaf.requires_grad_(True)",
    "x = leaf",
    "x = leaf * 2",
    "x = x.detach()",
    "x = x.detach().requires_grad_()",
    "x = x.view(x.shape)",
    "x = x.detach_() if x.grad_fn is not None and not x._is_view() else x",
    "with torch.no_grad(): leaf.mul_(0.5)",
    "leaf.data.add_(1)",
    "leaf.data = leaf.detach() * 2",
    "x = x * 1; x.mul_(3)",
    "total = total + torch.where(z > 0, x, z).sum(); total.backward(); total = 0.0 * z.sum()",
]


def _run_steps(lines, leaf, y, z):
    space = {"torch": torch, "leaf": leaf, "x": leaf, "y": y, "z": z, "total": 0.0 * z.sum()}
    for line in lines:
        exec(line, space)
    total = space["total"]
    if total.requires_grad:
        total.backward()
    zeros = torch.zeros(3, 2, dtype=F64)
    return [_whole(total.detach()), _whole(leaf.grad) if leaf.grad is not None else zeros]


def _values():
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(3, 2, generator=generator, dtype=F64) for _ in range(3)]


def _run_on_mesh(mesh, lines, placements):
    tensors = [
        pt.distribute_tensor(t, mesh, [p] * mesh.ndim)
        for t, p in zip(_values(), placements, strict=True)
    ]
    return _run_steps(lines, tensors[0].requires_grad_(), *tensors[1:])


@pytest.mark.parametrize("part", range(4))
def test_histories_that_change_between_uses_are_those_of_one_device(part):
    dice = random.Random(part if "PARTITA_EXAMPLES" not in os.environ else None)
    ran = 0
    while ran < EXAMPLES // 4:
        lines = [dice.choice(STEPS) for _ in range(dice.randint(4, 9))]
        placements = [dice.choice([Invariant(), Invariant(), Replicate(), Partial()])]
        placements += [dice.choice([Replicate(), Shard(0), Invariant(), Shard(1)]) for _ in "yz"]
        try:
            truth = _run_steps(lines, _values()[0].requires_grad_(), *_values()[1:])
        except RuntimeError:
            continue  # torch refuses it
        ran += 1
        with pt.ranks(**dice.choice([{"a": 2}, {"a": 3}, {"a": 2, "b": 2}])) as world:
            for found in world.run(_run_on_mesh, lines, placements):
                torch.testing.assert_close(found, truth, msg=lambda m, t=lines: f"{t}: {m}")


# -- frozen when it was first moved ----------------------------------------------------------------


def _freeze_first(mesh, layer, place):
    torch.manual_seed(0)
    layer = layer().double()
    x = torch.linspace(-1, 1, 15, dtype=F64).view(5, 3)
    if mesh is not None:
        pt.parallelize(layer, mesh, {"weight": {"tp": place}})
        x = pt.distribute_tensor(x, mesh, [Invariant()])
    layer.requires_grad_(False)
    layer(x)
    layer.requires_grad_(True)
    layer(x).square().sum().backward()
    found = [_whole(p.grad) for p in layer.parameters()]
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    return found


LAYERS = [
    (lambda: nn.Linear(3, 5), Shard(0)),
    (lambda: nn.Linear(3, 5), Shard(1)),
    (lambda: nn.LayerNorm(3), Shard(0)),
]


@pytest.mark.parametrize("case", range(len(LAYERS)))
def test_what_was_frozen_when_it_was_first_moved_gets_its_gradient(case):
    layer, place = LAYERS[case]
    truth = _freeze_first(None, layer, place)
    for ranks in (2, 3):
        with pt.ranks(tp=ranks) as world:
            for found in world.run(_freeze_first, layer, place):
                torch.testing.assert_close(found, truth)


# -- what it sends ---------------------------------------------------------------------------------


def _three_layers(mesh):
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    for layer in layers:
        pt.parallelize(layer, mesh, {"weight": {"tp": Shard(0)}})
    x = pt.distribute_tensor(torch.ones(2, 4), mesh, [Invariant()]).requires_grad_()
    with pt.ledger() as log:
        sum(
            layer(x * 1 if i < 0 else x).square().sum() for i, layer in enumerate(layers)
        ).backward()
    assert not [move for move in log.moves if move.kind == "all_gather"]
    return [m.op for m in log.moves if m.kind == "all_reduce" and m.reason == "gradient"]


def test_gradients_of_three_uses_meet_before_one_all_reduce():
    with pt.ranks(tp=2) as world:
        assert world.run(_three_layers) == [["linear"]] * 2
