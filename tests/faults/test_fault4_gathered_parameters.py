"""Does a gathered parameter ever outlive its last use?

Elsewhere a padded buffer lived on through the true-shape view of it, through aliases that compiled
code kept, and through the copies that autocast makes. Here what was gathered is one storage, and
releasing empties it whoever holds a view; what autograd saves of it is a note of where it stood.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import saved_tensors_hooks

import partita as pt
from tests.programs.zero_states import zero_state

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))


def model_of(width):
    """Three blocks of Linears; `width` rows are even or uneven over the ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 5, bias=False))
            for _ in range(3)
        )
    )


def rows(mesh):
    return pt.distribute_tensor(X, mesh, [pt.Shard(0)])


def nbytes(t):
    return t.untyped_storage().nbytes()


@pytest.mark.parametrize("width", [4, 7, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_view_or_alias_keeps_a_byte_after_the_last_use(ranks, width):
    def run(mesh):
        model = pt.zero(model_of(width), mesh)
        state, kept = zero_state(model), []

        def keep(module, *_):
            w = module.weight
            assert nbytes(w) > 0
            kept.extend([w, w.t(), w.view(-1), w.detach(), w[:1]])

        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(keep)
        out = model(rows(mesh))
        after_forward = state.alive, sum(map(nbytes, kept[::5]))
        (out * out).sum().backward()
        return after_forward, (state.alive, sum(map(nbytes, kept[::5])))

    with pt.ranks(dp=ranks) as world:
        assert world.run(run) == [((0, 0), (0, 0))] * ranks


def test_while_one_block_computes_the_next_is_gathered_and_no_other():
    def run(mesh):
        model = pt.zero(model_of(7), mesh)
        state, seen = zero_state(model), []
        for k, block in enumerate(model):
            block[0].register_forward_hook(
                lambda *_, k=k: seen.append((k, [u.alive > 0 for u in state.groups]))
            )
        for _ in range(2):
            seen.clear()
            model(rows(mesh)).sum().backward()
        return seen

    with pt.ranks(dp=2) as world:
        seen = world.run(run)[0]
    assert seen == [(0, [True, True, False]), (1, [False, True, True]), (2, [False, False, True])]


def test_what_follows_a_small_block_is_gathered_together_with_it_and_nothing_further():
    def run(mesh):
        torch.manual_seed(0)
        parts = [nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)]
        model = pt.zero(nn.Sequential(*map(nn.Sequential, parts)), mesh)
        state, seen = zero_state(model), []

        def note(block, when):
            return lambda *_: seen.append((block, when, [g.alive > 0 for g in state.groups]))

        for k, (part,) in enumerate(model):
            part.register_forward_hook(note(k, "forward"))
            part.register_full_backward_pre_hook(note(k, "backward"))
        x = pt.distribute_tensor(torch.randn(6, 32), mesh, [pt.Shard(0)]).requires_grad_()
        for _ in range(2):
            seen.clear()
            model(x).sum().backward()
        nbytes = [sum(flat.nbytes for flat in group.flats) for group in state.groups]
        return seen, state.peak, sum(nbytes[:3]), state.alive

    with pt.ranks(dp=2) as world:
        seen, peak, most, alive = world.run(run)[0]
    assert [which for _, when, which in seen if when == "forward"] == [
        [True, True, True, False],
        [False, True, True, False],
        [False, False, True, True],
        [False, False, False, True],
    ]
    found = {block: which for block, when, which in seen if when == "backward"}
    assert found[2] == [True, True, True, False]
    assert alive == 0 < peak <= most


@pytest.mark.parametrize("mixed", ["autocast", "param_dtype"])
def test_no_cast_of_a_parameter_is_saved_for_backward(mixed):
    saved = []

    def pack(t):  # hears of all that is kept as it is
        with DisableTorchFunctionSubclass():
            saved.append((tuple(t.shape), t.dtype))
        return t

    def run(mesh):
        precision = torch.bfloat16 if mixed == "param_dtype" else None
        model = pt.zero(model_of(8), mesh, precision=precision)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=mixed == "autocast")
        with autocast, saved_tensors_hooks(pack, lambda t: t):
            out = model(rows(mesh))
        alive = zero_state(model).alive
        out.float().square().sum().backward()
        return alive, {n: p.grad.full_tensor() for n, p in model.named_parameters()}

    with pt.ranks(dp=2) as world:
        alive, grads = world.run(run)[0]
    assert alive == 0
    shapes = {(8, 5), (5, 8)}
    assert saved and not [s for s, _ in saved if s in shapes], "a weight's cast was saved"
    model = model_of(8)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(X)
    out.float().square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=0.05, atol=0.05)


def test_persistent_parameters_are_gathered_once_until_the_shards_change():
    def run(mesh):
        model = pt.zero(model_of(7), mesh, persistent=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for step in range(2):
            for _ in range(2):
                with pt.ledger() as log:
                    model(rows(mesh)).square().sum().backward()
                counts.append(log.count("all_gather"))
            if step == 0:
                optimizer.step()
        return counts, [p.grad.full_tensor() for p in model.parameters()]

    with pt.ranks(dp=2) as world:
        counts, grads = world.run(run)[0]
    assert counts == [3, 0, 3, 0]
    model = model_of(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for _ in range(2):
            model(X).square().sum().backward()
        if step == 0:
            optimizer.step()
    for mine, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_in_the_middle_nothing_is_held(where):
    def run(mesh):
        model = pt.zero(model_of(7), mesh)

        def raise_(*_):
            raise ZeroDivisionError

        if where == "forward":
            model[1][1].register_forward_hook(raise_)
        else:
            model[1][1].register_full_backward_hook(raise_)
        with pytest.raises(ZeroDivisionError):
            model(rows(mesh)).sum().backward()
        return zero_state(model).alive

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [0, 0]


@pytest.mark.slow
def test_a_forward_that_no_backward_follows_leaves_no_memory_behind():
    """A node that saves its own result may not be held by what was saved."""

    def run(mesh):
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softmax(-1))
        model = pt.zero(nn.Sequential(block, copy.deepcopy(block)), mesh)
        x = pt.distribute_tensor(torch.randn(8, 8), mesh, [pt.Shard(0)])
        model(x)
        gc.collect()
        with pt.count_memory() as memory:
            model(x).sum()
            gc.collect()
            return memory.live

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [0, 0]
