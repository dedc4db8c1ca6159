"""Are tensors of zeros that have no memory sent as zeros?

torch makes them as gradients, for example of `torch.sgn`. A collective reads memory.
"""

from __future__ import annotations

import pytest
import torch

import partita as pt
from tests.programs.gloo_ranks import run_ranks

PLACEMENTS = {"all-gather": pt.Shard(0), "all-reduce": pt.Partial()}


def gather_gradient(rank, name):
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = pt.DTensor.from_local(torch.randn(1000), mesh, [PLACEMENTS[name]])
    zeros = torch._efficientzerotensor(1000)
    assert zeros._is_zerotensor()
    kept = [torch.full((2000,), 7.0) for _ in range(20)]
    del kept  # memory that a collective may get
    return x.full_tensor().shape, pt.DTensor.from_local(
        zeros, mesh, [PLACEMENTS[name]]
    ).full_tensor()


def gradient_of_sgn(rank):
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = pt.distribute_tensor(torch.linspace(-1, 1, 7), mesh, [pt.Shard(0)]).requires_grad_()
    torch.sgn(x).sum().backward()
    return x.grad.full_tensor()


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_zeros_without_memory_are_sent_as_zeros(name):
    for shape, found in run_ranks(gather_gradient, 2, name):
        assert found.shape == shape and not found.any()


@pytest.mark.slow
def test_the_gradient_of_sgn_is_zero_on_ranks():
    for found in run_ranks(gradient_of_sgn, 2):
        assert torch.equal(found, torch.zeros(7))
