"""Fault 5: does every compiled region within a recomputed one get its own results, and no other's?

Elsewhere the results of all compiled regions stood in one queue: a region that the recompute left
out left its results at the head, and the next region was given them. Here gradients equal those
without remat, or an error names both calls. Ground truth is the same program without remat.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import partita as pt
from tests.programs.checkpointed_regions import (
    Block,
    Function,
    gradients,
    leaf,
    ranked,
    same_shape_twice,
    spread_program,
    squash,
    stretch,
    trains_as_its_twin,
)

# torch's compiler asks every tensor for its gradient, and hides the warning that this gives; from a
# filter that makes warnings errors it cannot hide it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Backend:
    """Compiles to graphs that run eagerly, under autograd as Inductor's do, and counts the runs."""

    def __init__(self) -> None:
        self.runs = 0

    def compile(self, fn: Any) -> Any:
        return torch.compile(fn, backend=self.backend())

    def backend(self) -> Any:
        return aot_autograd(
            fw_compiler=self._forward, bw_compiler=lambda graph, _: make_boxed_func(graph)
        )

    def _forward(self, graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return make_boxed_func(run)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- one of several regions is left out ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["nothing", "all regions", "the first", "the second"])
def test_a_region_that_the_recompute_leaves_out_does_not_shift_the_others(keep: str):
    backend = Backend()
    marks: list[Any] = []

    def marked(fn: Function) -> Function:
        marks.append(pt.one_call(backend.compile(fn)))
        return marks[-1]

    program = same_shape_twice(marked, {})
    inputs = leaf(5, 4), leaf(4, 4), leaf(4, 4)
    truth = gradients(same_shape_twice(lambda fn: fn, {}), *inputs)
    policy = {
        "nothing": None,
        "all regions": marks,
        "the first": [marks[1]],
        "the second": [marks[2]],
    }[keep]
    program = pt.remat(program, policy)
    for _ in range(3):  # in the first, forward makes the mask and the recompute does not
        torch.testing.assert_close(gradients(program, *inputs), truth)


def test_a_region_whose_result_is_kept_is_not_run_again():
    backend = Backend()
    first, second = (pt.one_call(backend.compile(f)) for f in (squash, stretch))

    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return second(first(x, w), v).sin()

    inputs = leaf(5, 4), leaf(4, 4), leaf(4, 4)
    for policy, runs in ([None, 4], [[first], 3], [[second], 3], [[first, second], 2]):
        backend.runs = 0
        gradients(pt.remat(program, policy), *inputs)
        assert backend.runs == runs, policy


@pytest.mark.slow
def test_regions_of_equal_shapes_in_a_loop_each_get_their_own():
    backend = Backend()
    regions = [pt.one_call(backend.compile(f)) for f in (squash, stretch, squash, stretch)]
    weights = [leaf(4, 4) for _ in regions]

    def program(x: Tensor, regions: Any = regions) -> Tensor:
        for region, w in zip(regions, weights, strict=True):
            x = region(x, w) + x
        return x

    x = leaf(5, 4)
    truth = torch.autograd.grad(program(x).sum(), [x, *weights])
    for policy in (None, regions[1:3], regions[:1], regions):
        out = pt.remat(program, policy)(x)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), [x, *weights]), truth)


def test_a_region_in_a_loop_is_left_out_and_the_others_get_their_own():
    # The same region, the same shapes, the same line, no parameters to tell the calls apart by.
    backend = Backend()
    region = pt.one_call(backend.compile(lambda x: (x * 2.0).sin()))
    truth_of = torch.compiler.disable(lambda x: (x * 2.0).sin())
    for policy in (None, [region]):

        @cache
        def remembered() -> Tensor:
            return region(torch.ones(5))

        def program(x: Tensor, first: Function = remembered) -> Tensor:
            return region(region(x * first()))

        x = leaf(5)
        (truth,) = torch.autograd.grad(truth_of(truth_of(x * truth_of(torch.ones(5)))).sum(), x)
        (ours,) = gradients(pt.remat(program, policy), x)
        torch.testing.assert_close(ours, truth)


# -- a recompute that goes another way -------------------------------------------------------------


def test_another_region_of_the_same_shape_is_an_error_that_names_both_lines():
    backend = Backend()
    first, second = backend.compile(squash), backend.compile(stretch)
    turn = [0]

    def program(x: Tensor, w: Tensor) -> Tensor:
        turn[0] += 1
        return (first if turn[0] == 1 else second)(x, w).sin()

    out = pt.remat(program)(leaf(5, 4), leaf(4, 4))
    with pytest.raises(pt.RematError, match="makes a call that its forward did not make") as error:
        out.sum().backward()
    text = str(error.value)
    assert "forward    a compiled region(" in text
    assert "recompute  a compiled region(" in text
    assert text.count("checkpointed_regions.py:") == 2


