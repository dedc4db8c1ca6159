"""Small programs under all stages of ZeRO, compared with one process."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

import partita as pt

X, Y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
STAGES = (0, 1, 2, 3)


def mlp(blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(blocks)]
    ).double()


def whole(t):
    return (
        None
        if t is None
        else (t.full_tensor() if isinstance(t, pt.DTensor) else t).detach().clone()
    )


def gradients_of(model):
    return [whole(p.grad) for p in model.parameters()]


def run(program, stage, ranks=3, make=mlp):
    """Run `program(model, spread, no_sync)` in one process and under ZeRO; both give the same."""
    truth = program(make(), lambda t: t, lambda _: nullcontext())

    def body(mesh):
        model = pt.zero(make(), mesh, stage=stage)
        return program(model, lambda t: pt.distribute_tensor(t, mesh, [pt.Shard(0)]), pt.no_sync)

    with pt.ranks(dp=ranks) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


def loss_of(model, x):
    return model(x).square().mean()
