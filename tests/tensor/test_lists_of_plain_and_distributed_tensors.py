"""Foreach functions of lists in which plain tensors stand beside DTensors, eagerly and captured."""

from __future__ import annotations

import pytest
import torch

import partita as pt

FUNCTIONS = {
    "add a number": lambda x: torch._foreach_add(x, 1.0),
    "add a number by name": lambda x: torch._foreach_add(self=x, scalar=1.0),
    "add numbers": lambda x: torch._foreach_add(x, [1.0, 2.0]),
    "add a list by name": lambda x: torch._foreach_add(x, other=x, alpha=2),
    "lerp by name": lambda x: torch._foreach_lerp(x, tensors1=x[:], weight=0.3),
    "addcdiv by names": lambda x: torch._foreach_addcdiv(x, x, tensor2=x, scalars=[1.0, 2.0]),
    "addcmul by a tensor": lambda x: torch._foreach_addcmul(x, x, x, torch.tensor([0.5, 0.7])),
    "maximum of a number": lambda x: torch._foreach_maximum(x, 1.0),
    "norm": lambda x: torch._foreach_norm(self=x, ord=1),
    "in place": lambda x: torch._foreach_mul_(self=[*torch._foreach_neg(x)], other=x) or x,
    "sqrt of a tuple": lambda x: torch._foreach_sqrt(tuple(x)),
}
PLACEMENTS = [pt.Shard(0), pt.Replicate(), pt.Partial()]


def whole(t):
    return t.full_tensor() if isinstance(t, pt.DTensor) else t


def gradients_and_results(function, tensors):
    found = [whole(t) for t in function(tensors)]
    if found[0].requires_grad:
        sum((t * (i + 1)).sum() for i, t in enumerate(found)).backward()
        found += [whole(t.grad) for t in tensors]
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_place_of_a_mixed_list_is_what_one_device_gives(name):
    function = FUNCTIONS[name]
    plain, other = torch.linspace(2, 3, 4), torch.linspace(1, 2, 5)  # one element is 1
    trains = name != "addcmul by a tensor"  # torch has no gradient of it

    def lists(mesh=None, placement=None):
        there = other.clone()
        if mesh is not None:
            there = pt.distribute_tensor(other, mesh, [placement])
        return [t.requires_grad_(trains) for t in (plain.clone(), there)]

    def run(mesh, placement, compiled, turn):
        called = pt.compile(function, backend="graph") if compiled else function
        found = gradients_and_results(called, lists(mesh, placement)[::turn])
        return [t.detach() for t in found]

    with pt.ranks(dp=2) as world:
        for turn in (1, -1):
            wanted = [t.detach() for t in gradients_and_results(function, lists()[::turn])]
            for placement in PLACEMENTS:
                for compiled in (False, True) if placement is PLACEMENTS[0] else (False,):
                    (found, _) = world.run(run, placement, compiled, turn)
                    torch.testing.assert_close(found, wanted)


UNUSED = {
    "mul": lambda x, z: torch._foreach_mul([x, z], 0.5)[0],
    "two calls": lambda x, z: torch._foreach_add([torch._foreach_mul([x, z], 0.5)[0]] * 2, 1)[0],
    "lists": lambda x, z: torch._foreach_mul([x, z], [x, z])[0],
    "exp": lambda x, z: torch._foreach_exp([x, z])[0],
    "in place": lambda x, z: _add_in_place([x * 1, z])[0],
    "norm": lambda x, z: torch._foreach_norm([x, z])[0],
}


def _add_in_place(tensors):
    torch._foreach_add_(tensors, 1.0)
    return tensors


def _gradients_of_an_unused_result(call, mesh=None):
    whole = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    x, y = whole.clone(), whole.clone()
    if mesh is not None:
        x, y = (pt.distribute_tensor(t, mesh, [pt.Shard(d)]) for d, t in enumerate((x, y)))
    x.requires_grad_(), y.requires_grad_()
    call(x, x * y).sum().backward()
    return (x.grad if mesh is None else x.grad.full_tensor()), y.grad


@pytest.mark.parametrize("name", UNUSED)
def test_an_operand_of_an_unused_result_has_no_gradient(name):
    wanted, none = _gradients_of_an_unused_result(UNUSED[name])
    assert none is None
    with pt.ranks(dp=2) as world:
        for found, none in world.run(lambda m: _gradients_of_an_unused_result(UNUSED[name], m)):
            torch.testing.assert_close(found, wanted)
            assert none is None
