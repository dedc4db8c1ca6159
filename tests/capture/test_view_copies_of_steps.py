"""A captured step reads and returns view copies (a view whose layout had to change) as eager does.

One device is the truth: the same lines, run on plain tensors.
"""

from __future__ import annotations

import pytest
import torch

import partita as pt

F64 = torch.float64
RETURNED = []


def returned(step):
    RETURNED.append(step)
    return step


@returned
def a_row_of_an_argument(x):
    return x[1], x


@returned
def a_row_of_a_result(x):
    y = x * 2
    return y[1], y


@returned
def a_column_of_a_result(x):
    y = x * 2
    return y[:, 1], y


@returned
def a_row_written_in_the_step(x):
    y = x * 2
    row = y[1]
    y.add_(1)
    row.mul_(3)
    return row, y


@returned
def a_view_of_a_view(x):
    y = x * 2
    rows = y[1:3]
    row = rows[1]
    y.mul_(2)
    return row, y, rows


@returned
def two_rows_of_what_is_not_returned(x):
    y = x * 2
    return y[1], y[1:3]


@returned
def a_row_and_the_transpose(x):
    y = x * 2
    return y[2, 1:], y.t()


@returned
def a_row_of_a_view(x):
    y = x * 2
    return y.view(2, 3, 4)[1], y


def whole(t):
    return t.full_tensor() if isinstance(t, pt.DTensor) else t


def assert_ranks_give(truth, run):
    with pt.ranks(a=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)


def value():
    return torch.arange(24, dtype=F64).view(6, 4) / 7


def after_writes(step, x):
    """The results of `step`, and what they are after a write to the base and one to the view."""
    view, base, *others = step(x)
    found = [whole(t).detach().clone() for t in (view, base, *others)]
    with torch.no_grad():
        base.add_(1)
        found.append(whole(view * 1))
        view.mul_(3)
        found += [whole(t).clone() for t in (view, base, *others)]
    return found


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("step", RETURNED, ids=lambda f: f.__name__)
def test_a_returned_view_changes_with_its_base(step, dim):
    truth = after_writes(step, value())

    def run(mesh):
        captured = pt.compile(step, backend="graph")
        for _ in range(2):
            found = after_writes(captured, pt.distribute_tensor(value(), mesh, [pt.Shard(dim)]))
        return found

    assert_ranks_give(truth, run)


def gradients_of_views(function, x):
    x.requires_grad_()
    results = function(x)
    sum((t * t * (i + 1)).sum() for i, t in enumerate(results)).backward()
    return [whole(t).detach() for t in (*results, x.grad)]


@pytest.mark.parametrize("step", RETURNED[1:], ids=lambda f: f.__name__)
def test_a_returned_view_has_its_gradient(step):
    truth = gradients_of_views(step, value())

    def run(mesh):
        x = pt.distribute_tensor(value(), mesh, [pt.Shard(0)])
        return gradients_of_views(pt.compile(step, backend="graph"), x)

    assert_ranks_give(truth, run)


def test_a_view_that_only_the_step_can_make_is_refused_once_it_is_out_of_date():
    def run(mesh):
        x = pt.distribute_tensor(value(), mesh, [pt.Shard(0)])
        index = pt.distribute_tensor(torch.tensor([1, 2]), mesh, [pt.Replicate()])
        row = pt.compile(lambda x, i: x[i[0]], backend="graph")(x, index)
        assert torch.equal(row.full_tensor(), value()[1])
        assert row.stride() == (1,)
        with torch.no_grad():
            x.add_(1)
            with pytest.raises(pt.LayoutError, match=r"out of date[^\n]*test_view_copies_of"):
                row * 2
            with pytest.raises(pt.LayoutError, match=r"out of date[^\n]*test_view_copies_of"):
                row.add_(2)

    with pt.ranks(a=2) as world:
        world.run(run)


def test_two_views_of_what_is_not_returned_are_refused_if_its_pieces_are_uneven():
    def step(x):
        y = x * 2
        return y[1], y[1:3]

    def run(mesh):
        x = pt.distribute_tensor(value()[:5], mesh, [pt.Shard(0)])
        with pytest.raises(pt.CaptureError, match="views of one tensor"):
            pt.compile(step, backend="graph")(x)

    with pt.ranks(a=2) as world:
        world.run(run)


@pytest.mark.parametrize("place", ["argument", "attribute"])
def test_a_captured_step_reads_what_was_written_to_the_base_of_a_view(place):
    class Holder:
        view = None

    def run_lines(x, compile_):
        holder = Holder()
        step = compile_(lambda v: v * 2 if place == "argument" else holder.view * 2)
        holder.view = x[1]
        found = []
        for _ in range(3):
            found.append(whole(step(holder.view if place == "argument" else None)))
            x.add_(1)
        return found

    truth = run_lines(value(), lambda f: f)

    def run(mesh):
        x = pt.distribute_tensor(value(), mesh, [pt.Shard(0)])
        return run_lines(x, lambda f: pt.compile(f, backend="graph"))

    assert_ranks_give(truth, run)


def test_gradients_of_a_view_reach_its_base_through_a_captured_step():
    def lines(x, step):
        x.requires_grad_()
        y = x * 1
        row = y[1]
        with torch.no_grad():
            y.add_(1)
        (step(row) * step(row)).sum().backward()
        return whole(x.grad)

    truth = lines(value(), lambda v: v * v)

    def run(mesh):
        x = pt.distribute_tensor(value(), mesh, [pt.Shard(0)])
        return lines(x, pt.compile(lambda v: v * v, backend="graph"))

    assert_ranks_give(truth, run)


