"""Shares of a sum, times what is infinite or over zero, are the sum times that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import partita as pt
from partita import Partial, Shard

INF, NAN = float("inf"), float("nan")
X = torch.tensor([1.0, -2.0, 3.0, 0.0], dtype=torch.float64)
ZEROS, ONES = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
SOME = torch.tensor([INF, 0.0, -INF, 2.0], dtype=torch.float64)

WAYS = {
    "x / 0": lambda x: x / 0,
    "x / 0.": lambda x: x / 0.0,
    "x / -0.": lambda x: x / -0.0,
    "x * inf": lambda x: x * INF,
    "inf * x": lambda x: INF * x,
    "x * -inf": lambda x: x * -INF,
    "x * nan": lambda x: x * NAN,
    "0 * x": lambda x: 0 * x,
    "x / inf": lambda x: x / INF,
    "x / nan": lambda x: x / NAN,
    "x / a small number": lambda x: x / 1e-310,
    "torch.div": lambda x: torch.div(x, other=0),
    "torch.true_divide": lambda x: torch.true_divide(x, 0),
    "div_": lambda x: (x * 1).div_(0),
    "mul_": lambda x: (x * 1).mul_(INF),
    "/=": lambda x: (x * 1).__itruediv__(0),
    "finite, then not": lambda x: torch.stack([x * 2, x * INF, x * 3, x / 0, x / 2]),
    "x * a number of no dimensions": lambda x: x * torch.tensor(INF, dtype=torch.float64),
    "x / a tensor": lambda x: x / ZEROS,
    "x / another tensor": lambda x: x / SOME,
    "x * a tensor": lambda x: x * SOME,
    "x * a result": lambda x: x * (x.detach() * 0 + SOME),
    "x @ a matrix": lambda x: x @ torch.diag(SOME),
    "linear": lambda x: F.linear(x[None], torch.diag(SOME)),
    "dot": lambda x: x.dot(SOME),
    "outer": lambda x: torch.outer(x, SOME),
    "einsum": lambda x: torch.einsum("i,i->i", x, SOME),
    "kron": lambda x: torch.kron(x, SOME),
    "add, alpha": lambda x: torch.add(x, x, alpha=INF),
    "sub, alpha": lambda x: torch.sub(ZEROS, x, alpha=INF),
    "add_, alpha": lambda x: (x * 1).add_(x, alpha=INF),
    "addcmul": lambda x: torch.addcmul(ZEROS, x, ONES, value=INF),
    "addcdiv": lambda x: torch.addcdiv(ZEROS, x, ZEROS),
    "lerp": lambda x: torch.lerp(ZEROS, x, INF),
    "addmm, beta": lambda x: torch.addmm(x.view(2, 2), ONES.view(2, 2), ONES.view(2, 2), beta=INF),
    "index_add, alpha": lambda x: ZEROS.index_add(0, torch.arange(4), x, alpha=INF),
    "_foreach_mul": lambda x: torch._foreach_mul([x], INF)[0],
    "_foreach_div": lambda x: torch._foreach_div([x, x], [0.0, 2.0])[0],
}


def _run_on_shares(mesh, way, axes):
    at = mesh.get_coordinate()
    n = mesh.size(0)
    share = X * (2 * n - 1 if at[0] == 0 else -2)
    placements = [Partial(), Shard(0)][:axes]
    if axes > 1:
        share = share.chunk(mesh.size(1))[at[1]] if at[1] < 2 else share[:0]
    x = pt.DTensor.from_local(share, mesh, placements, shape=X.shape).requires_grad_()
    y = way(x)
    y.nan_to_num(0.0, 0.0, 0.0).sum().backward()  # the same moves in backward on all ranks
    return y.detach().full_tensor()


# A factor that is cut along another axis is not looked at: each rank would see another part.
CUT = {"x / a tensor", "x / another tensor", "x * a tensor", "x * a result", "x @ a matrix"}
CUT |= {"linear", "dot", "outer", "einsum", "kron", "addcdiv"}
CASES = [
    (mesh, way)
    for mesh in ({"tp": 2}, {"tp": 3}, {"tp": 2, "dp": 2})
    for way in WAYS
    if len(mesh) == 1 or way not in CUT
]


@pytest.mark.parametrize(("mesh", "way"), CASES, ids=str)
def test_shares_times_what_is_not_finite_are_the_value_times_that(mesh, way):
    truth = WAYS[way](X.clone())
    with pt.ranks(**mesh) as world:
        for ours in world.run(_run_on_shares, WAYS[way], len(mesh)):
            torch.testing.assert_close(ours, truth, equal_nan=True)


def _stay(mesh):
    x = pt.distribute_tensor(X, mesh, [Partial()])
    with pt.ledger() as log:
        kept = [x * 2.0, x / 3, x * ONES, torch.add(x, x, alpha=2.0)]
    assert [list(y.placements) for y in kept] == [[Partial()]] * 4
    piece = pt.distribute_tensor(X, mesh, [Shard(0)])
    filled = piece.masked_fill(piece > 0, value=-INF)
    padded = F.pad(pt.distribute_tensor(X.view(2, 2), mesh, [Shard(0)]), (1, 1), value=-INF)
    assert [list(y.placements) for y in (filled, padded)] == [[Shard(0)]] * 2
    return log.bytes


def test_finite_factors_move_nothing():
    with pt.ranks(tp=2) as world:
        assert world.run(_stay) == [0, 0]
