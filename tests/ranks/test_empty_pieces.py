"""A rank without rows does in backward what the others do, and raises the errors that they do."""

from __future__ import annotations

import pytest
import torch

import partita as pt

X = torch.arange(6.0, dtype=torch.float64).view(2, 3) + 1
W = torch.arange(6.0, dtype=torch.float64).view(3, 2) - 2


class SkipsEmptyRows(torch.autograd.Function):
    """A kernel of a user's, whose backward has nothing to say where there are no rows."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        if x.numel() == 0:
            return None, None
        return g @ w.t(), x.t() @ g


@pytest.mark.parametrize("place", [pt.Replicate(), pt.Shard(0)])
def test_a_function_without_gradients_where_there_are_no_rows_has_zeros(place):
    def body(mesh):
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)]).requires_grad_()
        w = pt.distribute_tensor(W, mesh, [place]).requires_grad_()
        on_pieces = pt.local_map(
            SkipsEmptyRows.apply,
            out_placements=[pt.Shard(0)],
            in_placements=([pt.Shard(0)], [pt.Replicate()]),
            redistribute_inputs=True,
        )
        on_pieces(x, w).square().sum().backward()
        return x.grad.full_tensor(), w.grad.full_tensor()

    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    (x @ w).square().sum().backward()
    with pt.ranks(a=3) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, (x.grad, w.grad))


@torch.library.custom_op("empty_pieces_test::times", mutates_args=())
def times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 0:
        raise RuntimeError("rows are not for this kernel")
    return x.clone()


@times.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 0:
        raise RuntimeError("rows are not for this kernel")
    return torch.empty_like(x)


def test_an_error_of_the_ops_own_is_heard_where_there_are_no_rows():
    pt.rule("n d, d -> n d", torch.ops.empty_pieces_test.times)

    def body(mesh):
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)]).requires_grad_()
        w = pt.distribute_tensor(torch.ones(3, dtype=torch.float64), mesh).requires_grad_()
        with pytest.raises(RuntimeError, match="rows are not for this kernel"):
            torch.ops.empty_pieces_test.times(x, w)
        return True

    with pt.ranks(a=3) as world:
        assert all(world.run(body))


def test_what_cannot_be_told_without_values_is_known_by_its_text():
    meta = torch.empty(3, device="meta")
    for ask in (
        lambda: meta.sum().item(),
        lambda: bool(meta.sum() > 0),
        lambda: meta.nonzero(),
        lambda: meta.tolist(),
        lambda: meta.numpy(),
        lambda: meta.unique(),
        lambda: torch.nn.functional.layer_norm(meta, (3,), torch.ones(3)),
    ):
        with pytest.raises((RuntimeError, TypeError), match=r"(?i)meta"):
            ask()
