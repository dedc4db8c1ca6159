"""A mixture of experts that are spread over ranks by one line of a plan.

    torchrun --nproc-per-node=4 examples/moe.py

The mesh has 2 x 2 ranks. Over "dp" each rank has some of the sequences, over "ep" some of the
experts. Each byte goes to two of eight experts. An expert takes a limited number of bytes of a
sequence, as in GShard (arXiv 2006.16668). A part of the loss keeps the experts evenly loaded. The
layer is written for one device with einsum, whose rules say what may be split. The text is Python's
own sources.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt
from partita.app.data import read

CONTEXT, WIDTH, EXPERTS, CHOICES = 64, 64, 8, 2
CAPACITY = 2 * CHOICES * CONTEXT // EXPERTS  # the most bytes of a sequence that one expert takes


class Experts(nn.Module):
    """Applies two of `EXPERTS` small MLPs to each byte. Returns their sum, and the imbalance."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x_btw: Tensor) -> tuple[Tensor, Tensor]:
        share_bte = self.router(x_btw).softmax(dim=-1)
        best_btk = share_bte.topk(CHOICES, dim=-1).indices
        chosen_bte = F.one_hot(best_btk, EXPERTS).sum(dim=2).to(x_btw.dtype)
        # A byte's place in the queue of its expert. Bytes beyond the capacity skip the expert.
        place_bte = (chosen_bte.cumsum(dim=1) - 1).long()
        taken_bte = chosen_bte * (place_bte < CAPACITY)
        places = F.one_hot(place_bte.clamp(0, CAPACITY - 1), CAPACITY)
        sent_btec = taken_bte[..., None] * places.to(x_btw.dtype)

        x_becw = torch.einsum("btec,btw->becw", sent_btec, x_btw)
        h_bech = F.gelu(torch.einsum("becw,ewh->bech", x_becw, self.up))
        y_becw = torch.einsum("bech,ehw->becw", h_bech, self.down)
        weighed_btec = sent_btec * share_bte[..., None]
        y_btw = torch.einsum("btec,becw->btw", weighed_btec, y_becw)

        load_e, wish_e = chosen_bte.mean(dim=(0, 1)), share_bte.mean(dim=(0, 1))
        return y_btw, EXPERTS / CHOICES * (load_e * wish_e).sum()


class Model(nn.Module):
    """Predicts the next byte from the bytes before it, by a recurrent layer and the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.past = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens_bt: Tensor) -> tuple[Tensor, Tensor]:
        x_btw, _ = self.past(self.embed(tokens_bt))
        y_btw, imbalance = self.experts(self.norm(x_btw))
        return self.head(x_btw + y_btw), imbalance


def main(mesh: Any, steps: int = 200) -> list[float]:
    """Train on `mesh`, with the axes "dp" and "ep". Returns the loss of each step."""
    text = read()
    torch.manual_seed(0)
    model = Model()
    pt.parallelize(
        model, mesh, {"experts.up": {"ep": pt.Shard(0)}, "experts.down": {"ep": pt.Shard(0)}}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    losses = []
    for step in range(steps):
        batch = text.batch(step, seed=0, size=16, context=CONTEXT)
        inputs, targets = pt.distribute_batch(batch, mesh)
        logits, imbalance = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        (loss + 0.01 * imbalance).backward()
        optimizer.step()
        losses.append(loss.item())
        even = imbalance.item()  # 1 if all experts have the same load
        if mesh.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:>3}  loss {losses[-1]:.3f}  imbalance {even:.2f}", flush=True)
    return losses


if __name__ == "__main__":
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # of torchrun, or this process alone
    if ranks == 1:
        print("the plan has no effect on one rank", flush=True)
    ep = min(2, ranks)
    main(pt.init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("dp", "ep")))
