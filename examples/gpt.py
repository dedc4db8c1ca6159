"""An ordinary GPT that is trained on several ranks, by an ordinary loop.

    torchrun --nproc-per-node=2 examples/gpt.py

The model is plain PyTorch, written for one device. The batch is split over the ranks. Each rank has
the whole model, and a shard of the optimizer's state (ZeRO, stage 1). The text is Python's own
sources. You can stop it at any time: the next start resumes from the last checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import partita as pt
from partita.app.data import read
from partita.app.models import GPT

CONTEXT = 64
RUN = Path(tempfile.gettempdir()) / "partita-gpt"


def main(mesh: Any, steps: int = 200, run: Path = RUN) -> list[float]:
    """Train on `mesh`, with the one axis "dp". Returns the losses of the steps made here."""
    text = read()
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = GPT(layers=2, width=128, heads=4, context=CONTEXT)
    pt.zero(model, mesh, "dp", stage=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after the model is on the mesh

    state = {"model": model, "optimizer": optimizer, "random": pt.RandomState(), "step": 0}
    if pt.is_checkpoint(run):
        pt.load(state, run)
        if mesh.get_rank() == 0:
            print(f"goes on at step {state['step']}, from {run}; remove that to begin anew")

    losses = []
    for step in range(state["step"], steps):
        batch = text.batch(step, seed=0, size=16, context=CONTEXT)  # the same on every rank
        inputs, targets = pt.distribute_batch(batch, mesh)  # each rank keeps its rows
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        pt.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())  # the mean over all rows, on every rank
        if mesh.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:>3}  loss {losses[-1]:.3f}", flush=True)
        if (step + 1) % 50 == 0:
            state["step"] = step + 1
            pt.save(state, run)
    return losses


if __name__ == "__main__":
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # of torchrun, or this process alone
    if ranks == 1:
        print("ZeRO has no effect on one rank", flush=True)
    main(pt.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
