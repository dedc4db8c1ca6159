"""A complete script: training, evaluation, a checkpoint after each epoch, and resume.

    torchrun --nproc-per-node=2 examples/start.py 4

The argument is the number of epochs. If you start it again, for example with 6, it resumes from the
checkpoint `run/start`. Remove that folder to start from the beginning.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import partita as pt


def main(mesh, epochs=4, run=Path("run/start")):
    """Train on `mesh`, with the one axis "dp". Returns the last loss of each epoch."""
    torch.manual_seed(0)  # all ranks make the same data and the same weights
    x = torch.randn(640, 32)
    y = (x @ torch.randn(32, 4)).argmax(1)
    train, held_out = TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])

    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 4))
    pt.zero(model, mesh)  # ZeRO-3: each rank keeps its shard of every parameter
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    state = {"model": model, "optimizer": optimizer, "random": pt.RandomState(), "epoch": 0}
    if pt.is_checkpoint(run):
        pt.load(state, run)  # every rank

    losses = []
    for epoch in range(state["epoch"], epochs):
        order = torch.Generator().manual_seed(epoch)  # the same order of rows on every rank
        for batch in DataLoader(train, batch_size=64, shuffle=True, generator=order):
            inputs, labels = pt.distribute_batch(batch, mesh)  # each rank keeps its rows
            loss = F.cross_entropy(model(inputs), labels)  # the mean over all rows
            optimizer.zero_grad()
            loss.backward()
            pt.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        losses.append(loss.item())  # every rank

        right = 0
        with torch.no_grad():
            for batch in DataLoader(held_out, batch_size=64):
                inputs, labels = pt.distribute_batch(batch, mesh)
                right += (model(inputs).argmax(1) == labels).sum().item()

        state["epoch"] = epoch + 1
        pt.save(state, run)  # every rank
        if mesh.get_rank() == 0:
            print(f"epoch {epoch}  loss {losses[-1]:.4f}  right {right} of {len(held_out)}")
    return losses


if __name__ == "__main__":
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # of torchrun, or this process alone
    if ranks == 1:
        print("ZeRO has no effect on one rank", flush=True)
    main(pt.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)), int(sys.argv[1]))
