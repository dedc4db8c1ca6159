"""Is a plain tensor that the model makes, and writes DTensors into, what it is on one device?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partita as pt
from partita import Partial, Replicate, Shard
from tests.programs.refused import refusal

X = torch.arange(8.0).view(4, 2) / 8
AT = torch.tensor([0, 2, 1, 0])
Make = Callable[..., Any]
"""`make(t)` or `make(t, True)`: a tensor of the program's layout, which requires grad or not."""


def scattered(make: Make) -> Any:
    return torch.zeros(3).scatter_add_(0, make(AT), make(X[:, 0]))


def scattered_by_a_plain_index_and_differentiated(make: Make) -> Any:
    x = make(X, True)
    y = torch.zeros(3).scatter_add_(0, AT, x[:, 0] * 2)
    (y * y).sum().backward()
    return x.grad


def rows_added_at_an_index(make: Make) -> Any:
    x = make(X, True)
    y = torch.zeros(3, 2).index_add_(0, make(AT), x)
    ((y * torch.arange(6.0).view(3, 2)).sum() + x.sum()).backward()
    return x.grad, y


def a_sum_of_losses(make: Make) -> Any:
    x, total = make(X, True), torch.zeros(())
    for i in range(3):
        total += (x * i).square().sum()
    total.backward()
    return x.grad, total


def a_sum_of_losses_beside_another(make: Make) -> Any:
    x, total = make(X, True), torch.zeros(())
    for i in range(3):
        total += (x * i).square().sum() / 3
    total /= 2
    (x.sum() + 0.1 * total).backward()
    return x.grad, total


def aliases_of_what_is_written(make: Make) -> Any:
    x, t = make(X, True), torch.zeros(2)
    same, view = t, t[0:1]
    t += x.sum(0)
    ((same * 2).sum() + view.sum()).backward()
    return x.grad, same, view, t


def losses_in_a_list_of_numbers(make: Make) -> Any:
    x, held = make(X, True), torch.zeros(3)
    held[0] = x.sum()
    held[1] += x.square().sum()
    held[2] = 1.0
    (held * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    return x.grad, held


def rows_and_places_set(make: Make) -> Any:
    rows, places = torch.zeros(4, 3), torch.zeros(4, 2)
    rows[:, :2] = make(X)
    rows[1] = 7.0
    places[make(AT)] = make(X) * 0 + 1
    return rows, places, torch.zeros(3).index_put_((make(AT),), make(X[:, 0]), accumulate=True)


def copies(make: Make) -> Any:
    x, y, z = make(X, True), torch.zeros(4, 2), torch.zeros(4, 2)
    y.copy_(x * 2)
    (y * y).sum().backward()
    return x.grad, y, z.copy_(make(X))


def into_out(make: Make) -> Any:
    none, some = torch.empty(0), torch.zeros(4)
    return torch.add(make(X), 1.0, out=none), torch.sum(make(X), 1, out=some), none


def a_moving_average(make: Make) -> Any:
    x, mean = make(X, True), torch.ones(4, 2)
    with torch.no_grad():
        mean.mul_(0.9).add_(x, alpha=0.1).lerp_(x, 0.5)
    assert type(mean) is torch.Tensor
    return mean


def lists(make: Make) -> Any:
    held = [torch.zeros(4, 2), torch.ones(4, 2)]
    torch._foreach_add_(held, [make(X), make(X)])
    torch._foreach_mul_(held, 2.0)
    return held


def statistics(make: Make) -> Any:
    mean, var = torch.zeros(2), torch.ones(2)
    return F.batch_norm(make(X), mean, var, training=True), mean, var


def views(make: Make) -> Any:
    t = torch.zeros(2, 4)
    t.t().add_(make(X))
    t.view(-1)[0:2] += make(X)[1]
    return t


def counts_and_products(make: Make) -> Any:
    n = torch.zeros(3, dtype=torch.int64)
    n += torch.bincount(make(AT), minlength=3)
    return n, torch.zeros(2, 2).addmm_(make(X).t(), make(X))


def a_leaf_of_forward(make: Make) -> Any:
    x, bias, scale = make(X, True), torch.zeros(1, 2), torch.ones(1, 2, requires_grad=True)
    bias.requires_grad = True
    (x * x + bias * x + x * (scale * 3 + 1)).square().sum().backward()
    assert type(bias.grad) is type(scale.grad) is torch.Tensor
    return x.grad, bias.grad, scale.grad


PROGRAMS = [
    scattered,
    scattered_by_a_plain_index_and_differentiated,
    rows_added_at_an_index,
    a_sum_of_losses,
    a_sum_of_losses_beside_another,
    aliases_of_what_is_written,
    losses_in_a_list_of_numbers,
    rows_and_places_set,
    copies,
    into_out,
    a_moving_average,
    lists,
    statistics,
    views,
    counts_and_products,
    a_leaf_of_forward,
]


def values(out: Any) -> Any:
    if isinstance(out, (tuple, list)):
        return [values(o) for o in out]
    return (out.full_tensor() if isinstance(out, pt.DTensor) else out).detach().clone()


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_each_alias_reads_and_each_gradient_is_what_one_device_has(program, place):
    right = values(program(lambda t, graded=False: t.clone().requires_grad_(graded)))

    def body(mesh):
        def make(t, graded=False):
            fits = t.is_floating_point() if place == Partial() else t.dim() > (place == Shard(1))
            where = [place if fits else Replicate()]
            return pt.distribute_tensor(t, mesh, where).requires_grad_(graded)

        return values(program(make))

    with pt.ranks(dp=2) as world:
        for mine in world.run(body):
            torch.testing.assert_close(mine, right)


def test_without_a_gradient_the_tensor_stays_plain_and_with_one_it_is_typed():
    def body(mesh):
        x = pt.distribute_tensor(X, mesh, [Shard(0)])
        plain, typed = torch.zeros(()), torch.zeros(())
        plain += x.sum()
        typed += x.requires_grad_().sum()
        return type(plain) is torch.Tensor, typed.placements

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [(True, (pt.Invariant(),))] * 2


def test_what_hangs_on_a_forgotten_parameter_is_still_refused():
    def body(mesh):
        layer = nn.Linear(2, 2)
        return pt.distribute_tensor(X, mesh, [Shard(0)]) + layer(torch.ones(1, 2))

    error = refusal(body, place=__file__, dp=2)
    assert "a plain tensor that requires grad" in error.fact


def test_what_left_the_dtensors_with_a_gradient_is_still_refused_beside_them():
    def body(mesh):
        x = pt.distribute_tensor(X, mesh, [Replicate()]).requires_grad_()
        return x + x.to_local() * 2

    error = refusal(body, place=__file__, dp=2)
    assert "a plain tensor that requires grad" in error.fact
