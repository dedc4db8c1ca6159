"""Does an eager training step cost a fixed number of Python calls of partita for each parameter?

A check that calls a Python function for each parameter in each step shows here. Times differ from
run to run, but calls do not.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

import partita as pt

FILES = os.path.dirname(pt.__file__) + os.sep
PARAMETERS = 8


class Wide(nn.Module):
    """A layer, and many parameters beside it that one op uses."""

    def __init__(self, repeat):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4).double()
        weights = torch.randn(repeat * PARAMETERS, 4, dtype=torch.float64)
        self.many = nn.ParameterList(nn.Parameter(w) for w in weights)

    def forward(self, x):
        return self.first(x) + torch.stack(list(self.many)).sum()


def count_calls(mesh, stage, repeat):
    """The calls of partita's Python functions in the fourth step."""
    model = pt.zero(Wide(repeat), mesh, stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = pt.distribute_tensor(torch.ones(4, 4, dtype=torch.float64), mesh, [pt.Shard(0)])

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(FILES)

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("stage, most", [(0, 35), (3, 37)])
def test_calls_of_a_step_for_each_parameter(stage, most):
    def program(mesh):
        few, many = (count_calls(mesh, stage, repeat) for repeat in (1, 5))
        return (many - few) / (4 * PARAMETERS)

    with pt.ranks(dp=2) as world:
        found = world.run(program)
    # The last rank to arrive makes a move for all, and either may be the last.
    assert sum(found) / len(found) <= most
