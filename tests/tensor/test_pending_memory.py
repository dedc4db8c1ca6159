"""Is memory that is pending, and a gradient that is, right however it is made, written and kept?"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import partita as pt
from partita import Partial, Replicate, Shard


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_new_memory_of_a_pending_value_holds_what_is_written_into_it(reduce):
    def body(mesh):
        local = torch.full((2, 2), float(mesh.get_coordinate()[0]))
        x = pt.DTensor.from_local(local, mesh, [Partial(reduce)])
        empty, filled, rows = x.new_empty((2, 2)), torch.empty_like(x), torch.empty_like(x)
        empty.copy_(x)
        filled.fill_(5.0)
        rows[0].fill_(1.0)
        rows.view(-1)[2:].copy_(torch.tensor([7.0, 8.0]))
        columns = x.new_empty((2, 2))
        columns.t()[1] = 2.0
        columns[:, 0] = 1.0
        made = (x.new_zeros((2, 2)), x.new_ones((2, 2)), x.new_full((2, 2), 3.0))
        written = (x, empty, filled, rows, columns, torch.zeros_like(x), torch.full_like(x, -2.0))
        return [t.full_tensor() for t in (*made, *written)]

    value = torch.full((2, 2), 0.0 if reduce == "min" else 1.0)  # of ranks that hold 0 and 1
    right = [torch.full((2, 2), n) for n in (0.0, 1.0, 3.0)] + [value, value]
    right += [torch.full((2, 2), 5.0), torch.tensor([[1.0, 1.0], [7.0, 8.0]])]
    right += [torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.zeros(2, 2), torch.full((2, 2), -2.0)]
    with pt.ranks(dp=2) as world:
        for mine in world.run(body):
            torch.testing.assert_close(mine, right)


W = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 3, 4)
X = torch.linspace(-2, 1, 12, dtype=torch.float64).view(4, 3)


def flat(w: torch.Tensor) -> torch.Tensor:
    return w.transpose(0, 1).reshape(w.shape[1], -1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.mm(x, flat(w))

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        back = torch.mm(x.t(), grad).reshape(w.shape[1], w.shape[0], w.shape[2])
        return torch.mm(grad, flat(w).t()), back.transpose(0, 1)


@pytest.mark.parametrize("multiply", [lambda x, w: torch.mm(x, flat(w)), Product.apply])
def test_a_strided_gradient_stays_pending_through_saving_and_hooks(multiply):
    one = W.clone().requires_grad_()
    torch.mm(X, flat(one)).square().sum().backward()

    def body(mesh):
        w = nn.Parameter(pt.DTensor.from_local(W.clone(), mesh, [Replicate()]))
        rows = X.chunk(2)[mesh.get_coordinate()[0]]
        x = pt.DTensor.from_local(rows, mesh, [Shard(0)])
        seen = []
        w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
        with pt.ledger() as log:
            multiply(x, w).square().sum().backward()
        return log.bytes, seen, w.grad.placements, w.grad.full_tensor()

    with pt.ranks(dp=2) as world:
        for sent, seen, placements, grad in world.run(body):
            assert sent == 0
            assert seen == [(Partial(),)] and placements == (Partial(),)
            torch.testing.assert_close(grad, one.grad)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["foreach", "fused", "op by op", "subclass"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=lambda m: m.__name__)
def test_steps_leave_no_objects_behind(make, kind):
    options = {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True}
    optimizer = type("Mine", (make,), {}) if kind == "subclass" else make

    def body(mesh):
        model = pt.distribute_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), mesh)
        opt = optimizer(model.parameters(), lr=0.01, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.999)
        x = pt.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        counts = []
        for i in range(200):
            opt.zero_grad()
            model(x).square().sum().backward()
            opt.step()
            schedule.step()
            if i in (50, 199):
                gc.collect()
                counts.append(len(gc.get_objects()))
        return counts

    with pt.ranks(dp=1) as world:
        ((early, late),) = world.run(body)
        assert late <= early + 30  # a leak of one object a step would be 149
