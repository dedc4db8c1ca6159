"""Does every rank of a ZeRO program send the same, whenever Python frees what nobody needs?"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.comm import wire_of
from partita.tensor.construct import place_buffer
from tests.programs.gloo_ranks import run_ranks


class Heads(nn.Module):
    """A head whose earlier results nobody uses, as in detectors with auxiliary losses."""

    def __init__(self, keep=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.classes = nn.ModuleList([nn.Linear(4, 3)])
        self.keep = keep

    def forward(self, x):
        outs = []
        for layer in self.layers:
            x = torch.relu(layer(x))
            outs.append(self.classes[0](x))
        if self.keep is not None:
            self.keep.append(outs)
        return outs[-1].square().mean()


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def moves_of(log):
    return [(r.kind, r.axes, r.nbytes, r.op, r.reason) for r in log.moves]


def gradients_of(model):
    return [
        p.grad.full_tensor() if isinstance(p.grad, pt.DTensor) else p.grad
        for p in model.parameters()
    ]


def one_device():
    model = Heads().double()
    model(X).backward()
    return gradients_of(model)


def test_what_is_sent_does_not_depend_on_unused_results_that_one_rank_still_holds():
    def body(mesh):
        kept = []
        model = Heads(kept).double()
        pt.zero(model, mesh)
        with pt.ledger() as log:
            loss = model(pt.distribute_tensor(X, mesh, [pt.Shard(0)]))
            if mesh.get_local_rank("dp"):
                kept.clear()
            loss.backward()
        return moves_of(log), gradients_of(model)

    with pt.ranks(dp=2) as world:
        (moves, grads), other = world.run(body)
    assert other[0] == moves
    torch.testing.assert_close(grads, one_device(), rtol=1e-12, atol=1e-12)


def test_gradients_of_a_block_that_is_called_several_times_are_sent_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            return self.blocks[0](torch.sin(self.blocks[1](self.blocks[0](x)))).square().mean()

    def body(mesh):
        model = pt.zero(Twice().double(), mesh)
        with pt.ledger() as log:
            loss = model(pt.distribute_tensor(X, mesh, [pt.Shard(0)]))
            loss.backward(retain_graph=True)
        with pt.ledger() as again:
            loss.backward()
        return log.count("reduce_scatter"), again.count("reduce_scatter")

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [(2, 2)] * 2


def test_a_budget_is_divided_when_the_ranks_count_says_so_though_a_region_is_unused():
    def body(mesh):
        torch.manual_seed(0)
        kept = []

        class Regions(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

            def forward(self, x):
                first = self.blocks[0](x)
                kept.append(self.blocks[1](x))
                return self.blocks[2](first).square().mean()

        model = pt.remat(pt.zero(Regions().double(), mesh, stage=1), policy=1 << 20)
        losses = []
        with pt.ledger() as log:
            for _ in range(3):
                loss = model(pt.distribute_tensor(X, mesh, [pt.Shard(0)]))
                if mesh.get_local_rank("dp"):
                    kept.clear()
                loss.backward()
                losses.append(loss.item())
        return moves_of(log), losses

    with pt.ranks(dp=2) as world:
        one, other = world.run(body)
    assert one == other
    assert len(set(one[1])) == 1


def test_a_buffer_of_two_models_is_sent_once_though_one_model_is_gone():
    def body(mesh):
        b, sent, kept = torch.ones(3), [], []

        def spread(b):
            sent.append(1)
            return pt.distribute_tensor(b, mesh, [pt.Replicate()])

        wire = wire_of(mesh)
        placed = place_buffer(b, wire, spread)
        if mesh.get_local_rank("dp"):
            kept.append(placed)
        del placed
        place_buffer(b, wire, spread)
        return len(sent)

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [1, 1]


def collect_on_one_rank(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    found = []
    for threshold in (0, 60):
        gc.set_threshold(threshold or 100_000)
        model = pt.zero(Heads().double(), mesh)
        with pt.ledger() as log:
            for _ in range(3):
                loss = model(pt.distribute_tensor(X, mesh, [pt.Shard(0)]))
                if rank == 0 and not threshold:
                    gc.collect()
                loss.backward()
                pt.clip_grad_norm_(model.parameters(), 1e9)
                grads = gradients_of(model)
                model.zero_grad()
        found.append((moves_of(log), grads))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_garbage_collector_of_one_rank_does_not_change_the_order_of_collectives(ranks):
    one, *others = run_ranks(collect_on_one_rank, ranks, ranks)
    for way, (moves, grads) in enumerate(one):
        assert all(other[way][0] == moves for other in others)
        torch.testing.assert_close(grads, one_device(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_hooks_run_in_one_order_where_a_rank_has_no_rows(stage):
    """Hooks that read values meet the other ranks, so that another order would be an error."""

    def program(mesh):
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4, bias=i > 0)) for i in (0, 1)
        ]
        model, x, names = nn.Sequential(*blocks).double(), torch.randn(4, 4).double(), []
        if mesh is not None:
            pt.zero(model, mesh, stage=stage)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        for name, p in model.named_parameters():
            if name in ("1.0.bias", "0.0.bias"):
                p.register_hook(
                    lambda g, name=name: names.append((name, round(g.norm().item(), 9)))
                )
            elif not name.startswith("1.2"):
                p.register_post_accumulate_grad_hook(
                    lambda p, name=name: names.append((name, round(p.grad.sum().item(), 9)))
                )
        model(x).square().mean().backward()
        return names

    with pt.ranks(dp=3) as world:
        assert world.run(program) == [program(None)] * 3
