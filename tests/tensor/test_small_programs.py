"""Do the small things that programs do by the way give what one device gives?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partita as pt
from partita import Partial, Replicate, Shard

X = torch.arange(8.0).view(4, 2) / 8
AT = torch.tensor([[0, 2], [1, 0], [3, 1], [2, 2]])
Make = Callable[..., Any]
PLACES = [Shard(0), Shard(1), Replicate(), Partial()]


def values(out: Any) -> Any:
    if isinstance(out, (tuple, list)):
        return [values(o) for o in out]
    if isinstance(out, str):
        return [ord(c) for c in out]
    if isinstance(out, pt.DTensor):
        out = out.full_tensor()
    return out.detach().clone() if isinstance(out, torch.Tensor) else out


def spread(mesh: Any, t: torch.Tensor, place: Any, graded: bool = False) -> Any:
    fits = t.is_floating_point() if place.is_partial() else t.dim() > (place == Shard(1))
    where = place if fits and t.dim() else Replicate()
    return pt.distribute_tensor(t, mesh, [where]).requires_grad_(graded)


def check(program: Callable[[Make], Any], place: Any) -> None:
    right = values(program(lambda t, graded=False: t.clone().requires_grad_(graded)))

    def body(mesh):
        return values(program(lambda t, graded=False: spread(mesh, t, place, graded)))

    with pt.ranks(dp=2) as world:
        for mine in world.run(body):
            torch.testing.assert_close(mine, right)


def embedding_with_a_largest_norm(make: Make) -> Any:
    module = nn.Embedding(4, 2, max_norm=1.0)
    module.weight = nn.Parameter(make(X * 4))
    out = module(make(AT))
    out.square().sum().backward()
    table = make(X * 4)
    return out, module.weight, module.weight.grad, F.embedding(make(AT), table, 1, 1.5), table


def bags(make: Make) -> Any:
    table, bag = make(X, True), make(X)
    padded = F.embedding_bag(make(AT), table, padding_idx=2, mode="sum")
    padded.square().sum().backward()
    normed = F.embedding_bag(make(AT), bag, max_norm=0.5, mode="mean")
    offsets = make(torch.tensor([0, 3, 5]))
    return padded, table.grad, normed, bag, F.embedding_bag(make(AT.view(-1)), make(X), offsets)


def plain_tensors_of_every_stride(make: Make) -> Any:
    x = make(X)
    return (
        x * torch.ones(1, 4)[:, 0],
        x * torch.ones(1, 4, dtype=torch.bfloat16)[:, 0],
        x * torch.tensor([2.0]).expand(4, 2),
        x * torch.arange(32.0).view(8, 4)[::2, ::2],
        x * torch.arange(9.0)[1:].view(4, 2),
        x * torch.arange(9, dtype=torch.int8)[1:].view(4, 2),
        x * X.t().contiguous().t(),
        x * torch.tensor([1 + 2j, 3j]).conj(),
        x * torch.tensor([1 + 2j, 3j]).conj().imag,
        x[torch.ones(4, 8, dtype=torch.bool)[:, 3]],
        x.masked_fill(torch.eye(4, dtype=torch.bool)[:, 1:3], 0.0),
    )


def numbers(make: Make) -> Any:
    s, i = make(torch.tensor(3.7)), make(torch.tensor(5))
    read = [
        math.floor(s),
        math.ceil(s),
        int(s),
        float(s),
        bool(s),
        complex(s),
        range(10)[i],
        hex(i),
    ]
    text = [f"{s:.2f}", f"{i:d}", f"{i:d} {s:.1f}"]
    ints = [~i, i << 1, 2 << i, i >> 1, i & 3, 3 | i, i ^ 1, 7 % i, 7 // i, sum([i, i])]
    floats = [abs(-s), s // 2, 2 // s, s % 2, 2 % s, 2**s, s**2, 3 / s, 3 - s, +s, max(s, i)]
    return read, text, ints, floats, torch.zeros(i).shape, s in [s], list(range(i))


def segments(make: Make) -> Any:
    x = make(X, True)
    means = torch.segment_reduce(x, "mean", offsets=make(torch.tensor([0, 1, 4])), axis=0)
    means.square().sum().backward()
    return means, x.grad, torch.segment_reduce(make(X[:, 0]), "sum", lengths=torch.tensor([1, 3]))


PROGRAMS = [
    embedding_with_a_largest_norm,
    bags,
    plain_tensors_of_every_stride,
    numbers,
    segments,
]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_program_gives_what_one_device_gives(program, place):
    check(program, place)


def test_round_rounds_as_torch_does():
    def body(mesh):
        x = pt.distribute_tensor(X * 10, mesh, [Shard(0)])
        return round(x).full_tensor(), round(x, 1).full_tensor()

    with pt.ranks(dp=2) as world:
        for whole, tenths in world.run(body):
            assert torch.equal(whole, torch.round(X * 10))
            assert torch.equal(tenths, torch.round(X * 10, decimals=1))


# -- lists -----------------------------------------------------------------------------------------

LISTS = {
    "list": lambda d: (d(0), d(1)),
    "scalar": lambda d: (d(0), 2.0),
    "scalars": lambda d: (d(0), [2.0, 3.0]),
    "one": lambda d: (d(0),),
    "three": lambda d: (d(0), d(1), d(2)),
    "value": lambda d: (d(0), d(1), d(2), 0.5),
    "values": lambda d: (d(0), d(1), d(2), [0.5, 2.0]),
    "values in a tensor": lambda d: (d(0), d(1), d(2), torch.tensor([0.5, 2.0])),
    "weight": lambda d: (d(0), d(1), 0.3),
    "a number first": lambda d: (2.0, d(0)),
    "plain second": lambda d: (d(0), held(1)),
    "plain first": lambda d: (held(0), d(1)),
}


def held(which: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(which)
    return [torch.rand(s, generator=generator) * 0.8 + 0.1 for s in ((4, 2), (3,))]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["S(0)", "R", "P", "each another"])
def test_every_function_of_lists_is_as_on_one_device(place):
    def body(mesh, function, arguments):
        count = iter(range(9))

        def make(which):
            by_turns = [Replicate(), Shard(0), Partial()][next(count) % 3]
            where = {"S(0)": Shard(0), "R": Replicate(), "P": Partial()}.get(place, by_turns)
            return [pt.distribute_tensor(t, mesh, [where]) for t in held(which)]

        given = arguments(make)
        return values((function(*given), list(given)))

    ran = 0
    with pt.ranks(dp=2) as world:
        for name in [n for n in dir(torch) if n.startswith("_foreach_")]:
            for form, arguments in LISTS.items():
                function, given = getattr(torch, name), arguments(held)
                try:
                    right = values((function(*given), list(given)))
                except (RuntimeError, TypeError, IndexError):
                    continue  # not a call of this function
                ran += 1
                for mine in world.run(body, function, arguments):
                    torch.testing.assert_close(mine, right, equal_nan=True, msg=f"{name} {form}")
    assert ran > 150


OPTIMIZERS = {
    "AMSGrad": lambda p: Sub(torch.optim.AdamW)(p, lr=0.1, amsgrad=True),
    "AMSGrad, op by op": lambda p: Sub(torch.optim.AdamW)(p, lr=0.1, amsgrad=True, foreach=False),
    "AMSGrad, fused": lambda p: Sub(torch.optim.AdamW)(p, lr=0.1, amsgrad=True, fused=True),
    "fused SGD": lambda p: Sub(torch.optim.SGD)(p, lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: Sub(torch.optim.Adagrad)(p, lr=0.1, fused=True),
    **{
        f"{name}, {how}": lambda p, name=name, how=how: Sub(getattr(torch.optim, name))(
            p, lr=0.1, foreach=how == "lists"
        )
        for name in (
            "Adam Adamax NAdam RAdam Rprop ASGD Adagrad Adadelta RMSprop SGD Adafactor".split()
        )
        for how in ("lists", "op by op")
    },
}


def Sub(cls: type) -> type:
    """Somebody's own optimizer, of which nothing is known."""
    return type(f"My{cls.__name__}", (cls,), {})


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_subclasses_of_torchs_optimizers_step_as_on_one_device(place):
    def train(make: Make) -> Any:
        found = []
        for make_optimizer in OPTIMIZERS.values():
            params = [nn.Parameter(make(X)), nn.Parameter(make(X + 1))]
            opt = make_optimizer(params)
            for k in range(3):
                opt.zero_grad()
                sum((p * p * (k + 1)).sum() for p in params).backward()
                opt.step()
            found.append(params)
        return found

    check(train, place)


