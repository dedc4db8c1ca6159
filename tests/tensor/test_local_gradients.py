"""What a gradient means at the border to local tensors is said by the program, or asked for."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import Tensor

import partita as pt
from partita import Invariant, Partial, Replicate, Shard

W = torch.arange(8.0).view(4, 2) - 3


def on_ranks(body, **axes):
    with pt.ranks(**(axes or {"dp": 2})) as world:
        return world.run(body)


def rows_of(mesh) -> Tensor:
    return torch.ones(1, 4) * (1 + mesh.get_rank())


@pytest.mark.parametrize("start", [Shard(0), Replicate()], ids=str)
def test_a_gradient_that_comes_back_to_a_whole_value_is_asked_for(start):
    def body(mesh):
        w = pt.distribute_tensor(W, mesh, [start]).requires_grad_()
        local = w.redistribute(placements=[Replicate()]).to_local()  # the line
        loss = (rows_of(mesh) @ local).sum()
        with pytest.raises(pt.LayoutError) as caught:
            loss.backward()
        return str(caught.value)

    for error in on_ranks(body):
        assert (
            "to_local: a gradient came back to a value that left as Replicate on axis dp" in error
        )
        assert "x.to_local(grad_placements=[Partial()])" in error
        assert "x.to_local(grad_placements=[Replicate()])" in error
        line = int(error.partition("test_local_gradients.py:")[2].partition(")")[0])
        assert "# the line" in linecache.getline(__file__, line)


@pytest.mark.parametrize("start", [Shard(0), Replicate()], ids=str)
def test_both_answers_are_what_they_say(start):
    def body(mesh):
        got = []
        for gradient in (Partial(), Replicate()):
            w = pt.distribute_tensor(W, mesh, [start]).requires_grad_()
            whole = w.redistribute(placements=[Replicate()])
            local = whole.to_local(grad_placements=[gradient])
            rows = rows_of(mesh) if gradient.is_partial() else torch.ones(1, 4)
            (rows @ local).sum().backward()
            got.append(w.grad.full_tensor())
        return got

    for of_parts, of_whole in on_ranks(body):
        torch.testing.assert_close(of_parts, torch.full((4, 2), 3.0))  # rows of 1 and of 2
        torch.testing.assert_close(of_whole, torch.ones(4, 2))


def test_a_gradient_that_leaves_for_a_local_tensor_is_asked_for():
    def body(mesh):
        rank = mesh.get_rank()
        got = []
        for gradient in (None, [Partial()], [Replicate()]):
            t = W.clone().requires_grad_()
            x = pt.DTensor.from_local(t, mesh, [Replicate()], grad_placements=gradient)
            loss = (pt.DTensor.from_local(rows_of(mesh), mesh, [Shard(0)]) @ x).sum()
            if gradient is None:
                with pytest.raises(pt.LayoutError) as caught:
                    loss.backward()
                error = str(caught.value)
            else:
                loss.backward()
                got.append(t.grad)
        torch.testing.assert_close(got[0], torch.full((4, 2), 1.0 + rank))
        torch.testing.assert_close(got[1], torch.full((4, 2), 3.0))
        return error

    for error in on_ranks(body):
        assert "from_local: a gradient goes to a value that entered as Replicate" in error
        assert "from_local(x, mesh, placements, grad_placements=[Partial()])" in error
        assert "test_local_gradients.py" in error


def test_only_the_axes_in_doubt_are_asked_about():
    def body(mesh):
        w = pt.distribute_tensor(W, mesh, [Replicate(), Shard(0), Replicate()]).requires_grad_()
        with pytest.raises(pt.LayoutError) as caught:
            w.to_local().sum().backward()
        return str(caught.value)

    for error in on_ranks(body, dp=2, tp=2, one=1):
        assert "on axis dp, and" in error
        assert "x.to_local(grad_placements=[Partial(), Shard(0), Partial()])" in error
        assert "x.to_local(grad_placements=[Replicate(), Shard(0), Partial()])" in error


SILENT = {
    "sharded": lambda mesh: pt.distribute_tensor(W, mesh, [Shard(0)]),
    "invariant": lambda mesh: pt.distribute_tensor(W, mesh, [Invariant()]),
    "pending": lambda mesh: pt.distribute_tensor(W, mesh, [Partial()]),
}


@pytest.mark.parametrize("kind", SILENT)
def test_nothing_is_asked_where_a_gradient_has_one_meaning(kind):
    def body(mesh):
        x = SILENT[kind](mesh).requires_grad_()
        (x.to_local() * 2).sum().backward()
        return x.grad.full_tensor()

    for grad in on_ranks(body):
        torch.testing.assert_close(grad, torch.full((4, 2), 2.0))


def test_nothing_is_asked_on_one_rank_or_where_no_gradient_comes():
    def alone(mesh):
        w = pt.distribute_tensor(W, mesh).requires_grad_()
        w.to_local().sum().backward()
        return w.grad.full_tensor()

    torch.testing.assert_close(on_ranks(alone, dp=1)[0], torch.ones(4, 2))

    def body(mesh):
        w = pt.distribute_tensor(W, mesh).requires_grad_()
        local = w.to_local()
        (gradient,) = torch.autograd.grad((local * 3).sum(), local)  # of the local tensor itself
        torch.testing.assert_close(gradient, torch.full((4, 2), 3.0))
        (local.detach() + 1).sum()
        with torch.no_grad():
            w.to_local().add_(1)
        (w * 1).sum().backward()
        torch.testing.assert_close(w.full_tensor(), W + 1)
        torch.testing.assert_close(w.grad.full_tensor(), torch.ones(4, 2))

    on_ranks(body)


def test_a_function_of_pieces_keeps_the_dual_and_a_full_tensor_is_whole():
    def body(mesh):
        w = pt.distribute_tensor(W, mesh).requires_grad_()
        rows = pt.DTensor.from_local(rows_of(mesh), mesh, [Shard(0)])
        multiply = pt.local_map(lambda x, w: x @ w, [Shard(0)], ([Shard(0)], [Replicate()]))
        multiply(rows, w).sum().backward()
        of_parts = w.grad.full_tensor()
        w.grad = None
        double = pt.local_map(lambda w: w * 2, [Replicate()])  # leaves as Replicate, too
        (rows @ double(w)).sum().backward()
        of_doubled = w.grad.full_tensor()
        w.grad = None
        w.full_tensor().sum().backward()
        return of_parts, of_doubled, w.grad.full_tensor()

    for of_parts, of_doubled, of_whole in on_ranks(body):
        torch.testing.assert_close(of_parts, torch.full((4, 2), 3.0))
        torch.testing.assert_close(of_doubled, torch.full((4, 2), 6.0))
        torch.testing.assert_close(of_whole, torch.ones(4, 2))


def test_a_gradient_that_is_cut_otherwise_is_refused():
    def body(mesh):
        w = pt.distribute_tensor(W, mesh).requires_grad_()
        with pytest.raises(pt.LayoutError, match="to_local: grad_placements shard"):
            w.to_local(grad_placements=[Shard(0)]).sum().backward()
        with pytest.raises(pt.LayoutError, match="from_local: grad_placements shard"):
            pt.DTensor.from_local(W, mesh, [Shard(0)], grad_placements=[Replicate()])

    on_ranks(body)


def test_a_compiled_step_asks_too():
    def body(mesh):
        w = pt.distribute_tensor(W, mesh).requires_grad_()

        def step(x):
            w.grad = None
            (x @ w.to_local()).sum().backward()

        with pytest.raises((pt.LayoutError, pt.CaptureError), match=r"grad_placements=\[Partial"):
            pt.compile(step, backend="graph")(rows_of(mesh))

    on_ranks(body)


def test_a_region_says_that_a_gradient_may_come_back_and_how_none_does():
    def each(mesh):
        w = torch.nn.Parameter(pt.distribute_tensor(torch.ones(4), mesh, [pt.Replicate()]))
        region = pt.compile(lambda: ((w * 2).to_local(), (w * 3).sum()), backend="graph")
        with pytest.raises(pt.LayoutError) as raised:
            region()
        text = str(raised.value)
        assert (
            "to_local: a gradient may come back to a value that left as Replicate on axis dp"
            in text
        )
        assert "x.detach().to_local()" in text
        region = pt.compile(lambda: ((w * 2).detach().to_local(), (w * 3).sum()), backend="graph")
        local, total = region()
        total.backward()
        assert local.tolist() == [2] * 4 and w.grad.full_tensor().tolist() == [3] * 4

    with pt.ranks(dp=2) as world:
        world.run(each)
