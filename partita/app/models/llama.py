"""A small Llama, in ordinary PyTorch, without any code for ranks."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from .decoder import Block, Decoder, rotate


class Llama(Decoder):
    """A decoder-only transformer like Llama 3: RMSNorm, rotary positions, grouped heads, SwiGLU.

    (Touvron et al., arXiv 2302.13971; Grattafiori et al., arXiv 2407.21783.)

    Args:
        layers: the number of blocks.
        width: the size of the residual stream, a multiple of `heads`.
        heads: heads of queries per block; each is `width // heads` wide, an even number.
        groups: heads of keys and values, which `heads // groups` heads of queries share.
        context: the longest sequence, in tokens.
        vocab: the number of tokens; bytes by default.
        hidden: the width inside the MLP; 8/3 of `width` by default, a multiple of 16.
        tied: True if the head uses the embedding's weight.

    Raises:
        ValueError: `width` does not divide into `heads` of an even size, or `heads` into `groups`.
    """

    adds = ("o.weight", "down.weight")

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        groups: int,
        context: int,
        vocab: int = 256,
        hidden: int | None = None,
        tied: bool = False,
    ):
        if heads % groups:
            raise ValueError(f"{heads} heads do not divide into {groups} groups")
        hidden = 16 * math.ceil(width / 6) if hidden is None else hidden
        super().__init__(
            vocab=vocab,
            width=width,
            heads=heads,
            context=context,
            blocks=(make_block(width, heads, groups, hidden) for _ in range(layers)),
            norm=nn.RMSNorm(width, eps=1e-5),
            base=500_000.0,
        )
        if tied:
            self.head.weight = self.embed.weight
        self.init_weights()


def make_block(width: int, heads: int, groups: int, hidden: int) -> Block:
    norm1, attention = nn.RMSNorm(width, eps=1e-5), Attention(width, heads, groups)
    return Block(norm1, attention, nn.RMSNorm(width, eps=1e-5), SwiGLU(width, hidden))


class Attention(nn.Module):
    """Causal attention in which `heads // groups` query heads share a key and value head."""

    def __init__(self, width: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.q = nn.Linear(width, heads * size, bias=False)
        self.k = nn.Linear(width, groups * size, bias=False)
        self.v = nn.Linear(width, groups * size, bias=False)
        self.o = nn.Linear(heads * size, width, bias=False)

    def forward(self, x_btw: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
        b, t, _ = x_btw.shape
        q_bhtd = self.q(x_btw).view(b, t, self.heads, -1).transpose(1, 2)
        k_bgtd = self.k(x_btw).view(b, t, self.groups, -1).transpose(1, 2)
        v_bgtd = self.v(x_btw).view(b, t, self.groups, -1).transpose(1, 2)
        q_bhtd, k_bgtd = rotate(q_bhtd, cos_td, sin_td), rotate(k_bgtd, cos_td, sin_td)
        y_bhtd = F.scaled_dot_product_attention(
            q_bhtd, k_bgtd, v_bgtd, is_causal=True, enable_gqa=True
        )
        return self.o(y_bhtd.transpose(1, 2).reshape(b, t, -1))


class SwiGLU(nn.Module):
    """An MLP with a gate: down(silu(gate(x)) * up(x)). Shazeer, arXiv 2002.05202."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_btw: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_btw)) * self.up(x_btw))
