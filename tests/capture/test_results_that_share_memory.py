"""What a captured step returns shares memory with its arguments as what it returns eagerly does."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import partita as pt
from partita import Replicate, Shard
from partita.compile import CaptureError
from partita.graph.verify import IllegalGraph

_PROGRAMS = []


def _program(step):
    _PROGRAMS.append(step)
    return step


@_program
def a_view_of_what_is_written(x):
    x.add_(1)
    return x.view(-1)[2:5]


@_program
def a_view_of_what_is_not_written(x):
    return x.view(-1)[2:5], x[0], x[0]


@_program
def the_view_that_is_written_through(x):
    row = x[1]
    row.fill_(7)
    return row, x.t()


@_program
def itself_otherwise(x):
    x.mul_(2)
    return x, x.detach(), x.data, x.view_as(x), x.t(), x.T


@_program
def pieces(x):
    x.sub_(1)
    return x.chunk(3), x.unbind(1), x.split([1, 2])


@_program
def other_views(x):
    x.sub_(1)
    return (
        *(x.diagonal(), x.unfold(1, 2, 1), x[0].expand(5, 4), x.view(torch.int32), x[None, ..., 0]),
        *(x.as_strided((2, 2), (4, 1), 1), x.unflatten(1, (2, 2)), x.movedim(0, 1), x.ravel()),
    )


@_program
def a_list_that_is_written(x):
    rows = [x[0], x[1]]
    torch._foreach_add_(rows, 1.0)
    return rows


@_program
def views_of_what_is_made(x):
    y = x + 1
    row = y[1]
    row.fill_(7)
    return y, row, y.t()


@_program
def what_is_made_and_written_afterwards(x):
    y = x * 2
    row = y[0]
    y.add_(1)
    return row, y


@_program
def a_view_of_a_view(x):
    y = x + 1
    rest = y[1:]
    first = rest[0]
    first.fill_(3)
    return first, rest


@_program
def parts_of_what_is_not_returned(x):
    y = x + 1
    y[0].fill_(7)
    return y[0:2], y[1:3].t()


@_program
def pieces_that_do_not_overlap(x):
    q, k, v = (x + 1).split([2, 1, 1], 1)
    q.mul_(2)
    return q, k, v


@_program
def equal_values(x):
    return x * 2, x * 2, x.clone(), x.clone(), torch.zeros(3), torch.zeros(3)


@_program
def what_is_asked_for_twice(x):
    y = x.exp()
    return y, y.detach(), y, x.to(torch.float32), x.contiguous(), x.reshape(-1)


@_program
def what_is_swapped(x):
    before = x[0].clone()
    x[0] = x[1]
    x[1] = before
    return before, x[1]


def _memory(tensors):
    """For each tensor which of them is the first in its memory, and which is the same object."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    objects = [id(t) for t in tensors]
    return [(memory.index(m), objects.index(o)) for m, o in zip(memory, objects, strict=True)]


def _seen(step, x):
    """What `step` gives, and what becomes of it when each of its results is written."""
    tensors = [x, *pytree.tree_leaves(step(x))]
    values = [t.clone() for t in tensors]
    for i, t in enumerate(tensors):
        with torch.no_grad():
            (t if 0 not in t.stride() else t[0]).fill_(i)
        values += [t.clone() for t in tensors]
    return [_memory(tensors), values]


@pytest.mark.parametrize("step", _PROGRAMS, ids=lambda step: step.__name__)
def test_who_writes_a_result_writes_what_he_would_eagerly(step):
    compiled = pt.compile(step, backend="graph")
    for offset in (0, 5):  # an argument may itself lie anywhere in its memory
        memory, values = _seen(step, torch.arange(20.0)[offset : offset + 12].view(3, 4))
        now, found = _seen(compiled, torch.arange(20.0)[offset : offset + 12].view(3, 4))
        assert now == memory
        assert all(torch.equal(a, b) for a, b in zip(values, found, strict=True))


class _Held(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 2))
        self.register_buffer("mean", torch.zeros(4, 2))
        self.last = None


def test_what_a_step_leaves_in_an_attribute_is_a_view_of_the_buffer():
    def step(held, x):
        held.mean.add_(x)
        held.last = held.mean[1]
        held.weight.data.mul_(2)
        return held.weight.detach()[0], held.mean.t()

    held, x = _Held(), torch.ones(4, 2)
    row, turned = pt.compile(step, backend="graph")(held, x)
    held.mean.fill_(5)
    held.weight.data.fill_(6)
    assert held.last.tolist() == [5, 5] and turned.unique().tolist() == [5]
    assert row.tolist() == [6, 6]


