"""Gradients that have a history, come in batches, or are larger than what they are gradients of."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional as F

import partita as pt
from partita import Invariant, Partial, Replicate, Shard

PLACEMENTS = [Shard(0), Replicate(), Invariant(), Partial()]
V = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)


def _lay_out(mesh, t, placement):
    return t.clone() if mesh is None else pt.distribute_tensor(t, mesh, [placement])


def _whole(t):
    return t.full_tensor() if isinstance(t, pt.DTensor) else t


def _check(program):
    """`program(mesh, placement)` gives the same on a mesh as on one device."""
    truth = program(None, None)
    for ranks in (2, 3):
        for placement in PLACEMENTS:
            with pt.ranks(tp=ranks) as world:
                for ours in world.run(program, placement):
                    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-12)


# -- gradients that are read where none are recorded -----------------------------------------------


def _read_in_no_grad(mesh, placement):
    x = _lay_out(mesh, V, placement).requires_grad_()
    (x**3).sum().backward(create_graph=True)
    with torch.no_grad():
        grad = x.grad
    assert grad.requires_grad
    return _whole(torch.autograd.grad(grad.sum(), x)[0])


def _grad_in_no_grad(mesh, placement):
    x = _lay_out(mesh, V, placement).requires_grad_()
    y = (x**3).sum()
    with torch.no_grad():
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return _whole(torch.autograd.grad((grad * grad).sum(), x)[0])


@pytest.mark.parametrize("program", [_read_in_no_grad, _grad_in_no_grad])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_keeps_its_history_where_none_is_recorded(program):
    _check(program)


# -- gradients in batches --------------------------------------------------------------------------


def _batched(mesh, placement):
    x = _lay_out(mesh, V, placement).requires_grad_()
    y = x**2 * x.sum()
    seeds = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    seeds = _lay_out(mesh, seeds, Shard(1))
    found = torch.autograd.grad(y, x, seeds, is_grads_batched=True)
    return _whole(found[0])


def _batched_of_two(mesh, placement):
    x = _lay_out(mesh, V, placement).requires_grad_()
    u = _lay_out(mesh, V, Shard(0)).requires_grad_()
    seeds = torch.eye(3, dtype=torch.float64)
    found = torch.autograd.grad(
        [x**2, x.sin()], [u, x], [seeds, seeds * 2], is_grads_batched=True, allow_unused=True
    )
    assert found[0] is None
    return _whole(found[1])


def _jacobian(mesh, placement):
    x = _lay_out(mesh, V, placement)
    return _whole(jacobian(lambda x: x**2 * x.sum(), x, vectorize=True))


def _jacobian_with_graph(mesh, placement):
    x = _lay_out(mesh, V, placement).requires_grad_()
    jacobian(lambda x: x**3, x, vectorize=True, create_graph=True).sum().backward()
    return _whole(x.grad)


def _hessian(mesh, placement):
    x = _lay_out(mesh, V, placement)
    return _whole(hessian(lambda x: (x**3).sum() * x.sum(), x, vectorize=True))


BATCHED = [_batched, _batched_of_two, _jacobian, _jacobian_with_graph, _hessian]


@pytest.mark.parametrize("program", BATCHED)
def test_gradients_in_a_batch_are_those_of_one_device(program):
    _check(program)


# -- where a value is zero -------------------------------------------------------------------------


def _norm_where_elements_are_zero(compute_norm):
    def program(mesh, placement):
        x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
        x = _lay_out(mesh, x, placement).requires_grad_()
        (first,) = torch.autograd.grad(compute_norm(x).sum(), x, create_graph=True)
        weights = torch.arange(1.0, 7, dtype=torch.float64).view(3, 2)
        (second,) = torch.autograd.grad((first * weights).sum(), x)
        return torch.stack([_whole(first).detach(), _whole(second)])

    return program


NORMS = [
    torch.linalg.norm,
    lambda x: torch.linalg.vector_norm(x, 3),
    lambda x: torch.linalg.vector_norm(x, dim=0),
    lambda x: F.normalize(x, dim=0),
    lambda x: torch.linalg.matrix_norm(torch.complex(x, x * 2)),
    lambda x: torch.dist(x, x * 3),
]


@pytest.mark.parametrize("compute_norm", NORMS)
def test_a_norm_has_the_second_derivative_of_one_device_where_elements_are_zero(compute_norm):
    _check(_norm_where_elements_are_zero(compute_norm))


# -- gradients that torch sums ---------------------------------------------------------------------


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx, grad):
        x, s = ctx.saved_tensors
        return grad * s, grad * x  # as large as x: torch sums it to the shape of s


def _summed(shape):
    def program(mesh, placement):
        x = _lay_out(mesh, torch.outer(V, V)[:, :2], placement).requires_grad_()
        s = _lay_out(mesh, torch.full(shape, 2.0, dtype=torch.float64), Replicate())
        _Scale.apply(x, s.requires_grad_()).square().sum().backward()
        return torch.cat([_whole(s.grad).flatten(), _whole(x.grad).flatten()])

    return program


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1,), (), (1, 1), (2,), (3, 1), (1, 2)])
def test_a_gradient_that_is_larger_than_its_input_is_summed(shape):
    _check(_summed(shape))


def _hook_of_another_shape(mesh):
    x = pt.distribute_tensor(V, mesh, [Replicate()]).requires_grad_()
    x.register_hook(lambda grad: grad.sum())
    with pytest.raises(RuntimeError, match="has changed the size of value"):
        (x * 2).sum().backward()


def test_a_hook_that_gives_another_shape_is_refused_as_torch_does():
    with pt.ranks(tp=2) as world:
        world.run(_hook_of_another_shape)


# -- gradients that are set to zero ----------------------------------------------------------------


def _zero_gradients(mesh, placement):
    x = _lay_out(mesh, V, placement).requires_grad_()
    optimizer = torch.optim.SGD([x], 0.1)
    (x**3).sum().backward(create_graph=True)
    optimizer.zero_grad(set_to_none=False)
    (x**2).sum().backward()
    return _whole(x.grad)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_history_is_detached_and_set_to_zero():
    _check(_zero_gradients)
