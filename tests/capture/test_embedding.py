"""Is a table whose rows are split over ranks read in a captured step as one device reads it?"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import partita as pt

INDEX = torch.tensor([[0, 3, 7], [11, 5, 0]])

# The row that gets no gradient is another rank's, or this one's: all must capture one program.
READS = {
    "the first row is padding": lambda i, w: F.embedding(i, w, 0),
    "the last row is padding": lambda i, w: F.embedding(i, w, -1),
    "a row in the middle is padding": lambda i, w: F.embedding(i, w, 7),
    "the builtin": lambda i, w: torch.embedding(w, i, 5),
    "rows are brought to a norm": lambda i, w: F.embedding(i, w, 0, max_norm=1.0),
}


def steps_of(read, rows, mesh=None):
    numbers = torch.linspace(-2, 3, rows * 4, dtype=torch.float64).view(rows, 4)
    index = INDEX
    if mesh is not None:
        numbers = pt.distribute_tensor(numbers, mesh, [pt.Shard(0)])
        index = pt.distribute_tensor(index, mesh, [pt.Replicate()])
    table = numbers.detach().requires_grad_()

    def step(index):
        table.grad = None
        found = READS[read](index, table)
        found.square().sum().backward()
        return found.detach()

    step = step if mesh is None else pt.compile(step, backend="graph")
    step(index)
    return [getattr(t, "full_tensor", t.clone)() for t in (step(index), table.grad, table.detach())]


@pytest.mark.parametrize("rows", [12, 13])
@pytest.mark.parametrize("read", READS)
def test_the_rows_and_their_gradients_are_one_devices(read, rows):
    with pt.ranks(tp=2) as world:
        found = world.run(lambda mesh: steps_of(read, rows, mesh))
    for mine in found:
        torch.testing.assert_close(mine, steps_of(read, rows), rtol=0, atol=1e-12)
