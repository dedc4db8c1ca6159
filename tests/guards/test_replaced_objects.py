"""Guards after objects were replaced: only what holds or reaches other ones is compared by content,
and what is shared, nested or holds itself is seen to change afterwards, too."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch

import partita as pt


class Holder:
    """What a step reads: `a` and `b`, each of which a change may replace."""

    def __init__(self, a, b):
        self.a, self.b = a, b


def sum_of(value, around=()):
    """A number of all that a value holds; of a container within itself one half."""
    if any(value is outer for outer in around):
        return 0.5
    if isinstance(value, dict):
        return sum(sum_of(v, (*around, value)) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum((i + 1) * sum_of(v, (*around, value)) for i, v in enumerate(value))
    return float(value.sum()) if isinstance(value, numpy.ndarray) else value


def shared():
    both = [1, [2, 3]]
    return Holder(both, both)


def apart():
    return Holder([1, [2, 3]], [1, [2, 3]])


def shared_within():
    inner = [2, 3]
    return Holder([1, inner], {"k": inner})


def of_itself():
    a = [1]
    a.append(a)
    return Holder(a, (a, 2))


def with_array():
    numbers = numpy.ones(2)
    return Holder([numbers, 1], {"n": numbers})


def equal_a(h):
    h.a = copy.deepcopy(h.a)


def equal_b(h):
    h.b = copy.deepcopy(h.b)


def join(h):
    h.b = h.a


def first_of_a(h):
    h.a[0] += 1


def within_a(h):
    h.a[1][0] += 5


def within_b(h):
    (h.b["k"] if isinstance(h.b, dict) else h.b[1])[0] += 7


def array_of_a(h):
    h.a[0][0] += 3


def array_of_b(h):
    h.b["n"][1] += 4


def first_of_tuple(h):
    h.b[0][0] += 2


def equal_but_for_the_tuple(h):
    h.a = [h.a[0]]
    h.a.append(h.a)


def equal_both(h):
    equal_but_for_the_tuple(h)
    h.b = (h.a, 2)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (shared, [equal_a, within_a, within_b, join, within_a, equal_b, within_b, first_of_a]),
        (shared, [equal_b, within_b, equal_a, within_a, equal_b, join, within_b]),
        (apart, [equal_a, within_a, equal_b, within_b, join, within_a]),
        (apart, [join, within_a, equal_a, within_b, within_a]),
        (shared_within, [equal_a, within_b, within_a, equal_b, within_b, within_a, first_of_a]),
        (shared_within, [within_b, equal_b, within_a, equal_a, within_b]),
        (with_array, [equal_a, array_of_a, array_of_b, equal_b, array_of_b, array_of_a]),
        (with_array, [array_of_b, equal_b, array_of_a, equal_a, array_of_b]),
        (of_itself, [first_of_a, equal_both, first_of_a, first_of_tuple]),
        (of_itself, [equal_but_for_the_tuple, first_of_a, first_of_tuple, equal_both]),
    ],
)
def test_a_change_is_seen_after_what_holds_it_was_replaced(make, changes):
    holder, x = make(), torch.ones(2)

    def step(x):
        return x * sum_of(holder.a) + sum_of(holder.b)

    compiled = pt.compile(step, backend="graph")
    for change in (lambda _: None, *changes):
        change(holder)
        for _ in range(2):
            assert torch.equal(compiled(x), step(x)), change.__name__
