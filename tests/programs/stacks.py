"""Models of blocks that are alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Stack(nn.Module):
    """Blocks between two linears, all of one width."""

    def __init__(self, blocks: Iterable[nn.Module], width: int):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