def test_moves_that_a_pass_leaves_out_leave_results_apart():
    def there_and_back(x):
        y = x * 2
        once = x.redistribute(placements=[Replicate()])
        again = x.redistribute(placements=[Replicate()])
        return (
            y,
            y.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)]),
            [
                once.redistribute(placements=[Shard(0)]),
                once,
                again,
            ],
        )

    def results(mesh, captured):
        step = pt.compile(there_and_back, backend="graph") if captured else there_and_back
        x = pt.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        found = [t.to_local() for t in (x, *pytree.tree_leaves(step(x)))]
        for i, t in enumerate(found):
            t.fill_(i)
        return [t.tolist() for t in found]

    with pt.ranks(dp=2) as world:
        assert world.run(results, True) == world.run(results, False)


def test_a_result_that_a_pass_makes_an_input_is_what_that_was_before_it_is_written():
    def as_it_was(program):
        (end,) = program.graph.graph.find_nodes(op="output")
        end.args = ([program.graph.graph.find_nodes(op="placeholder")[0]],)

    def step(x):
        before = x.clone()
        x.mul_(2)
        return before

    x = torch.ones(3)
    before = pt.compile(step, backend="graph", passes={"end": as_it_was})(x)
    assert before.tolist() == [1, 1, 1] and x.tolist() == [2, 2, 2]


def test_an_uneven_result_is_its_argument_or_no_view_of_it():
    def written(x):
        x.mul_(2)
        return x, x.redistribute(placements=[Shard(0)]), x + 1

    def turned(x):
        return x.mul_(2).t()

    def results(mesh):
        x = pt.distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Shard(0)])
        same, alias, more = pt.compile(written, backend="graph")(x)
        x.fill_(5)
        assert same is x and alias is not x
        with pytest.raises(CaptureError, match="a view whose pieces are uneven"):
            pt.compile(turned, backend="graph")(x)
        return alias.to_local().unique().tolist(), more.full_tensor().tolist()

    with pt.ranks(dp=2) as world:
        for alias, more in world.run(results):
            assert alias == [5] and more == [[4.0 * i + 1, 4.0 * i + 3] for i in range(7)]


# -- gradients -------------------------------------------------------------------------------------


def _summed(w, v):
    return lambda x: (w + v).mul(x).sum().backward()


def _given(w, v):
    return lambda x: w.add(v).backward(x)


def _assigned(w, v):
    def step(x):
        (grad,) = torch.autograd.grad((w * x).sum(), [w])
        w.grad = grad
        del v.grad
        v.grad = x * 2

    return step


@pytest.mark.parametrize("build", [_summed, _given, _assigned], ids=lambda build: build.__name__)
def test_gradients_have_memory_of_their_own(build):
    def run(compiled):
        w, v = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        step = pt.compile(build(w, v), backend="graph") if compiled else build(w, v)
        for k in (1.0, 2.0, 3.0):
            x = torch.full((2,), k)
            step(x)
        assert len({t.data_ptr() for t in (w.grad, v.grad, x)}) == 3
        w.grad.mul_(2)
        step(x)
        return w.grad, v.grad, x

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


class _Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x):
        return ((self.w + self.v) * x).sum()


def test_sharded_gradients_that_were_one_are_not_added_up_twice():
    def run(mesh, compiled):
        model = pt.zero(_Sum(), mesh, stage=1)

        def step(x):
            model(x).backward()

        step = pt.compile(step, backend="graph") if compiled else step
        x = pt.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(0)])
        for _ in range(2):
            step(x)
        return [p.grad.full_tensor() for p in model.parameters()]

    with pt.ranks(dp=2) as world:
        for one, other in zip(world.run(run, True), world.run(run, False), strict=True):
            assert all(map(torch.equal, one, other))


def test_a_pass_that_takes_a_result_out_of_the_memory_of_another_is_refused():
    def copying(program):
        (end,) = program.graph.graph.find_nodes(op="output")
        with program.graph.graph.inserting_before(end):
            copy = program.graph.graph.call_function(
                torch.ops.aten.clone.default, (end.args[0][1],)
            )
        end.args = ([end.args[0][0], copy],)

    def step(x):
        y = x * 2
        return y, y[0]

    with pytest.raises(IllegalGraph, match="no longer shares the memory of output 0"):
        pt.compile(step, backend="graph", passes={"end": copying})(torch.ones(2, 2))


def _view_of_what_is_written(w, x):
    v = w[1:]
    w.mul_(2)
    return v


