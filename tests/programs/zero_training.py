"""Models that are trained with ZeRO's stages, and how: a small GPT, and one of odd shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.app.models import GPT

TOKENS = torch.randint(0, 256, (2, 12, 8), generator=torch.Generator().manual_seed(1))


def gpt(layers=3, width=16):
    torch.manual_seed(0)
    return GPT(layers=layers, width=width, heads=2, context=8)


class Odd(nn.Module):
    """Uneven everything: rows that no number of ranks divides, a scalar, one row, a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 5)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x) * self.scale + self.shift
        return self.head(x)


def odd():
    torch.manual_seed(0)
    return Odd()


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(model, spread, steps=4, make=torch.optim.AdamW, clip=None, **options):
    optimizer = make(model.parameters(), lr=1e-2, **options)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, *map(spread, TOKENS))
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            pt.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def rows(mesh, axis="dp"):
    placements = [pt.Shard(0) if a == axis else pt.Replicate() for a in mesh.mesh_dim_names]
    return lambda t: pt.distribute_tensor(t, mesh, placements)
