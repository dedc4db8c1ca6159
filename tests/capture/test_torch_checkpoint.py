"""Is torch.utils.checkpoint in a captured step what it is in eager, random numbers too?"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partita as pt


def whole(t):
    return (t.full_tensor() if isinstance(t, pt.DTensor) else t).detach().clone()


def train(mesh, reentrant, compiled):
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)) for _ in range(2))
    ).double()
    x = torch.randn(4, 4).double()
    if mesh:
        pt.zero(blocks, mesh)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        h = x.clone().requires_grad_()
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        loss = h.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    fast = pt.compile(step, backend="graph") if compiled else step
    torch.manual_seed(7)
    found = []
    for _ in range(3):
        found += [whole(fast(x)), torch.rand(1)]  # no more and no less is drawn
    made_again = compiled and "are recomputed in backward" in fast.explain()
    return [*found, *map(whole, blocks.parameters())], made_again


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_dropout_in_a_checkpoint_has_one_mask_in_a_captured_step(reentrant):
    want, _ = train(None, reentrant, False)
    alone, _ = train(None, reentrant, True)
    torch.testing.assert_close(alone, want)
    with pt.ranks(dp=2) as world:
        (found, made_again), _ = world.run(train, reentrant, True)
    torch.testing.assert_close(found, want)
    assert made_again


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_holds_is_made_again_in_backward_by_a_graph(reentrant):
    def peak(run):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        x = torch.randn(256, 8, requires_grad=True)

        def step(x):
            h = x
            for layer in model:
                h = run(lambda h, layer=layer: layer(h).sin().exp().sin(), h)
            h.sum().backward()

        # Otherwise the step without checkpoints keeps less, too.
        fast = pt.compile(step, backend="graph", without="free_remat")
        fast(x)
        return fast.memory.peak

    plain = peak(lambda f, h: f(h))
    assert peak(lambda f, h: checkpoint(f, h, use_reentrant=reentrant)) < 0.6 * plain


def test_a_batch_norm_within_counts_a_batch_once():
    norm = nn.BatchNorm1d(4)
    once = copy.deepcopy(norm)
    x = torch.randn(6, 4)
    once(x)

    def step(x):
        checkpoint(norm, x, use_reentrant=False).square().sum().backward()

    pt.compile(step, backend="graph")(x)
    assert norm.num_batches_tracked == once.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_mean, once.running_mean)
    torch.testing.assert_close(norm.running_var, once.running_var)


def written_before_backward(x, w):
    y = checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False)
    w.data.mul_(3)
    y.sum().backward()


def written_through_a_view(x, w):
    y = checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=True)
    w.data[0].mul_(3)
    y.sum().backward()


def written_after_backward(x, w):
    checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False).sum().backward()
    w.data.mul_(3)


def written_where_another_checkpoint_reads(x, w):
    y = checkpoint(torch.sin, x, use_reentrant=False)
    z = checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False)
    z.sum().backward()
    w.data.mul_(3)
    y.sum().backward()


@pytest.mark.parametrize(
    ("step", "is_refused"),
    [
        (written_before_backward, True),
        (written_through_a_view, True),
        (written_after_backward, False),
        (written_where_another_checkpoint_reads, False),
    ],
)
def test_what_a_checkpoint_reads_is_not_written_before_its_backward(step, is_refused):
    def run(step):
        x, w = (torch.arange(4.0).view(2, 2).requires_grad_() for _ in "xw")
        step(x, w)
        return x.grad, w.grad, w.detach()

    compiled = pt.compile(step, backend="graph")
    if is_refused:
        with pytest.raises(pt.CaptureError, match="between a checkpoint that reads it and its"):
            run(compiled)
    else:
        torch.testing.assert_close(run(compiled), run(step))
