"""Are gradients settled once, whoever reads them first, and are they then one device's?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import partita as pt

Clip = Callable[..., Tensor]


def by_hand(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """What people write when they do not know of clip_grad_norm_."""
    grads = [p.grad for p in parameters if p.grad is not None]
    total = torch.stack([g.norm(norm_type) for g in grads]).norm(norm_type)
    for g in grads:
        g.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


CLIPS: dict[str, Clip] = {
    "partita": pt.clip_grad_norm_,
    "torch": nn.utils.clip_grad_norm_,
    "torch, one by one": lambda *a, **k: nn.utils.clip_grad_norm_(*a, **k, foreach=False),
}


def deep(width: int = 6, layers: int = 24) -> nn.Module:
    """48 parameters."""
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def put(model: nn.Module, mesh: Any) -> nn.Module:
    """Every second layer split by columns, the next by rows, where the mesh has tp."""
    if "tp" not in mesh.mesh_dim_names:
        return pt.parallelize(model, mesh)
    plan = {}
    for i in range(0, len(model), 2):
        plan |= pt.plans.column(f"{i}") | pt.plans.row(f"{i + 1}")
    return pt.parallelize(model, mesh, plan)


def data(rows: int = 5, width: int = 6) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3))


def ring(nbytes: int, n: int) -> int:
    """What one rank sends when n ranks reduce this many bytes."""
    return 2 * (n - 1) * nbytes // n


def run(fn: Callable[[Any], Any], **sizes: int) -> list[Any]:
    with pt.ranks(**sizes) as world:
        return world.run(fn)


def same(mine: nn.Module, truth: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(mine.named_parameters(), truth.parameters(), strict=True):
        value = p.full_tensor() if isinstance(p, pt.DTensor) else p
        torch.testing.assert_close(value, q, msg=lambda m, at=name: f"{at}: {m}", **tolerance)


# -- what is sent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("how", ["foreach", "fused", "forloop"])
def test_backward_clip_and_step_send_each_byte_of_48_gradients_once(clip: str, how: str) -> None:
    def ranks(mesh: Any) -> None:
        model = put(deep(), mesh)
        assert len(list(model.parameters())) == 48
        options = {"foreach": False} if how == "forloop" else {how: True}
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        total = sum(p.nbytes for p in model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with pt.ledger() as log:
                model(pt.distribute_batch(data(), mesh)).square().sum().backward()
                CLIPS[clip](model.parameters(), 0.1)
                optimizer.step()
            assert log.bytes == ring(total, 2)
            if clip != "torch, one by one":
                assert log.count("all_reduce") == 1
            assert {m.reason for m in log.moves if m.nbytes} == {"settle"}

    run(ranks, dp=2)


@pytest.mark.parametrize("clip", ["partita", "torch"])
def test_where_gradients_are_split_the_norm_is_one_small_collective_more(clip: str) -> None:
    def ranks(mesh: Any) -> None:
        model = put(deep(), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(pt.distribute_batch(data(), mesh)).square().sum().backward()
        with pt.ledger() as log:
            CLIPS[clip](model.parameters(), 0.1)
            optimizer.step()
        sent = [(m.kind, m.op) for m in log.moves if m.nbytes]
        # Those of dp alone and those of dp and tp, and the norms.
        assert sent == [("all_reduce", "gradients")] * 2 + [("all_reduce", "norms")]
        norms = next(m for m in log.moves if m.op == "norms")
        assert norms.nbytes <= ring(48 * 4, 2)

    run(ranks, dp=2, tp=2)


def test_a_gradient_that_is_read_by_hand_is_settled_for_good() -> None:
    def ranks(mesh: Any) -> None:
        model = put(deep(layers=3), mesh)
        model(pt.distribute_batch(data(), mesh)).square().sum().backward()
        assert all(p.grad.placements == (pt.Partial(),) for p in model.parameters())
        with pt.ledger() as log:
            by_hand(model.parameters(), 0.1)
            assert all(p.grad.placements == (pt.Replicate(),) for p in model.parameters())
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert log.bytes == ring(sum(p.nbytes for p in model.parameters()), 2)

    run(ranks, dp=2)


def test_values_that_torch_clips_are_settled_first_and_once() -> None:
    truth = deep(layers=4)
    truth(data()).square().sum().backward()
    nn.utils.clip_grad_value_(truth.parameters(), 0.05)

    def ranks(mesh: Any, foreach: bool) -> None:
        model = put(deep(layers=4), mesh)
        model(pt.distribute_batch(data(), mesh)).square().sum().backward()
        with pt.ledger() as log:
            nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=foreach)
            torch.optim.SGD(model.parameters(), lr=0.0).step()
        assert log.bytes == ring(sum(p.nbytes for p in model.parameters()), 2)
        for p, q in zip(model.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    with pt.ranks(dp=2) as world:
        world.run(ranks, True)
        world.run(ranks, False)


def test_micro_batches_send_nothing_until_the_step() -> None:
    def ranks(mesh: Any) -> None:
        model = put(deep(), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        with pt.ledger() as log:
            for _ in range(4):
                model(pt.distribute_batch(data(), mesh)).square().sum().backward()
        assert log.bytes == 0
        with pt.ledger() as log:
            optimizer.step()
        assert log.bytes == ring(sum(p.nbytes for p in model.parameters()), 2)

    run(ranks, dp=2)


def test_large_gradients_travel_in_several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.tensor.dtensor_gradients.BUCKET_BYTES", 6 * 6 * 4 * 8)

    def ranks(mesh: Any) -> None:
        model = put(deep(), mesh)
        model(pt.distribute_batch(data(), mesh)).square().sum().backward()
        with pt.ledger() as log:
            pt.reduce_gradients(model.parameters())
        assert 3 <= log.count("all_reduce") <= 5
        assert log.bytes == ring(sum(p.nbytes for p in model.parameters()), 2)

    run(ranks, dp=2)


# -- a pending gradient stays pending (PyTorch #180486, #180511) -----------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return 2 * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda w: w,
    "transposed": lambda w: w.transpose(1, 2),
    "transposed and made contiguous": lambda w: w.transpose(1, 2).contiguous(),
    "through a function of its own": Doubled.apply,
    "transposed, through a function of its own": lambda w: Doubled.apply(w.transpose(1, 2)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("flat", [False, True])
def test_backward_of_a_whole_weight_carries_nothing_however_it_is_used(use: str, flat: bool):
    """A gradient whose strides are not its weight's is no reason to reduce it."""
    torch.manual_seed(0)
    weight, x = torch.randn(3, 4, 4), torch.randn(6, 4)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        used = USES[use](w)
        y = torch.mm(x, used.reshape(12, 4).t()) if flat else torch.matmul(x, used)
        return y.square().sum()

    truth = weight.clone().requires_grad_()
    loss(truth, x).backward()

    def ranks(mesh: Any) -> None:
        w = pt.distribute_tensor(weight, mesh).requires_grad_()
        rows = pt.distribute_batch(x, mesh)
        for times in (1, 2):  # the second adds shares to shares
            out = loss(w, rows)
            with pt.ledger() as log:
                out.backward()
            assert log.bytes == 0 and log.count("all_reduce") == 0
            assert w.grad.placements == (pt.Partial(),)
            torch.testing.assert_close(w.grad.full_tensor(), times * truth.grad)

    run(ranks, dp=2)


