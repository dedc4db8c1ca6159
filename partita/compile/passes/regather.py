"""Which gathered values would wait in memory for backward?"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..graph import is_collective
from ..notes import NOTE, note_of
from ..program import Program

__all__ = ["regather"]

_CHAIN = (
    "wait_tensor view t transpose permute unsqueeze squeeze slice _to_copy cat split "
    "getitem clone expand narrow copy reshape"
).split()


def regather(program: Program) -> str:
    """A parameter that ZeRO gathers for forward is gathered again for backward.

    Without it the gathered weight would live from its forward to its backward: ZeRO-3 would
    silently hold what ZeRO-2 holds. The whole chain is made again, from the shard: its cast, the
    gather, its wait, and the views and casts of what it gave.
    """
    graph = program.graph.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    again = 0
    for gather in [n for n in graph.nodes if is_collective(n)]:
        note = note_of(gather)
        if (note.kind, note.reason, note.phase) != ("all_gather", "gather", "forward"):
            continue
        chain = _chain(gather, order)
        late = [u for n in chain for u in n.users if u not in chain and _is_late(u)]
        if not late:
            continue
        first = min(late, key=order.__getitem__)
        copies = _copied(graph, [*_from_shard(gather), *chain], first)
        for user in late:
            for node in chain:
                if node in user.all_input_nodes:
                    user.replace_input_with(node, copies[node])
        again += 1
    return f"{again} parameters are gathered again for backward"


def _is_late(node: fx.Node) -> bool:
    return note_of(node).phase in ("backward", "update") and node.op == "call_function"


def _chain(gather: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """The gather and what is made of it alone without computing, in order."""
    chain = [gather]
    reached = {gather}
    for node in sorted(_after(gather), key=order.__getitem__):
        if _is_moving(node) and reached.issuperset(node.all_input_nodes):
            chain.append(node)
            reached.add(node)
    return chain


def _from_shard(gather: fx.Node) -> list[fx.Node]:
    """The views and casts that make of a parameter's shard what is gathered, in order.

    A cast shard would wait for backward else.
    """
    found: list[fx.Node] = []
    (node,) = gather.all_input_nodes
    while _is_moving(node) and len(node.all_input_nodes) == 1:
        found.insert(0, node)
        (node,) = node.all_input_nodes
    return found if node.op == "placeholder" else []


def _is_moving(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
    return name in _CHAIN


def _after(node: fx.Node) -> set[fx.Node]:
    """What can be reached from `node` through nodes of a chain's kind."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and _is_moving(user):
                found.add(user)
                waiting.append(user)
    return found


def _copied(graph: fx.Graph, chain: list[fx.Node], before: fx.Node) -> dict[fx.Node, fx.Node]:
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(before):
        for node in chain:
            copy = graph.node_copy(node, lambda n: copies.get(n, n))
            copy.meta[NOTE] = replace(note_of(node), phase="backward", reason="regather")
            copies[node] = copy
    return copies
