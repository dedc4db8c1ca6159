"""Captured steps of which only some calls step an optimizer, and steps without inputs."""

from __future__ import annotations

import collections
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

OPTIMIZERS = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "moments": lambda ps: torch.optim.AdamW(ps, lr=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_only_some_calls_step_shifts_no_argument(name):
    def run(compiled):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(last, *parts):  # more arguments than the optimizer has states
            loss = sum(k * model(part).square().mean() for k, part in enumerate(parts))
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        fast = pt.compile(step, backend="graph") if compiled else step
        parts = [torch.full((2, 3), float(k)) for k in range(8)]
        losses = [fast(call % 2 == 1, *parts).detach() for call in range(6)]
        return losses, [p.detach() for p in model.parameters()]

    for found, want in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, want)


def test_a_step_that_reads_nothing_is_a_graph_too():
    fast = pt.compile(lambda: (torch.arange(3) * 2, 7), backend="graph")
    for _ in range(2):
        found, number = fast()
        assert found.tolist() == [0, 2, 4] and number == 7


def scaled(x, by=torch.full((2, 3), 2.0)):  # noqa: B008
    return x * by


def test_tensors_in_defaults_attributes_of_functions_and_deques_are_inputs():
    def attributed(x):
        return x * attributed.by

    attributed.by = torch.full((2, 3), 2.0)
    last = collections.deque([torch.full((2, 3), 2.0)], maxlen=2)
    x = torch.ones(2, 3)
    for step, held in (
        (scaled, scaled.__defaults__[0]),
        (attributed, attributed.by),
        (lambda x: x * last[0], last[0]),
    ):
        fast = pt.compile(step, backend="graph")
        for _ in range(3):
            held.add_(1.0)
            assert torch.equal(fast(x), step(x))
        assert len(fast.reasons) == 1
    last[0] = torch.full((2, 3), 9.0)
    assert torch.equal(fast(x), x * 9.0)
    attributed.by = torch.full((2, 3), 9.0)
    assert torch.equal(pt.compile(attributed, backend="graph")(x), x * 9.0)


def test_what_a_step_computes_without_autocast_stays_so_where_its_caller_has_it_on():
    def turned(x):
        with torch.autocast("cpu", enabled=False):
            exact = x @ x.t()
        return exact, x @ x

    x = torch.rand(8, 8) * 100
    step = pt.compile(turned, backend="graph")
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            for one, other in zip(step(x), turned(x), strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)


def test_an_operator_of_ones_own_that_writes_is_refused_by_name_and_falls_back():
    @torch.library.custom_op("partita_tests::twice", mutates_args=("x",))
    def twice(x: torch.Tensor) -> None:
        x.mul_(2)

    def step(x):
        y = x + 0
        twice(y)
        return y

    with pytest.raises(pt.LayoutError, match="a custom operator"):
        pt.compile(step, backend="graph")(torch.ones(2))
    with pytest.warns(UserWarning, match="runs eagerly"):
        fast = pt.compile(step, backend="graph", fallback="eager")
        assert fast(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("sections", [None, False])
@pytest.mark.parametrize("message", [(), ('a "number" of %s',)])
def test_compiled_code_checks_a_value_before_it_writes_what_follows(sections, message):
    total = torch.zeros(3)

    def checked(x):
        total.add_(x)
        torch._assert_async(x.min() > 0, *message)
        total.mul_(3)
        return x * 2

    step = pt.compile(checked, sections=sections)
    assert step(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match=message[0] if message else "nonzero"):
        step(-torch.ones(3))
    assert total.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("call", "good", "bad"),
    [
        (lambda x: F.one_hot(x, num_classes=3), [0, 2], [0, 3]),
        (lambda x: F.one_hot(x, 3), [0, 2], [0, -1]),
        (lambda x: torch.ones(1).quantile(x), [0.0, 1.0], [0.0, 1.1]),
        (lambda x: torch.nanquantile(torch.ones(1), x), [0.0, 1.0], [-0.1, 1.0]),
    ],
)
def test_values_that_torch_checks_in_eager_alone_are_checked_in_a_graph(call, good, bad):
    step = pt.compile(call, backend="graph")
    assert torch.equal(step(torch.tensor(good)), call(torch.tensor(good)))
    with pytest.raises(RuntimeError) as eager:
        call(torch.tensor(bad))
    with pytest.raises(RuntimeError, match=re.escape(str(eager.value))):
        step(torch.tensor(bad))


def test_values_are_checked_beside_a_recurrent_layer():
    layer = torch.nn.GRU(4, 4)  # it writes in ways for which the graph is traced once more

    def call(x, classes):
        return layer(x)[0] + F.one_hot(classes, 4)

    step, x = pt.compile(call, backend="graph"), torch.ones(2, 4)
    assert torch.equal(step(x, torch.tensor([0, 3])), call(x, torch.tensor([0, 3])))
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        step(x, torch.tensor([0, 4]))


def test_a_rank_checks_the_classes_of_its_piece():
    def each(mesh):
        step = pt.compile(lambda x: F.one_hot(x, 5), backend="graph")
        x = pt.distribute_tensor(torch.tensor([0, 1, 2, 4, 3]), mesh, [pt.Shard(0)])
        assert step(x).full_tensor().argmax(-1).tolist() == [0, 1, 2, 4, 3]
        assert "0 collectives" in str(step.graph)
        with pytest.raises(RuntimeError, match="smaller than num_classes"):
            step(pt.distribute_tensor(torch.tensor([0, 1, 5, 5, 5]), mesh, [pt.Shard(0)]))

    with pt.ranks(dp=2) as world:
        world.run(each)


@pytest.mark.parametrize("graded", [False, True])
def test_what_torch_checks_of_values_is_checked_in_each_call(graded):
    def checked(x):
        torch._assert_async((x.diagonal() < 9).all())
        return torch.linalg.cholesky(x) + torch.linalg.inv(x)

    step = pt.compile(checked, backend="graph")
    good = torch.eye(3).requires_grad_(graded)
    assert torch.equal(step(good), 2 * torch.eye(3))
    for bad, error in ((-torch.eye(3), "cholesky"), (10 * torch.eye(3), "nonzero")):
        with pytest.raises(RuntimeError, match=error):
            step(bad.requires_grad_(graded))
    assert torch.equal(step(good), 2 * torch.eye(3))
