"""What `pt.eager_memory` tells, refuses, and leaves as it was."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import partita as pt
from partita.tensor.tensor_state import HERE
from tests.programs.mixed_steps import mixed_step


def make(**way):
    return lambda: mixed_step(pt.dry_mesh(dp=4), **way)[:2]


def test_it_tells_what_holds_the_peak_and_what_is_held_between_steps():
    memory = pt.eager_memory(make(zero=3))
    assert memory.peak == max(memory.live) > 0
    held = {h.kind for h in memory.held}
    assert {"parameter", "optimizer"} <= held
    assert {b.phase for b in memory.buffers} >= {"forward", "backward"}
    assert any("mixed_steps.py" in b.source for b in memory.buffers)
    assert "peak" in str(memory) and all(b.birth < b.death for b in memory.buffers)


def test_a_gathered_weight_is_a_buffer_each_time_that_it_is_gathered():
    """In forward, and again in backward; in between it is freed."""

    def stack():
        mesh = pt.dry_mesh(dp=4)
        model = pt.zero(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)]), mesh)
        x = pt.distribute_tensor(torch.zeros(8, 64), mesh, [pt.Shard(0)])
        return lambda x: model(x).sum().backward(), (x,)

    memory = pt.eager_memory(stack)
    gathered = [b for b in memory.buffers if b.made_by == "resize_"]
    assert [b.nbytes for b in gathered] == [64 * 64 * 4] * len(gathered)
    assert [b.phase for b in gathered] == ["forward"] * 3 + ["backward"] * (len(gathered) - 3)
    at_once = max(sum(b.birth <= i < b.death for b in gathered) for i in range(len(memory.places)))
    assert len(gathered) >= 5 and at_once <= 2
    assert not [b for b in pt.eager_memory(make(zero=1)).buffers if b.made_by == "resize_"]


def test_a_number_that_decides_is_no_count_of_steps():
    class Choosing(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad.norm().item() > 10:
                        p.grad.mul_(0.5)
            super().step()

    def choosing():
        weight = nn.Parameter(torch.ones(8))
        optimizer = Choosing([weight], lr=0.1)

        def step(x):
            (weight * x).sum().backward()
            optimizer.step()

        return step, (torch.ones(8),)

    with pytest.raises(pt.LayoutError, match="reads the value"):
        pt.eager_memory(choosing)


@pytest.mark.slow
def test_it_is_the_same_each_time():
    """Whatever ran before, and whatever torch has cached of fake tensors."""
    found = {pt.eager_memory(make(zero=zero, remat=True)).peak for zero in (3, 3, 3)}
    assert len(found) == 1


def test_a_model_that_no_memory_would_hold_has_a_peak():
    def large():
        mesh = pt.dry_mesh(dp=1024)
        model = pt.zero(nn.Sequential(*[nn.Linear(2**16, 2**16) for _ in range(2)]), mesh, stage=3)
        optimizer = torch.optim.AdamW(model.parameters())
        x = pt.distribute_tensor(torch.zeros(1024, 2**16), mesh, [pt.Shard(0)])

        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step, (x,)

    assert pt.eager_memory(large).peak > 2**34  # a gathered weight of float32


@pytest.mark.slow
def test_the_staging_of_gloo_is_counted_where_the_mesh_says_so():
    def on(backend):
        return lambda: mixed_step(pt.dry_mesh(dp=4, backend=backend), zero=3)[:2]

    assert pt.eager_memory(on("gloo")).peak > pt.eager_memory(on("nccl")).peak


def test_a_step_that_reads_a_value_is_refused_and_nothing_is_left_behind():
    def reading():
        step, args = make(zero=2)()

        def more(x, y):
            if step(x, y).item() > 1:
                raise AssertionError

        return more, args

    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    with pytest.raises(pt.LayoutError, match="reads the value"):
        pt.eager_memory(reading)
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks and HERE.resized is None
    assert pt.eager_memory(make(zero=2)).peak > 0


def test_an_error_of_the_users_passes_through():
    def failing():
        raise ZeroDivisionError("of mine")

    with pytest.raises(ZeroDivisionError, match="of mine"):
        pt.eager_memory(failing)


def test_a_tensor_that_was_made_before_is_refused_where_the_step_computes_with_it():
    before = torch.ones(5)

    def using():
        step, args = make(zero=1)()
        return lambda x, y: step(x, y) + before, args

    with pytest.raises(pt.LayoutError, match="has memory"):
        pt.eager_memory(using)


@pytest.mark.slow
def test_optimizers_of_other_threads_are_none_of_its_business():
    done, weight = [], nn.Parameter(torch.ones(3))

    def elsewhere():
        other = torch.optim.SGD([weight], lr=0.5)
        weight.grad = torch.ones(3)
        for _ in range(20):
            other.step()
        done.append(True)

    def beside():
        step, args = make(zero=1)()

        def both(x, y):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            step(x, y)
            thread.join()

        return both, args

    assert pt.eager_memory(beside).peak == pt.eager_memory(make(zero=1)).peak
    assert (
        done
        and weight.is_leaf
        and torch.equal(weight.detach(), torch.full((3,), 1 - 10.0 * len(done)))
    )


def test_count_memory_counts_gathered_weights_by_itself():
    with pt.ranks(dp=2) as world:

        def run(mesh):
            model = pt.zero(nn.Linear(64, 64, bias=False), mesh, stage=3)
            x = pt.distribute_tensor(torch.ones(2, 64), mesh, [pt.Shard(0)])
            with torch.no_grad(), pt.count_memory() as memory:
                model(x)
            return memory.peak, memory.live

        for peak, live in world.run(run):
            assert peak >= 64 * 64 * 4 > live
