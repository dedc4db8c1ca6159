"""Models of which parts are compiled, each a region."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

WHOLE, ROWS, COLUMNS = [pt.Replicate()], [pt.Shard(0)], [pt.Shard(1)]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    """Statistics that forward writes, and dropout."""

    def __init__(self, d=8):
        super().__init__()
        self.up, self.norm = nn.Linear(d, 2 * d), nn.BatchNorm1d(2 * d)
        self.down, self.drop = nn.Linear(2 * d, d), nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        return x + scale * self.drop(self.down(F.relu(self.norm(self.up(x)))))


class Layer(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def gpt_like(layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(layers)])


def train(model, optimizer, x, steps=3):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


BATCH = torch.randn(8, 8, generator=torch.Generator().manual_seed(4))


def one_device():
    model = gpt_like()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), BATCH)
