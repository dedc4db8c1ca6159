"""Do transforms of torch.func, and its control flow, give one device's values on DTensors?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_over
from torch.utils._pytree import tree_leaves

import partita as pt
from tests.programs.refused import each_rank, refusal

pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

D = (torch.arange(15, dtype=torch.float64).view(5, 3) + 1) / 10
W = (torch.arange(9, dtype=torch.float64).view(3, 3) - 4) / 7

Program = Callable[[Any, Any, Any], Any]


def squares(model: nn.Module) -> Callable[[Any, Any], Any]:
    return lambda p, x: func.functional_call(model, p, (x,)).square().sum()


def stacked(model: nn.Module) -> dict[str, Any]:
    return {name: torch.stack([p, 2 * p]) for name, p in model.named_parameters()}


def seeded(run: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return run()


TRANSFORMS: dict[str, Program] = {
    "reads by index": lambda d, w, m: torch.vmap(lambda i: d[i, 0])(torch.arange(4)),
    "nested": lambda d, w, m: torch.vmap(
        lambda i: torch.vmap(lambda j: d[i, j] * w[j, j])(torch.arange(3))
    )(torch.arange(5)),
    "an argument": lambda d, w, m: torch.vmap(lambda row: row @ w)(d),
    "in_dims, out_dims": lambda d, w, m: torch.vmap(
        lambda a, b: a * b.sum(), in_dims=(1, None), out_dims=1
    )(d, w),
    "what it closes over": lambda d, w, m: torch.vmap(lambda i: d)(torch.arange(2)),
    "several results": lambda d, w, m: torch.vmap(lambda i: (d[i], {"a": i * w.sum()}))(
        torch.arange(2)
    ),
    "chunks": lambda d, w, m: torch.vmap(lambda row: row * 2, chunk_size=2)(d),
    "a module": lambda d, w, m: torch.vmap(m)(d),
    "an ensemble": lambda d, w, m: torch.vmap(
        lambda p, x: func.functional_call(m, p, (x,)), in_dims=(0, None)
    )(stacked(m), d),
    "its shape": lambda d, w, m: torch.vmap(lambda i: d.shape[0] * i + d.sum())(torch.arange(3.0)),
    "one draw": lambda d, w, m: seeded(
        lambda: torch.vmap(lambda r: r + torch.randn(3), randomness="same")(d)
    ),
    "draws": lambda d, w, m: seeded(
        lambda: torch.vmap(lambda r: r + torch.rand_like(r), randomness="different")(d)
    ),
    "grad": lambda d, w, m: func.grad(lambda x: (x * x * x).sum())(d),
    "grad, has_aux": lambda d, w, m: func.grad(
        lambda x: ((x @ w).square().sum(), x * 2), has_aux=True
    )(d),
    "grad beside a DTensor": lambda d, w, m: func.grad(lambda t: (d * t).sin().sum())(
        torch.tensor(2.0, dtype=torch.float64)
    ),
    "gradients of each sample": lambda d, w, m: torch.vmap(
        func.grad(squares(m)), in_dims=(None, 0)
    )(dict(m.named_parameters()), d),
    "vjp": lambda d, w, m: func.vjp(lambda x: x @ w, d)[1](d * 2),
    "jvp": lambda d, w, m: func.jvp(lambda x: (x @ x.T).sin(), (d,), (d * 2,)),
    "jacrev": lambda d, w, m: func.jacrev(lambda x: (x * x).sum(0))(d),
    "jacfwd": lambda d, w, m: func.jacfwd(lambda x: (x * x).sum(0))(d),
    "hessian": lambda d, w, m: func.hessian(lambda x: (x * x * x).sum())(d),
    "linearize": lambda d, w, m: func.linearize(lambda x: x.sin(), d)[1](d),
    "functionalize": lambda d, w, m: func.functionalize(lambda x: x * 2 + w.sum())(d),
}

CONTROL_FLOW: dict[str, Program] = {
    "cond": lambda d, w, m: torch.cond(d.sum() > 0, lambda x: x @ w, lambda x: x * 3, (d,)),
    "cond of a closure": lambda d, w, m: torch.cond(
        torch.tensor(False), lambda: d * 2, lambda: d * 3, ()
    ),
    "while_loop": lambda d, w, m: while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), d)
    ),
    "map": lambda d, w, m: map_over(lambda x, k: (x @ k).sin(), d, w),
    "scan": lambda d, w, m: scan(lambda c, x: (c + x, c * x), torch.ones(3).double(), d),
    "scan, reverse": lambda d, w, m: scan(
        lambda c, x: (c + x, c * x), torch.ones(5).double(), d, dim=1, reverse=True
    ),
    "associative_scan": lambda d, w, m: associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (d, d * 2), 1, combine_mode="generic"
    ),
    "associative_scan, reverse": lambda d, w, m: associative_scan(
        lambda a, b: a * b, d, 0, reverse=True, combine_mode="generic"
    ),
    "associative_scan of products": lambda d, w, m: associative_scan(
        lambda a, b: a @ b, w.expand(4, 3, 3), 0, combine_mode="generic"
    ),
}

PROGRAMS = {**TRANSFORMS, **CONTROL_FLOW}
LAYOUTS = {"S0": pt.Shard(0), "S1": pt.Shard(1), "R": pt.Replicate(), "I": pt.Invariant()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, pt.DTensor) else t


def results(program: Program, d: Any, w: Any, m: nn.Module) -> list[Any]:
    """What a program returns, and the gradients of a sum over it."""
    inputs = [d.requires_grad_(), w.requires_grad_(), *m.parameters()]
    leaves = [t for t in tree_leaves(program(d, w, m)) if isinstance(t, torch.Tensor)]
    weighted = [(t * torch.arange(t.numel()).view(t.shape)).sum() for t in leaves]
    total = sum(t for t in weighted if t.requires_grad)
    gradients = (
        torch.autograd.grad(total, inputs, allow_unused=True)
        if isinstance(total, torch.Tensor)
        else []
    )
    return [None if t is None else whole(t).detach() for t in (*leaves, *gradients)]


def check(name: str, layout: str, **axes: int) -> None:
    torch._dynamo.reset()
    truth = results(PROGRAMS[name], D.clone(), W.clone(), model())

    def body(mesh: Any) -> list[Any]:
        rest = [pt.Replicate()] * (mesh.ndim - 1)
        d = pt.distribute_tensor(D, mesh, [LAYOUTS[layout], *rest])
        w = pt.distribute_tensor(W, mesh, [pt.Shard(1), *rest])
        m = model()
        pt.parallelize(m, mesh, {"weight": {"dp": pt.Shard(0)}, "bias": {"dp": pt.Shard(0)}})
        return results(PROGRAMS[name], d, w, m)

    for found in each_rank(body, **axes):
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_one_devices(name: str) -> None:
    check(name, "S0", dp=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", [{"dp": 3}, {"dp": 2, "tp": 3}], ids=str)
def test_index_functions_read_every_layout(layout: str, axes: dict[str, int]) -> None:
    for name in ("reads by index", "gradients of each sample", "vjp", "associative_scan"):
        check(name, layout, **axes)


def test_the_ledger_has_what_is_gathered_for_a_transform() -> None:
    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(D, mesh, [pt.Shard(0)])
        with pt.ledger() as log:
            out = torch.vmap(lambda i: d[i].sum() + d[i, 0])(torch.arange(4))
        return [(m.kind, m.op, m.reason) for m in log.moves], out.placements

    assert each_rank(body, dp=2) == [
        ([("all_gather", "vmap", "implicit")], (pt.Invariant(),)) for _ in range(2)
    ]


def test_strict_refuses_a_transform_that_has_to_gather() -> None:
    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(D, mesh, [pt.Shard(0)])
        with pt.strict():
            return torch.vmap(lambda i: d[i].sum())(torch.arange(4))

    assert "vmap" in refusal(body, place=__file__, dp=2).fact


def test_a_scan_by_pointwise_ops_sends_nothing() -> None:
    def body(mesh: Any) -> int:
        d = pt.distribute_tensor(D, mesh, [pt.Shard(0)])
        with pt.ledger() as log:
            associative_scan(lambda a, b: a * b, d, 1, combine_mode="generic")
        return log.bytes

    assert each_rank(body, dp=2) == [0, 0]


def test_a_scan_of_a_mamba_is_captured_by_rule() -> None:
    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(D, mesh, [pt.Shard(0)])
        step = pt.compile(
            lambda x: associative_scan(lambda a, b: a * b, x, 1, combine_mode="generic"),
            backend="graph",
        )
        return step(d).full_tensor()

    for found in each_rank(body, dp=2):
        torch.testing.assert_close(found, D.cumprod(1), rtol=1e-9, atol=1e-12)


def test_index_functions_are_captured() -> None:
    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(D, mesh, [pt.Shard(0)])
        step = pt.compile(
            lambda x: torch.vmap(lambda i: x[i] * 2)(torch.arange(4)), backend="graph"
        )
        step(d)
        return step(d * 3).full_tensor()

    for found in each_rank(body, dp=2):
        torch.testing.assert_close(found, 6 * D[:4], rtol=1e-9, atol=1e-12)


# -- what is refused -------------------------------------------------------------------------------


def test_a_write_into_a_part_is_refused() -> None:
    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(D, mesh, [pt.Shard(0)])
        return torch.vmap(lambda row: row.mul_(2))(d)

    assert "vmap writes into a DTensor" in refusal(body, place=__file__, dp=2).fact


def test_a_plain_tensor_that_differs_between_ranks_is_refused() -> None:
    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(D, mesh, [pt.Shard(0)])
        mine = torch.full((3,), float(mesh.get_local_rank()))
        return torch.vmap(lambda i: (d[i] + mine).sum())(torch.arange(4))

    assert "differs between ranks" in refusal(body, place=__file__, dp=2).fact


def test_draws_of_unlike_generators_are_refused() -> None:
    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(D, mesh, [pt.Shard(0)])
        torch.manual_seed(mesh.get_local_rank())
        return torch.vmap(lambda row: row + torch.rand(3), randomness="different")(d)

    assert "random generators" in refusal(body, place=__file__, dp=2).fact


def test_forward_mode_of_a_closure_is_refused_on_threads() -> None:
    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(D, mesh, [pt.Shard(0)])
        return func.jvp(lambda t: d * t, (torch.ones(3),), (torch.ones(3),))

    assert "ranks that are threads" in refusal(body, place=__file__, dp=2).fact
