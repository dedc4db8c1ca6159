"""Is a rank that has no rows right in every loss, norm and attention, forward and backward?

Two rows on three Gloo ranks: the last has none. Truth is one process of plain torch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partita as pt
from partita import Replicate, Shard
from tests.programs.gloo_ranks import run_ranks

pytestmark = pytest.mark.slow

ROWS = 2
Case = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]


def randn(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64)


def losses() -> dict[str, Case]:
    """By name and reduction: what is split into rows, what is trained, and the loss."""
    x, other, third = randn(ROWS, 6), torch.rand(ROWS, 6, dtype=torch.float64), randn(ROWS, 6)
    signs, one_sign = (other - 0.5).sign(), torch.ones(ROWS, dtype=torch.float64)
    classes, w = torch.tensor([1, 4]), randn(6, 6)
    many_classes = torch.tensor([[1, 3, -1, 0, 0, 0], [2, -1, 0, 0, 0, 0]])
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    by_values = "mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss"
    calls: dict[str, tuple[tuple[torch.Tensor, ...], Callable[..., Any]]] = {
        name: ((x, other), lambda r, x, y, w, name=name: getattr(F, name)(x @ w, y, reduction=r))
        for name in by_values.split() + ["binary_cross_entropy_with_logits"]
    }
    calls |= {
        "cross_entropy": ((x, classes), lambda r, x, y, w: F.cross_entropy(x @ w, y, reduction=r)),
        "cross_entropy of probabilities": (
            (x, other),
            lambda r, x, y, w: F.cross_entropy(x @ w, y, reduction=r),
        ),
        "smoothed cross_entropy": (
            (x, classes),
            lambda r, x, y, w: F.cross_entropy(x @ w, y, label_smoothing=0.1, reduction=r),
        ),
        "weighted cross_entropy": (
            (x, classes),
            lambda r, x, y, w: F.cross_entropy(x @ w, y, weights, reduction=r),
        ),
        "nll_loss": (
            (x, classes),
            lambda r, x, y, w: F.nll_loss(F.log_softmax(x @ w, -1), y, reduction=r),
        ),
        "binary_cross_entropy": (
            (x, other),
            lambda r, x, y, w: F.binary_cross_entropy(torch.sigmoid(x @ w), y, reduction=r),
        ),
        "multi_margin_loss": (
            (x, classes),
            lambda r, x, y, w: F.multi_margin_loss(x @ w, y, reduction=r),
        ),
        "multilabel_margin_loss": (
            (x, many_classes),
            lambda r, x, y, w: F.multilabel_margin_loss(x @ w, y, reduction=r),
        ),
        "multilabel_soft_margin_loss": (
            (x, other),
            lambda r, x, y, w: F.multilabel_soft_margin_loss(x @ w, y, reduction=r),
        ),
        "soft_margin_loss": (
            (x, signs),
            lambda r, x, y, w: F.soft_margin_loss(x @ w, y, reduction=r),
        ),
        "hinge_embedding_loss": (
            (x, signs),
            lambda r, x, y, w: F.hinge_embedding_loss(x @ w, y, reduction=r),
        ),
        "gaussian_nll_loss": (
            (x, other),
            lambda r, x, y, w: F.gaussian_nll_loss(x @ w, y, (x @ w) ** 2 + 0.1, reduction=r),
        ),
        "cosine_embedding_loss": (
            (x, other, one_sign),
            lambda r, x, y, t, w: F.cosine_embedding_loss(x @ w, y, t, reduction=r),
        ),
        "margin_ranking_loss": (
            (x, other, signs),
            lambda r, x, y, t, w: F.margin_ranking_loss(x @ w, y @ w, t, reduction=r),
        ),
        "triplet_margin_loss": (
            (x, other, third),
            lambda r, a, p, n, w: F.triplet_margin_loss(a @ w, p @ w, n @ w, reduction=r),
        ),
    }
    every: dict[str, Case] = {
        f"{name}, {r}": (data, (w,), lambda *ts, f=f, r=r: f(r, *ts))
        for name, (data, f) in calls.items()
        for r in ("mean", "sum", "none")
    }
    every["a trained target"] = ((x,), (randn(6),), lambda x, w: F.mse_loss(x, x * w))
    return every


def norms() -> dict[str, Case]:
    x, image, each = randn(ROWS, 4, 6), randn(ROWS, 4, 8, 8), (randn(4), randn(4))
    zeros, ones = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    gain = (randn(4, 1, 1),)
    return {
        "layer_norm": (
            (x,),
            (randn(6), randn(6)),
            lambda x, w, b: F.layer_norm(x, (6,), w, b),
        ),
        "layer_norm of two dims": (
            (x,),
            (randn(4, 6), randn(4, 6)),
            lambda x, w, b: F.layer_norm(x, (4, 6), w, b),
        ),
        "rms_norm": ((x,), (randn(6),), lambda x, w: F.rms_norm(x, (6,), w)),
        "group_norm": ((image,), each, lambda x, w, b: F.group_norm(x, 2, w, b)),
        "instance_norm": ((image,), each, lambda x, w, b: F.instance_norm(x, None, None, w, b)),
        "instance_norm of 1 dim": (
            (x,),
            each,
            lambda x, w, b: F.instance_norm(x, None, None, w, b),
        ),
        "batch_norm": (
            (image,),
            each,
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        ),
        "batch_norm in eval": ((image,), each, lambda x, w, b: F.batch_norm(x, zeros, ones, w, b)),
        "local_response_norm": ((image,), gain, lambda x, w: F.local_response_norm(x * w, 2)),
        "normalize": ((x,), (randn(6),), lambda x, w: F.normalize(x * w, dim=-1)),
        "written into": (
            (image,),
            each,
            lambda x, w, b: F.instance_norm(x, None, None, w, b).mul_(2),
        ),
    }


def attentions() -> dict[str, Case]:
    sdpa = F.scaled_dot_product_attention
    q, tokens = randn(ROWS, 2, 5, 4), randn(ROWS, 5, 4)
    of_heads = (randn(12, 4), randn(12), randn(4, 4), randn(4))

    def of_module(x: Any, w: Any, b: Any, o: Any, ob: Any) -> Any:
        x = x.transpose(0, 1)
        return F.multi_head_attention_forward(x, x, x, 4, 2, w, b, None, None, False, 0.0, o, ob)[0]

    return {
        "projections": (
            (q,),
            (randn(4, 4), randn(4, 4), randn(4, 4)),
            lambda x, a, b, c: sdpa(x @ a, x @ b, x @ c),
        ),
        "a bias": ((q,), (randn(5, 5),), lambda x, m: sdpa(x, x, x, attn_mask=m)),
        "a bias of each head": (
            (q,),
            (randn(2, 5, 5), randn(4, 4)),
            lambda x, m, w: sdpa(x @ w, x, x, attn_mask=m),
        ),
        "a bias of one row": ((q,), (randn(1, 2, 5, 5),), lambda x, m: sdpa(x, x, x, attn_mask=m)),
        "causal": ((q,), (randn(4, 4),), lambda x, a: sdpa(x @ a, x, x, is_causal=True)),
        "trained keys": (
            (q,),
            (randn(1, 2, 5, 4), randn(1, 2, 5, 4)),
            lambda x, k, v: sdpa(x, k.expand(2, 2, 5, 4), v.expand(2, 2, 5, 4)),
        ),
        "multi_head_attention_forward": ((tokens,), of_heads, of_module),
        "by hand": (
            (q,),
            (randn(2, 5, 5),),
            lambda x, m: torch.softmax(x @ x.transpose(-1, -2) + m, -1) @ x,
        ),
    }


def others() -> dict[str, Case]:
    x, image, w = randn(ROWS, 4, 6), randn(ROWS, 4, 8, 8), (randn(6),)
    ids = torch.tensor([3, 5])
    return {
        "mean": ((x,), w, lambda x, w: (x * w).mean()),
        "mean of rows": ((x,), w, lambda x, w: (x * w).mean((1, 2))),
        "mean over rows": ((x,), w, lambda x, w: (x * w).mean(0)),
        "std": ((x,), w, lambda x, w: (x * w).std()),
        "max": ((x,), w, lambda x, w: (x * w).max()),
        "amax over rows": ((x,), w, lambda x, w: (x * w).amax(0)),
        "prod": ((x,), w, lambda x, w: (x * w).prod()),
        "norm": ((x,), w, lambda x, w: (x * w).norm()),
        "softmax over rows": ((x,), w, lambda x, w: (x * w).softmax(0)),
        "linear": ((x,), (randn(3, 6), randn(3)), F.linear),
        "bilinear": ((x[:, 0], x[:, 1]), (randn(3, 6, 6), randn(3)), F.bilinear),
        "conv2d": ((image,), (randn(3, 4, 3, 3), randn(3)), F.conv2d),
        "conv_transpose2d": ((image,), (randn(4, 3, 3, 3), randn(3)), F.conv_transpose2d),
        "embedding": ((ids,), (randn(6, 4),), F.embedding),
        "prelu": ((image,), (randn(4),), F.prelu),
        "max_pool2d": ((image,), (randn(4, 1, 1),), lambda x, w: F.max_pool2d(x * w, 2)),
        "the first row": ((x,), w, lambda x, w: (x * w)[0]),
        "rows and a trained one": ((x,), (randn(1, 4, 6),), lambda x, w: torch.cat([w, x])),
        "where": ((x,), w, lambda x, w: torch.where(x > 0, x, w)),
    }


def bias_in_local_map() -> dict[str, Case]:
    q, bias = randn(ROWS, 2, 5, 4), randn(5, 5)

    def attend(q: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=m)

    def run(q: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        mapped = pt.local_map(attend, [Shard(0)]) if isinstance(q, pt.DTensor) else attend
        return mapped(q, m)

    return {"a bias in local_map": ((q,), (bias,), run)}


def every() -> dict[str, Case]:
    torch.manual_seed(0)
    return losses() | norms() | attentions() | others() | bias_in_local_map()


def on_one_device(case: Case) -> list[torch.Tensor]:
    data, trained, fn = case
    params = [p.clone().requires_grad_() for p in trained]
    loss = fn(*data, *params).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, params)]


def on_ranks(case: Case, mesh: Any) -> list[torch.Tensor]:
    data, trained, fn = case
    rows = [pt.distribute_tensor(t, mesh, [Shard(0)]) for t in data]
    params = [nn.Parameter(pt.distribute_tensor(p, mesh, [Replicate()])) for p in trained]
    loss = fn(*rows, *params).square().sum()
    loss.backward()
    pt.reduce_gradients(params)
    return [loss.detach().full_tensor(), *[p.grad.full_tensor() for p in params]]


def wrong(rank: int) -> list[str]:
    mesh = pt.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    found = []
    for name, case in every().items():
        try:
            torch.testing.assert_close(
                on_ranks(case, mesh), on_one_device(case), rtol=1e-9, atol=1e-9
            )
        except AssertionError as error:
            found.append(f"{name}: {error}")
        except Exception as error:
            error.add_note(f"in {name!r}")
            raise
    return found


def test_losses_norms_and_attention_are_right_where_a_rank_has_no_rows():
    assert run_ranks(wrong, 3) == [[], [], []]


WRITES_OF_OVERLAPS = {
    "columns": lambda b: b[:, 1:].add_(b[:, :-1]),
    "lists": lambda b: torch._foreach_add_([b[:, 1:]], [b[:, :-1]]),
    "a row": lambda b: b.copy_(b[0]),
    "more than one element": lambda b: b[:1].expand(3, -1).mul_(2),
    "out": lambda b: torch.add(b[:, :-1], 1, out=b[:, 1:]),
}


@pytest.mark.parametrize("write", WRITES_OF_OVERLAPS.values(), ids=WRITES_OF_OVERLAPS)
def test_a_write_that_overlaps_its_operand_is_refused_on_all_ranks_or_on_none(write):
    def find_error(mesh, rows, dim):
        x = pt.distribute_tensor(torch.arange(4.0 * rows).view(rows, 4), mesh, [pt.Shard(dim)])
        try:
            write(x)
        except RuntimeError as error:
            return str(error)[:60]
        return ""

    with pt.ranks(dp=3) as world:
        for rows, dim in ((1, 0), (1, 1), (2, 0), (3, 1)):
            first, *others = world.run(lambda mesh, n=rows, dim=dim: find_error(mesh, n, dim))
            assert all(found == first for found in others), (rows, dim)
            assert first or rows > 1  # as in one process, where the memory has no gaps
