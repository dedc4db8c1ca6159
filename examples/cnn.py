"""A convolutional net with batch norm, which learns the same on several ranks as on one device.

    pip install scikit-learn && torchrun --nproc-per-node=2 examples/cnn.py

The data are the digits of scikit-learn: 1797 images of 8 x 8, in ten classes. The batch is split
over the ranks. Batch norm uses the mean and variance of the whole batch, as on one device.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import partita as pt

BATCH = 64


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns images (n, 1, 8, 8) in [0, 1] and labels (n,): 1500 for training, 297 for testing."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[mixed], labels[mixed]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def main(mesh: Any, steps: int = 150) -> list[float]:
    """Train on `mesh`, with the axis "dp". Returns the loss of each step."""
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(0)
    model = build()
    pt.parallelize(model, mesh)  # without a plan, every rank has the whole model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    losses = []
    for step in range(steps):
        chosen = torch.randint(len(labels), (BATCH,), generator=torch.Generator().manual_seed(step))
        x, y = pt.distribute_batch((images[chosen], labels[chosen]), mesh)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if mesh.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:>3}  loss {losses[-1]:.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        x, y = pt.distribute_batch((test_images, test_labels), mesh)  # 297 rows: 149 and 148
        right = (model(x).argmax(dim=1) == y).float().mean().item()
    if mesh.get_rank() == 0:
        print(f"{right:.1%} of {len(test_labels)} images that it had not seen are right")
    return losses


if __name__ == "__main__":
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # of torchrun, or this process alone
    if ranks == 1:
        print("on one rank the batch is not split", flush=True)
    main(pt.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
