"""A transformer and its plan of tensor parallelism, with the names of torch or of partita."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS, STEPS = 24, 16, 4, 8, 4, 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        # Both packages: the number of heads follows from the size of what a projection returns.
        q, k, v = (
            f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_model():
    torch.manual_seed(0)
    return Model().double()


def make_tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (STEPS, ROWS, LENGTH), generator=generator)


def apply_plan(model, mesh, names, placements, sequence):
    """Both packages: torch's example of a transformer, with or without sequence parallelism."""
    Shard, Replicate = placements.Shard, placements.Replicate
    of_block = {
        "attention": names.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "norm1": names.SequenceParallel(),
        "norm2": names.SequenceParallel(),
        "mlp": names.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
    }
    for layer in model.layers:
        names.parallelize_module(
            layer,
            mesh,
            {
                **(of_block if sequence else {}),
                **{f"attention.{n}": names.ColwiseParallel() for n in "qkv"},
                "mlp.up": names.ColwiseParallel(),
                **{
                    n: names.RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
                    for n in ("attention.out", "mlp.down")
                },
            },
        )
    return names.parallelize_module(
        model,
        mesh,
        {
            "words": names.RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate()
            ),
            **({"norm": names.SequenceParallel()} if sequence else {}),
            "head": names.ColwiseParallel(
                input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate()
            ),
        },
    )
