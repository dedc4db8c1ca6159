"""Does a captured step that reads values go the way of one process, in each call?"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import partita as pt
from tests.programs.refused import each_rank

X = torch.arange(6, dtype=torch.float64).view(3, 2) - 2
CALLS = [X, X + 1, -X, X * float("inf")]
GRIDS = [
    torch.tensor([[n, 2 + k], [n, 3 + k], [n, 1 + k]]) for n, k in ((2, 0), (3, 0), (2, 0), (3, 2))
]


def is_on(flag: Any) -> bool:
    return flag is True


def halved(x: Any) -> Any:
    count = 0
    while x.abs().max() > 1:
        x, count = x / 2, count + 1
    return x + count


def tiles(x: Any, grid: Any) -> Any:
    parts = [torch.ones(h, w, dtype=x.dtype) * x.sum() for h, w in grid.tolist()]
    return torch.cat(parts, 1)


def pieces(x: Any, grid: Any) -> Any:
    sizes = grid[:, 0].tolist()
    parts = torch.split(torch.cat([x, x, x]), [*sizes, 9 - sum(sizes)])
    return torch.cat([part * i for i, part in enumerate(parts)])


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "a branch": lambda x, grid: x * 2 if x.sum() > 3 else x * 3,
    "a branch on item()": lambda x, grid: x * 2 if x.sum().item() > 3 else x * 3,
    "is True": lambda x, grid: x * 2 if is_on((x > 3).any().item()) else x * 3,
    "is True of something else": lambda x, grid: (
        torch._check_tensor_all(x != 12345),
        is_on(None),
        x * 2,
    )[2],
    "is it finite": lambda x, grid: x * 2 if not torch.isfinite(x).all() else x * 3,
    "is it nan": lambda x, grid: x * 2 if torch.isnan(x).any() else x * 3,
    "labels within the vocabulary": lambda x, grid: x * 2 if grid.max() >= 4 else x * 3,
    "shapes by tolist()": tiles,
    "sizes of pieces": pieces,
    "int()": lambda x, grid: x[: int(grid[0, 0])] * 2,
    "a bound": lambda x, grid: x[: grid[0, 0].item()] * 2,
    "a key": lambda x, grid: x * {2: 5, 3: 7}[grid[0, 0].item()],
    "range": lambda x, grid: sum(x * i for i in range(grid[0, 1])),
    "half of a size": lambda x, grid: x[: grid[0, 1].item() // 2] * 2,
    "what a size leaves": lambda x, grid: x[: -grid[0, 1].item() % 3] * 2,
    "a size in parts": lambda x, grid: x[: sum(divmod(grid[0, 1].item(), 3))] * 2,
    "parts of a size": lambda x, grid: x[: sum(divmod(7, grid[0, 1].item()))] * 2,
    "one size by another": lambda x, grid: x[: grid[2, 1].item() // grid[0, 0].item()] * 2,
    "bits": lambda x, grid: x * ((grid[0, 1].item() ^ 5 | 8) & ~grid[0, 0].item()),
    "shifts": lambda x, grid: x[: grid[0, 1].item() >> 1] * (1 << grid[0, 0].item()),
    "range of a half": lambda x, grid: sum(x * i for i in range(grid[0, 1].item() // 2 + 1)),
    "grids in halves": lambda x, grid: tiles(x, grid)[: grid[0, 0].item() // 2],
    "is it even": lambda x, grid: x * 2 if grid.sum().item() % 2 == 0 else x * 3,
    "is it even as computed": lambda x, grid: x * 2 if x.gt(0).sum().item() % 2 else x * 3,
    "a half that is reckoned with": lambda x, grid: x * (grid.sum().item() // 2),
    "a loop": lambda x, grid: halved(x.clamp(-9, 9)),
    "a bool that is returned": lambda x, grid: (x * 2, (x > 3).any().item()),
    "a number that is reckoned with": lambda x, grid: x / grid.sum().item(),
    "torch.cond": lambda x, grid: torch.cond(x.sum() > 3, lambda t: t * 2, lambda t: t * 3, (x,)),
}
SERVED_BY_ONE = ["is True of something else", "a size in parts", "bits"]
SERVED_BY_ONE += ["a half that is reckoned with", "a number that is reckoned with"]
SERVED_BY_THREE = ["shapes by tolist()", "one size by another", "shifts", "grids in halves"]
CAPTURES = (
    dict.fromkeys(PROGRAMS, 2) | dict.fromkeys(SERVED_BY_ONE, 1) | dict.fromkeys(SERVED_BY_THREE, 3)
)
"""The number of captures in the four calls, of each program."""


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, pt.DTensor) else t


def run(name: str, mesh: Any, *layout: Any) -> tuple[list[Any], int]:
    step = pt.compile(PROGRAMS[name], backend="graph")
    found = []
    for x, grid in zip(CALLS, GRIDS, strict=True):
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, [*layout])
            # Over one axis: rows that are cut unevenly twice are refused in a graph.
            rows = [pt.Shard(0), *[pt.Replicate()] * (mesh.ndim - 1)]
            grid = pt.distribute_tensor(grid, mesh, rows)
        found.append(tree_map(whole, step(x, grid)))
    return found, len(step.reasons)


def check(name: str, found: list[Any], captures: int) -> None:
    torch._dynamo.reset()
    truth = [PROGRAMS[name](x, grid) for x, grid in zip(CALLS, GRIDS, strict=True)]
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert captures == CAPTURES[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_plain_tensors_are_read_as_in_one_process(name: str) -> None:
    check(name, *run(name, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_dtensors_are_read_as_in_one_process(name: str) -> None:
    for found in each_rank(lambda mesh: run(name, mesh, pt.Shard(0)), dp=2):
        check(name, *found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(pt.Shard(0), pt.Shard(1)), (pt.Replicate(), pt.Shard(0))])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_read_on_a_mesh_of_two_axes(name: str, layout: Any) -> None:
    for found in each_rank(lambda mesh: run(name, mesh, *layout), dp=2, tp=3):
        check(name, *found)


def test_a_divisor_of_zero_and_a_negative_shift_raise_as_in_python() -> None:
    for step, error in (
        (lambda x, n: x * (5 // n.item()), ZeroDivisionError),
        (lambda x, n: x * (n.item() % n.item()), ZeroDivisionError),
        (lambda x, n: x * (5 >> n.item()), ValueError),
    ):
        fast = pt.compile(step, backend="graph")
        for number in (3, 1):
            assert torch.equal(fast(X, torch.tensor(number)), step(X, torch.tensor(number)))
        with pytest.raises(error):
            fast(X, torch.tensor(0 if error is ZeroDivisionError else -1))


CHAIN = [torch.tensor([3, 0, 5, 1, 2, 4]), torch.tensor([2, 5, 4, 0, 3, 1])]


def follow(x: Any, chain: Any) -> Any:
    """Each read says where the next one is."""
    at = 0
    for _ in range(6):
        at = chain[at].item()
        x = x.repeat(at + 1, 1)[:7] * (at + 1)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(pt.Shard(0),), (pt.Shard(0), pt.Replicate())])
def test_reads_that_follow_from_one_another_do_not_each_begin_a_capture_anew(
    monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    runs: list[Any] = []
    module = importlib.import_module("partita.guards.capture_run")
    trace_once = module.trace_once
    monkeypatch.setattr(module, "trace_once", lambda run: (runs.append(run), trace_once(run))[1])

    def run_chains(mesh: Any) -> list[Any]:
        step, found = pt.compile(follow, backend="graph"), []
        for chain in CHAIN:
            x = pt.distribute_tensor(X, mesh, [pt.Replicate()] * mesh.ndim)
            found.append(whole(step(x, pt.distribute_tensor(chain, mesh, [*layout]))))
        return found

    axes = {"dp": 2, "tp": 2} if len(layout) == 2 else {"dp": 3}
    for found in each_rank(run_chains, **axes):
        assert [*map(torch.equal, found, (follow(X, chain) for chain in CHAIN))] == [True, True]
    per_capture = len(runs) / len(CHAIN) / math.prod(axes.values())
    assert per_capture <= 2


class Counter:
    said = "nothing"


def make_counting_step(counter: Counter) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        if x.sum() > 3:
            counter.said = "big"
        return x * 2

    return step


@pytest.mark.parametrize("first", [0.0, 5.0])
def test_only_a_captures_own_writes_are_undone_if_the_call_takes_another_branch(
    first: float,
) -> None:
    ours, theirs = Counter(), Counter()
    fast, step = pt.compile(make_counting_step(ours), backend="graph"), make_counting_step(theirs)
    for value in (first, 5.0, 5.0, 0.0, 0.0, 5.0, 0.0):
        x = torch.full((2,), value)
        torch.testing.assert_close(fast(x), step(x))
        assert ours.said == theirs.said
    assert len(fast.reasons) == 2


def test_writes_between_a_capture_and_the_first_call_stand() -> None:
    counter = Counter()
    fast = pt.compile(make_counting_step(counter), backend="graph")
    fast.capture(torch.full((2,), 5.0))
    assert counter.said == "nothing"
    counter.said = "set by the caller"
    fast(torch.zeros(2))
    assert counter.said == "set by the caller"


def test_a_training_step_skips_what_is_not_finite() -> None:
    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()
            return loss

        run = pt.compile(step, backend="graph") if compiled else step
        losses = [run(x).detach() for x in (X, X * float("inf"), X, X + 1)]
        return [*losses, *(p.detach() for p in model.parameters())]

    torch.testing.assert_close(train(True), train(False), rtol=1e-9, atol=1e-12, equal_nan=True)


def test_a_number_that_each_step_changes_is_refused_as_a_shape() -> None:
    model = torch.nn.BatchNorm1d(3)

    def step(x: Any) -> Any:
        return model(x) * torch.ones(int(model.num_batches_tracked), 1, 1).sum()

    with pytest.raises(pt.CaptureError, match="reads a value"):
        pt.compile(step, backend="graph")(torch.ones(4, 3))