@pytest.mark.parametrize(
    "made",
    [
        torch.no_grad()(lambda w, x: (w[1:], w.detach()[1:], w.data, w.view(-1), w * 1)),
        torch.no_grad()(_view_of_what_is_written),
        lambda w, x: (torch.no_grad()(lambda: w[1:])(), (w * x).sum()),
        lambda w, x: torch.no_grad()(lambda y: y[1:])(w * x),
        lambda w, x: (x.detach().requires_grad_(), torch.zeros(2).requires_grad_()),
    ],
)
def test_results_require_gradients_as_in_eager(made):
    w = torch.nn.Parameter(torch.ones(3))
    step = pt.compile(lambda x: made(w, x), backend="graph")
    x = torch.ones(3)
    for _ in range(2):
        eager, captured = (f(x) for f in (lambda x: made(w, x), step))
        for one, other in zip(*map(_in_tuple, (eager, captured)), strict=True):
            assert one.requires_grad is other.requires_grad
    assert not x.requires_grad


def _in_tuple(found):
    return found if isinstance(found, tuple) else (found,)


def test_views_of_what_is_conjugated_are_results_and_another_program():
    def step(x):
        return x.t(), x.imag

    captured = pt.compile(step, backend="graph")
    x = torch.tensor([[1 + 2j, 3 - 1j]])
    for given in (x.conj(), x, x.conj()):
        for one, other in zip(captured(given), step(given), strict=True):
            assert torch.equal(one, other)
    assert len(captured.reasons) == 2 and "conjugated True became False" in captured.reasons[1]
    captured(x)[1].zero_()
    assert not x.imag.any()


# -- numbers in tensors ----------------------------------------------------------------------------

NUMBERED = {
    "the base is written": lambda t, i: (t[i], t.sigmoid_())[0],
    "the view is written": lambda t, i: (t[i].mul_(3), t)[1],
    "beside a slice": lambda t, i: (t[i, 1:], t.sigmoid_())[0],
    "a part that is written": lambda t, i: (t[1:, i].mul_(3), t)[1],
    "an index that is written": lambda t, i: (t[i], i.add_(1), t.mul_(2))[0],
    "a number is assigned": lambda t, i: (t.__setitem__((i, slice(0, 1)), 5.0), t)[1],
    "rows are assigned": lambda t, i: (t.__setitem__((slice(1, None), i), t[1:, 0] + 1), t)[1],
    "places": lambda t, i: (t[i, torch.tensor([0, 2])], t.mul_(2))[0],
}


def number(mesh, spread, compiled):
    """What each program of `NUMBERED` gives, and the gradient of its operand."""
    found = []
    for program in NUMBERED.values():
        x = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 9
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, spread)
        x.requires_grad_()

        def step(x, program=program):
            t = x * 1
            out = program(t, t.detach().argmin()) * 1
            (out * out).sum().backward()
            return out.detach()

        out = (pt.compile(step, backend="graph") if compiled else step)(x)
        found += [out, x.grad] if mesh is None else [out.full_tensor(), x.grad.full_tensor()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("spread", [[Shard(0)], [Shard(1)], [Replicate()], [pt.Partial()]])
def test_an_integer_in_a_tensor_picks_a_view_as_an_int_does(spread, compiled):
    with pt.ranks(a=2) as world:
        found = world.run(number, spread, compiled)[0]
    for t, wanted in zip(found, number(None, None, False), strict=True):
        torch.testing.assert_close(t, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "results", [lambda p: (p, p[1]), lambda p: (p, (p * 2).sum()), lambda p: p * 2]
)
def test_results_computed_from_a_leaf_that_the_step_makes_are_refused(results):
    """In the next calls they would not require grad, or their history would not reach the leaf."""

    def step(x):
        return results(torch.nn.Parameter(x * 2))

    with pytest.raises(CaptureError, match="computed from a leaf that it makes"):
        pt.compile(step, backend="graph")(torch.ones(4, 3))


def test_forces_that_are_gradients_of_a_leaf_made_in_the_region_are_differentiated():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def find_forces(at):
        at = at.detach().requires_grad_()
        energy = model(at).sum()
        (slope,) = torch.autograd.grad(energy, at, create_graph=True)
        return energy, -slope

    def train(run):
        model.zero_grad()
        energy, forces = run(torch.linspace(-1, 1, 6).view(2, 3))
        (energy + forces.square().sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    compiled = pt.compile(find_forces, backend="graph")
    for _ in range(2):
        torch.testing.assert_close(train(compiled), train(find_forces))
