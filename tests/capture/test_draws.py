"""Does a captured step draw what eager draws, whatever the memory of a tensor looks like?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partita as pt

DRAWS = {
    "dropout of a transposed tensor": lambda x: F.dropout(x.T * 2, 0.3),
    "dropout of a slice": lambda x: F.dropout(x[:, 1:3].T),
    "dropout in place": lambda x: F.dropout((x * 1).T, inplace=True),
    "dropout of channels": lambda x: F.dropout2d(x.view(1, 2, 3, 4).permute(0, 3, 1, 2)),
    "a mask within gaps": lambda x: (x * 2)[:, 1:3].T.bernoulli_(0.4).sin(),
    "a mask of contiguous memory": lambda x: torch.zeros_like(x).bernoulli_(0.4),
    "numbers within gaps": lambda x: (x * 2).T[1:3].uniform_().sin(),
    "an equal chance": lambda x: (x * 2).T.bernoulli_(),
    "numbers of a transposed tensor": lambda x: (x * 2).T.uniform_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_fill_memory_in_the_order_of_eager(name):
    draw, x = DRAWS[name], torch.linspace(-2, 2, 24).view(6, 4)
    found = []
    for call in (draw, pt.compile(draw, backend="graph")):
        torch.manual_seed(7)
        found.append((call(x), torch.rand(2)))  # the generator goes on alike
    (eager, after), (graph, after_graph) = found
    assert eager.equal(graph) and after.equal(after_graph) and eager.stride() == graph.stride()


def trained(mesh=None, compiled=False):
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.2, batch_first=True).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    if mesh is not None:
        pt.zero(layer, mesh, stage=3)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])

    def step(x):
        layer.zero_grad()
        found = layer(x)
        found.square().sum().backward()
        return found.detach()

    found = (pt.compile(step, backend="graph") if compiled else step)(x)
    found = [found, *(p.grad for p in layer.parameters())]
    return [t if mesh is None else t.full_tensor() for t in found]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_drops_out_on_ranks_of_one_sample_what_one_device_does(compiled):
    truth = trained()
    torch.testing.assert_close(trained(compiled=compiled), truth, rtol=0, atol=1e-12)
    with pt.ranks(dp=2) as world:
        for found in world.run(trained, compiled):
            torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)
