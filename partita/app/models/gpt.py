"""A small GPT over bytes, in ordinary PyTorch, without any code for ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .decoder import Block, Decoder, rotate

VOCAB = 256  # a token is a byte


class GPT(Decoder):
    """A decoder-only transformer over bytes: pre-norm, rotary positions, causal attention, GELU.

    Args:
        layers: the number of blocks.
        width: the size of the residual stream, a multiple of `heads`.
        heads: attention heads per block; each is `width // heads` wide, an even number.
        context: the longest sequence, in tokens.
        vocab: the number of tokens; bytes by default.

    Raises:
        ValueError: `width` does not divide into `heads` of an even size.
    """

    adds = ("out.weight", "down.weight")

    def __init__(self, *, layers: int, width: int, heads: int, context: int, vocab: int = VOCAB):
        super().__init__(
            vocab=vocab,
            width=width,
            heads=heads,
            context=context,
            blocks=(make_block(width, heads) for _ in range(layers)),
            norm=nn.LayerNorm(width),
        )
        self.init_weights()


def make_block(width: int, heads: int) -> Block:
    norm1, attention = nn.LayerNorm(width), Attention(width, heads)
    return Block(norm1, attention, nn.LayerNorm(width), MLP(width))


class Attention(nn.Module):
    """Causal self-attention of several heads, with rotary positions."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # rows: head, then q, k, v
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_btw: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
        b, t, _ = x_btw.shape
        qkv_bhtd = self.qkv(x_btw).view(b, t, self.heads, -1).transpose(1, 2)
        q, k, v = qkv_bhtd.chunk(3, dim=-1)
        q, k = rotate(q, cos_td, sin_td), rotate(k, cos_td, sin_td)
        y_bhtd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y_bhtd.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """Two linear layers with GELU between them; the inner width is four times the outer."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_btw: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_btw)))
