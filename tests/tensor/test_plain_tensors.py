"""What is a plain tensor beside a DTensor taken for, and what if the ranks' differ?"""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partita as pt
from partita import Partial, Replicate, Shard
from partita.comm.ranks import RankWire
from tests.programs.refused import each_rank, refusal

T = (torch.arange(32.0).view(8, 4) - 16) / 16  # sums of these are exact
RANK = threading.local()
FIRST = [Shard(0), Shard(1), Replicate(), Partial()]


def spread(mesh, t=T, first=None):
    return pt.distribute_tensor(t, mesh, [first or Shard(0), *[Replicate()] * (mesh.ndim - 1)])


@pytest.fixture
def exchanges(monkeypatch):
    """The small exchanges that ranks make, one entry for each rank and exchange."""
    made, real = [], RankWire.gather_ints

    def counted(self, values, what):
        made.append(self.rank)
        return real(self, values, what)

    monkeypatch.setattr(RankWire, "gather_ints", counted)
    return made


# -- it is taken as a whole value ------------------------------------------------------------------


class Positions(nn.Module):
    """Attention with positions, a causal mask and a scale that forward makes itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(8, 4)
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        n = x.shape[-2]
        x = x + self.table(torch.arange(n))
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) * torch.tensor(0.5)
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).square().sum()


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 3}, {"dp": 1}], ids=str)
@pytest.mark.parametrize("first", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
def test_positions_and_masks_made_in_forward_are_whole_values(axes, first):
    inputs = torch.linspace(-2, 2, 5 * 8 * 4).view(5, 8, 4)
    one = Positions()
    loss = one(inputs)
    loss.backward()

    def body(mesh):
        model = pt.distribute_module(Positions(), mesh)
        value = model(spread(mesh, inputs, first))
        value.backward()
        return value.item(), [p.grad.full_tensor() for p in model.parameters()]

    with pt.ranks(**axes) as world:
        for value, grads in world.run(body):
            assert value == pytest.approx(loss.item(), rel=1e-5)
            torch.testing.assert_close(grads, [p.grad for p in one.parameters()])


PLACES = {
    "the right of an operator": lambda x, t: x * t,
    "the left of an operator": lambda x, t: t - x,
    "a method's argument": lambda x, t: x.add(t, alpha=2),
    "in place": lambda x, t: x.clone().mul_(t),
    "a matmul": lambda x, t: x @ t.t(),
    "the left of a matmul": lambda x, t: t.t() @ x,
    "a weight": lambda x, t: F.linear(x, t),
    "a list": lambda x, t: torch.cat([x, t, x]),
    "a stack": lambda x, t: torch.stack([t, x]),
    "a condition": lambda x, t: torch.where(t > 0, x, t),
    "a mask": lambda x, t: x.masked_fill(t > 0, 3.0),
    "an index": lambda x, t: x[torch.tensor([3, 1, 1])],
    "an index that is a mask": lambda x, t: x[t > 0].sum(),
    "rows": lambda x, t: F.embedding(torch.tensor([[0, 7]]), x),
    "targets": lambda x, t: F.cross_entropy(x, torch.arange(8) % 4, t[0].exp()),
    "a keyword": lambda x, t: F.layer_norm(x, (4,), weight=t[0], bias=t[1]),
    "what is written": lambda x, t: x.clone().index_copy_(0, torch.tensor([2]), t[:1]),
    "an op without a rule": lambda x, t: torch.cdist(x, t),
    "a scalar tensor": lambda x, t: x * torch.tensor(3.0),
    "an integer tensor": lambda x, t: x + torch.arange(4),
    "einsum": lambda x, t: torch.einsum("ij,kj->ik", x, t),
    "lerp": lambda x, t: torch.lerp(x, t, t),
    "addcmul": lambda x, t: torch.addcmul(x, t, t),
    "foreach": lambda x, t: torch._foreach_add([x, x], [t, t])[1],
    "foreach by a scalar tensor": lambda x, t: torch._foreach_mul([x], torch.tensor(2.0))[0],
}


@pytest.mark.parametrize("first", FIRST, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_in_every_place_of_a_call_the_value_is_one_devices(place, first):
    call = PLACES[place]
    other = T.flip(0) * 2
    expected = call(T.clone(), other)
    with pt.ranks(dp=2, tp=2) as world:
        for out in world.run(lambda mesh: call(spread(mesh, T, first), other).full_tensor()):
            torch.testing.assert_close(out, expected)


def test_the_users_own_tensor_stays_plain():
    def body(mesh):
        x, t = spread(mesh), torch.ones(8, 4)
        made = [t.type_as(x), t.to(torch.float32), t.expand_as(x), torch.maximum(t, t), t + x]
        torch.broadcast_tensors(t, x)
        torch._foreach_add([x], [t])
        return type(t), [type(m) for m in made[1:4]], type(made[-1])

    with pt.ranks(dp=2) as world:
        for plain, others, result in world.run(body):
            assert plain is torch.Tensor
            assert others[0] is torch.Tensor
            assert result is pt.DTensor


# -- ranks that bring different ones ---------------------------------------------------------------


def unlike(how, rank):
    """What rank `rank` brings where the last rank's differs in one respect."""
    t, last = torch.arange(1.0, 5), rank == 3
    return {
        "a value": lambda: t.nextafter(t + 1) if last else t,
        "its own data": lambda: t + rank,
        "an order": lambda: t.flip(0) if last else t,
        "a shape": lambda: t[:, None].expand(4, 4) if last else t,
        "a length": lambda: t[:1] if last else t,
        "a dtype": lambda: torch.zeros(4, dtype=torch.int32 if last else torch.float32),
        "a sign": lambda: torch.tensor([True, False] if last else [False, True]).repeat(2),
        "the last element of many": lambda: (torch.arange(300_004) == 300_003) & last,
    }[how]()


