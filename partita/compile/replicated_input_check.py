"""The check of replicated inputs: are plain tensors that are used with DTensors equal on all ranks?

A plain tensor beside DTensors is taken as one whole value. Eager compares it the first time that a
line does this. During capture there is no value; so the nodes that lead to these tensors are copied
into a graph of their own, which runs before the step's first run, and before each run under
`check_ranks()`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire, is_alone
from partita.comm.device import accelerator_indices
from partita.layout import Fix, LayoutError
from partita.tensor.dtensor import checksum

from .graph_nodes import copy_node, lazy_graph_module, note_of
from .program import Input

__all__ = ["Compared", "extract_compared"]


@dataclass(eq=False)
class Compared:
    """The plain values that are used with DTensors.

    Attributes:
        graph: computes them.
        inputs: of the graph.
        said: for each value its name ("" if the step makes it) and the user's line.
        wires: for each value, the wire on whose ranks it has to be equal.
    """

    graph: fx.GraphModule
    inputs: list[Input]
    said: list[tuple[str, str]]
    wires: list[Wire]

    def check(self, tensors: Sequence[Any], run: Callable[..., Sequence[torch.Tensor]]) -> None:
        """Raise on all ranks if one of the values differs between two of them.

        Args:
            tensors: the leaves of the call.
            run: runs the graph.
        """
        if all(map(is_alone, self.wires)):  # a dry mesh, whose device may not be there either
            return
        given = [entered(i, tensors) for i in self.inputs]
        with torch.random.fork_rng(devices=accelerator_indices(given)), Local(), torch.no_grad():
            values = run(*given)
        for wire in dict.fromkeys(self.wires):
            mine = [i for i, w in enumerate(self.wires) if w is wire]
            checksums = wire.gather_ints(tuple(n for i in mine for n in checksum(values[i])))
            for rank, theirs in enumerate(checksums):
                for place, i in enumerate(mine):
                    at = slice(3 * place, 3 * place + 3)
                    if theirs[at] != checksums[0][at]:
                        raise _make_difference_error(*self.said[i], rank)


def entered(given: Input, tensors: Sequence[Any]) -> torch.Tensor:
    """The value of an input, padded where its pieces are uneven."""
    x = given.now(tensors)
    return x if given.border is None else given.border.enter(x)


def _make_difference_error(name: str, line: str, rank: int) -> LayoutError:
    what = f"{name}, a plain tensor" if name else "a plain tensor that the step makes,"
    return LayoutError(
        f"compile: {what} next to DTensors, differs between ranks 0 and {rank}",
        place=line,
        reason="a plain tensor is taken as one whole value, equal on every rank",
        fixes=(
            Fix("pt.DTensor.from_local(t, mesh, placements)", "a rank's piece"),
            Fix("pt.distribute_tensor(t, mesh, placements)", "to take rank 0's"),
        ),
    )


def extract_compared(
    made: fx.GraphModule,
    given: Mapping[fx.Node, Input],
    values: Sequence[tuple[fx.Node, Wire]],
    line: str,
) -> Compared | None:
    """Copy what computes `values` in a graph without writes; None where there are none.

    Args:
        given: the graph's inputs by node.
        values: (node, wire) for each; nodes that are erased, being unused, are left out.
        line: the user's line, for values that are inputs.
    """
    there = set(made.graph.nodes)
    values = [(n, w) for n, w in dict.fromkeys(values) if n in there]
    if not values:
        return None
    needed = {n for n, _ in values}
    for node in reversed(made.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    graph, copies = fx.Graph(made), dict[fx.Node, fx.Node]()
    for node in made.graph.nodes:
        if node in needed:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output([copies[n] for n, _ in values])
    return Compared(
        lazy_graph_module(made, graph),
        [i for n, i in given.items() if n in needed],
        [(given[n].name, line) if n in given else ("", _line_of_node(n)) for n, _ in values],
        [w for _, w in values],
    )


def _line_of_node(node: fx.Node) -> str:
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return note_of(node).source
