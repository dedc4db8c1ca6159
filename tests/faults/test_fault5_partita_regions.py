"""Fault 5 for regions that partita compiled: does each within a recomputed one get its own results?

As for those that torch compiled (`test_fault5_remat_regions.py`): gradients equal those without
remat, or an error names both calls. Ground truth is the same program without remat.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pt
from tests.programs.checkpointed_regions import (
    Block,
    gradients,
    leaf,
    ranked,
    same_shape_twice,
    scores,
    spread_program,
    squash,
    stretch,
    trains_as_its_twin,
)

Function = Callable[..., Any]


def compiled(fn: Function) -> Any:
    return pt.compile(fn, backend="graph")


class Runs(TorchDispatchMode):
    """Counts how often kernels run."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.of[name] = self.of.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


# -- one of several regions is left out ------------------------------------------------------------


@pytest.mark.parametrize("keep", ["nothing", "all regions", "the first", "the second", "marked"])
def test_a_region_that_the_recompute_leaves_out_does_not_shift_the_others(keep: str):
    regions: list[Any] = []

    def remembered(fn: Function) -> Any:
        regions.append(compiled(fn))
        return regions[-1] if keep != "marked" else pt.one_call(regions[-1])

    program = same_shape_twice(remembered, {})
    inputs = leaf(5, 4), leaf(4, 4), leaf(4, 4)
    truth = gradients(same_shape_twice(lambda fn: fn, {}), *inputs)
    policy = {
        "nothing": None,
        "all regions": regions,
        "the first": [regions[1]],
        "the second": [regions[2]],
        "marked": [torch.mul],
    }[keep]
    program = pt.remat(program, policy)
    for _ in range(3):  # in the first, forward makes the mask and the recompute does not
        torch.testing.assert_close(gradients(program, *inputs), truth)


def test_regions_of_different_shapes_one_left_out():
    mask, first, second = compiled(scores), compiled(squash), compiled(stretch)

    def program_with(remember: dict[str, Tensor], regions: Any) -> Function:
        mask, first, second = regions

        def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            if "mask" not in remember:
                remember["mask"] = mask(x.detach())
            return second(first(x * remember["mask"], w), v)

        return program

    inputs = leaf(5, 4), leaf(4, 6), leaf(6, 3)
    truth = gradients(program_with({}, (scores, squash, stretch)), *inputs)
    for policy in (None, [first], [second], [mask, first]):
        program = pt.remat(program_with({}, (mask, first, second)), policy)
        torch.testing.assert_close(gradients(program, *inputs), truth)


def test_a_region_whose_result_is_kept_is_not_run_again():
    first, second = compiled(squash), compiled(stretch)

    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return second(first(x, w), v).sin()

    inputs = leaf(5, 4), leaf(4, 4), leaf(4, 4)
    gradients(program, *inputs)
    for policy, runs in ([None, (2, 2)], [[first], (1, 2)], [[second], (2, 1)]):
        with Runs() as counted:
            gradients(pt.remat(program, policy), *inputs)
        assert (counted.of["tanh"], counted.of["gelu"]) == runs, policy


def test_regions_of_equal_shapes_in_a_loop_each_get_their_own():
    regions = [compiled(f) for f in (squash, stretch, squash, stretch)]
    weights = [leaf(4, 4) for _ in regions]

    def program(x: Tensor, regions: Any = regions) -> Tensor:
        for region, w in zip(regions, weights, strict=True):
            x = region(x, w) + x
        return x

    x = leaf(5, 4)
    plain = program(x, (squash, stretch, squash, stretch))
    truth = torch.autograd.grad(plain.sum(), [x, *weights])
    for policy in (None, regions[1:3], regions[:1], regions):
        out = pt.remat(program, policy)(x)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), [x, *weights]), truth)


