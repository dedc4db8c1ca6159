"""A small GPT.

What is the model? A small GPT over bytes, in ordinary PyTorch: it knows nothing of ranks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT"]

VOCAB = 256  # a token is a byte


class GPT(nn.Module):
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

    cos: Tensor
    sin: Tensor

    def __init__(self, *, layers: int, width: int, heads: int, context: int, vocab: int = VOCAB):
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width {width} does not divide into {heads} heads of an even size")
        self.context = context
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("cos", torch.empty(context, width // heads), persistent=False)
        self.register_buffer("sin", torch.empty(context, width // heads), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Write every parameter and buffer, as after `to_empty`. As GPT-2 has it.

        Normal of deviation 0.02, less where a block adds to the residual stream; biases 0.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("out.weight", "down.weight"))
                less = math.sqrt(2 * len(self.blocks)) if adds else 1
                nn.init.normal_(parameter, std=0.02 / less)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)
        cos, sin = rotary_table(*self.cos.shape, device=self.cos.device)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Tokens (b, t), int64, t at most `context` -> logits (b, t, vocab)."""
        t = tokens_bt.shape[1]
        cos_td, sin_td = self.cos[:t], self.sin[:t]
        x_btw = self.embed(tokens_bt)
        for block in self.blocks:
            x_btw = block(x_btw, cos_td, sin_td)
        return self.head(self.norm(x_btw))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x_btw: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
        x_btw = x_btw + self.attention(self.norm1(x_btw), cos_td, sin_td)
        return x_btw + self.mlp(self.norm2(x_btw))


class Attention(nn.Module):
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
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_btw: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_btw)))


def rotary_table(
    context: int, size: int, *, base: float = 10_000.0, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """The cosines and sines (context, size) of rotary positions (Su et al., arXiv 2104.09864)."""
    frequency = base ** (-torch.arange(0, size, 2, device=device) / size)
    angle = torch.outer(torch.arange(context, device=device), frequency)
    angle_td = torch.cat([angle, angle], dim=1)
    return angle_td.cos(), angle_td.sin()


def rotate(x_bhtd: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its position's angle."""
    first, second = x_bhtd.chunk(2, dim=-1)
    return x_bhtd * cos_td + torch.cat([-second, first], dim=-1) * sin_td
