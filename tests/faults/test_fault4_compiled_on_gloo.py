"""Is a gathered parameter let go on real process groups, as the schedule of the step says?

The schedule (test_fault4_compiled_graphs.py) is a prediction. Here the bytes are counted that
the allocator gave out while a compiled step ran, over weights so large that they are most of it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.comm.collective import sum_of_shares
from partita.testing.allocated_bytes import counted
from tests.programs.gloo_ranks import run_ranks

LAYERS, ROWS = 8, 8
WIDTH = 255  # 128 rows and 127: padded where it is gathered
LAYER = 4 * 256 * WIDTH


class Tied(nn.Module):
    """The first weight is the last one too, transposed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = layers(LAYERS - 1)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


def layers(count):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def remade(count):
    model = layers(count)
    for layer in model:
        pt.remat(layer)
    return model


MAKE = {"tied": lambda count: Tied(), "remat": remade}


def layers_at_once(rank, ways, backend, without):
    """The layers that a step of each way has out at once, and its schedule."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return {way: of_one_step(mesh, way, backend, without) for way in ways}


def of_one_step(mesh, way, backend, without):
    torch.manual_seed(0)
    model = pt.zero(MAKE.get(way, layers)(LAYERS), mesh)
    x = pt.distribute_tensor(torch.randn(2 * ROWS, WIDTH), mesh, [pt.Shard(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad()
        for _ in range(2 if way == "micro-batches" else 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                loss = model(x).float().square().mean()
            loss.backward()
        if way == "clipped":
            pt.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    fast = pt.compile(step, backend=backend, without=without)
    for _ in range(2):
        fast(x)
    return counted(lambda: fast(x)) / LAYER, str(fast.memory)


# In layers: the weight in use, the next one, a gradient and what of it is under way. Besides, tied
# weights have two gradients, and the shards of all gradients wait for their norm, or for those of
# the next micro-batch.
ROOM = {"once": 3.5, "autocast": 2.5, "remat": 3.5, "tied": 4}
ROOM |= dict.fromkeys(("clipped", "micro-batches"), 4 + LAYERS / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "ways"),
    [
        ("graph", ("once", "autocast", "remat", "tied", "micro-batches")),
        ("inductor", ("autocast", "clipped", "micro-batches")),
    ],
)
def test_of_eight_uneven_layers_no_more_are_there_than_are_in_use(backend, ways):
    for found in run_ranks(layers_at_once, 2, ways, backend, ()):
        assert set(found) == set(ways)
        for way, (layers, text) in found.items():
            assert layers <= ROOM[way], f"{way}: {layers} layers\n{text}"


@pytest.mark.slow
def test_without_the_pass_all_layers_are_counted():
    for found in run_ranks(layers_at_once, 2, ("once",), "graph", ("regather",)):
        assert found["once"][0] > LAYERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_shares_is_added_in_rank_order_and_rounded_once(dtype):
    shares = torch.randn(3, 1000).to(dtype)
    wide = shares.to(torch.float32)
    wanted = ((wide[0] + wide[1]) + wide[2]).to(dtype)
    assert torch.equal(sum_of_shares(shares.view(-1), 3), wanted)