def test_backward_of_a_local_piece_of_a_whole_weight_carries_nothing() -> None:
    weight, x = torch.randn(3, 4, 4), torch.randn(6, 4)
    truth = weight.clone().requires_grad_()
    torch.matmul(x, truth.transpose(1, 2)).square().sum().backward()

    def ranks(mesh: Any) -> None:
        w = pt.distribute_tensor(weight, mesh).requires_grad_()
        local = w.to_local(grad_placements=[pt.Partial()]).transpose(1, 2).contiguous()
        rows = pt.distribute_batch(x, mesh).to_local()
        with pt.ledger() as log:
            torch.matmul(rows, local).square().sum().backward()
        assert not log.moves
        assert w.grad.placements == (pt.Partial(),)
        torch.testing.assert_close(w.grad.full_tensor(), truth.grad)

    run(ranks, dp=2)


def test_memory_that_is_overwritten_is_pending_as_what_it_is_made_like_and_a_value_is_not() -> None:
    def ranks(mesh: Any) -> None:
        x = pt.DTensor.from_local(torch.ones(4, 6), mesh, [pt.Partial()])
        whole, pending = (pt.Replicate(),), (pt.Partial(),)
        with pt.ledger() as log:
            assert x.new_empty(4, 6).placements == pending
            assert x.new_empty_strided((4, 6), (1, 4)).placements == pending
            assert x.new_empty(6, 4).placements == whole
            for made, value in (
                (x.new_zeros(4, 6), 0.0),
                (x.new_ones(4, 6), 1.0),
                (x.new_full((4, 6), 3.0), 3.0),
            ):
                assert made.placements == whole
                assert torch.equal(made.full_tensor(), torch.full((4, 6), value))
        assert log.bytes == 0

    run(ranks, dp=2)


