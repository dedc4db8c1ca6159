"""Does attention with queries, keys and values split along the sequence keep its queries split?

Each rank has its share of the work, keys and values are gathered once each and their gradients
scattered, and values and gradients are one device's.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import partita as pt
from partita import Replicate, Shard
from tests.programs.split_attention import Operations, double, losses

B, H, D = 2, 4, 6
TWICE = {"all_gather": 2, "reduce_scatter": 2}


def sent(log):
    kinds = [m.kind for m in log.moves if m.nbytes]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def beside_one_device(mesh, attend, tensors, placements):
    """Layout of the result, operations here and on one device, error, what was sent."""
    alone = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(1)
    with Operations() as dense:
        wanted = attend(*alone)
        direction = torch.cos(torch.arange(wanted.numel(), dtype=wanted.dtype)).view_as(wanted)
        wanted.backward(direction)
    spread = [pt.distribute_tensor(t, mesh, placements).requires_grad_() for t in tensors]
    direction = pt.distribute_tensor(direction, mesh, placements)
    torch.manual_seed(1)
    with pt.ledger() as log, Operations() as own:
        out = attend(*spread)
        out.backward(direction)
    pairs = [(out.full_tensor(), wanted)]
    pairs += [(x.grad.full_tensor(), y.grad) for x, y in zip(spread, alone, strict=True)]
    error = max((x - y).abs().max().item() for x, y in pairs)
    rows = out.to_local().shape[-2] / out.shape[-2]
    return out.placements, own.count, dense.count * rows, error, sent(log)


def operands(s, groups=H, e=D):
    torch.manual_seed(0)
    return double(B, H, s, D), double(B, groups, s, D), double(B, groups, s, e)


MASKS = {
    "no mask": lambda s: None,
    "bool": lambda s: (torch.arange(s * s).view(s, s) % 3 > 0).logical_or(torch.eye(s).bool()),
    "float": lambda s: torch.sin(torch.arange(s * s, dtype=torch.float64)).view(s, s),
    "of heads": lambda s: torch.sin(torch.arange(H * s, dtype=torch.float64)).view(H, 1, s),
}


def every_kind(mesh, s, groups):
    found = []
    for e, (causal, name) in product((D, 5), [(True, "no mask"), *((False, n) for n in MASKS)]):

        def attend(q, k, v, causal=causal, name=name):
            mask = MASKS[name](s)
            return F.scaled_dot_product_attention(
                q, k, v, mask, 0.0, causal, scale=0.3, enable_gqa=groups != H
            )

        found.append(beside_one_device(mesh, attend, operands(s, groups, e), [Shard(2)]))
    return found


@pytest.mark.parametrize("groups", [H, 2, 1])
@pytest.mark.parametrize(("ranks", "s"), [(2, 8), (2, 7), (3, 7), (4, 8), (4, 3)])
def test_each_rank_does_its_share_and_gathers_keys_and_values(ranks, s, groups):
    with pt.ranks(cp=ranks) as world:
        for rank in world.run(every_kind, s, groups):
            for placements, own, share, error, moved in rank:
                assert placements == (Shard(2),)
                assert own == round(share)
                assert error <= 1e-12
                assert moved == TWICE


@pytest.mark.parametrize("causal", [False, True])
def test_heads_and_sequence_are_split_at_once(causal):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def run(mesh, placements):
        return beside_one_device(mesh, attend, operands(7), placements)

    for placements in ([Shard(1), Shard(2)], [Shard(2), Shard(2)]):
        with pt.ranks(tp=2, cp=2) as world:
            for out, _, _, error, moved in world.run(run, placements):
                assert list(out) == placements
                assert error <= 1e-12 and moved == TWICE


@pytest.mark.parametrize("s", [8, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_draws_one_device_s_numbers_and_keeps_the_queries_split(causal, s):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=causal)

    with pt.ranks(cp=2) as world:
        found = world.run(lambda mesh: beside_one_device(mesh, attend, operands(s), [Shard(2)]))
    for placements, own, share, error, moved in found:
        assert placements == (Shard(2),) and own == round(share)
        assert error <= 1e-12 and moved == TWICE


def test_layers_share_the_mask_that_their_backward_keeps():
    def run(mesh):
        x = pt.distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [Shard(2)]).requires_grad_()
        masks = []

        def save(t):
            with local_ops():
                if tuple(t.shape[-2:]) == (4, 8):
                    masks.append(t.untyped_storage().data_ptr())
            return t

        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            for _ in range(3):
                x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        x.sum().backward()
        return len(masks), len(set(masks))

    with pt.ranks(cp=2) as world:
        assert world.run(run) == [(0, 0), (3, 1)]  # the first rank's queries need none


REFUSES_BOTH = torch.__version__ >= "2.14"
"""From then on torch has no kernel that takes a mask beside a causal one."""


def test_a_mask_beside_a_causal_one_is_what_torch_takes_it_for():
    mask = MASKS["float"](7)

    def run(mesh, e):
        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)

        tensors = operands(7, H, e)
        spread = [pt.distribute_tensor(t, mesh, [Shard(2)]) for t in tensors]
        if e != D or REFUSES_BOTH:  # no kernel takes it
            with pytest.raises(RuntimeError, match="attn_mask should not be set"):
                attend(*tensors)
            with pytest.raises(RuntimeError, match="attn_mask should not be set"):
                attend(*spread)
            return
        assert torch.equal(attend(*spread).full_tensor(), attend(*tensors))

    with pt.ranks(cp=2) as world:
        world.run(run, D)
        world.run(run, 5)


# -- by other ways ---------------------------------------------------------------------------------


def attend_by_operator(q, k, v):
    return torch.ops.aten.scaled_dot_product_attention(q, k, v, None, 0.0, True)


def attend_by_binding(q, k, v):
    return torch._C._nn.scaled_dot_product_attention(q, k, v, None, 0.0, True)


def attend_by_keyword(q, k, v):
    return F.scaled_dot_product_attention(value=v, key=k, query=q, is_causal=True)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("attend", [attend_by_operator, attend_by_binding, attend_by_keyword])
def test_other_ways_to_call_it_are_spread_alike(attend, backend):
    with sdpa_kernel(backend), pt.ranks(cp=2) as world:  # a flag of the process
        found = world.run(lambda mesh: beside_one_device(mesh, attend, operands(7), [Shard(2)]))
    for placements, own, share, error, moved in found:
        assert placements == (Shard(2),) and own == round(share)
        assert error <= 1e-12 and moved == TWICE


def of_module(mesh, first, causal, dropout):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, dropout, batch_first=first, dtype=torch.float64)
    spread = copy.deepcopy(module)
    for inner in spread.modules():
        for name, p in [*inner.named_parameters(recurse=False)]:
            own = pt.distribute_tensor(p.detach(), mesh, [Replicate()])
            setattr(inner, name, nn.Parameter(own))
    x = double(3, 6, 8) if first else double(6, 3, 8)
    mask = torch.ones(6, 6).triu(1).bool() if causal else None

    def run(module, x):
        torch.manual_seed(2)
        out = module(x, x, x, need_weights=False, attn_mask=mask, is_causal=causal)[0]
        (out**2).sum().backward()
        return out

    alone = x.clone().requires_grad_()
    wanted = run(module, alone)
    x = pt.distribute_tensor(x, mesh, [Shard(1 if first else 0)]).requires_grad_()
    with pt.ledger() as log:
        out = run(spread, x)
    pairs = [(out.full_tensor(), wanted), (x.grad.full_tensor(), alone.grad)]
    pairs += [
        (p.grad.full_tensor(), q.grad)
        for p, q in zip(spread.parameters(), module.parameters(), strict=True)
    ]
    gathers = log.count("all_gather", reason="implicit")
    return out.placements, gathers, max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_multihead_attention_keeps_its_sequence_split(first, causal, dropout):
    with pt.ranks(cp=2) as world:
        for placements, gathers, error in world.run(of_module, first, causal, dropout):
            assert placements == (Shard(1 if first else 0),)
            assert gathers == 2 and error <= 1e-12


# -- in a step -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "graph", "blocks"])
def test_a_step_under_zero_trains_as_one_device(way):
    wanted, _, _ = losses(None)
    with pt.ranks(dp=2, cp=2) as world:
        for found, gathers, _ in world.run(losses, way):
            assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-10)
            assert gathers == 3 * 3 * 2  # steps, layers, keys and values


@pytest.mark.slow
def test_a_graph_has_one_causal_mask_for_all_layers():
    with pt.ranks(dp=1, cp=2) as world:
        for _, _, step in world.run(losses, "graph"):
            lines = step.graph.to_string().splitlines()
            assert sum("flash_attention_for_cpu.default" in line for line in lines) == 3
            assert sum(line.startswith("masked_fill") for line in lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("s", [5, 9])
def test_a_sequence_that_two_axes_cut_unevenly_is_captured(s):
    def run(mesh):
        torch.manual_seed(0)
        x, direction = double(2, 2, s, 8), torch.cos(torch.arange(8.0, dtype=torch.float64))
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, [Shard(2), Shard(2)])
        x = x.requires_grad_()

        def step(x):
            out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            loss = (out.square() * direction).sum()
            (grad,) = torch.autograd.grad(loss, x)
            return loss, grad.square().sum()

        run = step if mesh is None else pt.compile(step, backend="graph")
        return [value.item() for value in run(x)]

    with pt.ranks(a=2, b=2) as world:
        for found in world.run(run):
            assert found == pytest.approx(run(None), rel=1e-12)
