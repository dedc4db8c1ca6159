"""Muon under ZeRO: its update is a function of whole matrices, wherever their pieces lie.

Torch iterates in bfloat16, where another order of sums moves the result by percents. Here both
sides iterate in float64, so that what is compared is the update and not its rounding.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.optim._muon as muon
from torch import nn

import partita as pt


def orthogonalized(grad, coefficients, steps, eps):
    """The Newton-Schulz iteration of a matrix, in its own dtype."""
    a, b, c = coefficients
    x = grad.mT if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if grad.size(0) > grad.size(1) else x


def trained(model, x):
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if isinstance(p, pt.DTensor) else p.data for p in model.parameters()]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 3])
def test_muon_steps_as_on_one_device_in_every_stage(monkeypatch, stage, ranks):
    monkeypatch.setattr(muon, "_zeropower_via_newtonschulz", orthogonalized)
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 5, bias=False))
    start, x = start.double(), torch.randn(8, 8, dtype=torch.float64)
    wanted = trained(copy.deepcopy(start), x)

    def run(mesh):
        model = pt.zero(copy.deepcopy(start), mesh, stage=stage)
        return trained(model, pt.distribute_batch(x, mesh))

    with pt.ranks(dp=ranks) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