# -- what comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"dp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("clip", [*CLIPS, "by hand"])
def test_a_clip_is_one_devices(clip: str, norm_type: float, sizes: dict[str, int]) -> None:
    """Width 6 over 4 ranks: the last rank's pieces are empty."""
    truth = deep(layers=4)
    truth(data()).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(truth.parameters(), 0.1, norm_type)

    def ranks(mesh: Any) -> None:
        model = put(deep(layers=4), mesh)
        model(pt.distribute_batch(data(), mesh)).square().sum().backward()
        mine = CLIPS.get(clip, by_hand)(model.parameters(), 0.1, norm_type)
        assert float(mine) == pytest.approx(float(norm), rel=1e-5)
        for p, q in zip(model.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-7)

    run(ranks, **sizes)


@pytest.mark.parametrize("order", [-1.0, -2.0, -math.inf])
def test_norms_of_negative_order_are_one_devices(order: float) -> None:
    """Two tensors are split along different axes, one in pieces of which some are empty."""
    values = torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6, 7, 8]), torch.tensor([9.0])
    truth = torch.stack([torch.linalg.vector_norm(v, order) for v in values])
    whole = pt.Replicate()
    placements = [pt.Shard(0), whole], [whole, pt.Shard(0)], [pt.Shard(0), whole]

    def program(mesh: Any) -> Tensor:
        spread = map(pt.distribute_tensor, values, [mesh] * 3, placements)
        return torch.stack(torch._foreach_norm(list(spread), order)).full_tensor()

    with pt.ranks(dp=2, tp=2) as world:
        for norms in world.run(program):
            torch.testing.assert_close(norms, truth)


@pytest.mark.parametrize("clip", CLIPS)
def test_a_norm_that_is_not_finite_is_an_error_on_every_rank_where_asked(clip: str) -> None:
    def ranks(mesh: Any) -> None:
        model = put(deep(layers=2), mesh)
        model(pt.distribute_batch(data(), mesh)).square().sum().backward()
        if mesh.get_rank() == 1:
            with torch.no_grad():
                model[0].weight.grad.to_local()[0, 0] = math.inf  # a share of one rank
        with pytest.raises(RuntimeError, match="non-finite"):
            CLIPS[clip](model.parameters(), 0.1, error_if_nonfinite=True)

    run(ranks, dp=2)


@pytest.mark.parametrize("clip", [name for name in CLIPS if name != "torch, one by one"])
def test_parameters_on_several_meshes_and_plain_ones_are_clipped_together(clip: str) -> None:
    values = [torch.randn(4, 4) for _ in range(5)]

    def places(mesh: Any) -> list[Any]:
        return [
            (mesh["dp"], [pt.Shard(0)]),
            (mesh["tp"], [pt.Shard(1)]),
            (mesh, [pt.Shard(0), pt.Replicate()]),
            (mesh["dp"], [pt.Replicate()]),
        ]

    truth = [nn.Parameter(torch.ones(4, 4)) for _ in values]
    for p, g in zip(truth, values, strict=True):
        p.grad = g.clone()
    norm = nn.utils.clip_grad_norm_(truth, 1.0)

    def ranks(mesh: Any) -> None:
        params = [nn.Parameter(pt.distribute_tensor(torch.ones(4, 4), *p)) for p in places(mesh)]
        for p, g in zip(params, values, strict=False):
            p.grad = pt.distribute_tensor(g, p.device_mesh, p.placements)
        params.append(nn.Parameter(torch.ones(4, 4)))
        params[-1].grad = values[-1].clone()
        assert float(CLIPS[clip](params, 1.0)) == pytest.approx(float(norm), rel=1e-6)
        for p, q in zip(params, truth, strict=True):
            mine = p.grad.full_tensor() if isinstance(p, pt.DTensor) else p.grad
            torch.testing.assert_close(mine, q.grad)
        torch.optim.AdamW(params).step()
        torch.optim.AdamW(params, foreach=False).step()

    run(ranks, dp=2, tp=2)


