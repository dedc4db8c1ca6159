"""Orders of a graph's nodes: topological, and with writes into inputs as early as they may be."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from .graph_nodes import checks_value
from .memory.storages import Storages

__all__ = ["with_early_writes"]


_COPY = torch.ops.aten.copy_.default


def with_early_writes(graph: fx.Graph, storages: Storages) -> list[fx.Node]:
    """The calls of a graph, each write into an input as early as it may be.

    A write comes after its operands and the last use of the old value, and stays behind the checks
    before it, so that nothing is written where one raises. A `getitem` follows its call directly.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    place: dict[fx.Node, int] = {}  # in the new order; moved nodes share that of their predecessor
    for i, node in enumerate(calls):
        if node.target is operator.getitem:
            i = place.get(node.args[0], i)  # type: ignore[call-overload, arg-type]
        place[node] = i
    used: dict[int, int] = {}  # by storage, the place of its last use
    for node in calls:
        if node.target is not _COPY:
            _record_last_use(used, storages, node.all_input_nodes, place[node])
    written: dict[int, int] = {}
    checked = -1
    for node in calls:
        if checks_value(node):
            checked = place[node]
        if node.target is _COPY:
            into, value = node.args[:2]
            places = [checked, *(used.get(s, -1) for s in storages.of[into])]  # type: ignore[index]
            places += [place.get(n, -1) for n in node.all_input_nodes]
            places += [written.get(s, -1) for s in storages.of[value]]  # type: ignore[index]
            place[node] = max(places)
            _record_last_use(written, storages, [into], place[node])  # type: ignore[list-item]
            _record_last_use(used, storages, node.all_input_nodes, place[node])
    return sorted(calls, key=lambda n: place[n])  # a stable sort


def _record_last_use(
    used: dict[int, int], storages: Storages, nodes: Sequence[fx.Node], place: int
) -> None:
    for node in nodes:
        for s in storages.of[node]:
            used[s] = max(used.get(s, -1), place)
