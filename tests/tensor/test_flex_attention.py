"""Is flex_attention on DTensors, plain or compiled, what it is on one device?"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import partita as pt
from partita import Partial, Replicate, Shard

B, H, L, D = 4, 2, 16, 8
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(B, H, L, D, generator=GENERATOR) for _ in range(3))
K1, V1 = (torch.randn(B, 1, L, D, generator=GENERATOR) for _ in range(2))
SLOPES = torch.tensor([0.1, 0.7])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 16, [0] * 9 + [1] * 7, [0] * 2 + [1] * 14])

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:torch.compile cannot compile code with a DTensor"),
    # Dynamo's own, where it traces a mask function that reads a tensor at an index.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def causal(b, h, i, j):
    return i >= j


def within_documents(b, h, i, j):
    return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (i >= j)


def sloped(score, b, h, i, j):
    return score + SLOPES[h] * (j - i) + 0.01 * b


@cache
def mask(rule: Any, batch: int | None, heads: int | None, compiled: bool) -> Any:
    """A block mask that is made once and kept, by a compiled function where asked."""
    made = torch.compile(create_block_mask, backend="eager") if compiled else create_block_mask
    return made(rule, batch, heads, L, L, device="cpu")


class Block(torch.nn.Module):
    def forward(self, x, block_mask):
        return flex_attention(x.sin(), x, x, block_mask=block_mask).cos()


def program(make: Any, compiled: bool) -> list[torch.Tensor]:
    attend, block = flex_attention, Block()
    if compiled:
        attend = torch.compile(flex_attention, backend="eager")
        block = torch.compile(block, backend="eager")
    q, k, v = make(Q), make(K), make(V)
    lower = mask(causal, None, None, compiled)
    attended, aux = attend(q, k, v, return_aux=AuxRequest(lse=True))
    return [
        attended,
        aux.lse,
        attend(q, k, v, score_mod=sloped, block_mask=mask(within_documents, B, None, compiled)),
        attend(q, k, v, block_mask=mask(within_documents, B, H, compiled)),
        attend(q, make(K1), make(V1), enable_gqa=True, block_mask=lower),
        block(q, lower),
    ]


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_each_layout_gives_what_one_device_gives(compiled):
    right = program(lambda t: t, compiled)

    def body(mesh, place):
        def make(t):
            fits = place != Shard(1) or t.shape[1] > 1
            return pt.distribute_tensor(t, mesh, [place if fits else Replicate()])

        with pt.ledger() as log:
            outs = program(make, compiled)
        return outs[2].placements, log.bytes, [t.full_tensor() for t in outs]

    places = [Shard(0), Shard(1)] if compiled else [Shard(0), Shard(1), Shard(2), Partial()]
    for place in places:
        with pt.ranks(dp=2) as world:
            for lies, sent, mine in world.run(body, place):
                torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
                if place in (Shard(0), Shard(1)):
                    assert (lies, sent) == ((place,), 0)


@pytest.mark.slow
def test_the_compiled_kernel_is_compiled_once_for_each_piece_and_kept():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    def body(mesh):
        q = pt.distribute_tensor(Q, mesh, [Shard(0)])
        attend = torch.compile(flex_attention, backend=backend)
        for _ in range(3):
            attend(q, q, q)

    with pt.ranks(dp=2) as world:
        world.run(body)
    assert 1 <= len(seen) <= 2


X, W1, W2 = (torch.randn(s, 8, generator=GENERATOR).double() for s in (4, 8, 8))


@pytest.mark.parametrize(
    "places",
    [
        [Shard(0), Replicate(), Replicate()],
        [Replicate(), Shard(1), Shard(0)],
        [Shard(1), Shard(0), Shard(1)],
    ],
    ids=str,
)
def test_torchs_selective_checkpoints_keep_what_they_name_over_dtensors(places):
    ran = []

    def policy(ctx, op, *args, **kwargs):
        ran.append((op, ctx.is_recompute))
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(make, selective):
        x, w, v = (make(t, i).requires_grad_() for i, t in enumerate((X, W1, W2)))
        contexts = partial(create_selective_checkpoint_contexts, policy)

        def block(x):
            return torch.nn.functional.linear((x @ w).relu().sin() @ v, w).cos()

        def run(x):
            if not selective:
                return block(x)
            return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

        run(run(x)).square().sum().backward()
        return [x.grad, w.grad, v.grad]

    right = gradients(lambda t, i: t.clone(), False)

    def body(mesh):
        found = gradients(lambda t, i: pt.distribute_tensor(t, mesh, [places[i]]), True)
        return [g.full_tensor() for g in found]

    with pt.ranks(tp=2) as world:
        for mine in world.run(body):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)
    assert torch.ops.aten.mm.default in {op for op, _ in ran}
