"""Is the memory that a parameter had freed once it is given other?"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita.tensor.tensor_state import count_unseen_writes


def give_half(p):
    p.data = p.data.half()


def give_a_part(p):
    part = p.data.clone()
    p.data = part


def swap(p):
    p.data.mul_(2)
    torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 1))


@pytest.mark.slow
@pytest.mark.parametrize("give", [give_half, give_a_part, swap])
def test_other_data_of_a_parameter_frees_the_memory_that_it_had(give):
    def body(mesh):
        memory = np.ones((2, 4))
        known = weakref.ref(memory)
        p = nn.Parameter(pt.DTensor.from_local(torch.from_numpy(memory), mesh, [pt.Shard(0)]))
        del memory
        assert known() is not None
        before = count_unseen_writes(p)
        give(p)
        gc.collect()
        assert count_unseen_writes(p) > before
        return known() is None

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [True, True]


def test_writes_through_an_earlier_data_count_after_the_same_memory_is_given_back():
    def body(mesh):
        p = nn.Parameter(pt.distribute_tensor(torch.ones(4, 2), mesh, [pt.Shard(0)]))
        data = p.data
        p.data = data
        before = count_unseen_writes(p)
        data.mul_(2)
        return count_unseen_writes(p) - before, p.full_tensor().sum().item()

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [(1, 16.0)] * 2
