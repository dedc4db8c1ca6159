"""Regathering: a parameter that ZeRO gathers is freed between distant uses, and gathered again.

Its users are grouped by the runs in which they stand (`gathered_parameters.Runs`); each group after
the first gets its own copy of the gather, from the shard on. No node frees anything: what runs the
graph drops a value behind its last use (`backend.executor`), so that a copy that ends sooner is
freed sooner.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..graph_nodes import NOTE, copy_node, note_of
from ..program import Program
from .gathered_parameters import GatheredParameter, Runs, is_backward, only_moves

_NEXT = 2
"""A parameter is kept to a use at most so many runs later: across one run of another block."""


def regather(program: Program) -> str:
    """A parameter that ZeRO gathers is let go where other blocks compute, and gathered again.

    Always for backward: otherwise the gathered weight would live from its forward to its backward,
    and ZeRO-3 would silently hold what ZeRO-2 holds. The same holds from one micro-batch to the
    next, and between uses of a tied weight, since `dedupe` has merged their gathers. The whole
    chain is repeated from the shard: its cast, the gather, its wait, and the views and casts of its
    result.
    """
    graph = program.graph.graph
    runs = Runs(graph)
    regathered = backward = 0
    for parameter in runs.found:
        uses = _group_users(parameter, runs)
        for users in uses[1:]:
            _gather_again(graph, parameter, users)
            regathered += 1
            backward += is_backward(users[0])
        if uses:
            _sink_to_first_use(parameter, uses[0][0])
    forward = regathered - backward
    return f"{backward} parameters are gathered again for backward, {forward} for forward"


def _group_users(parameter: GatheredParameter, runs: Runs) -> list[list[fx.Node]]:
    """The users of a parameter, in groups between which it is freed."""
    groups: list[list[fx.Node]] = []
    for user in parameter.users:
        if groups:
            before = groups[-1][-1]
            turned = is_backward(user) and not is_backward(before)
            if (
                not turned
                and runs.number(parameter, user) - runs.number(parameter, before) <= _NEXT
            ):
                groups[-1].append(user)
                continue
        groups.append([user])
    return groups


def _gather_again(graph: fx.Graph, parameter: GatheredParameter, users: list[fx.Node]) -> None:
    late = is_backward(users[0])
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(users[0]):
        for node in [*_from_shard(parameter.gather), *parameter.chain]:
            copies[node] = copy = copy_node(graph, node, lambda n: copies.get(n, n))
            copy.meta[NOTE] = replace(
                note_of(node),
                phase="backward" if late else "forward",
                reason="regather" if late else "gather",
                again=True,
            )
    for user in users:
        for node in parameter.chain:
            if node in user.all_input_nodes:
                user.replace_input_with(node, copies[node])


def _sink_to_first_use(parameter: GatheredParameter, first: fx.Node) -> None:
    """Move the gather to right before its first use, however early its block was entered."""
    moved = [*_from_shard(parameter.gather), *parameter.chain]
    together = set(parameter.chain)
    for node in reversed(moved):
        if together.issuperset(node.users):
            together.add(node)
    for node in moved:
        if node in together:
            first.prepend(node)


def _from_shard(gather: fx.Node) -> list[fx.Node]:
    """The views and casts between a parameter's shard and its gather, in order.

    They are repeated, too: the cast shard would otherwise live until backward.
    """
    found: list[fx.Node] = []
    (node,) = gather.all_input_nodes
    while only_moves(node) and len(node.all_input_nodes) == 1:
        found.insert(0, node)
        (node,) = node.all_input_nodes
    return found if node.op == "placeholder" else []
