"""The check of replicated inputs.

Do ranks hold the same, where a step takes a plain tensor for one whole value?

Eager compares such a tensor the first time that each place of the program does this. While a step
is captured there is no value: what leads to those tensors is kept as a graph of its own, which runs
before the step does for the first time, and each time under `check_ranks()`.
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
from partita.tensor.checksum import checksum

from .graph_nodes import copy_node, lazy_graph_module
from .node_metadata import note_of
from .program import Input

__all__ = ["Compared", "compared"]


@dataclass(eq=False)
class Compared:
    """The plain values that stand next to DTensors.

    Attributes:
        graph: gives them.
        inputs: of the graph.
        said: for each value what it is, and the user's line; `("", line)` of what the step makes.
        wires: for each, where it is the same on every rank.
    """

    graph: fx.GraphModule
    inputs: list[Input]
    said: list[tuple[str, str]]
    wires: list[Wire]

    def check(self, tensors: Sequence[Any], run: Callable[..., Sequence[torch.Tensor]]) -> None:
        """Raise on all ranks if one of the values differs between two of them.

        Args:
            tensors: of the call.
            run: runs the graph.
        """
        if all(map(is_alone, self.wires)):  # a dry mesh, whose device may not be there either
            return
        given = [entered(i, tensors) for i in self.inputs]
        with torch.random.fork_rng(devices=accelerator_indices(given)), Local(), torch.no_grad():
            values = run(*given)
        for wire in dict.fromkeys(self.wires):
            mine = [i for i, w in enumerate(self.wires) if w is wire]
            told = wire.gather_ints(tuple(n for i in mine for n in checksum(values[i])))
            for rank, theirs in enumerate(told):
                for place, i in enumerate(mine):
                    at = slice(3 * place, 3 * place + 3)
                    if theirs[at] != told[0][at]:
                        raise _make_difference_error(*self.said[i], rank)


def entered(given: Input, tensors: Sequence[Any]) -> torch.Tensor:
    """An input of a graph, as the graph takes it: padded where its pieces are uneven."""
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


def compared(
    made: fx.GraphModule,
    given: Mapping[fx.Node, Input],
    values: Sequence[tuple[fx.Node, Wire]],
    line: str,
) -> Compared | None:
    """What leads to `values` in a graph without writes.

    Args:
        given: the graph's inputs.
        values: its nodes, and where each is the same on every rank; those that are gone since,
            because nobody reads them, need not be compared.
        line: the user's, for values that are inputs.
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
