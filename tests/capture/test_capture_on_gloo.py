"""Does a compiled step train as an eager one does, on real process groups?"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from tests.programs.captured_steps import (
    adamw,
    data_parallel,
    losses,
    plain_step,
    rows,
    tensor_parallel,
    tiny,
    zero3,
)
from tests.programs.gloo_ranks import run_ranks
from tests.programs.zero_training import TOKENS

SPREAD = {"dp": data_parallel, "tp": tensor_parallel, "zero3": zero3}


def trains(rank, how, axis, backend):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    batch = [rows(mesh)(t) for t in TOKENS]
    found = []
    for compiled in (False, True):
        model = SPREAD[how](tiny(), mesh)
        step = plain_step(model, adamw(model.parameters()))
        step = pt.compile(step, backend=backend) if compiled else step
        found.append(losses(step, batch, 20))
    return (*found, step.key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "axis", "backend"),
    [
        ("dp", "dp", "graph"),
        ("tp", "tp", "graph"),
        ("zero3", "dp", "graph"),
        ("zero3", "dp", "inductor"),
    ],
)
def test_twenty_losses_of_a_compiled_step_are_those_of_eager(how, axis, backend):
    per_rank = run_ranks(trains, 2, how, axis, backend)
    assert per_rank[0] == per_rank[1]
    eager, compiled, _ = per_rank[0]
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-6, atol=0)
    model = tiny()
    single = losses(plain_step(model, adamw(model.parameters())), TOKENS, 20)
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(single), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_a_step_of_one_process_compiles():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    step = plain_step_of_one(model)
    fast = pt.compile(step)
    before = model.weight.detach().clone()
    found = [fast(torch.ones(2, 4)).item() for _ in range(3)]
    torch.manual_seed(0)
    model.load_state_dict(torch.nn.Linear(4, 4).state_dict())
    assert torch.equal(model.weight, before)
    wanted = [step(torch.ones(2, 4)).item() for _ in range(3)]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def plain_step_of_one(model):
    def step(x):
        loss = (model(x) ** 2).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * g
        return loss

    return step
