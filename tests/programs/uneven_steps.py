"""Steps of models whose rows the ranks share unevenly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

G = torch.Generator().manual_seed(5)

X = torch.rand(6, 6, generator=G) + 0.5

Y = torch.rand(6, 5, generator=G) + 0.5


def widths():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 5))


def on(mesh):
    placements = [pt.Shard(0) if a == "dp" else pt.Replicate() for a in mesh.mesh_dim_names]
    return lambda t: pt.distribute_tensor(t, mesh, placements)


def compiled(step):
    return pt.compile(step, backend="graph")


def train(mesh, spread_out, rows, fast):
    model = widths()
    x, y = X[:rows], Y[:rows]
    if mesh is not None:
        model = spread_out(model, mesh)
        x, y = on(mesh)(x), on(mesh)(y)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = pt.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss, norm

    if fast:
        step = pt.compile(step, backend="graph" if fast is True else fast)
    found = [[t.item() for t in step(x, y)] for _ in range(3)]
    return torch.tensor(found), step.key if fast else "", step


def close(found, wanted, rtol=1e-6):
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-7)
