"""Regathering: which gathered values would wait in memory until they are used again?"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..graph_nodes import copy_node
from ..node_metadata import NOTE, note_of
from ..program import Program
from .gathered import GatheredParameter, Runs, is_backward, only_moves

__all__ = ["regather"]

_NEXT = 2
"""So many runs further a value may still be kept: the one between has no other to wait for."""


def regather(program: Program) -> str:
    """A parameter that ZeRO gathers is let go where other blocks compute, and gathered again.

    Always for backward: without it the gathered weight would live from its forward to its backward,
    and ZeRO-3 would silently hold what ZeRO-2 holds. So it would from one micro-batch to the next,
    and from one use of a tied weight to the other, since what is gathered twice is carried once.
    The whole chain is made again, from the shard: its cast, the gather, its wait, and the views and
    casts of what it gave.
    """
    graph = program.graph.graph
    runs = Runs(graph)
    again = backward = 0
    for one in runs.found:
        uses = _group_users(one, runs)
        for users in uses[1:]:
            _gather_again(graph, one, users)
            again += 1
            backward += is_backward(users[0])
        if uses:
            _sink_to_first_use(one, uses[0][0])
    return f"{backward} parameters are gathered again for backward, {again - backward} for forward"


def _group_users(one: GatheredParameter, runs: Runs) -> list[list[fx.Node]]:
    """Its users, in groups between which it is let go."""
    groups: list[list[fx.Node]] = []
    for user in one.users:
        if groups:
            before = groups[-1][-1]
            turned = is_backward(user) and not is_backward(before)
            if not turned and runs.number(one, user) - runs.number(one, before) <= _NEXT:
                groups[-1].append(user)
                continue
        groups.append([user])
    return groups


def _gather_again(graph: fx.Graph, one: GatheredParameter, users: list[fx.Node]) -> None:
    late = is_backward(users[0])
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(users[0]):
        for node in [*_from_shard(one.gather), *one.chain]:
            copies[node] = copy = copy_node(graph, node, lambda n: copies.get(n, n))
            copy.meta[NOTE] = replace(
                note_of(node),
                phase="backward" if late else "forward",
                reason="regather" if late else "gather",
                again=True,
            )
    for user in users:
        for node in one.chain:
            if node in user.all_input_nodes:
                user.replace_input_with(node, copies[node])


def _sink_to_first_use(one: GatheredParameter, first: fx.Node) -> None:
    """Have it gathered right before it is first used, however early its block was entered."""
    moved = [*_from_shard(one.gather), *one.chain]
    together = set(one.chain)
    for node in reversed(moved):
        if together.issuperset(node.users):
            together.add(node)
    for node in moved:
        if node in together:
            first.prepend(node)


def _from_shard(gather: fx.Node) -> list[fx.Node]:
    """The views and casts that make of a parameter's shard what is gathered, in order.

    A cast shard would wait for backward else.
    """
    found: list[fx.Node] = []
    (node,) = gather.all_input_nodes
    while only_moves(node) and len(node.all_input_nodes) == 1:
        found.insert(0, node)
        (node,) = node.all_input_nodes
    return found if node.op == "placeholder" else []
