"""Are hooks, and writes of `.data`, part of a captured step?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt

x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()


def hook_of_a_tensor(model, optimizer):
    model[0].weight.register_hook(lambda g: g * 2)
    model[2].bias.register_hook(lambda g: None)


def hook_that_is_gone(model, optimizer):
    model[0].weight.register_hook(lambda g: g * 2).remove()


def hook_after_accumulation(model, optimizer):
    def triple(p):
        p.grad.mul_(3)

    model[0].weight.register_post_accumulate_grad_hook(triple)


def hooks_of_modules(model, optimizer):
    model[0].register_forward_hook(lambda m, i, out: out * 2)
    model[2].register_forward_pre_hook(lambda m, i: (i[0] * 2,))
    model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    model[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))


def hooks_of_the_optimizer(model, optimizer):
    def before(optimizer, args, kwargs):
        for p in model.parameters():
            p.grad.mul_(2)

    @torch.no_grad()
    def after(optimizer, args, kwargs):
        for p in model.parameters():
            p.mul_(0.9)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


HOOKS = (
    hook_of_a_tensor,
    hook_that_is_gone,
    hook_after_accumulation,
    hooks_of_modules,
    hooks_of_the_optimizer,
)


def spread_out(model, mesh, stage):
    if stage is None:
        return pt.parallelize(model, mesh)
    pt.zero(model, mesh, stage=stage)
    return model


def trained(step_of, prepare, mesh, stage=None, compiled=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    model = model if mesh is None else spread_out(model, mesh, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer)

    def step(x):
        return step_of(model, optimizer, x)

    fast = pt.compile(step, backend="graph") if compiled else step
    batch = x if mesh is None else pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    for _ in range(3):
        fast(batch)
    params = [p.detach() for p in model.parameters()]
    return params if mesh is None else [p.full_tensor() for p in params]


def sgd(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


STAGES = [*((hang, stage) for hang in HOOKS for stage in (None, 3)), (hooks_of_the_optimizer, 1)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("hang", "stage"), STAGES)
def test_hooks_do_what_they_do_on_one_device(hang, compiled, stage):
    want = trained(sgd, hang, None, compiled=False)
    with pt.ranks(dp=2) as world:
        for found in world.run(lambda mesh: trained(sgd, hang, mesh, stage, compiled)):
            for p, q in zip(found, want, strict=True):
                torch.testing.assert_close(p, q)


def test_a_hook_that_fails_leaves_the_optimizer_its_hooks():
    def run(mesh):
        model = pt.parallelize(nn.Linear(6, 2), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told = []

        def hook(optimizer, args, kwargs):
            told.append(1)
            if len(told) == 1:
                raise ValueError("once")

        optimizer.register_step_pre_hook(hook)
        for _ in range(3):
            model(pt.distribute_tensor(x.float(), mesh, [pt.Shard(0)])).sum().backward()
            try:
                optimizer.step()
            except ValueError:
                told.append(0)
        return told

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [[1, 0, 1, 1]] * 2


# -- .data -----------------------------------------------------------------------------------------


def update_by_data(model, optimizer, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.data = p.data - 0.1 * p.grad
        p.data.mul_(0.9)
    return loss + model(x).square().mean()


def exchange(model, optimizer, x):
    one, other = model[0].weight, model[2].weight
    held = one.data
    one.data = other.data
    other.data = held
    return sgd(model, optimizer, x)


def gradient_by_data(model, optimizer, x):
    model.zero_grad()
    model(x).square().mean().backward()
    for p in model.parameters():
        p.grad.data = p.grad.data * 2
    optimizer.step()


@pytest.mark.parametrize("stage", ["one process", None, 3])
@pytest.mark.parametrize(
    "step", [update_by_data, exchange, gradient_by_data], ids=lambda f: f.__name__
)
def test_what_is_written_to_data_is_written_by_the_graph(step, stage):
    def nothing(*_):
        return None

    want = trained(step, nothing, None, compiled=False)
    if stage == "one process":
        found = [trained(step, nothing, None)]
    else:
        with pt.ranks(dp=2) as world:
            found = world.run(lambda mesh: trained(step, nothing, mesh, stage))
    for params in found:
        for p, q in zip(params, want, strict=True):
            torch.testing.assert_close(p, q)


def test_data_of_another_shape_is_refused_with_its_line():
    weight = torch.ones(4)

    def step(x):
        weight.data = x
        return weight * 2

    with pytest.raises(pt.CaptureError, match=r"another shape or dtype.*test_hooks"):
        pt.compile(step, backend="graph")(torch.ones(3))


def one_is_the_other(one, other, x):
    one.data = other.data


def both_are_new(one, other, x):
    one.data = x * 2
    other.data = one.data


def a_view_of_the_other(one, other, x):
    one.data = other[:]


@pytest.mark.parametrize("write", [one_is_the_other, both_are_new, a_view_of_the_other])
def test_tensors_that_would_share_memory_after_the_step_are_refused(write):
    """In eager what is written into one of them later is seen in the other."""
    one, other = torch.ones(3), torch.zeros(3)

    def step(x):
        write(one, other, x)
        return one + 1

    with pytest.raises(pt.CaptureError, match=r"both share memory.*\n.*x\.data\.copy_\(y\)"):
        pt.compile(step, backend="graph")(torch.ones(3))
    assert one.tolist() == [1, 1, 1] and other.tolist() == [0, 0, 0]


def return_new_data(w, v, kept):
    y = w * 0.5
    w.data = y
    return [y]


def return_former_data(w, v, kept):
    former = w.detach()
    w.data = w * 0.5
    return [former]


def exchange_and_return(w, v, kept):
    first, second = w.data, v.data
    w.data, v.data = second * 1.5, first * 2.5
    return [first, second, w.data, v.data]


def keep_new_data(w, v, kept):
    kept.value = w.detach() * 0.5
    w.data = kept.value
    return [w.sum()]


def update_all(w, v, kept):
    for p in (w, v):
        p.data = p.data - 0.1 * p.data.square()
    return [w.sum() + v.sum()]


class Kept:
    value = None


@pytest.mark.parametrize("placement", [None, pt.Shard(0), pt.Shard(1), pt.Replicate()], ids=str)
@pytest.mark.parametrize(
    "step",
    [return_new_data, return_former_data, exchange_and_return, keep_new_data, update_all],
    ids=lambda f: f.__name__,
)
def test_new_data_shares_memory_with_what_shares_it_in_eager(step, placement):
    """Tensors that shared the former memory keep its values; writes to the new data are seen."""

    def run(mesh, wrap):
        def place(t):
            return t if mesh is None else pt.distribute_tensor(t, mesh, [placement])

        w, v = place(torch.full((5, 3), 0.5)), place(torch.full((5, 3), 0.7))
        kept, found = Kept(), []
        compiled = wrap(lambda: step(w, v, kept))
        for _ in range(3):
            before = [w.detach(), v.detach()]
            results = compiled()
            found += [t.clone() for t in before]
            for factor, t in enumerate(results, 2):
                t.mul_(factor)
            if kept.value is not None:
                kept.value.mul_(3)
            found += [t.clone() for t in (w, v, *results)]
        return [t if mesh is None else t.full_tensor() for t in found]

    compiled = pt.compile(backend="graph")
    want = run(None, lambda f: f)
    if placement is None:
        got = [run(None, compiled)]
    else:
        with pt.ranks(dp=3) as world:
            got = world.run(run, compiled)
    for values in got:
        torch.testing.assert_close(values, want)


def test_another_view_of_new_data_is_refused_as_a_result():
    weight = torch.ones(4, 3)

    def step():
        weight.data = weight * 2
        return weight.t()

    with pytest.raises(pt.CaptureError, match=r"shares the memory that x had .*test_hooks"):
        pt.compile(step, backend="graph")()
    assert weight.eq(1).all()
