"""The order of fused kernels: in which order does Inductor run what it has fused?

It brings every write into an input, and so every update of a parameter, to the end of the graph,
where all gradients wait for it, and calls that need little to its beginning. Here all is put into
the order that the passes gave it, and each write to where what it needs is there.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import custom_graph_pass as torchs

from ..ordering import behind_needs

__all__ = ["InOrder"]

# Torch 2.11 has no class of its own for a pass over what is fused, and takes any.
_Pass: Any = getattr(torchs, "CustomSchedulerPass", torchs.CustomGraphPass)


class InOrder(_Pass):  # type: ignore[misc]
    """Runs on what Inductor is to make kernels of, after it has fused.

    Private torch: there is no public hook behind fusion, and before it there is no place for a
    write into an input but the end.
    """

    def uuid(self) -> str:
        """Of this order, for Inductor's keys."""
        return "partita.compile.backend.fused_order 1"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        nodes = _as_in_graph(nodes)
        makers = {name: node for node in nodes for name in node.get_buffer_names()}
        needs = {node: _find_dependencies(node, makers) for node in nodes}
        late = _find_late_kernels(nodes, needs)
        place = {node: i for i, node in enumerate(nodes)}
        ready: dict[Any, int] = {}
        for node in nodes:  # in an order in which what is needed comes first
            places = [ready[n] if n in late else place[n] for n in needs[node]]
            ready[node] = max(places, default=-1)
        behind: dict[int, list[Any]] = {}
        for node in nodes:
            # What reads inputs alone could run at once: it waits for who needs it.
            if node in late and (ready[node] >= 0 or _writes_input(node)):
                behind.setdefault(ready[node], []).append(node)
        done: set[Any] = set()
        order = list(behind_needs(behind.get(-1, []), needs, done))
        for i, node in enumerate(nodes):
            if node not in late and node not in done:
                done.add(node)
                order.append(node)
            order += behind_needs(behind.get(i, []), needs, done)
        assert len(order) == len(nodes)
        return order


def _as_in_graph(nodes: list[Any]) -> list[Any]:
    """In the graph's order, as far as what each needs allows."""
    from torch._inductor.virtualized import V

    graph: Any = V.graph.module.graph
    index = {node: i for i, node in enumerate(graph.nodes)}

    def place_in_graph(node: Any) -> int:
        """Where the graph computes the last of what a kernel computes."""
        parts = [part.node for part in node.get_nodes() if part.node is not None]
        return max((index.get(o, -1) for p in parts for o in p.get_origins()), default=-1)

    makers = {name: node for node in nodes for name in node.get_buffer_names()}
    needs = {node: _find_dependencies(node, makers) for node in nodes}
    return list(behind_needs(sorted(nodes, key=place_in_graph), needs, set()))


def _find_dependencies(node: Any, makers: dict[str, Any]) -> list[Any]:
    found = dict.fromkeys(makers[d.name] for d in node.unmet_dependencies if d.name in makers)
    return [n for n in found if n is not node]


def _writes_input(node: Any) -> bool:
    from torch._inductor.virtualized import V

    inputs = V.graph.graph_inputs
    return any(name in inputs for b in node.get_outputs() for name in b.get_mutations())


def _find_late_kernels(nodes: list[Any], needs: dict[Any, list[Any]]) -> set[Any]:
    """What writes into inputs, and kernels that are there for nothing else."""
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for need in needs[node]:
            users.setdefault(need, []).append(node)
    late: set[Any] = set()
    for node in reversed(nodes):
        made = [b for b in node.get_outputs() if not b.get_mutations()]
        returned = any(user.get_name() == "OUTPUT" for b in made for user in b.users)
        if returned or node.is_extern():
            continue
        if _writes_input(node) or (node in users and late.issuperset(users[node])):
            late.add(node)
    return late
