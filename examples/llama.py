"""A Llama with grouped heads, with tensor and sequence parallelism, ZeRO-3 and remat.

    torchrun --nproc-per-node=4 examples/llama.py

The mesh has 2 x 2 ranks. Over "tp" each rank has some of the heads and of the hidden features, and
between the blocks a piece of the sequence. Over "dp" each rank has some rows of the batch. Between
steps each rank along "dp" stores half of the weights (ZeRO, stage 3). Blocks are recomputed in
backward. The ledger shows what is sent. The text is Python's own sources.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

import partita as pt
from partita.app.data import read
from partita.app.models import Llama

CONTEXT = 64


def build(mesh: Any) -> Llama:
    """Returns the model. It is made piece by piece: no rank ever holds it whole."""
    with torch.device("meta"):
        model = Llama(layers=2, width=128, heads=8, groups=4, context=CONTEXT)
    pt.parallelize(model, mesh, pt.plans.llama("tp", sequence=True))
    pt.zero(model, mesh, "dp", stage=3)
    torch.manual_seed(0)
    pt.materialize(model)  # the values that one device would have drawn
    pt.remat(model, blocks=list(model.blocks))
    return model


def main(mesh: Any, steps: int = 200) -> list[float]:
    """Train on `mesh`, with the axes "dp" and "tp". Returns the loss of each step."""
    text = read()
    model = build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(steps):
        batch = text.batch(step, seed=0, size=16, context=CONTEXT)
        inputs, targets = pt.distribute_batch(batch, mesh)
        with pt.ledger() as log:
            # The logits are split along the vocabulary, and the loss is computed on the pieces.
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            pt.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        losses.append(loss.item())
        if mesh.get_rank() == 0:
            if step == 1:
                print(sent(log), flush=True)
            if step % 20 == 0:
                print(f"step {step:>3}  loss {losses[-1]:.3f}", flush=True)
    return losses


def sent(log: Any) -> str:
    """Returns a text that says what this rank sent in a step."""
    kinds = Counter(move.kind for move in log.moves if move.nbytes)
    each = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    return f"a step sends {log.bytes / 2**20:.1f} MiB: {each}"


if __name__ == "__main__":
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # of torchrun, or this process alone
    if ranks == 1:
        print("the plan and ZeRO have no effect on one rank", flush=True)
    tp = min(2, ranks)
    main(pt.init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp")))
