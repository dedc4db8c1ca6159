"""Gradients of a captured part of a model, for a caller who may call backward on its results.

Backward is traced right after forward into the same graph, so graph passes get both. The gradients
of results become "cotangent" inputs of the graph. Their placements are the duals of the results'
placements.

Results that share autograd history form one `ResultPart`. They go backward together, so that the
history is traversed once, as in eager. If a result is computed from another one and they share no
other history, they are separate parts. The part of the earlier result runs later, because autograd
first sums its gradients and calls its hooks with the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.graph.fake_values import make_distinct
from partita.graph.graph_nodes import NOTE
from partita.graph.program import Input
from partita.tensor.dtensor import as_dtensor
from partita.tensor.tensor_state import Spec

from .graph_inputs import GraphInputs
from .recorder import Recorder

_SPENT = (
    "Trying to backward through the graph a second time",
    "modified by an inplace operation",
)
"""Autograd's messages after a backward has freed a history, or a write has changed it."""


class SpentHistory(Exception):
    """Raised if autograd refuses to go backward, with autograd's message."""


@dataclass(frozen=True)
class Seed:
    """The gradient of a result, where the traced backward begins. It becomes a graph input.

    Attributes:
        node: the name of the gradient's node.
        spec: the spec of the gradient, if the result is a DTensor.
        number: the index of the result.
    """

    node: str
    spec: Spec | None
    number: int


def has_history(value: torch.Tensor) -> bool:
    """True if the caller can call backward on `value`: it requires grad and has a `grad_fn`.

    For a DTensor, partial values must be sums.
    """
    if not requires_grad(value) or not _is_computed(value):
        return False
    spec = getattr(value, "_spec", None)
    return spec is None or all(op == "sum" for _, op in spec.layout.partial)


def asks_gradient(value: torch.Tensor) -> bool:
    """True if `value` requires grad, but backward cannot go through its computation.

    This holds for a leaf, and for a view that was made under `no_grad`.
    """
    return requires_grad(value) and not _is_computed(value)


def requires_grad(value: torch.Tensor) -> bool:
    """True if `value` requires grad. For a DTensor, `requires_grad` of its local tensor is read."""
    with local_ops():
        return value.requires_grad


def _is_computed(value: torch.Tensor) -> bool:
    with local_ops(), suppress(RuntimeError):  # a view made under `no_grad`, with a written base
        return value.grad_fn is not None
    return False


