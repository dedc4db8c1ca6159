"""Are gradients of a compiled step reduced while backward computes, and are they one device's?

Layers of a MiB each, so that each is reduced by itself, and so many rows that no gradient needs to
make room for another.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.graph.graph_nodes import note_of
from partita.testing.allocated_bytes import counted
from tests.programs.gloo_ranks import run_ranks
from tests.programs.steps import squares

pytestmark = pytest.mark.slow

LAYERS, WIDTH, ROWS, STEPS = 4, 512, 1024, 3
aten, functional = torch.ops.aten, torch.ops._c10d_functional
STARTS = (
    functional.all_reduce.default,
    functional.reduce_scatter_tensor.default,
    torch.ops.partita.all_to_all.default,
)


def layers(activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(
        *(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH, bias=False), activation()))
    )


def batch(ranks):
    torch.manual_seed(1)
    return torch.randn(ranks * ROWS, WIDTH)


def trained(rank, ranks, stage, backend, clipped=False):
    """The parameters that a compiled step trains, and what the step is."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    model = pt.zero(layers(), mesh, stage=stage)
    x = pt.distribute_tensor(batch(ranks), mesh, [pt.Shard(0)])
    step = pt.compile(step_of(model, clipped), backend=backend)
    for _ in range(STEPS):
        step(x)
    found = [p.detach().full_tensor().clone() for p in model.parameters()]
    places = order(step) if backend == "graph" else order_of_code(step.memory.places)
    return found, places, (counted(lambda: step(x)), step.memory.peak)


def of_stages(rank, ranks, stages):
    return [trained(rank, ranks, stage, "graph") for stage in stages]


def step_of(model, clipped):
    optimizer = torch.optim.SGD(model.parameters(), lr=300.0, momentum=0.9)
    if not clipped:
        return squares(model, optimizer)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        return loss

    return step


def order(step):
    """Where each reduction begins and is waited for; and backward's products."""
    nodes = list(step.program.graph.graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    settled = [n for n in nodes if n.target in STARTS and note_of(n).reason == "settle"]
    ends = [min(place[u] for u in n.users) for n in settled]
    backward = [n for n in nodes if n.target is aten.mm.default and note_of(n).phase == "backward"]
    return [place[n] for n in settled], ends, [place[n] for n in backward]


def order_of_code(lines):
    """The same of generated code: places of lines."""
    starts = [i for i, line in enumerate(lines) if "_c10d_functional.all_reduce_." in line]
    ends = [i for i, line in enumerate(lines) if "wait_tensor.default(" in line]
    return starts, ends, [i for i, line in enumerate(lines) if "extern_kernels.mm(" in line]


def one_device(ranks, clipped=False):
    model, x = layers(), batch(ranks)
    step = step_of(model, clipped)
    for _ in range(STEPS):
        step(x)
    return [p.detach() for p in model.parameters()]


def are_reduced_beside_backward(places):
    starts, ends, products = places
    assert len(starts) == len(ends) == LAYERS
    # Backward makes a layer's gradient, and then what the layer before it needs for its own.
    for start, following in pairwise(starts):
        assert any(start < at < following for at in products)
    assert sum(start < products[-1] for start in starts) == LAYERS - 1
    assert min(ends) > max(products)
    assert min(ends) > max(starts)
    return True


@pytest.mark.parametrize(("ranks", "stages"), [(2, (0, 1, 2)), (3, (0,))])
def test_a_layers_gradient_is_reduced_while_backward_computes_the_layer_before(ranks, stages):
    wanted = one_device(ranks)
    for per_stage in run_ranks(of_stages, ranks, ranks, stages):
        for found, places, (taken, told) in per_stage:
            assert are_reduced_beside_backward(places)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
            assert taken == pytest.approx(told, rel=0.01)


def test_generated_code_keeps_that_order():
    wanted = one_device(2)
    for found, places, (taken, told) in run_ranks(trained, 2, 2, 0, "inductor"):
        assert are_reduced_beside_backward(places)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        assert taken == pytest.approx(told, rel=0.01)


def test_where_a_norm_scales_all_gradients_they_are_reduced_beside_backward_too():
    wanted = one_device(2, clipped=True)
    for found, places, _ in run_ranks(trained, 2, 2, 0, "graph", True):
        assert are_reduced_beside_backward(places)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