def test_a_write_to_a_view_that_was_made_before_the_step_is_refused():
    def run(mesh):
        x = pt.distribute_tensor(value(), mesh, [pt.Shard(0)])
        row = x[1]
        with pytest.raises(pt.CaptureError, match=r"writes to argument\[0\]"):
            pt.compile(lambda v: v.mul_(2), backend="graph")(row)
        assert torch.equal(x.full_tensor(), value())
        assert torch.equal(row.full_tensor(), value()[1])

    with pt.ranks(a=2) as world:
        world.run(run)


CASES = []


def case(lines):
    CASES.append(lines)
    return lines


@case
def a_row_of_a_gradient_that_the_update_uses(x, step_of):
    p = torch.nn.Parameter(x)
    optimizer = torch.optim.SGD([p], lr=0.1)

    def step(k):
        optimizer.zero_grad()
        ((p * k) ** 2).sum().backward()
        row = p.grad[1]
        optimizer.step()
        return row

    return *views_of_gradients(step_of(step), x.detach() + 1, p), p.detach()


@case
def a_row_of_a_gradient_that_is_added_to(x, step_of):
    p = torch.nn.Parameter(x)
    (p * 2).sum().backward()

    def step(k):
        (p * k).sum().backward()
        return p.grad[1]

    return views_of_gradients(step_of(step), x.detach() + 1, p)


def views_of_gradients(step, k, p):
    found = []
    for _ in range(2):
        row = step(k)
        found.append(whole(row).clone())
    p.grad.mul_(2)
    found.append(whole(row * 1))
    row.add_(1)
    return *found, p.grad


@case
def a_view_of_a_given_view(x, step_of):
    row = x[1]
    part = step_of(lambda v: v[1:])(row)
    x.add_(1)
    found = whole(part * 1)
    part.mul_(3)
    return found, part, row * 1, x


@case
def a_given_view_that_gets_gradients(x, step_of):
    row = x[1].requires_grad_()

    def step(k):
        (row * k).sum().backward()
        return row * 1

    step = step_of(step)
    return *[whole(step(x[2:3]).detach()) for _ in range(3)], row.grad


@pytest.mark.parametrize("lines", CASES, ids=lambda f: f.__name__)
def test_views_of_gradients_and_of_given_views_are_those_of_eager(lines):
    truth = [whole(t) for t in lines(value(), lambda f: f)]

    def run(mesh):
        x = pt.distribute_tensor(value(), mesh, [pt.Shard(0)])
        return [whole(t) for t in lines(x, lambda f: pt.compile(f, backend="graph"))]

    assert_ranks_give(truth, run)


@pytest.mark.parametrize("first", ["a view of the base", "another view"])
@pytest.mark.parametrize("written", ["argument", "closure", "gradient"])
def test_a_step_that_writes_the_base_of_a_given_view_is_refused(first, written):
    """Also if one rank has no element of the base."""

    def run(mesh):
        x, other = (pt.distribute_tensor(value()[:1], mesh, [pt.Shard(0)]) for _ in "ab")
        p = torch.nn.Parameter(x.detach() * 1)
        (p * 2).sum().backward()

        def step(base, view):
            if written == "gradient":
                (p * p).sum().backward()
            else:
                (x if written == "closure" else base).add_(1)
            return view * 2

        captured = pt.compile(step, backend="graph")
        base = p.grad if written == "gradient" else x
        if first == "another view":
            captured(x, other.view(4, 1))
        before = base.full_tensor()
        with pytest.raises(pt.CaptureError, match="share memory"):
            captured(x, base.view(4, 1))
        assert torch.equal(base.full_tensor(), before)

    with pt.ranks(a=2) as world:
        world.run(run)


def test_a_view_is_not_made_again_of_the_same_memory_in_another_layout():
    def run(mesh):
        def step(x):
            y = x * 2
            return y[1], pt.DTensor.from_local(y.to_local(), mesh, [pt.Replicate()])

        x = pt.distribute_tensor(value(), mesh, [pt.Shard(0)])
        row, other = pt.compile(step, backend="graph")(x)
        other.add_(1)
        assert torch.equal((row * 1).full_tensor(), value()[1] * 2 + 1)

    with pt.ranks(a=2) as world:
        world.run(run)


def test_a_view_made_without_gradients_has_none_when_it_is_made_again():
    def run(mesh):
        def step(x):
            y = x * 2
            with torch.no_grad():
                row = y[1]
            return row, y

        x = pt.distribute_tensor(value(), mesh, [pt.Shard(0)]).requires_grad_()
        row, y = pt.compile(step, backend="graph")(x)
        with torch.no_grad():
            y.add_(1)
        assert torch.equal((row * 1).full_tensor(), value()[1] * 2 + 1)
        assert not (row * 1).requires_grad and y.requires_grad

    with pt.ranks(a=2) as world:
        world.run(run)


def test_a_gradient_that_is_a_view_shows_a_later_write_of_the_step():
    def run(mesh):
        x = pt.distribute_tensor(value(), mesh, [pt.Shard(0)])
        p = torch.nn.Parameter(pt.distribute_tensor(value()[1], mesh, [pt.Replicate()]))

        def step(x):
            p.grad = x[1]
            x.mul_(2)

        pt.compile(step, backend="graph")(x)
        assert torch.equal(p.grad.full_tensor(), value()[1] * 2)
        x.add_(1)
        assert torch.equal(p.grad.full_tensor(), value()[1] * 2 + 1)

    with pt.ranks(a=2) as world:
        world.run(run)
