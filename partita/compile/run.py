"""How does a graph run as it is, node by node?

The collectives of its nodes are carried by the ranks' wires themselves, so that a captured step
runs wherever an eager one does: on process groups, on many ranks of one process, on a dry mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from partita.comm import Ask, Wire
from partita.comm.compiled import all_gather

__all__ = ["COLLECTIVES", "interpreted"]

_functional = torch.ops._c10d_functional
Groups = dict[str, tuple[Wire, tuple[str, ...]]]


def interpreted(graph: fx.GraphModule, groups: Groups) -> Callable[..., Sequence[torch.Tensor]]:
    """A function of the graph's inputs that gives its outputs."""
    return _Run(graph, groups).run


class _Run(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, groups: Groups):
        super().__init__(graph)
        self.extra_traceback = False  # an error says what it is by itself
        self.groups = groups

    def run(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().run(*inputs, **options)
        finally:
            self.env = {}  # what it was given, and what it gave, is not its own to hold
            self.args_iter = iter(())

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        carry = COLLECTIVES.get(target)
        if carry is None:
            return super().call_function(target, args, kwargs)
        return carry(self.groups, *args, **kwargs)


def _all_gather(groups: Groups, x: torch.Tensor, size: int, name: str) -> torch.Tensor:
    wire, axes = groups[name]
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    wire.gather(out, x.contiguous(), axes, Ask("all_gather", None, name))
    return out


def _reduce_scatter(groups: Groups, x: torch.Tensor, op: str, size: int, name: str) -> torch.Tensor:
    wire, axes = groups[name]
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    wire.reduce_scatter(out, x.contiguous(), axes, op, Ask("reduce_scatter", None, name))
    return out


def _all_reduce(groups: Groups, x: torch.Tensor, op: str, name: str) -> torch.Tensor:
    wire, axes = groups[name]
    copy = x.clone(memory_format=torch.contiguous_format)
    return wire.all_reduce(copy, axes, op, Ask("all_reduce", None, name))


def _all_to_all(
    groups: Groups, x: torch.Tensor, get: list[int], send: list[int], name: str
) -> torch.Tensor:
    wire, axes = groups[name]
    rest = x[0].numel() if x.shape[0] else 1
    out = x.new_empty((sum(get), *x.shape[1:]))
    elements = [[n * rest for n in sizes] for sizes in (get, send)]
    wire.all_to_all(out, x.contiguous(), axes, *elements, Ask("all_to_all", None, name))
    return out


def _broadcast(groups: Groups, x: torch.Tensor, src: int, name: str) -> torch.Tensor:
    wire, axes = groups[name]
    out = x.clone(memory_format=torch.contiguous_format)
    flat = out.view(-1)
    wire._broadcast(flat, axes, src, Ask("broadcast", None, name))
    return out


COLLECTIVES: dict[Any, Callable[..., torch.Tensor]] = {
    _functional.all_gather_into_tensor.default: _all_gather,
    all_gather: _all_gather,
    _functional.reduce_scatter_tensor.default: _reduce_scatter,
    _functional.all_reduce.default: _all_reduce,
    _functional.all_to_all_single.default: _all_to_all,
    _functional.broadcast.default: _broadcast,
    _functional.wait_tensor.default: lambda groups, x: x,
}
"""What carries each collective that a graph may have."""
