"""Decoders: the trunk and the blocks that the models share, and rotary positions.

Ordinary PyTorch, without any code for ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Decoder(nn.Module):
    """The common part of the models: an embedding, blocks, a norm and a head that returns logits.

    Args:
        vocab: the number of tokens.
        width: the size of the residual stream, a multiple of `heads`.
        heads: attention heads per block; each is `width // heads` wide, an even number.
        context: the longest sequence, in tokens.
        blocks: the blocks. A generator makes them between embedding and head, in the order in which
            random numbers are drawn.
        norm: the norm of the residual stream before the head.
        base: the base of the angles of rotary positions.

    Raises:
        ValueError: `width` does not divide into `heads` of an even size.
    """

    cos: Tensor
    sin: Tensor
    adds: tuple[str, ...]
    """Suffixes of the names of weights whose products are added to the residual stream."""

    def __init__(
        self,
        *,
        vocab: int,
        width: int,
        heads: int,
        context: int,
        blocks: Iterable[Block],
        norm: nn.Module,
        base: float = 10_000.0,
    ):
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width {width} does not divide into {heads} heads of an even size")
        self.context, self.base = context, base
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("cos", torch.empty(context, width // heads), persistent=False)
        self.register_buffer("sin", torch.empty(context, width // heads), persistent=False)

    def init_weights(self) -> None:
        """Initializes every parameter and buffer, as GPT-2 does; also after `to_empty`.

        Weights are normal with standard deviation 0.02. It is less for weights whose products are
        added to the residual stream (`adds`). Biases are 0, and norms are 1.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                less = math.sqrt(2 * len(self.blocks)) if name.endswith(self.adds) else 1
                nn.init.normal_(parameter, std=0.02 / less)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)
        cos, sin = _rotary_table(*self.cos.shape, base=self.base, device=self.cos.device)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Returns logits (b, t, vocab) of the int64 tokens `tokens_bt`; t is at most `context`."""
        t = tokens_bt.shape[1]
        cos_td, sin_td = self.cos[:t], self.sin[:t]
        x_btw = self.embed(tokens_bt)
        for block in self.blocks:
            x_btw = block(x_btw, cos_td, sin_td)
        return self.head(self.norm(x_btw))


class Block(nn.Module):
    """A pre-norm transformer block: attention and an MLP, each added to the residual stream."""

    def __init__(self, norm1: nn.Module, attention: nn.Module, norm2: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp

    def forward(self, x_btw: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
        x_btw = x_btw + self.attention(self.norm1(x_btw), cos_td, sin_td)
        return x_btw + self.mlp(self.norm2(x_btw))


def _rotary_table(
    context: int, size: int, *, base: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines (context, size) of rotary positions (arXiv 2104.09864)."""
    frequency = base ** (-torch.arange(0, size, 2, device=device) / size)
    angle = torch.outer(torch.arange(context, device=device), frequency)
    angle_td = torch.cat([angle, angle], dim=1)
    return angle_td.cos(), angle_td.sin()


def rotate(x_bhtd: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + d/2]) by the angle of its position (rotary positions).

    Args:
        x_bhtd: queries or keys: (batch, heads, tokens, d).
        cos_td, sin_td: cosine and sine of the angle of each position and element.
    """
    first, second = x_bhtd.chunk(2, dim=-1)
    return x_bhtd * cos_td + torch.cat([-second, first], dim=-1) * sin_td
