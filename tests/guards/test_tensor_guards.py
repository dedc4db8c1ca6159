"""Tensors that a step reaches are looked at all at once, and each change of one is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt


def pair():
    """A step over two weights, compiled and run until its calls are compared to the one before."""
    weights = [nn.Parameter(torch.arange(6.0).reshape(3, 2) + k) for k in range(2)]

    def step(x):
        first, second = weights
        flag = getattr(first, "scale", 1.0) - getattr(second, "scale", 0.0)
        loss = (x @ first.t()).square().sum() + flag * (x @ second.t()).sum()
        loss.backward()
        grads = [w.grad for w in weights]
        for w in weights:
            w.grad = None
        return loss.detach(), *grads

    compiled = pt.compile(step, backend="graph")
    for _ in range(3):
        compiled(torch.ones(4, 2))
    assert len(compiled.reasons) == 1 and compiled.call_guard is not None
    return weights, step, compiled


def same_as_eager(step, compiled):
    x = torch.linspace(-1, 1, 8).reshape(4, 2)
    want, got = step(x), compiled(x)
    return all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(want, got, strict=True))


def cut(weights):
    weights[0].data = weights[0].data[:2]  # it begins where it did, with the strides that it had


def turn(weights):
    weights[0].data = weights[0].data.as_strided((3, 2), (1, 3))


def move(weights):
    weights[0].data = weights[0].data.clone() + 1


def swap(weights):
    weights.reverse()


@pytest.mark.parametrize("change", [cut, turn, move, swap])
def test_a_tensor_that_is_other_memory_is_noticed(change):
    weights, step, compiled = pair()
    change(weights)
    assert same_as_eager(step, compiled) and same_as_eager(step, compiled)


def enlarge(w):
    w.grad.mul_(5)


def test_an_attribute_that_goes_over_to_another_tensor_is_noticed():
    weights, step, compiled = pair()
    weights[0].scale = 3.0
    assert same_as_eager(step, compiled) and same_as_eager(step, compiled)
    del weights[0].scale
    weights[1].scale = 3.0
    assert same_as_eager(step, compiled) and same_as_eager(step, compiled)


def test_a_hook_that_goes_over_to_another_tensor_is_noticed():
    weights, step, compiled = pair()

    def double(grad):
        return 2 * grad

    for w in weights:  # both have a table of hooks from now on
        w.register_hook(double).remove()
    handle = weights[0].register_hook(double)
    assert same_as_eager(step, compiled) and same_as_eager(step, compiled)
    handle.remove()
    handle = weights[1].register_hook(double)
    assert same_as_eager(step, compiled) and same_as_eager(step, compiled)
    handle.remove()
    assert same_as_eager(step, compiled) and len(compiled.reasons) == 3
    weights[0].register_post_accumulate_grad_hook(enlarge)
    assert same_as_eager(step, compiled) and same_as_eager(step, compiled)


def test_what_has_attributes_is_compared_by_identity_too():
    weights, _, compiled = pair()
    weights[0]._no_weight_decay = True
    compiled(torch.ones(4, 2))
    assert len(compiled.reasons) == 2 and compiled.program.guards.hold_by_identity()


def test_an_attribute_is_noticed_beside_one_that_was_there():
    weights, step, compiled = pair()
    weights[0]._no_weight_decay = True
    compiled(torch.ones(4, 2))
    del weights[0]._no_weight_decay
    weights[0].scale = 3.0  # as many as before
    assert same_as_eager(step, compiled) and same_as_eager(step, compiled)
