"""Until when must a gradient wait?"""

from __future__ import annotations

import torch
from torch import fx

from partita.tensor.op_facts import facts_of

from ..node_metadata import note_of
from ..ordering import behind_needs
from ..program import Program

__all__ = ["lifetime"]

_COPY = torch.ops.aten.copy_.default


def lifetime(program: Program) -> str:
    """Each parameter is updated as soon as its gradient is there, and its gradient is freed.

    An optimizer's step comes behind the whole of backward, and goes through the parameters one op
    at a time: all gradients live at once, and then a temporary for every parameter. Here what
    updates one parameter runs together, behind the last of what it reads. Where a norm over all
    gradients scales them, all are waited for, as ever.
    """
    graph = program.graph.graph
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    late: set[fx.Node] = set()
    for n in nodes:
        if n.op == "call_function" and (_is_update(n) or not late.isdisjoint(n.all_input_nodes)):
            late.add(n)
    needs = {n: _find_prerequisites(n, late) for n in late}
    floor = max((place[n] for n in nodes if n.op in ("placeholder", "get_attr")), default=0)
    ready = _find_ready_places(nodes, late, needs, place, floor)
    behind: dict[int, list[fx.Node]] = {}
    for node in nodes:
        returned = any(user.op == "output" for user in node.users)
        if node in late and (node.target is _COPY or returned):
            behind.setdefault(ready[node], []).append(node)
    first = min((place[n] for n in late), default=len(nodes))
    order: list[fx.Node] = []
    done: set[fx.Node] = set()
    for i, node in enumerate(nodes):
        if node.op == "output":
            order += behind_needs([n for n in nodes if n in late], needs, done)
        if node not in late:
            order.append(node)
        order += behind_needs(behind.get(i, []), needs, done)
    moved = sum(ready[n] < first for n in late if n.target is _COPY)
    for node in order:
        graph._root.prepend(node)
    return f"{moved} tensors are updated before backward ends"


def _is_update(node: fx.Node) -> bool:
    return note_of(node).phase == "update" or node.target is _COPY


def _find_prerequisites(node: fx.Node, late: set[fx.Node]) -> list[fx.Node]:
    """What must run before `node`: what it reads and, before an input is written, who reads it."""
    found = list(node.all_input_nodes)
    if node.target is _COPY:
        waiting = [node.args[0]]
        while waiting:
            shown = waiting.pop()
            assert isinstance(shown, fx.Node)
            for user in shown.users:
                if user is not node and user.op != "output":
                    found.append(user)
                    if facts_of(user.target).is_view:
                        waiting.append(user)
    return found


def _find_ready_places(
    nodes: list[fx.Node],
    late: set[fx.Node],
    needs: dict[fx.Node, list[fx.Node]],
    place: dict[fx.Node, int],
    floor: int,
) -> dict[fx.Node, int]:
    """Of each late node the place of the last other node that must run before it."""
    ready = {node: floor for node in nodes if node in late}

    def of(node: fx.Node) -> int:
        return ready[node] if node in late else place[node]

    # Who reads an input may stand behind what writes others: so until nothing changes.
    changing = True
    while changing:
        changing = False
        for node in nodes:
            if node in late:
                now = max((of(n) for n in needs[node]), default=floor)
                if now > ready[node]:
                    ready[node], changing = now, True
    return ready
