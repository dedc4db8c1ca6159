"""A bucket of gathers whose pieces land in their places, which is how GPUs gather."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.comm.backends import Gloo
from partita.comm.collective import all_gather_pieces
from partita.testing.allocated_bytes import counted
from tests.programs.gloo_ranks import run_ranks
from tests.programs.steps import squares

WIDTH = 24


class Layer(nn.Module):
    """Parameters of uneven sizes, one of which no rank shares evenly with others."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.back = nn.Linear(5, WIDTH, bias=False)

    def forward(self, x):
        return x + self.back(self.linear(self.norm(x)).sigmoid())


def train(pieces, **options):
    """Losses and parameters after three steps, the gathers of pieces, and the memory."""
    Gloo.gathers_pieces = lambda self, x: pieces  # Gloo has them, too, but is faster without
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    mixed = pt.MixedPrecision(torch.bfloat16, grad_dtype=torch.float32, reduce_dtype=torch.float32)
    pt.zero(model, mesh, stage=3, precision=mixed)
    x = pt.distribute_tensor(torch.randn(6, WIDTH), mesh, [pt.Shard(0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = pt.compile(squares(model, optimizer), **options)
    losses = [step(x).item() for _ in range(3)]
    left = [p.to_local().detach().clone() for p in model.parameters()]
    nodes = step.program.graph.graph.nodes
    count = sum(node.target is all_gather_pieces for node in nodes)
    return losses, left, count, (step.memory.peak, counted(lambda: step(x)))


def both(rank, options):
    return train(False, **options), train(True, **options)


def check(per_rank):
    for (losses, left, none, _), (same_losses, same_left, some, (predicted, taken)) in per_rank:
        assert (none, some) == (0, 6)  # three blocks, forward and backward
        assert losses == same_losses
        assert all(map(torch.equal, left, same_left))
        assert abs(predicted - taken) <= 0.05 * taken


@pytest.mark.slow
def test_a_step_that_gathers_pieces_has_the_same_bits():
    check(run_ranks(both, 2, {"backend": "graph"}))


@pytest.mark.slow
@pytest.mark.parametrize("sections", [False, True])
def test_a_compiled_step_that_gathers_pieces_has_the_same_bits(sections, tmp_path, monkeypatch):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    check(run_ranks(both, 2, {"sections": sections}))
