"""Constants of a graph: tensors made of Python numbers, which compiled code takes as inputs.

They follow the inputs of the graph. Compiled code that held them would lose them in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["constants_as_inputs", "constants_of", "names_of_constants", "with_constants"]

Call = Callable[..., Sequence[torch.Tensor]]


def constants_of(graph: fx.GraphModule) -> list[torch.Tensor]:
    """The constants of a graph, in the order in which it reads them."""
    return [getattr(graph, name) for name in names_of_constants(graph)]


def constants_as_inputs(graph: fx.GraphModule) -> None:
    """Change a graph so that it takes its constants as inputs, after its own."""
    held = graph.graph.find_nodes(op="get_attr")
    names = names_of_constants(graph)
    last = graph.graph.find_nodes(op="placeholder")[-1:]
    for name in names:
        place = graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before()
        with place:
            given = graph.graph.placeholder(f"constant_{names.index(name)}")
        last = [given]
        for node in held:
            if str(node.target) == name:
                given.meta = dict(node.meta)
                node.replace_all_uses_with(given)
                graph.graph.erase_node(node)
        delattr(graph, name)
    if names:
        graph.recompile()


def with_constants(call: Call, graph: fx.GraphModule) -> Call:
    """A function of the inputs of `graph` alone, of a `call` that takes its constants, too."""
    constants = constants_of(graph)
    if not constants:
        return call

    def call_with_constants(*inputs: Any) -> Sequence[torch.Tensor]:
        return call(*inputs, *constants)

    return call_with_constants


def names_of_constants(graph: fx.GraphModule) -> list[str]:
    """The attribute names of a graph's constants, in the order in which it reads them."""
    found = graph.graph.find_nodes(op="get_attr", sort=True)
    return list(dict.fromkeys(str(node.target) for node in found))
