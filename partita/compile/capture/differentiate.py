"""Gradients of a captured function.

Which gradients can the caller of a captured function ask for, and what are they?

A function through whose results no backward has run is a region of a larger model. Its backward is
traced right behind its forward, into the same graph, so that passes see both. Where the gradients
of its results come in the graph gets inputs, "cotangents"; they are laid out by duality.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local

from partita.tensor.dtensor import tagged
from partita.tensor.spec import Spec

from ..node_metadata import NOTE, Recorder
from ..program import Input
from .inputs import GraphInputs

__all__ = [
    "ResultPart",
    "Seed",
    "asks_gradient",
    "cut_history",
    "differentiate",
    "has_history",
    "made_inputs",
    "part_results",
]


_SPENT = (
    "Trying to backward through the graph a second time",
    "modified by an inplace operation",
)
"""What autograd says of a history that a backward, or an update, has used up."""


@dataclass(frozen=True)
class Seed:
    """Where the gradient of a result comes in.

    Attributes:
        node: the name of the node that stands there while the graph is made.
        spec: of the gradient, where the result is a DTensor.
        number: of the result.
    """

    node: str
    spec: Spec | None
    number: int


def has_history(value: torch.Tensor) -> bool:
    """Could a caller of the function that made `value` go backward from it?"""
    if not _requires_grad(value) or not _is_computed(value):
        return False
    spec = getattr(value, "_spec", None)
    return spec is None or all(op == "sum" for _, op in spec.layout.partial)


def asks_gradient(value: torch.Tensor) -> bool:
    """Does it require a gradient without a history, as leaves do, and views under `no_grad`?"""
    return _requires_grad(value) and not _is_computed(value)


def _requires_grad(value: torch.Tensor) -> bool:
    with Local():
        return value.requires_grad


def _is_computed(value: torch.Tensor) -> bool:
    with Local(), suppress(RuntimeError):  # a view made under `no_grad`, of what was written since
        return value.grad_fn is not None
    return False


def differentiate(
    results: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    recorder: Recorder,
    like: Mapping[int, torch.Tensor] | None = None,
    again: bool = False,
) -> tuple[list[Seed], list[torch.Tensor | None]] | None:
    """The gradients of `inputs`, and where those of `results` come in.

    Args:
        again: what is computed here may be asked once more.
        like: gradients of the results as they will be, strides and all; then what is computed here
            may be asked once more, of others.

    Returns:
        None where a backward within the function has used up what they are computed by: there is
        nothing left to give, in eager neither. And where no input has one: a history that begins
        within the function ends there.
    """
    if not inputs:
        return None
    seeds, values = [], []
    with recorder.behind_forward():
        pairs = zip(results, (like or {}).values() or results, strict=True)
        for number, (result, as_given) in enumerate(pairs):
            spec = getattr(result, "_spec", None)
            with Local(), torch.no_grad():
                value = _make_seed_gradient(as_given.detach(), like is not None)
            seeds.append(Seed(recorder.newest().name, spec and spec.gradient, number))
            values.append(value if spec is None else tagged(value, spec.gradient))
        try:
            found = torch.autograd.grad(
                results, inputs, values, retain_graph=again or like is not None, allow_unused=True
            )
        except RuntimeError as error:
            if any(told in str(error) for told in _SPENT):
                return None
            raise
        with Local():
            return seeds, [None if g is None else g.detach() for g in found]


def _make_seed_gradient(like: torch.Tensor, exactly: bool) -> torch.Tensor:
    if not exactly:
        return torch.empty_like(like)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def made_inputs(graph: fx.Graph, seeds: Sequence[Seed], inputs: GraphInputs) -> None:
    """Make inputs of the graph of the nodes at which gradients come in."""
    if not seeds:
        return
    nodes = {n.name: n for n in graph.nodes}
    last = graph.find_nodes(op="placeholder")[-1]
    for seed in seeds:
        number, node = seed.number, nodes[seed.node]
        with graph.inserting_after(last):
            last = graph.placeholder(f"cotangent_{number}")
        last.meta = {k: v for k, v in node.meta.items() if k != NOTE}
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        with inputs.mode, Local(), torch.no_grad():
            like = last.meta["val"].detach()
        if seed.spec is not None:
            like = tagged(like, seed.spec)
        inputs.add_made(Input(f"gradient {number}", "cotangent", like, number))


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
