"""What an op needs in another layout is moved once, and goes when what it was made of goes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import partita as pt
from partita import Invariant, Replicate

pytestmark = pytest.mark.slow


def _activations_that_stay(mesh):
    x, w = (
        pt.distribute_tensor(torch.ones(4, 4), mesh, [p]).requires_grad_()
        for p in (Replicate(), Invariant())
    )
    kept = []
    for _ in range(3):
        h = x * 2
        kept.append(weakref.ref(h))
        ((h * w).sum() + (h + w).sum()).backward()
        del h
    gc.collect()
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 4), 12.0))
    assert torch.equal(w.grad.full_tensor(), torch.full((4, 4), 9.0))
    return sum(ref() is not None for ref in kept)


def test_an_activation_that_is_read_as_invariant_too_does_not_outlive_its_step():
    with pt.ranks(tp=2) as world:
        assert world.run(_activations_that_stay) == [0, 0]