@pytest.mark.parametrize(
    "how",
    ["a value", "its own data", "an order", "a shape", "a length", "a dtype", "a sign"],
)
def test_a_difference_is_an_error_on_every_rank_that_names_the_line(how):
    def body(mesh):
        t = unlike(how, mesh.get_rank())
        return spread(mesh, T[:4]) * t

    error = refusal(body, place=__file__, dp=2, tp=2)
    assert error.fact == "mul: a plain tensor next to a DTensor differs between ranks"
    assert error.operands[0].startswith("rank 0 ")
    assert error.operands[1].startswith("rank 1 " if how == "its own data" else "rank 3 ")
    line = body.__code__.co_firstlineno + 2
    assert error.place.endswith(f"test_plain_tensors.py:{line}")


def test_one_element_of_many_is_enough():
    def body(mesh):
        t = unlike("the last element of many", mesh.get_rank())
        return pt.zeros(300_004, device_mesh=mesh) + t

    assert "differs between ranks" in refusal(body, place=__file__, dp=2, tp=2).fact


def test_each_way_out_of_a_difference_works():
    def body(mesh, way):
        mine = T[:4] + mesh.get_local_rank("dp")  # this rank's own data
        x = spread(mesh)
        if way == "piece":
            mine = pt.DTensor.from_local(mine, mesh, [Shard(0), Replicate()])
        else:
            mine = pt.distribute_tensor(mine, mesh)[0]
        return (x + mine).full_tensor()

    with pt.ranks(dp=2, tp=2) as world:
        pieces = torch.cat([T[:4], T[:4] + 1])
        assert all(torch.equal(out, T + pieces) for out in world.run(body, "piece"))
        assert all(torch.equal(out, T + T[0]) for out in world.run(body, "first"))


def test_values_that_are_not_numbers_are_compared_as_they_are():
    t = torch.tensor([torch.nan, torch.inf, -0.0, 0.0])
    with pt.ranks(dp=2) as world:
        for out in world.run(lambda mesh: (spread(mesh) * t).full_tensor()):
            torch.testing.assert_close(out, T * t, equal_nan=True)


# -- when ranks compare ----------------------------------------------------------------------------


def test_a_call_site_is_compared_the_first_time_only(exchanges):
    def body(mesh):
        x = pt.zeros(8, 4, device_mesh=mesh)
        for i in range(5):
            x = x + torch.full((4,), float(i))
        return x.full_tensor()

    with pt.ranks(dp=2) as world:
        assert all(torch.equal(out, torch.full((8, 4), 10.0)) for out in world.run(body))
    assert sorted(exchanges) == [0, 1]


