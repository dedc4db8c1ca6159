"""Is a deep step compiled once for what is equal in it, on all ranks, and in another model, too?"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.testing.allocated_bytes import counted
from tests.programs.gloo_ranks import run_ranks
from tests.programs.steps import squares

pytestmark = pytest.mark.slow

WIDTH = 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.linear(self.norm(x)).sigmoid())


def train(layers, stage, **options):
    """Losses and the compiled step."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    pt.zero(model, mesh, stage=stage)
    x = pt.distribute_tensor(torch.randn(6, WIDTH), mesh, [pt.Shard(0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = pt.compile(squares(model, optimizer), **options)
    return [step(x).item() for _ in range(3)], step, x


def in_sections(rank, folder, stage):
    os.environ["PARTITA_CACHE"] = f"{folder}/store"
    wanted, *_ = train(10, stage, backend="graph")
    found, step, x = train(10, stage, sections=True)
    deeper_wanted, *_ = train(14, stage, backend="graph")
    deeper, deep, _ = train(14, stage, sections=True)
    memory = step.memory.peak, counted(lambda: step(x))
    parts = [{one.key: one.loaded for one in s.artifact.sections} for s in (step, deep)]
    return (wanted, found), (deeper_wanted, deeper), memory, parts, str(deep.artifact)


@pytest.mark.parametrize("stage", [0, 3])
def test_sections_are_compiled_by_turns_and_serve_a_deeper_model(stage, tmp_path):
    """Fails too where a new torch cannot give the function that Inductor generated."""
    per_rank = run_ranks(in_sections, 2, str(tmp_path), stage)
    for (wanted, found), (deeper_wanted, deeper), (predicted, taken), parts, said in per_rank:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.tensor(deeper), torch.tensor(deeper_wanted))
        assert abs(predicted - taken) <= 0.01 * taken
        first, deep = parts
        assert all(deep[key] for key in first.keys() & deep.keys())
        # Without shards, how much of backward stands between two reductions hangs on the depth.
        assert len(first.keys() & deep.keys()) >= len(deep) / (2 if stage else 3)
        assert said.startswith(f"{len(deep)} sections, ")
    one, other = ([*parts[0].values()] for *_, parts, _ in per_rank)
    assert all(mine != yours for mine, yours in zip(one, other, strict=True))  # each by one rank
    assert False in one and False in other
