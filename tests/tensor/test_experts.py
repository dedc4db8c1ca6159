"""Does a product of groups of rows by their experts' matrices stay on the rank that has them?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partita as pt
from partita import Partial, Replicate, Shard


def ends(*places):
    return torch.tensor(places, dtype=torch.int32)


def beside_one_device(mesh, tensors, offs, placements):
    """Layout of the result, kinds of moves, error; of rows that are in a group."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    count = offs[-1]
    wanted = torch._grouped_mm(*leaves, offs)[:count]
    direction = torch.cos(torch.arange(float(wanted.numel()))).view_as(wanted)
    wanted.backward(direction)
    spread = [
        pt.distribute_tensor(t, mesh, p).requires_grad_()
        for t, p in zip(tensors, placements, strict=True)
    ]
    with pt.ledger() as log:
        out = F.grouped_mm(*spread, offs=offs)
    kinds = [m.kind for m in log.moves if m.nbytes]
    own = out.full_tensor()[:count]
    own.backward(direction)
    pairs = [(own, wanted), (spread[0].grad.full_tensor()[:count], leaves[0].grad[:count])]
    pairs += [(spread[1].grad.full_tensor(), leaves[1].grad)]
    return out.placements, kinds, max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("offs", [(3, 8, 9, 16), (5, 5, 5, 12), (0, 0, 16, 16)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_experts_that_are_split_multiply_where_they_are(ranks, offs):
    tensors = torch.randn(16, 16), torch.randn(4, 16, 32)
    with pt.ranks(ep=ranks) as world:
        found = world.run(beside_one_device, tensors, ends(*offs), [[Replicate()], [Shard(0)]])
    for placements, kinds, error in found:
        assert placements == (Partial(),) and kinds == []
        assert error < 1e-4


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_are_split_meet_all_experts(ranks):
    tensors = torch.randn(17, 16), torch.randn(4, 16, 32)
    with pt.ranks(dp=ranks) as world:
        found = world.run(
            beside_one_device, tensors, ends(3, 8, 9, 17), [[Shard(0)], [Replicate()]]
        )
    for placements, kinds, error in found:
        assert placements == (Shard(0),) and kinds == []
        assert error < 1e-4


def test_rows_and_experts_are_split_at_once():
    tensors = torch.randn(17, 16), torch.randn(3, 16, 32)
    places = [[Shard(0), Replicate()], [Replicate(), Shard(0)]]
    with pt.ranks(dp=2, ep=2) as world:
        found = world.run(beside_one_device, tensors, ends(8, 12, 16), places)
    for placements, kinds, error in found:
        assert placements == (Shard(0), Partial()) and kinds == []
        assert error < 1e-4


def test_each_rank_multiplies_the_rows_of_its_experts_only():
    seen = []
    real = torch.ops.aten._grouped_mm.default

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is real and args[0].device.type != "meta":
                seen.append((args[1].shape[0], int(args[2][-1])))
            return func(*args, **(kwargs or {}))

    def run(mesh):
        x = pt.distribute_tensor(torch.randn(16, 16), mesh, [Replicate()])
        w = pt.distribute_tensor(torch.randn(4, 16, 32), mesh, [Shard(0)])
        with Watch():
            torch._grouped_mm(x, w, ends(3, 8, 9, 16))

    with pt.ranks(ep=2) as world:
        world.run(run)
    assert sorted(seen) == [(2, 8), (2, 8)]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(4, *shape) / 4) for shape in ((16, 32), (32, 16))
        )

    def forward(self, x, offs):
        hidden = torch._grouped_mm(x, self.up, offs).relu()
        return x + torch._grouped_mm(hidden, self.down, offs)


def losses(mesh, fast):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if fast else torch.float32  # torch can tell shapes of no other
    model, x = Experts().to(dtype), torch.randn(12, 16, dtype=dtype)
    if mesh is not None:
        pt.parallelize(model, mesh, {"up": {"ep": Shard(0)}, "down": {"ep": Shard(0)}})
        x = pt.distribute_tensor(x, mesh, [Replicate()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, offs):
        optimizer.zero_grad()
        loss = model(x, offs).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = pt.compile(step, backend="graph") if fast and mesh is not None else step
    return [run(x, ends(*offs)).item() for offs in ((2, 5, 6, 12), (0, 7, 9, 12), (3, 3, 3, 12))]


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True], ids=["eager", "in a graph"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mixture_of_experts_trains_as_on_one_device(ranks, fast):
    wanted = losses(None, fast)
    with pt.ranks(ep=ranks) as world:
        for found in world.run(losses, fast):
            assert found == pytest.approx(wanted, rel=2e-2 if fast else 1e-5)