# -- meshes, custom ops, worlds, plans -------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm", [2.0, 1.0, math.inf])
def test_gradients_of_two_meshes_are_clipped_together(foreach, norm):
    def clip(place):
        params = [nn.Parameter(place(X, "dp")), nn.Parameter(place(X + 1, "tp"))]
        params.append(nn.Parameter(torch.ones(2)))
        sum((p * p).sum() for p in params[:1]).backward()
        sum((p * p).sum() for p in params[1:2]).backward()
        (params[2] * 3).sum().backward()
        total = nn.utils.clip_grad_norm_(params, 1.0, norm, foreach=foreach)
        return values([total, *(p.grad for p in params)])

    right = clip(lambda t, axis: t.clone())
    with pt.ranks(dp=2, tp=2) as world:
        for mine in world.run(
            lambda mesh: clip(lambda t, axis: pt.distribute_tensor(t, mesh[axis], [Shard(0)]))
        ):
            torch.testing.assert_close(mine, right)


@torch.library.custom_op("partita_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("partita_tests::rows_summed", mutates_args=())
def rows_summed(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


doubled.register_autograd(lambda ctx, g: g * 2)


def test_a_custom_op_is_taught_by_what_the_decorator_gave():
    pt.rule("... -> ...", doubled)

    @pt.rule(rows_summed)
    def _(x):
        return f"{x.names} -> sum {x.names.without(0)}"

    def body(mesh):
        x = pt.distribute_tensor(X, mesh, [Shard(0)]).requires_grad_()
        with pt.ledger() as log:
            ops = torch.ops.partita_tests
            outs = [f(x) for f in (doubled, ops.doubled, ops.doubled.default)]
            outs.append(rows_summed(x.detach()))
        placements = [y.placements[0] for y in outs]
        outs[0].sum().backward()
        return log.bytes, placements, values(outs), x.grad.full_tensor()

    with pt.ranks(dp=2) as world:
        for sent, placements, outs, grad in world.run(body):
            assert sent == 0
            assert placements == [Shard(0)] * 3 + [Partial()]
            torch.testing.assert_close(outs, [X * 2] * 3 + [X.sum(0)])
            assert torch.equal(grad, torch.full_like(X, 2))


def test_a_world_runs_functions_with_arguments_by_name():
    with pt.ranks(dp=2) as world:
        assert world.run(lambda mesh, a, fn=0: (a, fn), 1, fn=3) == [(1, 3)] * 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.up(x).relu()
        return self.down(h), None, {"cache": h}


@pytest.mark.parametrize("sequence", [False, True])
def test_a_plan_for_what_lies_between_takes_modules_that_return_more_than_a_tensor(sequence):
    x = X.view(1, 4, 2)
    torch.manual_seed(0)
    right = Attention()(x)[0]

    def body(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(Attention())
        plan = pt.plans.column("0.up") | pt.plans.row("0.down")
        pt.parallelize(model, mesh, plan | pt.plans.inner("0", sequence=sequence))
        place = Shard(1) if sequence else Replicate()
        out, none, cache = model(pt.distribute_tensor(x, mesh, [place]))
        assert none is None and cache["cache"].placements == (Shard(2),)
        return out.placements == (place,), out.full_tensor()

    with pt.ranks(tp=2) as world:
        for lies, out in world.run(body):
            assert lies
            torch.testing.assert_close(out, right)


def test_a_number_of_another_mesh_is_reduced_once_the_first_time_too():
    def run(mesh):
        x = pt.distribute_tensor(torch.ones(4, 4), mesh["dp"], [pt.Shard(0)])
        y = pt.distribute_tensor(torch.ones(4, 4), mesh["tp"], [pt.Shard(0)])
        with pt.ledger() as log:
            found = (x * y.sum()).full_tensor()
        return log.count("all_reduce"), found[0, 0].item()

    pt.cache_clear()
    with pt.ranks(dp=2, tp=2) as world:
        assert world.run(run) == [(1, 16.0)] * 4