def test_gradients_of_several_dtypes_are_clipped_together() -> None:
    def model() -> nn.Module:
        torch.manual_seed(2)
        return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()])  # type: ignore

    def loss(m: Any, x: Tensor) -> Tensor:
        return m[0](x).square().sum() + m[1](x.bfloat16()).square().sum().float()

    truth = model()
    loss(truth, data(4, 4)).backward()
    norm = nn.utils.clip_grad_norm_(truth.parameters(), 0.1)

    def ranks(mesh: Any) -> None:
        for clip in (pt.clip_grad_norm_, nn.utils.clip_grad_norm_):
            mine = pt.parallelize(model(), mesh, {"*weight": {"tp": pt.Shard(0)}})
            loss(mine, pt.distribute_batch(data(4, 4), mesh)).backward()
            assert float(clip(mine.parameters(), 0.1)) == pytest.approx(float(norm), rel=1e-2)

    run(ranks, dp=2, tp=2)


# -- any optimizer, in a plain loop ----------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: (lambda params, name=name: getattr(torch.optim, name)(params, lr=0.01))
    for name in (
        "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
    ).split()
} | {
    "SGD with momentum": lambda params: torch.optim.SGD(
        params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "AdamW with amsgrad, maximizing": lambda params: torch.optim.AdamW(
        params, amsgrad=True, maximize=True
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_loop_with_any_optimizer_is_one_devices(name: str) -> None:
    def loop(model: nn.Module, put: Callable[[Tensor], Tensor]) -> None:
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            model(put(data(5 + step))).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    truth = deep(layers=2).double()
    loop(truth, lambda x: x.double())

    def ranks(mesh: Any) -> None:
        model = put(deep(layers=2).double(), mesh)
        loop(model, lambda x: pt.distribute_batch(x.double(), mesh))
        same(model, truth, rtol=1e-7, atol=1e-9)

    run(ranks, dp=2, tp=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ASGD", "NAdam"])
@pytest.mark.parametrize("compiled", [False, True])
def test_scalars_of_an_optimizers_state_are_plain_and_can_be_loaded(name: str, compiled: bool):
    def train(mesh):
        torch.manual_seed(0)
        model = pt.zero(nn.Linear(5, 5), mesh)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        x = pt.distribute_tensor(torch.ones(6, 5), mesh, [pt.Shard(0)])

        def step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        run = pt.compile(step, backend="graph") if compiled else step
        run()
        state = optimizer.state[model.weight]
        scalars = [type(v) for v in state.values() if not v.ndim]
        shapes = {v.full_tensor().shape for v in state.values() if v.ndim}
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run()
        return scalars, shapes

    with pt.ranks(dp=3) as world:
        for scalars, shapes in world.run(train):
            assert len(scalars) >= 2 and set(scalars) == {Tensor}
            assert shapes == {(5, 5)}


def test_an_optimizer_that_asks_again_for_the_loss_is_one_devices() -> None:
    def loop(model: nn.Module, put: Callable[[Tensor], Tensor]) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def loss() -> Tensor:
            optimizer.zero_grad()
            out = model(put(data().double())).square().mean()
            out.backward()
            return out

        for _ in range(3):
            optimizer.step(loss)

    truth = deep(layers=2).double()
    loop(truth, lambda x: x)

    def ranks(mesh: Any) -> None:
        model = put(deep(layers=2).double(), mesh)
        loop(model, lambda x: pt.distribute_batch(x, mesh))
        same(model, truth, rtol=1e-7, atol=1e-9)

    run(ranks, dp=2)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_set_to_zero_in_either_way(set_to_none: bool, foreach: bool) -> None:
    def loop(model: nn.Module, put: Callable[[Tensor], Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=foreach)
        for step in range(6):
            model(put(data(5 + step))).square().mean().backward()
            if step % 2:  # of two micro-batches
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

    truth = deep(layers=2).double()
    loop(truth, lambda x: x.double())

    def ranks(mesh: Any) -> None:
        model = put(deep(layers=2).double(), mesh)
        loop(model, lambda x: pt.distribute_batch(x.double(), mesh))
        same(model, truth, rtol=1e-9, atol=1e-12)

    run(ranks, dp=2, tp=2)


def test_a_step_of_a_fused_kernel_is_not_missed() -> None:
    """It does not count what it changes, and a bias that was moved for a row is kept by count."""

    def ranks(mesh: Any) -> None:
        model = pt.parallelize(nn.Linear(4, 4), mesh, {"weight": {"tp": pt.Shard(1)}})
        x = pt.distribute_batch(data(4, 4), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        truth = nn.functional.linear(
            data(4, 4), model.weight.full_tensor(), model.bias.full_tensor()
        )
        torch.testing.assert_close(model(x).full_tensor(), truth)

    run(ranks, tp=2)


def test_shares_that_come_after_a_clip_still_add_up() -> None:
    def loop(model: nn.Module, put: Callable[[Tensor], Tensor]) -> None:
        for rows in (3, 4, 5):
            model(put(data(rows).double())).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    truth = deep(layers=2).double()
    loop(truth, lambda x: x)

    def ranks(mesh: Any) -> None:
        model = put(deep(layers=2).double(), mesh)
        loop(model, lambda x: pt.distribute_batch(x, mesh))
        for p, q in zip(model.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run(ranks, dp=2, tp=2)


def test_frozen_and_unused_parameters_are_left_alone() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.used, self.frozen, self.unused = (nn.Linear(6, 6) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x))

    def loop(model: nn.Module, put: Callable[[Tensor], Tensor]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            model(put(data())).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    truth = Partly()
    loop(truth, lambda x: x)

    def ranks(mesh: Any) -> None:
        model = pt.parallelize(Partly(), mesh, {"*.weight": {"tp": pt.Shard(0)}})
        before = model.unused.weight.full_tensor().clone()
        loop(model, lambda x: pt.distribute_batch(x, mesh))
        same(model, truth, rtol=1e-4, atol=1e-6)
        assert model.unused.weight.grad is None and model.frozen.weight.grad is None
        assert torch.equal(model.unused.weight.full_tensor(), before)

    run(ranks, dp=2, tp=2)


def test_what_looked_at_a_gradient_before_it_was_settled_is_still_right_after() -> None:
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(nn.Linear(4, 4), mesh)
        model(pt.distribute_batch(data(4, 4), mesh)).square().sum().backward()
        grad = model.weight.grad
        row, flat, truth = grad[1], grad.view(-1), grad.full_tensor()
        pt.reduce_gradients(model.parameters())
        assert model.weight.grad is grad and torch.equal(grad.full_tensor(), truth)
        assert torch.equal(flat.full_tensor(), truth.view(-1))
        assert torch.equal(row.full_tensor(), truth[1])

    run(ranks, dp=2)


def test_a_gradient_keeps_its_order_in_memory() -> None:
    def ranks(mesh: Any) -> None:
        torch.manual_seed(1)
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        truth = copy.deepcopy(conv)
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
        truth(x).square().sum().backward()
        model = pt.parallelize(conv, mesh)
        model(pt.distribute_batch(x, mesh)).square().sum().backward()
        pending = model.weight.grad.to_local().stride()
        pt.reduce_gradients(model.parameters())
        assert model.weight.grad.to_local().stride() == pending
        torch.testing.assert_close(model.weight.grad.full_tensor(), truth.weight.grad)

    run(ranks, dp=2)


# -- a GradScaler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("clips", [True, False])
def test_a_loss_that_is_scaled_trains_as_on_one_device(how: str, clips: bool) -> None:
    def loop(model: nn.Module, put: Callable[[Tensor], Tensor]) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **{how: True})
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            rows = data(5 + step)
            if step == 3:  # too large for float32, in one row only
                rows[-1] = 1e30
            scaler.scale(model(put(rows)).square().mean()).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    truth = deep(layers=2)
    scales = loop(truth, lambda x: x)
    assert scales[3] == scales[2] / 2  # that step was left out

    def ranks(mesh: Any) -> None:
        model = put(deep(layers=2), mesh)
        assert loop(model, lambda x: pt.distribute_batch(x, mesh)) == scales
        same(model, truth, rtol=1e-3, atol=1e-5)

    run(ranks, dp=2, tp=2)


def test_an_infinity_on_one_rank_is_found_by_all() -> None:
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(nn.Linear(4, 4), mesh, {"weight": {"tp": pt.Shard(0)}})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        before = model.weight.full_tensor().clone()
        scaler.scale(model(pt.distribute_batch(data(4, 4), mesh)).sum()).backward()
        if mesh.get_rank() == 3:
            with torch.no_grad():
                model.weight.grad.to_local()[0, 0] = math.inf
        with pt.ledger() as log:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert torch.equal(model.weight.full_tensor(), before)
        assert log.count("all_reduce") == 3  # two sets of axes, and who found one

    run(ranks, dp=2, tp=2)


def test_a_mean_loss_of_split_rows_holds_in_half_precision():
    # The sum of a rank's losses is more than float16 holds.
    logits = (torch.arange(4096 * 4) % 7).reshape(4096, 4).half() * 12
    target = torch.arange(4096) % 4
    target[::5] = -100
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]).half()
    # torch's own on a CPU is infinite there; the truth is float32's.
    single = logits.float().requires_grad_()
    expected = F.cross_entropy(single, target, weight.float(), label_smoothing=0.1)
    expected.backward()

    def run(mesh):
        x = pt.distribute_tensor(logits, mesh, [pt.Shard(0)]).requires_grad_()
        rows = pt.distribute_tensor(target, mesh, [pt.Shard(0)])
        each = pt.distribute_tensor(weight, mesh, [pt.Replicate()])
        loss = F.cross_entropy(x, rows, each, label_smoothing=0.1)
        loss.backward()
        return loss.dtype, loss.full_tensor(), x.grad.full_tensor()

    with pt.ranks(dp=2) as world:
        for dtype, loss, grad in world.run(run):
            assert dtype == torch.float16 and torch.isfinite(loss)
            torch.testing.assert_close(loss.float(), expected.detach(), rtol=2e-3, atol=0)
            torch.testing.assert_close(grad.float(), single.grad, rtol=2e-3, atol=1e-6)


class Unchanged(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Cubed(torch.autograd.Function):
    """Its forward and its backward call operators of torch."""

    @staticmethod
    def forward(ctx, x):
        total = torch.ops.aten.sum.default(x)
        ctx.save_for_backward(total, x)
        return total * total * total

    @staticmethod
    def backward(ctx, g):
        total, x = ctx.saved_tensors
        assert torch.equal(torch.ops.aten.sum.default(x), total)
        return torch.ops.aten.expand.default(3 * torch.ops.aten.square.default(total) * g, x.shape)


def test_a_function_that_copies_the_attributes_of_another_is_its_own():
    def body(mesh):
        x = pt.distribute_tensor(torch.ones(4), mesh, [pt.Shard(0)]).requires_grad_()
        Cubed.apply(x).backward()
        members = {k: v for k, v in vars(Cubed).items() if k not in ("__dict__", "__weakref__")}
        members["backward"] = staticmethod(lambda ctx, g: g.expand(4) * 100)
        x.grad = None
        type("Copied", (torch.autograd.Function,), members).apply(x).backward()
        return x.grad.full_tensor().tolist()

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [[100.0] * 4] * 2


@pytest.mark.parametrize("mode", [nullcontext, Unchanged])
def test_an_operator_of_torch_in_a_hook_takes_the_whole_gradient(mode):
    def body(mesh):
        w = pt.distribute_tensor(torch.ones(4), mesh).requires_grad_()
        x = pt.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [pt.Shard(0)])
        seen = []

        @torch.inference_mode()
        def add_up(g):
            seen.append(torch.ops.aten.sum.default(g).item())

        w.register_hook(add_up)
        w.register_hook(lambda g: seen.append(torch.ops.aten.sum.default(g).item()))
        w.register_hook(lambda g: seen.append(torch.ops.aten.max.default(g).item()))
        w.register_hook(lambda g: torch.ops.aten.relu.default(g - 5))
        w.register_hook(lambda g: torch.ops.aten.add.Tensor(g, torch.arange(4.0)))
        with mode():
            (x * w).sum().backward()
        return [*seen, w.grad.full_tensor().tolist()]

    x = torch.arange(8.0).view(2, 4)
    wanted = [28.0, 28.0, 10.0, ((x.sum(0) - 5).relu() + torch.arange(4.0)).tolist()]
    with pt.ranks(dp=2) as world:
        assert world.run(body) == [wanted] * 2


@pytest.mark.parametrize("place", [pt.Shard(0), pt.Shard(1)])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.prod(0).sum(),
        lambda x: x.prod(1).sum(),
        lambda x: x.renorm(2, 0, 1.0).sum(),
        lambda x: checkpoint(Cubed.apply, x, use_reentrant=False),
    ],
    ids=["prod 0", "prod 1", "renorm", "recomputed"],
)
def test_a_mode_round_backward_changes_no_gradient(f, place):
    """It also calls the operators of torch's formulas, some on saved DTensors alone."""

    def body(mesh):
        x = torch.arange(1.0, 17.0).view(4, 4) / 8
        x = (x if mesh is None else pt.distribute_tensor(x, mesh, [place])).requires_grad_()
        if mesh is None:
            f(x).backward()
            return x.grad
        loss = f(x)
        with Unchanged():
            loss.backward()
        return x.grad.full_tensor()

    with pt.ranks(dp=2) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, body(None))
