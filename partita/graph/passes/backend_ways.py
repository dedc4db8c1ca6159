"""Replacement of collectives by the form that their backend uses in eager code.

A backend (`comm/backends`) defines how it gathers and sums in eager code. The graph does the same,
so that a captured step gives the same bits. A reduce-scatter may become an all-to-all and a local
sum in rank order; a small all-reduce may become a gather and a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partita.comm.backends.backend import WayOfSum
from partita.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    all_gather,
    all_to_all,
    sum_of_shares,
)

from ..graph_nodes import is_collective, note_of
from ..program import Program
from .regather import only_moves
from .rewrite import NodeBuilder

_aten = torch.ops.aten

_MOST_ADDITIONS = 8
"""Up to so many shares, each addition is a node, which Inductor fuses. More shares are summed by
one node."""


def backend_ways(program: Program) -> str:
    """Collectives take the form that their backend uses in eager code, so that the bits are equal.

    A gather may become a broadcast by each rank. Partial values may be exchanged and summed in rank
    order. The sum of a reduce-scatter is computed on arrival if other collectives run before its
    first read. So the exchanged values are freed, which are larger by a factor of the number of
    ranks.
    """
    graph = program.graph.graph
    changed = 0
    read_late = _find_read_late(graph)
    for node in list(graph.nodes):
        if node.target not in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
            continue
        wire, axes = program.groups[node.args[-1]]
        n, backend = wire.mesh_size(axes), wire.backend
        if node.target is ALL_GATHER:
            if not backend.gathers_by_broadcast:
                continue
            node.target = all_gather
        elif node.args[1] != "sum" or not node.args[0].meta["val"].is_floating_point():
            continue
        elif node.target is REDUCE_SCATTER:
            if not backend.sums_in_rank_order:
                continue
            _lower_reduce_scatter(graph, node, n, node in read_late)
        elif (way := backend.way_of_sum(node.meta["val"], n)) != "own":
            _lower_all_reduce(graph, node, n, way)
        else:
            continue
        changed += 1
    return f"{changed} collectives are replaced by others that are faster on the backend"


def _find_read_late(graph: fx.Graph) -> set[fx.Node]:
    """Returns the collectives whose result is first read after other collectives."""
    number, count = {}, 0
    for node in graph.nodes:
        count += is_collective(node)
        number[node] = count
    found = set()
    for node in filter(is_collective, graph.nodes):
        reached = [*node.users]
        for user in reached:
            if number[user] > number[reached[0]]:
                found.add(node)
            elif only_moves(user):
                reached += user.users
    return found


def _lower_reduce_scatter(graph: fx.Graph, node: fx.Node, n: int, is_read_late: bool) -> None:
    (wait,) = node.users
    x, name = node.args[0], node.args[-1]
    dtype = node.meta["val"].dtype
    with graph.inserting_before(node):
        begun = NodeBuilder(graph, note_of(node))(all_to_all, x, n, name)
    with graph.inserting_before(wait):
        make = NodeBuilder(graph, note_of(node))
        shares = make(WAIT, begun)
        whole = (
            make(sum_of_shares, shares, n) if is_read_late else _sum_shares(make, shares, n, dtype)
        )
        wait.replace_all_uses_with(whole)


def _lower_all_reduce(graph: fx.Graph, node: fx.Node, n: int, way: WayOfSum) -> None:
    (wait,) = node.users
    x, name, value = node.args[0], node.args[-1], node.meta["val"]
    size, shape = value.numel(), list(value.shape)
    gathers = way == "gather"
    with graph.inserting_before(node):
        make = NodeBuilder(graph, note_of(node))
        flat = make(_aten.reshape.default, x, [-1])
        if gathers:  # one round instead of two: every rank sends its share to all
            begun = make(ALL_GATHER, flat, n, name)
        else:
            if size % n:
                flat = make(_aten.constant_pad_nd.default, flat, [0, -size % n])
            begun = make(all_to_all, flat, n, name)
    with graph.inserting_before(wait):
        make = NodeBuilder(graph, note_of(node))
        whole = _sum_shares(make, make(WAIT, begun), n, value.dtype)
        if not gathers:
            whole = make(WAIT, make(all_gather, whole, n, name))
            if size % n:
                whole = make(_aten.slice.Tensor, whole, 0, 0, size)
        wait.replace_all_uses_with(make(_aten.reshape.default, whole, shape))


def _sum_shares(make: NodeBuilder, shares: fx.Node, n: int, dtype: torch.dtype) -> fx.Node:
    """Returns the sum of n shares that lie end to end, in rank order, in at least 32 bits."""
    if n > _MOST_ADDITIONS:
        return make(sum_of_shares, shares, n)
    rows = make(_aten.view.default, shares, [n, -1])
    narrow = dtype.itemsize < 4
    total: Any = None
    for i in range(n):
        row = make(_aten.select.int, rows, 0, i)
        if narrow:
            row = make(_aten._to_copy.default, row, dtype=torch.float32)
        total = row if total is None else make(_aten.add.Tensor, total, row)
    return make(_aten._to_copy.default, total, dtype=dtype) if narrow else total
