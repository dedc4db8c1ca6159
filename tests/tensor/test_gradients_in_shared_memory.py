"""Are gradients right that share an object or memory with others?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt

R, S = pt.Replicate(), pt.Shard(0)


def value(t):
    return (t.full_tensor() if isinstance(t, pt.DTensor) else t).detach().clone()


def model_and_batch(mesh):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    if mesh is None:
        return model, x
    return pt.parallelize(model, mesh, {}), pt.distribute_tensor(x, mesh, [S])


def backward(model, x):
    model(x).square().sum().backward()


def both(program):
    """Run `program(mesh)` in one process (`mesh` is None) and on ranks: both give the same."""
    truth = program(None)
    with pt.ranks(dp=3) as world:
        for found in world.run(program):
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


def step(params):
    torch.optim.SGD(params, 0.1).step()


def clip(params):
    torch.nn.utils.clip_grad_norm_(params, 0.1)


@pytest.mark.parametrize("reduce", [step, clip, lambda params: [value(p.grad) for p in params]])
@pytest.mark.parametrize("first", [False, True])
def test_one_gradient_of_two_tensors_is_added_to_after_it_was_reduced(reduce, first):
    def program(mesh):
        model, x = model_and_batch(mesh)
        other = nn.Parameter(model.weight.detach().clone())
        found = []
        for _ in range(3):
            backward(model, x)
            other.grad = model.weight.grad
            reduce([model.weight if first else other])
            backward(model, x)
            assert other.grad is model.weight.grad
            found += map(value, (model.weight.grad, other.grad, other, *model.parameters()))
        return found

    both(program)


def with_gradients_in_one_buffer(mesh):
    model, x = model_and_batch(mesh)
    flat = torch.zeros(8, dtype=torch.float64)
    flat = flat if mesh is None else pt.distribute_tensor(flat, mesh, [R])
    at = 0
    for p in model.parameters():
        p.grad = flat[at : (at := at + p.numel())].view_as(p)
    return model, x, flat


def test_gradients_that_are_parts_of_a_buffer_are_added_there():
    def program(mesh):
        model, x, flat = with_gradients_in_one_buffer(mesh)
        optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(3):
            for _ in range(2):
                backward(model, x)
            found += [value(flat), value(flat.norm())]
            flat.mul_(0.5)
            optimizer.step()
            found += [value(t) for p in model.parameters() for t in (p, p.grad)]
            flat.zero_()
        return found

    both(program)


def test_a_hook_on_a_tensor_whose_gradient_is_a_part_of_a_buffer_is_refused():
    def program(mesh):
        model, x, _ = with_gradients_in_one_buffer(mesh)
        model.weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(pt.LayoutError, match="gradient is a part of another tensor"):
            backward(model, x)

    with pt.ranks(dp=2) as world:
        world.run(program)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_adds_to_no_gradient_under_zero_that_was_a_part_of_a_buffer(stage):
    """Stages 2 and 3 keep shards of gradients, which cannot be in the buffer."""

    def program(model, x, flat):
        at = 0
        for p in model.parameters():
            p.grad = flat[at : (at := at + p.numel())].view_as(p)
        backward(model, x)
        return value(flat)

    torch.manual_seed(0)
    x, flat = torch.randn(4, 4).double(), torch.zeros(20).double()

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4).double())

    truth = program(make(), x, flat.clone())

    def run(mesh):
        model = pt.zero(make(), mesh, stage=stage)
        given = pt.distribute_tensor(x, mesh, [S]), pt.distribute_tensor(flat, mesh, [R])
        if stage > 1:
            with pytest.raises(pt.LayoutError, match="set to a part of another tensor"):
                program(model, *given)
        else:
            torch.testing.assert_close(program(model, *given), truth)

    with pt.ranks(dp=2) as world:
        world.run(run)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("stage", [2, 3])
def test_backward_adds_to_a_part_that_has_the_layout_of_the_shards_or_raises_on_all_ranks(
    stage, rows
):
    def program(model, x, stack):
        model.weight.grad = stack[1]
        backward(model, x)
        return value(stack)

    def run(mesh):
        torch.manual_seed(0)
        model, x, stack = nn.Linear(4, rows), torch.randn(4, 4), torch.randn(2, rows, 4)
        model, given = model.double(), (x.double(), stack.double())
        if mesh is None:
            return program(model, *given)
        pt.zero(model, mesh, stage=stage)
        x, stack = given
        given = pt.distribute_tensor(x, mesh, [S]), pt.distribute_tensor(stack, mesh, [pt.Shard(1)])
        if stage == 3:
            return program(model, *given)
        with pytest.raises(pt.LayoutError, match="set to a part of another tensor"):
            program(model, *given)

    truth = run(None)
    with pt.ranks(dp=3) as world:
        for found in world.run(run):
            if stage == 3:
                torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_may_be_set_to_parts_of_a_vector_and_stepped(stage):
    def program(model, x):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model, x)
            vector = torch.cat([p.grad.view(-1) for p in model.parameters()]) * 0.5
            at = 0
            for p in model.parameters():
                p.grad = vector[at : (at := at + p.numel())].view_as(p)
            optimizer.step()
        return [value(p) for p in model.parameters()]

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4).double())

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth = program(make(), x)

    def run(mesh):
        return program(pt.zero(make(), mesh, stage=stage), pt.distribute_tensor(x, mesh, [S]))

    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, truth)


def write_the_base(row, w, x):
    x.mul_(2.0)


def write_the_row(row, w, x):
    row.add_(1.0)


def write_the_gradient(row, w, x):
    w.grad.mul_(3.0)


def clear_the_gradient(row, w, x):
    torch.optim.SGD([w]).zero_grad(set_to_none=False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "write", [write_the_base, write_the_row, write_the_gradient, clear_the_gradient]
)
def test_a_gradient_that_is_a_row_of_a_split_tensor_shares_its_values(write, compiled):
    def program(mesh):
        x, w = torch.arange(12.0).double().view(4, 3), torch.ones(3).double()
        if mesh is not None:
            x, w = pt.distribute_tensor(x, mesh, [S]), pt.distribute_tensor(w, mesh, [R])
        w = nn.Parameter(w)
        optimizer, found = torch.optim.SGD([w], 0.1), []

        def train():
            w.grad = row = x[1]
            write(row, w, x)
            optimizer.step()
            return x.sum(), w.grad.sum()

        run = pt.compile(train, backend="graph") if compiled and mesh is not None else train
        for _ in range(3):
            found += map(value, (*run(), w, x))
            x.add_(0.5)
            if not compiled:  # a captured step keeps no gradient that its update has used
                found.append(value(w.grad))
        return found

    both(program)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_are_parts_of_a_vector_follow_its_writes(stage):
    def program(model, vector):
        optimizer, found, at = torch.optim.SGD(model.parameters(), 0.1), [], 0
        for p in model.parameters():
            p.grad = vector[at : (at := at + p.numel())].view_as(p)
        vector.mul_(0.5)
        for p in model.parameters():
            p.grad.detach().mul_(0.7)
            p.grad.view(-1)[0] = 2.0
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.append(value(vector))
        optimizer.step()
        return [*found, *(value(t) for p in model.parameters() for t in (p, p.grad))]

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4).double())

    def run(mesh):
        vector = pt.distribute_tensor(torch.arange(20.0).double(), mesh, [R])
        return program(pt.zero(make(), mesh, stage=stage), vector)

    truth = program(make(), torch.arange(20.0).double())
    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, truth)


def test_a_gradient_of_two_parameters_is_reduced_once_in_whatever_buckets(monkeypatch):
    def program(mesh):
        model, x = model_and_batch(mesh)
        other, _ = model_and_batch(mesh)
        backward(model, x)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = p.grad
        params = [*model.parameters(), *other.parameters()]
        step(params)
        return [value(p) for p in params]

    monkeypatch.setattr("partita.tensor.dtensor_gradients.BUCKET_BYTES", 8)
    both(program)


def test_gradients_that_are_only_returned_are_shares_beside_a_whole_buffer():
    def program(mesh):
        model, x = model_and_batch(mesh)
        buffer = torch.zeros(6, dtype=torch.float64)
        if mesh is not None:
            buffer = pt.distribute_tensor(buffer, mesh, [R])
        model.weight.grad = buffer.view(2, 3)
        found = []
        for _ in range(2):
            loss = model(x).square().sum()
            found += torch.autograd.grad(loss, model.weight, retain_graph=True)
            loss.backward()
        return [value(t) for t in (*found, model.weight.grad, buffer)]

    both(program)


@pytest.mark.parametrize("buffered", [False, True])
def test_a_compiled_step_adds_to_the_gradient_that_others_refer_to(buffered):
    def program(mesh):
        model, x = model_and_batch(mesh)
        backward(model, x)
        clip(model.parameters())
        buffer = torch.zeros(6, dtype=torch.float64)
        if buffered:
            buffer = buffer if mesh is None else pt.distribute_tensor(buffer, mesh, [R])
            model.weight.grad = buffer.view(2, 3)
        kept, found = model.weight.grad, []

        def train():
            backward(model, x)
            step(model.parameters())
            return model.weight.sum()

        run = train if mesh is None else pt.compile(train, backend="graph")
        for _ in range(2):
            found += [value(t) for t in (run(), model.weight.grad, kept, buffer)]
        assert kept is model.weight.grad
        return found

    both(program)


def exchange(a, b):
    a.grad, b.grad = b.grad, a.grad
    return a.grad


def give(a, b):
    a.grad, b.grad = None, a.grad
    return b.grad


@pytest.mark.slow
@pytest.mark.parametrize("change", [exchange, give, lambda a, b: a.grad])
def test_a_gradient_to_which_a_compiled_step_adds_is_one_object_wherever_the_step_puts_it(change):
    def program(mesh):
        model, x = model_and_batch(mesh)
        a, b = model.weight, nn.Parameter(model.weight.detach() * 2)

        def train():
            (model(x) + x @ b.T).square().sum().backward()
            return change(a, b)

        run, found = train if mesh is None else pt.compile(train, backend="graph"), []
        for _ in range(3):
            for p in (a, b):
                p.grad = torch.ones_like(p)
            kept = [a.grad, b.grad]
            clip([a, b])
            result = run()
            found += [result is g for g in (a.grad, b.grad, *kept)]
            found += [g is p.grad for g in kept for p in (a, b)]
            found += [value(t) for t in (result, a.grad, b.grad, kept[0]) if t is not None]
        return found

    both(program)
