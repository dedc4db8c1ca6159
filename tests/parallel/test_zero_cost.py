"""The host's work for a block of ZeRO-3 does not grow with the number of blocks."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partita as pt

ROOMS = ["partita/parallel", "partita/remat", "torch/nn/modules"]


class Model(nn.Module):
    def __init__(self, layers: int, recomputes: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.recomputes = recomputes

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def count_calls(mesh, layers, how):
    """Returns the number of calls in the third step, of functions that visit blocks."""
    model = pt.zero(Model(layers, how == "checkpoint"), mesh)
    if how == "remat":
        model = pt.remat(model)
    x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)])
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and any(room in frame.f_code.co_filename for room in ROOMS)

    for step in range(3):
        sys.setprofile(count if step == 2 else None)
        try:
            model(x).sum().backward()
        finally:
            sys.setprofile(None)
        model.zero_grad()
    return calls


@pytest.mark.parametrize("how", ["plain", "checkpoint", "remat"])
def test_a_further_block_costs_as_many_calls_in_a_deep_model_as_in_a_flat_one(how):
    def program(mesh):
        return [count_calls(mesh, layers, how) for layers in (2, 4, 12, 14)]

    gc.disable()  # what is left of earlier steps is the same in each model
    try:
        with pt.ranks(dp=2) as world:
            counts = world.run(program)
    finally:
        gc.enable()
    for two, four, more, most in counts:
        # Some calls are made once in several steps. A visit of all blocks is 20 calls more.
        assert most - more <= four - two + 12
