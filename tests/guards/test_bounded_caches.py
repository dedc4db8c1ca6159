"""Does a captured step that calls a function of `functools.lru_cache` compute what eager does?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import partita as pt

X = torch.ones(3, dtype=torch.float64)


def make_scale(most: int | None) -> tuple[dict[str, float], Any]:
    table = {"k": 2.0}

    @functools.lru_cache(maxsize=most)
    def scale(n: int) -> float:
        return table["k"] * n

    return table, scale


def list_results(
    most: int | None, compiled: bool, between: Callable[[dict[str, float], Any, int], object]
) -> tuple[list[float], int]:
    table, scale = make_scale(most)
    between(table, scale, -1)

    def step(x: Any) -> Any:
        return x * scale(3)

    run = pt.compile(step, backend="graph") if compiled else step
    found = []
    for i in range(5):
        found.append(float(run(X)[0]))
        between(table, scale, i)
    return found, len(run.reasons) if compiled else 0  # type: ignore[attr-defined]


def drop_between(table: Any, scale: Any, i: int) -> None:
    if i >= 0:
        for k in range(8):
            scale(100 * (i + 1) + k)


def fill_before(table: Any, scale: Any, i: int) -> None:
    if i < 0:
        for k in range(8):
            scale(100 + k)


def keep_between(table: Any, scale: Any, i: int) -> None:
    scale(100 + i)
    scale(3)


def outdate(table: Any, scale: Any, i: int) -> None:
    """Keep a result of before a change of what it was made of, and drop it after two calls."""
    if i < 0:
        scale(3)
        table["k"] = 5.0
    if i == 1:
        drop_between(table, scale, i)


def change_and_drop(table: Any, scale: Any, i: int) -> None:
    if i == 1:
        table["k"] = 5.0
        drop_between(table, scale, i)


def clear(table: Any, scale: Any, i: int) -> None:
    if i == 1:
        table["k"] = 5.0
        scale.cache_clear()


def replace_result(table: Any, scale: Any, i: int) -> None:
    """Have the cache hold a result that differs from what the step would compute."""
    if i == 1:
        scale.cache_clear()
        table["k"] = 5.0
        scale(3)
        table["k"] = 2.0


WAYS = [drop_between, fill_before, keep_between, outdate, change_and_drop, clear, replace_result]


@pytest.mark.parametrize("most", [1, 4, None])
@pytest.mark.parametrize("between", WAYS)
def test_a_step_with_a_cached_function_computes_what_eager_does(between: Any, most: Any) -> None:
    found, captures = list_results(most, True, between)
    assert found == list_results(most, False, between)[0]
    assert captures <= (2 if between in (outdate, change_and_drop, clear, replace_result) else 1)


def test_a_cache_that_holds_dictionaries_is_read() -> None:
    @functools.lru_cache(maxsize=2)
    def find(n: int) -> dict[str, int]:
        return {"n": n}

    fast = pt.compile(lambda x: x * find(3)["n"], backend="graph")
    for i in range(4):
        assert float(fast(X)[0]) == 3.0
        find(10 + i)
    assert len(fast.reasons) == 1