def test_a_call_site_stays_one_when_the_interpreter_has_met_the_call_often():
    def called():
        return pt.comm.call_site(sys._getframe(1))

    def rounds(n):
        return [called() for _ in range(n)]

    def two_of_a_line():
        return called(), called()

    assert len(set(rounds(200))) == 1
    assert rounds(1) == rounds(200)[:1]
    first, second = two_of_a_line()
    assert first != second


def test_each_call_of_a_line_and_each_operand_of_a_call_is_a_site():
    t = torch.ones(4)

    def two_calls(mesh):
        return spread(mesh) + t + (t + mesh.get_rank())

    def two_operands(mesh):
        return torch.addcmul(spread(mesh), t, t + mesh.get_rank())

    def inside_a_function(mesh):
        weight, bias = t, t + mesh.get_rank()
        return F.layer_norm(spread(mesh), (4,), weight, bias)

    for body in (two_calls, two_operands, inside_a_function):
        assert "differs between ranks" in refusal(body, place=__file__, dp=2).fact


def test_what_was_compared_once_is_trusted_and_under_check_ranks_never():
    def body(mesh, checked):
        x = spread(mesh)
        for round_ in range(2):
            t = torch.full((4,), float(round_ * mesh.get_rank()))
            if checked:
                with pt.check_ranks():
                    x = x + t
            else:
                x = x + t  # the ranks go apart in the second round, unseen: see check_ranks
        return x.to_local()

    with pt.ranks(dp=2) as world:
        pieces = world.run(body, False)
    assert torch.equal(pieces[1] - 1, T[4:])
    error = refusal(lambda mesh: body(mesh, True), place=__file__, dp=2)
    assert "differs between ranks" in error.fact


def test_one_rank_compares_with_nobody(exchanges):
    with pt.ranks(dp=1) as world:
        world.run(lambda mesh: pt.zeros(4, device_mesh=mesh) + torch.ones(4))
    assert not exchanges


def test_after_a_difference_the_site_is_compared_again():
    def body(mesh):
        x, said = spread(mesh), []
        for round_ in range(3):
            try:
                x = x + torch.full((4,), float(mesh.get_rank() * (round_ < 2)))
            except pt.LayoutError:
                said.append(round_)
        return said, x.full_tensor()

    for said, x in each_rank(body, dp=2):
        assert said == [0, 1] and torch.equal(x, T)


def test_a_gradient_that_a_user_gives_and_one_that_a_function_returns_are_compared_too():
    def given(mesh):
        (spread(mesh).requires_grad_() * 2).backward(torch.full((8, 4), float(mesh.get_rank())))

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return torch.full((8, 4), float(RANK.rank))

    def returned(mesh):
        RANK.rank = mesh.get_rank()
        Own.apply(spread(mesh).requires_grad_()).sum().backward()

    for body, giver in ((given, "backward"), (returned, "Own.backward")):
        fact = refusal(body, place=__file__, dp=2).fact
        assert fact == f"{giver}: a plain tensor next to a DTensor differs between ranks"


# -- strict ----------------------------------------------------------------------------------------


def test_strict_refuses_plain_tensors_and_lets_those_that_are_spread():
    def body(mesh, spread_too=False):
        x, t = spread(mesh), torch.ones(4)
        with pt.strict():
            if spread_too:
                t = pt.distribute_tensor(t, mesh)
            return (x + t).full_tensor()

    error = refusal(body, place=__file__, dp=2, tp=2)
    assert "add: a plain tensor stands next to a DTensor, and strict() refuses this" in error.fact
    with pt.ranks(dp=2, tp=2) as world:
        assert all(torch.equal(out, T + 1) for out in world.run(body, True))


def test_strict_may_be_lifted_around_a_line():
    def body(mesh):
        with pt.strict(), pt.strict(False):
            return (spread(mesh) + torch.ones(4)).full_tensor()

    with pt.ranks(dp=2) as world:
        assert all(torch.equal(out, T + 1) for out in world.run(body))


def test_numbers_are_no_tensors():
    def body(mesh):
        with pt.strict():
            return ((spread(mesh) + 1) * 2.5).full_tensor()

    with pt.ranks(dp=2) as world:
        assert all(torch.equal(out, (T + 1) * 2.5) for out in world.run(body))