@pytest.mark.slow
def test_another_kept_region_of_the_same_shape_is_an_error_that_names_both():
    backend = Backend()
    first, second = (pt.one_call(backend.compile(f)) for f in (squash, stretch))
    turn = [0]

    def program(x: Tensor, w: Tensor) -> Tensor:
        turn[0] += 1
        return (first if turn[0] == 1 else second)(x, w).sin()

    out = pt.remat(program, [first, second])(leaf(5, 4), leaf(4, 4))
    with pytest.raises(pt.RematError) as error:
        out.sum().backward()
    assert "forward    squash(" in str(error.value)
    assert "recompute  a compiled region(" in str(error.value)
    for file in ("test_fault5_remat_regions.py:", "checkpointed_regions.py:"):
        assert str(error.value).count(file) == 1


def test_a_region_that_was_differentiated_and_is_left_out_is_an_error_unless_it_is_kept():
    backend = Backend()
    first, second = (pt.one_call(backend.compile(f)) for f in (squash, stretch))

    def program_with(remember: dict[str, Tensor]) -> Function:
        def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            if "y" not in remember:
                remember["y"] = first(x, w)
            return second(remember["y"], v)

        return program

    inputs = leaf(5, 4), leaf(4, 4), leaf(4, 4)
    truth = gradients(program_with({}), *inputs)
    out = pt.remat(program_with({}))(*inputs)
    with pytest.raises(pt.RematError, match="leaves out a call whose saved tensors") as error:
        out.sum().backward()
    assert "forward    a compiled region(" in str(error.value)
    assert "recompute  a compiled region(" in str(error.value)
    # Of a kept region nothing has to be brought but its inputs, which are the region's own here.
    with pytest.raises(pt.RematError, match="leaves out a call") as error:
        gradients(pt.remat(program_with({}), [first]), *inputs)
    assert "squash" in str(error.value)
    del truth


# -- DTensors, integers beside floats --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("keep", [[], [0], [1], [0, 1]])
def test_regions_take_and_give_dtensors_with_integers_beside_floats(keep: list[int]):
    plain = torch.randn(5, 4), torch.randn(4, 4), torch.randn(4, 4)
    truth = gradients(
        spread_program(ranked, ranked, {}), *[t.clone().requires_grad_() for t in plain]
    )

    def rank(mesh: Any) -> tuple[list[Tensor], int]:
        backend = Backend()
        rows, whole = [pt.Shard(0)], [pt.Replicate()]
        regions = []
        for _ in range(2):
            inside = pt.local_map(
                backend.compile(lambda x, w: ranked(x, w)),
                out_placements=(rows, rows),
                in_placements=(rows, whole),
            )
            regions.append(pt.one_call(inside))
        x = pt.distribute_tensor(plain[0], mesh, rows).requires_grad_()
        w, v = (pt.distribute_tensor(t, mesh, whole).requires_grad_() for t in plain[1:])
        program = pt.remat(spread_program(*regions, {}), [regions[i] for i in keep] or None)
        loss = program(x, w, v).sum()
        backend.runs = 0
        loss.backward()
        return [t.grad.full_tensor() for t in (x, w, v)], backend.runs

    with pt.ranks(dp=2) as world:
        for ours, runs in world.run(rank):
            torch.testing.assert_close(ours, truth)
            assert runs == 2 - len(keep)


# -- Inductor, and the option under which the fault was found --------------------------------------


# Inductor's own modules, at first import.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("options", [None, {"wrap_inductor_compiled_regions": True}])
def test_the_reported_program_with_inductor(options: dict[str, Any] | None):
    def compiled(fn: Function) -> Function:
        return torch.compile(fn, options=options)

    program = pt.remat(same_shape_twice(compiled, {}), [torch.mul])
    inputs = leaf(5, 4), leaf(4, 4), leaf(4, 4)
    truth = gradients(same_shape_twice(lambda fn: fn, {}), *inputs)
    torch.testing.assert_close(gradients(program, *inputs), truth)


# -- modules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["torch.compile", "compile()", "torch.compile, kept"])
def test_a_compiled_module_keeps_its_masks_and_its_statistics(how: str):
    torch.manual_seed(3)
    block, twin = Block(), Block()
    twin.load_state_dict(block.state_dict())
    backend = Backend()
    if how == "compile()":
        block.compile(backend=backend.backend())
        compiled: nn.Module = block
    else:
        compiled = backend.compile(block)

    def program(x: Tensor) -> Tensor:
        return compiled(compiled(x).sin())

    wrapped = pt.remat(program, [compiled] if "kept" in how else None)
    trains_as_its_twin(wrapped, block, twin)


def test_a_program_that_contains_a_region_can_be_compiled_itself():
    backend = Backend()

    def program(x: Tensor, w: Tensor) -> Tensor:
        return pt.remat(squash)(x, w).sin() @ w

    inputs = leaf(5, 4), leaf(4, 4)
    torch.testing.assert_close(
        gradients(backend.compile(program), *inputs), gradients(program, *inputs)
    )
    assert backend.runs == 1