def differentiate(
    results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], recorder: Recorder
) -> tuple[list[Seed], list[torch.Tensor | None]]:
    """Traces backward into the graph: the gradients of `inputs` with respect to `results`.

    The autograd graph is retained.

    Args:
        recorder: the recorder of the capture.

    Returns:
        The seeds (gradients of `results`), and for each of `inputs` its gradient or None.

    Raises:
        SpentHistory: the function has freed the history, or has written a tensor that it needs.
    """
    seeds, values = [], []
    with recorder.behind_forward():
        for number, result in enumerate(results):
            spec = getattr(result, "_spec", None)
            with local_ops(), torch.no_grad():
                value = torch.empty_like(result.detach())
            seeds.append(Seed(recorder.newest_node().name, spec and spec.gradient, number))
            values.append(value if spec is None else as_dtensor(value, spec.gradient))
        try:
            found = torch.autograd.grad(
                results, inputs, values, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if any(message in str(error) for message in _SPENT):
                raise SpentHistory(str(error)) from error
            raise
        with local_ops():
            return seeds, [None if g is None else g.detach() for g in found]


def find_spent(results: Sequence[torch.Tensor], recorder: Recorder) -> dict[int, str]:
    """Returns autograd's message for each result whose backward it refuses, by index.

    The nodes that this adds to the graph have no users.
    """
    found = {}
    for number, result in enumerate(results):
        leaves = find_leaves([result])
        try:
            if leaves:  # else the step has frozen them
                differentiate([result], leaves, recorder)
        except SpentHistory as error:
            found[number] = str(error)
    return found


def make_seeds_inputs(graph: fx.Graph, seeds: Sequence[Seed], inputs: GraphInputs) -> None:
    """Turns the nodes of `seeds` (gradients of results) into inputs of the graph."""
    if not seeds:
        return
    nodes = {n.name: n for n in graph.nodes}
    last = graph.find_nodes(op="placeholder")[-1]
    known: set[int] = set()
    for seed in seeds:
        number, node = seed.number, nodes.get(seed.node)
        if node is None:  # no gradient depends on it: the step has frozen all that it leads to
            continue
        with graph.inserting_after(last):
            last = graph.placeholder(f"cotangent_{number}")
        last.meta = {k: v for k, v in node.meta.items() if k != NOTE}
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        with inputs.mode, local_ops(), torch.no_grad():
            last.meta["val"] = make_distinct(last.meta["val"], known)
            like = last.meta["val"].detach()
        if seed.spec is not None:
            like = as_dtensor(like, seed.spec)
        inputs.add_made(Input(f"gradient {number}", "cotangent", like, number))


# -- parts of a backward ---------------------------------------------------------------------------


_Edge = tuple[Any, int]


@dataclass
class ResultPart:
    """Results whose gradients go backward together, because the results share autograd history.

    Attributes:
        results: the indices of the results.
        ancestors: the indices of results of other parts from which the results of this part are
            computed directly.
        hooks_miss_gradient: the indices in `results` from which other results of the part are
            computed. A hook on such a result does not get the gradient that flows through those
            others.
    """

    results: list[int]
    ancestors: list[int]
    hooks_miss_gradient: list[int] = field(default_factory=list)


def part_results(results: Sequence[torch.Tensor]) -> list[ResultPart]:
    """Groups results that must go backward together; returns the groups in backward's order.

    Take a result and another one that is computed from it. They are in one group if both also
    depend on a third value with a history. Otherwise backward would traverse the third value's
    history twice, each time with a part of its gradient.
    """
    edges = [_edge_of(t) for t in results]
    at = {edge: number for number, edge in reversed([*enumerate(edges)])}
    found = [_find_history(edge, at) for edge in edges]
    histories, ancestors_of = [nodes for nodes, _ in found], [ends for _, ends in found]
    levels = _compute_levels(ancestors_of)
    parts: list[tuple[set[Any], ResultPart]] = []
    for number in sorted(range(len(results)), key=lambda n: (levels[n], n)):
        whole, part = set(histories[number]), ResultPart([number], [])
        ancestors = set(ancestors_of[number])
        for other in [*parts]:  # history that two results of one level share is traversed once
            if levels[other[1].results[0]] == levels[number] and not whole.isdisjoint(other[0]):
                parts.remove(other)
                whole |= other[0]
                part.results = sorted([*part.results, *other[1].results])
                ancestors.update(other[1].ancestors)
        part.ancestors = sorted(ancestors)
        parts.append((whole, part))
    if sum(len(nodes) for nodes, _ in parts) > len(set().union(*(nodes for nodes, _ in parts))):
        made_of = set().union(*ancestors_of)
        return [ResultPart([*range(len(results))], [], sorted(made_of))]
    return [part for _, part in parts]


def _edge_of(t: torch.Tensor) -> _Edge:
    """Returns (node, output number) of the autograd graph, which a tensor's gradient enters."""
    with local_ops():
        return t.grad_fn, t.output_nr


def find_leaves(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns autograd's leaves that require grad and from which `results` are computed."""
    with local_ops():
        ahead = [t.grad_fn for t in results if t.grad_fn is not None]
        seen, leaves = set(ahead), []
        while ahead:
            node = ahead.pop()
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
            below = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= below
            ahead += below
        return [t for t in leaves if t.requires_grad]


@contextmanager
def cut_history(results: Sequence[torch.Tensor]) -> Iterator[None]:
    """Makes backward stop at `results` without running their hooks, inside the `with` block.

    So backward can be traced in parts: from later results to `results`, then from these to the
    inputs.
    """
    handles, hidden = [], []
    try:
        with local_ops():
            for t in results:
                node, place = _edge_of(t)
                handles.append(node.register_prehook(partial(_drop_gradient, place=place)))
                if t._backward_hooks:  # they get the whole gradient when the part of `t` runs
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


def _find_history(edge: _Edge, results: dict[_Edge, int]) -> tuple[set[Any], set[int]]:
    """Returns the autograd nodes behind a result, and the numbers of the results where they end."""
    nodes, ancestors = {edge[0]}, set[int]()  # two results of one call share it
    ahead = [edge[0]]
    while ahead:
        for below in ahead.pop().next_functions:
            if below in results:
                ancestors.add(results[below])
            elif below[0] is not None and below[0] not in nodes and below[0].next_functions:
                nodes.add(below[0])
                ahead.append(below[0])
    return nodes, ancestors


def _compute_levels(ancestors: Sequence[set[int]]) -> list[int]:
    """Returns for each result the length of the longest chain of results computed from it."""
    levels = [0] * len(ancestors)
    ahead = [*range(len(ancestors))]
    while ahead:
        number = ahead.pop()
        for ancestor in ancestors[number]:
            if levels[ancestor] <= levels[number]:
                levels[ancestor] = levels[number] + 1
                ahead.append(ancestor)
    return levels
