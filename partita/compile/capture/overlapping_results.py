"""Results that overlap: which of a graph's results show elements of one memory?

Who writes such a result after the step changes the other with it, or what the step was given. So a
pass must leave it as it was: what it makes of one result is no other's, nor an input's.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm.compiled import WAIT

from ..graph_nodes import add_call
from ..node_metadata import NOTE
from .functional_memory import shown_operand

__all__ = ["Pairs", "keep_apart", "overlap", "overlapping_results", "views_of"]

_aten = torch.ops.aten

Pairs = frozenset[frozenset[int]]
"""The places of two results each; of a result that shows an input, its own place and -1 - that of
the input."""


def overlapping_results(graph: fx.Graph) -> Pairs:
    """Which results of a graph overlap, or show an input."""
    return frozenset(_find_overlapping_pairs(graph))


def _find_overlapping_pairs(graph: fx.Graph) -> Iterator[frozenset[int]]:
    (end,) = graph.find_nodes(op="output")
    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    together: dict[fx.Node, list[tuple[int, fx.Node]]] = defaultdict(list)
    for i, node in enumerate(end.args[0]):  # type: ignore[arg-type]
        if isinstance(node, fx.Node):  # else a number
            together[views_of(node)[0]].append((i, node))
    for first, results in together.items():
        if first in inputs:
            yield from (frozenset((i, -1 - inputs[first])) for i, _ in results)
        if len(results) > 1:
            yield from _find_overlaps_within(first, results)


def _find_overlaps_within(
    first: fx.Node, results: list[tuple[int, fx.Node]]
) -> Iterator[frozenset[int]]:
    """The pairs of results, all in the memory that `first` made, that overlap."""
    shown = _replay_views([node for _, node in results], first)
    ordered = sorted(zip(shown, (i for i, _ in results), strict=True), key=_begin_of_view)
    for at, (one, i) in enumerate(ordered):
        for other, j in ordered[at + 1 :]:
            if other.storage_offset() > _last_element_offset(one):  # and so do all behind it
                break
            if _has_common_elements(one, other):
                yield frozenset((i, j))


def _begin_of_view(shown: tuple[torch.Tensor, int]) -> tuple[int, int]:
    return shown[0].storage_offset(), shown[1]  # type: ignore[return-value]


def keep_apart(graph: fx.Graph, before: Pairs) -> None:
    """Copy results that overlap now, and did not in `before`."""
    (end,) = graph.find_nodes(op="output")
    values = list(end.args[0])  # type: ignore[arg-type]
    now = overlapping_results(graph)
    if now <= before:
        return
    for place in sorted({max(pair) for pair in now - before}):
        shown = values[place]
        # At once: what it shows may be an input, into which the graph writes later.
        behind = graph.find_nodes(op="placeholder")[-1] if shown.op == "placeholder" else shown
        with graph.inserting_after(behind):
            values[place] = copy = add_call(graph, _aten.clone.default, (shown,))
        copy.meta["val"] = shown.meta["val"].clone()
        if NOTE in shown.meta:
            copy.meta[NOTE] = shown.meta[NOTE]
    end.args = (values,)


def overlap(one: fx.Node, other: fx.Node) -> bool:
    """Do two nodes show an element of the same memory?"""
    first = views_of(one)[0]
    return first is views_of(other)[0] and _has_common_elements(*_replay_views([one, other], first))


def _replay_views(nodes: list[fx.Node], first: fx.Node) -> list[torch.Tensor]:
    """The parts that nodes show of the memory that `first` made, where they lie in it."""
    value = first.meta["val"]
    with _disable_current_modes(), torch.no_grad():
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        like = like.conj() if value.is_conj() else like  # of which some views are others
        like = torch._neg_view(like) if value.is_neg() else like
        return [_apply_view_calls(like, views_of(node)[1]) for node in nodes]


def _has_common_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (a.numel() and b.numel()):
        return False
    if a.itemsize != b.itemsize:  # not told: elements of one lie across those of the other
        return True
    begin, end = (
        max(a.storage_offset(), b.storage_offset()),
        min(_last_element_offset(a), _last_element_offset(b)),
    )
    if begin > end:
        return False
    with _disable_current_modes(), torch.no_grad():
        marks = torch.zeros(
            max(_last_element_offset(a), _last_element_offset(b)) + 1, dtype=torch.bool
        )
        marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
        return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _last_element_offset(t: torch.Tensor) -> int:
    steps = ((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.storage_offset() + sum(steps)  # type: ignore[return-value]


def views_of(node: fx.Node, known: Container[fx.Node] = ()) -> tuple[fx.Node, list[fx.Node]]:
    """What made the memory that a node shows, and the views from there to the node.

    Args:
        known: nodes at which to stop before that.
    """
    calls: list[fx.Node] = []
    while True:
        if node in known:
            return node, calls
        source, is_written = shown_operand(node)
        if source is None:
            return node, calls
        if not is_written:
            calls.insert(0, node)
        node = source


def _apply_view_calls(shown: Any, calls: list[fx.Node]) -> Any:
    for call in calls:
        target: Any = call.target
        if target is operator.getitem:
            shown = shown[call.args[1]]
        elif target is not WAIT:
            shown = target(shown, *call.args[1:], **call.kwargs)
    return shown
