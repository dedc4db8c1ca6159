"""What is saved and loaded in the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

S, R, P, I = pt.Shard, pt.Replicate(), pt.Partial(), pt.Invariant()  # noqa: E741

VALUES = {
    "even": torch.randn(8, 4),
    "uneven": torch.randn(7, 5),
    "small": torch.randn(3, 2),  # some ranks have nothing of it
    "scalar": torch.tensor(2.5),
    "empty": torch.randn(0, 3),
    "half": torch.randn(5, 6).bfloat16(),
    "long": torch.arange(10),
    "bits": torch.tensor([True, False, True, True]),
    "complex": torch.randn(4, 3, dtype=torch.complex64),
    "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
}
SAVED_AS = {  # over two axes
    "even": [S(0), S(1)],
    "uneven": [S(0), S(0)],
    "small": [S(0), S(0)],
    "scalar": [R, I],
    "empty": [S(0), R],
    "half": [S(1), R],
    "long": [R, S(0)],
    "bits": [I, I],
    "complex": [S(1), S(0)],
    "odd": [R, R],
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def spread(mesh: Any, layouts: Callable[[str], list[pt.Placement]], values: Any = VALUES) -> Any:
    return {name: pt.distribute_tensor(v, mesh, layouts(name)) for name, v in values.items()}


def blank(mesh: Any, layouts: Callable[[str], list[pt.Placement]]) -> dict[str, pt.DTensor]:
    return spread(mesh, layouts, {n: torch.ones_like(v) for n, v in VALUES.items()})


# -- a model that trains ---------------------------------------------------------------------------


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 4))


def put(model: nn.Module, mesh: Any) -> nn.Module:
    """Tensor parallel on tp."""
    for name, p in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        split = 0 if owner == "0" else 1 if leaf == "weight" else None
        placements = [
            S(split) if axis == "tp" and split is not None else R for axis in mesh.mesh_dim_names
        ]
        new = nn.Parameter(pt.distribute_tensor(p.detach(), mesh, placements))
        setattr(model.get_submodule(owner), leaf, new)
    return model


def train(model: nn.Module, optimizer: Any, mesh: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=g), torch.randn(8, 4, generator=g)
        if mesh is not None:
            rows = [S(0) if a == "dp" else R for a in mesh.mesh_dim_names]
            x, y = (pt.distribute_tensor(t, mesh, rows, src_data_rank=None) for t in (x, y))
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
