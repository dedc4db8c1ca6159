"""Memory that nobody has written is not compared between ranks, and what is written is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import partita as pt
from tests.programs.refused import refusal

ALLOCATE = {
    "empty": lambda: torch.empty(3, 4),
    "empty of a requested dtype": lambda: torch.empty((3, 4), dtype=torch.float32),
    "empty_like": lambda: torch.empty_like(torch.ones(3, 4)),
    "empty_strided": lambda: torch.empty_strided((3, 4), (4, 1)),
    "empty_permuted": lambda: torch.empty_permuted((3, 4), (1, 0)),
    "new_empty": lambda: torch.ones(1).new_empty(3, 4),
    "new_empty_strided": lambda: torch.ones(1).new_empty_strided((3, 4), (1, 3)),
    "Tensor": lambda: torch.Tensor(3, 4),
    "Tensor of a Size": lambda: torch.Tensor(torch.Size((3, 4))),
    "FloatTensor": lambda: torch.FloatTensor(3, 4),
    "new": lambda: torch.ones(1).new(3, 4),
    "resize_": lambda: torch.ones(1).resize_(3, 4),
    "on a default device": lambda: on_cpu(lambda: torch.empty(3, 4)),
}


def on_cpu(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.device("cpu"):
        return make()


def by_rows(h: Any, x: Any) -> Any:
    for i in range(3):
        h[i] = x * (i + 1)
    return h


def by_some_rows(h: Any, x: Any) -> Any:
    h[1] = x
    return h[1]


def by_index(h: Any, x: Any) -> Any:
    h.index_copy_(0, torch.tensor([2, 0]), torch.stack([x, 2 * x]))
    h.index_put_((torch.tensor([1]),), x)
    return h


def by_scatter(h: Any, x: Any) -> Any:
    return h.scatter_(1, torch.arange(4).expand(3, 4), x.expand(3, 4))


def by_mask(h: Any, x: Any) -> Any:
    h.masked_scatter_(torch.ones(3, 4, dtype=torch.bool), x.expand(3, 4).contiguous())
    return h


def by_view(h: Any, x: Any) -> Any:
    h.select(0, 1).copy_(x)
    h[::2] = x
    return h


WRITE = [by_rows, by_some_rows, by_index, by_scatter, by_mask, by_view]
X = torch.tensor([1.0, -2.0, 3.0, 0.5])


def leave_different_memory(rank: int) -> None:
    """Fill memory that the next allocations get with what other ranks have not."""
    junk = [torch.full((n,), rank + 2.5) for n in (4, 8, 12, 16) for _ in range(8)]
    del junk


@pytest.mark.parametrize("graded", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("write", WRITE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("allocate", ALLOCATE)
def test_fresh_memory_takes_what_is_written_into_it(allocate, write, graded):
    def program(x: Any) -> tuple[float, Any]:
        x = x.detach().clone().requires_grad_(graded)
        loss = write(ALLOCATE[allocate](), x * 1).square().sum()
        if graded:
            loss.backward()
        grad = x.grad
        return loss.item(), grad.full_tensor() if isinstance(grad, pt.DTensor) else grad

    def body(mesh: Any) -> tuple[float, Any]:
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        leave_different_memory(mesh.get_rank())
        return program(x)

    want = program(X)
    with pt.ranks(dp=2) as world:
        for got in world.run(body):
            torch.testing.assert_close(got, want)


def test_what_resize_leaves_stays_and_what_it_adds_is_zero():
    with pt.ranks(dp=2) as world:
        world.run(lambda mesh: None)
    x = torch.arange(3.0)
    leave_different_memory(1)
    assert x.resize_(8).tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert x.resize_(2).tolist() == [0, 1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("graded", [False, True], ids=["values", "gradients"])
def test_what_a_rank_alone_has_written_is_refused(when, graded):
    def body(mesh: Any) -> Any:
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)]).requires_grad_(graded)
        h, own = torch.empty(3, 4), torch.full((4,), float(mesh.get_rank()))
        if when == "before":
            h[1] = own
        h[0] = x * 1
        if when == "after":
            h[1] = own
        return x + h

    assert "differs between ranks" in refusal(body, place=__file__, dp=2).fact


def test_a_default_device_holds_for_memory_that_nobody_has_written():
    """torch's context goes by the functions that C calls, which partita wraps."""
    with pt.ranks(dp=2) as world:

        def body(mesh):
            with torch.device("meta"):
                made = torch.empty(2), torch.empty_strided((2,), (1,)), torch.nn.Linear(2, 2).weight
            return [t.device.type for t in made]

        assert world.run(body) == [["meta"] * 3] * 2


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_allocated_as_torch_does():
    with pt.ranks(dp=2) as world:
        made = world.run(lambda mesh: torch.empty(3, dtype=torch.quint8).is_quantized)
    assert made == [True, True]
