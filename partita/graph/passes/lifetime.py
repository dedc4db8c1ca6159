"""Lifetime of gradients: each parameter is updated as soon as its gradient is complete.

The calls of an optimizer's step are moved to directly after the last node of backward that they
need, so that a gradient is freed right after its update.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from partita.tensor.op_facts import facts_of

from ..graph_nodes import note_of, order_by_needs, written_operands
from ..program import Program


def lifetime(program: Program) -> str:
    """Each parameter is updated as soon as its gradient is complete, and the gradient is freed.

    In eager code, an optimizer's step runs after the whole backward, and each of its ops runs over
    all parameters. So all gradients live together, and each op has a temporary for every parameter.
    This pass runs the calls that update one parameter together, directly after the last node that
    they need. If gradients are scaled by a norm over all of them, every update still waits for all
    gradients.
    """
    graph = program.graph.graph
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    calls = [n for n in nodes if n.op == "call_function"]
    writes = {n: written for n in calls if (written := [*written_operands(n)])}
    late: dict[fx.Node, None] = {}  # in order
    for n in calls:
        is_update = n in writes or note_of(n).phase == "update"
        if is_update or not late.keys().isdisjoint(n.all_input_nodes):
            late[n] = None
    needs = {n: _find_prerequisites(n, writes.get(n, ())) for n in late}
    floor = max((place[n] for n in nodes if n.op in ("placeholder", "get_attr")), default=0)
    ready = _find_ready_places(late, needs, place, floor)
    behind: dict[int, list[fx.Node]] = {}
    for node in late:
        if node in writes or any(user.op == "output" for user in node.users):
            behind.setdefault(ready[node], []).append(node)
    first = min((place[n] for n in late), default=len(nodes))
    order: list[fx.Node] = []
    done: set[fx.Node] = set()
    for i, node in enumerate(nodes):
        if node.op == "output":
            order += order_by_needs(late, needs, done)
        if node not in late:
            order.append(node)
        if i in behind:
            order += order_by_needs(behind[i], needs, done)
    moved = sum(len(writes[n]) for n in late if n in writes and ready[n] < first)
    for node in order:
        graph._root.prepend(node)
    return f"{moved} tensors are updated before backward ends"


def _find_prerequisites(node: fx.Node, written: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the nodes before `node`: its operands, and readers of the inputs that it writes."""
    found = list(node.all_input_nodes)
    waiting = [*written]
    while waiting:
        for user in waiting.pop().users:
            if user is not node and user.op != "output":
                found.append(user)
                if facts_of(user.target).is_view:
                    waiting.append(user)
    return found


def _find_ready_places(
    late: Collection[fx.Node],
    needs: dict[fx.Node, list[fx.Node]],
    place: dict[fx.Node, int],
    floor: int,
) -> dict[fx.Node, int]:
    """Returns for each late node the position of the last other node that must run before it.

    The result also has the own position of each node that is not late.
    """
    ready = {**place, **dict.fromkeys(late, floor)}
    # A reader of an input may follow writes of other inputs: repeat until nothing changes.
    changing = True
    while changing:
        changing = False
        for node in late:
            now = max((ready[n] for n in needs[node]), default=floor)
            if now > ready[node]:
                ready[node], changing = now, True
    return ready
