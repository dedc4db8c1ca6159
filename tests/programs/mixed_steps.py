"""Eager steps of a small model with odd widths, in many ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


def mixed_step(
    mesh,
    zero=None,
    *,
    rows=51,
    optimizer="adamw",
    backwards=1,
    clip=False,
    autocast=False,
    remat=False,
    frozen=False,
    converted=False,
):
    """A step over `mesh`, its arguments, and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(71, 131), nn.GELU(), nn.LayerNorm(131), nn.Linear(131, 53))
    dtype = torch.bfloat16 if converted else torch.float32
    model = model.to(mesh.device_type).to(dtype) if converted else model
    if frozen:
        model[0].weight.requires_grad_(False)
    model = pt.parallelize(model, mesh) if zero is None else pt.zero(model, mesh, "dp", stage=zero)
    if remat:
        pt.remat(model, blocks=[model[0], model[3]])
    chosen = OPTIMIZERS[optimizer](model.parameters())
    placements = [pt.Shard(0) if a == "dp" else pt.Replicate() for a in mesh.mesh_dim_names]
    x = pt.distribute_tensor(torch.randn(rows, 71, dtype=dtype), mesh, placements)
    y = pt.distribute_tensor(torch.randn(rows, 53), mesh, placements)

    def step(x, y):
        chosen.zero_grad()
        for _ in range(backwards):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(x)
            loss = F.mse_loss(out.float(), y)
            loss.backward()
        if clip:
            pt.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
        return loss.detach()

    return step, (x, y), chosen