def test_one_region_called_twice_is_left_out_once():
    # The same region, the same shapes, the same line, no parameters to tell the calls apart by.
    def twice(x: Tensor) -> Tensor:
        return (x * 2.0).sin()

    region = compiled(twice)
    for policy in (None, [region]):

        @cache
        def remembered() -> Tensor:
            return region(torch.ones(5))

        def program(x: Tensor, first: Function = remembered) -> Tensor:
            return region(region(x * first()))

        x = leaf(5)
        (truth,) = torch.autograd.grad(twice(twice(x * twice(torch.ones(5)))).sum(), x)
        (ours,) = gradients(pt.remat(program, policy), x)
        torch.testing.assert_close(ours, truth)


# -- a recompute that goes another way -------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
def test_another_region_of_the_same_shape_is_an_error_that_names_both(keeps: bool):
    first, second = compiled(squash), compiled(stretch)
    turn = [0]

    def program(x: Tensor, w: Tensor) -> Tensor:
        turn[0] += 1
        return (first if turn[0] == 1 else second)(x, w).sin()

    out = pt.remat(program, [first, second] if keeps else None)(leaf(5, 4), leaf(4, 4))
    with pytest.raises(pt.RematError, match="makes a call that its forward did not make") as error:
        out.sum().backward()
    text = str(error.value)
    assert "forward    squash(" in text
    assert "recompute  stretch(" in text
    assert text.count("test_fault5_partita_regions.py:") == 2


def test_a_region_that_was_differentiated_and_is_left_out_is_an_error():
    first, second = compiled(squash), compiled(stretch)
    remember: dict[str, Tensor] = {}

    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        if "y" not in remember:
            remember["y"] = first(x, w)
        return second(remember["y"], v)

    out = pt.remat(program)(leaf(5, 4), leaf(4, 4), leaf(4, 4))
    with pytest.raises(pt.RematError, match="leaves out a call whose saved tensors") as error:
        out.sum().backward()
    assert "forward    squash(" in str(error.value)
    assert "recompute  stretch(" in str(error.value)


# -- DTensors, integers beside floats --------------------------------------------------------------


@pytest.mark.parametrize("keep", [[], [0], [1], [0, 1]])
def test_regions_take_and_give_dtensors_with_integers_beside_floats(keep: list[int]):
    plain = torch.randn(6, 4), torch.randn(4, 4), torch.randn(4, 4)
    leaves = [t.clone().requires_grad_() for t in plain]
    truth = gradients(spread_program(ranked, ranked, {}), *leaves)

    def rank(mesh: Any) -> tuple[list[Tensor], dict[str, int]]:
        regions = compiled(ranked), compiled(lambda x, w: ranked(x, w))
        x = pt.distribute_tensor(plain[0], mesh, [pt.Shard(0)]).requires_grad_()
        w, v = (pt.distribute_tensor(t, mesh, [pt.Replicate()]).requires_grad_() for t in plain[1:])
        program = pt.remat(spread_program(*regions, {}), [regions[i] for i in keep] or None)
        loss = program(x, w, v).sum()
        with Runs() as counted:
            loss.backward()
        return [t.grad.full_tensor() for t in (x, w, v)], counted.of

    with pt.ranks(dp=2) as world:
        for ours, runs in world.run(rank):
            torch.testing.assert_close(ours, truth)
            assert runs.get("tanh", 0) == 2 - len(keep)


# -- modules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["remat of a program", "kept", "remat of the module"])
def test_a_compiled_module_keeps_its_masks_and_its_statistics(how: str):
    torch.manual_seed(3)
    block, twin = Block(), Block()
    twin.load_state_dict(block.state_dict())
    pt.compile(block, backend="graph")
    if how == "remat of the module":
        pt.remat(block)

    def program(x: Tensor) -> Tensor:
        return block(block(x).sin())

    if how != "remat of the module":
        wrapped = pt.remat(program, [block] if how == "kept" else None)
    else:
        wrapped = program
    trains_as_its_twin(wrapped, block, twin)


def test_remat_within_a_compiled_module_gives_its_gradients():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = pt.remat(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.inner(x))

    torch.manual_seed(3)
    block = Outer()
    x = leaf(6, 4)
    truth = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    pt.compile(block, backend="graph")
    ours = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    torch.testing.assert_close(ours, truth)
