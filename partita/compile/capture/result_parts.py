"""Parts of a backward: which results of a region go backward together, and in which order?

Results that share a history go backward at once, so that it is gone through once, as in eager. A
result that is made of another one, and shares no other history with it, is in an earlier part: it
gives a gradient to that one, which autograd adds to what comes to it otherwise, shows to hooks, and
hands on to its own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

__all__ = ["ResultPart", "cut_history", "part_results"]

Edge = tuple[Any, int]


@dataclass
class ResultPart:
    """Results that go backward together.

    Attributes:
        results: their numbers.
        ancestors: of the results that these are made of, by way of no other one.
        unheard: of `results`, those of which others in it are made: what comes by way of these does
            not come to them.
    """

    results: list[int]
    ancestors: list[int]
    unheard: list[int] = field(default_factory=list)


def part_results(results: Sequence[torch.Tensor]) -> list[ResultPart]:
    """The parts of the backward of `results`, which have a history, in the order in which they run:
    each before those of its ancestors.

    All are one part where a result and what is made of it have both come of a value that is none:
    its gradient would come in two halves, each to hooks of its own, and all that is behind it be
    gone through twice.
    """
    edges = [edge_of(t) for t in results]
    at = {edge: number for number, edge in reversed([*enumerate(edges)])}
    histories = [_find_history(edge, at) for edge in edges]
    levels = _compute_levels(histories)
    parts: list[tuple[set[Any], ResultPart]] = []
    for number in sorted(range(len(results)), key=lambda n: (levels[n], n)):
        whole, part = set(histories[number].nodes), ResultPart([number], [])
        ancestors = set(histories[number].ancestors)
        for other in [*parts]:  # what two results of one level share is gone through once
            if levels[other[1].results[0]] == levels[number] and not whole.isdisjoint(other[0]):
                parts.remove(other)
                whole |= other[0]
                part.results = sorted([*part.results, *other[1].results])
                ancestors.update(other[1].ancestors)
        part.ancestors = sorted(ancestors)
        parts.append((whole, part))
    if sum(len(nodes) for nodes, _ in parts) > len(set().union(*(nodes for nodes, _ in parts))):
        made_of = set().union(*(history.ancestors for history in histories))
        return [ResultPart([*range(len(results))], [], sorted(made_of))]
    return [part for _, part in parts]


def edge_of(t: torch.Tensor) -> Edge:
    """Where the gradient of a tensor with a history comes in."""
    with Local():
        return t.grad_fn, t.output_nr


@contextmanager
def cut_history(results: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within, a gradient comes to `results`, past their hooks, and goes on no further."""
    handles, hidden = [], []
    try:
        with Local():
            for t in results:
                node, place = edge_of(t)
                handles.append(node.register_prehook(partial(_drop_gradient, place=place)))
                if t._backward_hooks:  # they hear of the whole, when its own part runs
                    hidden.append((t._backward_hooks, dict(t._backward_hooks)))
                    t._backward_hooks.clear()
        yield
    finally:
        for handle in handles:
            handle.remove()
        for hooks, before in hidden:
            hooks.update(before)


def _drop_gradient(grads: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return (*grads[:place], None, *grads[place + 1 :])


@dataclass
class _History:
    """What autograd goes through from a result, up to other results.

    Attributes:
        nodes: but for those that take gradients of leaves.
        ancestors: the numbers of the results where it ends.
    """

    nodes: set[Any]
    ancestors: set[int] = field(default_factory=set)


def _find_history(edge: Edge, results: dict[Edge, int]) -> _History:
    found = _History({edge[0]})  # two results of one call share it
    ahead = [edge[0]]
    while ahead:
        node = ahead.pop()
        for below in node.next_functions:
            if below in results:
                found.ancestors.add(results[below])
            elif below[0] is not None and below[0] not in found.nodes and below[0].next_functions:
                found.nodes.add(below[0])
                ahead.append(below[0])
    return found


def _compute_levels(histories: Sequence[_History]) -> list[int]:
    """For each result how many are made of it, one of the other, at most."""
    levels = [0] * len(histories)
    ahead = [*range(len(histories))]
    while ahead:
        number = ahead.pop()
        for ancestor in histories[number].ancestors:
            if levels[ancestor] <= levels[number]:
                levels[ancestor] = levels[number] + 1
                ahead.append(ancestor)
    return levels
