"""Are tensors of zeros that have no memory read and sent as zeros?

torch makes them as gradients, for example of `torch.sgn`. Whoever reads memory finds none.
"""

from __future__ import annotations

import pytest
import torch

import partita as pt
from partita.comm.device import copy_bytes, view_bytes
from tests.programs.gloo_ranks import run_ranks

MOVES = [
    (pt.Shard(0), pt.Replicate()),
    (pt.Shard(0), pt.Shard(1)),
    (pt.Partial(), pt.Replicate()),
    (pt.Partial(), pt.Shard(0)),
]


def move_zeros(rank):
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found = []
    for before, after in MOVES:
        zeros = torch._efficientzerotensor(40, 50)
        assert zeros._is_zerotensor()
        kept = [torch.full((2000 * n,), 7.0) for n in (1, 2) for _ in range(20)]
        del kept  # memory that a collective may get
        x = pt.DTensor.from_local(zeros, mesh, [before])
        found.append(x.redistribute(placements=[after]).to_local().clone())
    return found


def gradient_of_sgn(rank):
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = pt.distribute_tensor(torch.linspace(-1, 1, 7), mesh, [pt.Shard(0)]).requires_grad_()
    torch.sgn(x).sum().backward()
    return x.grad.full_tensor()


@pytest.mark.slow
def test_zeros_without_memory_are_sent_as_zeros():
    for moved in run_ranks(move_zeros, 2):
        assert [bool(x.any()) for x in moved] == [False] * len(MOVES)


@pytest.mark.slow
def test_the_gradient_of_sgn_is_zero_on_ranks():
    for found in run_ranks(gradient_of_sgn, 2):
        assert torch.equal(found, torch.zeros(7))


def test_bytes_of_lazy_values_are_those_of_the_values():
    x = torch.tensor([1 + 2j, 3 - 4j])
    lazy = [torch._efficientzerotensor(3), x.conj(), x[:1].conj().imag]
    values = [torch.zeros(3), torch.tensor([1 - 2j, 3 + 4j]), torch.tensor([-2.0])]
    assert lazy[0]._is_zerotensor() and lazy[1].is_conj() and lazy[2].is_neg()
    for one, value in zip(lazy, values, strict=True):
        assert copy_bytes(one) == copy_bytes(value) == bytes(view_bytes(one))
