"""The executor of a graph as it is: straight-line Python that is written from its nodes.

A line for each call, whose targets, constants and collectives are bound once, and a value's name is
dropped behind the last line that reads it. The collectives are carried by the ranks' wires
themselves, so that a captured step runs wherever an eager one does: on process groups, on many
ranks of one process, on a dry mesh. An all-reduce is under way until the graph waits for it; what
else is carried is there when its line has run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import CodeType, TracebackType
from typing import Any

import torch
from torch import fx

from partita.comm import PendingWork, Request, Wire
from partita.comm.graph_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    WAIT,
    all_gather,
    all_to_all,
)
from partita.comm.splits import Splits

from ..node_metadata import note_of

__all__ = ["FILE", "FIRST_LINE", "Groups", "Writing", "function_of", "run_with_places"]

Axes = tuple[str, ...]
Groups = dict[str, tuple[Wire, Axes]]


def function_of(graph: fx.GraphModule, groups: Groups) -> Callable[..., Sequence[torch.Tensor]]:
    """A function of the graph's inputs that gives its outputs.

    An error of a call is noted with the node and with the user's line from which it comes, and
    keeps none of the values that were there.
    """
    return run_with_places(Writing(graph, groups))


def run_with_places(written: Writing) -> Callable[..., Sequence[torch.Tensor]]:
    """The function that was written; an error of it says where it comes from."""
    run, nodes = written.function(), written.nodes

    def call_noting_place(*inputs: Any) -> Sequence[torch.Tensor]:
        try:
            found: Sequence[torch.Tensor] = run(inputs)
            return found
        except BaseException as error:
            _note_place(error, run.__code__, nodes)
            raise

    return call_noting_place


def _note_place(error: BaseException, code: CodeType, nodes: Sequence[fx.Node]) -> None:
    """Say where an error comes from, and let go of what the code held."""
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_frame.f_code is not code:
        at = at.tb_next
    if at is None:
        return
    node = nodes[at.tb_lineno - FIRST_LINE]
    source = note_of(node).source
    if source and isinstance(error, Exception):
        error.add_note(f"in {node.name} of the captured step, from {source}")
    at.tb_frame.clear()


FILE = "<captured step>"
FIRST_LINE = 3
"""The line of the first node."""


class Writing:
    """The code of one graph: one line a node, behind two that begin it.

    Args:
        groups: of the graph's collectives; None for torch to carry these.

    Attributes:
        nodes: by line.
    """

    def __init__(self, graph: fx.GraphModule, groups: Groups | None):
        self.graph, self.groups = graph, groups
        self._bound: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self._of: dict[Any, str] = {}
        self.names: dict[fx.Node, str] = {}
        self._begun: set[fx.Node] = set()
        self.nodes: list[fx.Node] = []

    def function(self) -> Callable[[Sequence[Any]], Any]:
        """It takes its inputs as one sequence."""
        nodes = self.graph.graph.nodes
        inputs = [n for n in nodes if n.op == "placeholder"]
        self.names = {n: f"v{i}" for i, n in enumerate(nodes)}
        given = "".join(f"{self.names[n]}, " for n in inputs)
        lines = ["def run(inputs):", f" {given}= inputs" if given else " pass"]
        dropped = self._last_read(nodes)
        for node in nodes:
            if node.op != "placeholder":
                lines.append(f" {self.statements(node, dropped.get(node, ()))}")
                self.nodes.append(node)
        exec(compile("\n".join(lines), FILE, "exec"), self._bound)
        run: Callable[[Sequence[Any]], Any] = self._bound.pop("run")
        return run

    def statements(self, node: fx.Node, dropped: Iterable[fx.Node]) -> str:
        """What a node does, in one line, and the end of the names that it is the last to read."""
        return "; del ".join([self.line(node), *(self.names[n] for n in dropped)])

    def reads(self, node: fx.Node) -> Iterable[fx.Node]:
        """What has to be there until a node has run."""
        return node.all_input_nodes

    def line(self, node: fx.Node) -> str:
        target: Any = node.target
        if node.op == "output":
            return f"return {self.text(node.args[0])}"
        name = self.names[node]
        if node.op == "get_attr":
            return f"{name} = {self.bind(getattr(self.graph, str(target)))}"
        args = [self.text(a) for a in node.args]
        if target is operator.getitem:
            return f"{name} = {args[0]}[{args[1]}]"
        if self.groups is not None:
            if target is WAIT:  # what wires carry otherwise is there when they return
                begun = node.args[0] in self._begun
                return (
                    f"{name} = {self.bind(_wait_for_collective)}({args[0]})"
                    if begun
                    else f"{name} = {args[0]}"
                )
            carry: Any = _COLLECTIVES.get(target)
            if carry is not None:
                wire, axes = self.groups[str(node.args[-1])]
                if _may_be_under_way(node, wire, axes):
                    carry = _begin_all_reduce
                    self._begun.add(node)
                target, args = partial(carry, wire, axes, *node.args[1:]), args[:1]
        args += [f"{k}={self.text(v)}" for k, v in node.kwargs.items()]
        return f"{name} = {self.bind(target)}({', '.join(args)})"

    def _last_read(self, nodes: fx.graph._node_list) -> dict[fx.Node, list[fx.Node]]:
        """What each node is the last to read; itself where nobody reads it. Inputs are others'."""
        found: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(nodes):
            if node.op == "output":
                seen.update(node.all_input_nodes)
            elif node.op == "call_function":
                if not node.users:
                    found.setdefault(node, []).append(node)
                for read in self.reads(node):
                    if read not in seen:
                        seen.add(read)
                        if read.op != "placeholder":
                            found.setdefault(node, []).append(read)
        return found

    def text(self, value: Any) -> str:
        """An operand, as the code names it."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{self.text(v)}, " for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if value is None or type(value) in (int, bool, float, str):
            return repr(value)
        return self.bind(value)

    def bind(self, value: Any) -> str:
        """The name under which the code finds an object."""
        name = self._of.get(id(value))
        if name is None:
            name = self._of[id(value)] = f"c{len(self._of)}"
            self._bound[name] = value  # which keeps it, and its identity its own
        return name


# -- collectives -----------------------------------------------------------------------------------


def _all_gather(wire: Wire, axes: Axes, size: int, name: str, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    wire.gather(out, x.contiguous(), axes, Request("all_gather", None, name))
    return out


def _reduce_scatter(
    wire: Wire, axes: Axes, op: str, size: int, name: str, x: torch.Tensor
) -> torch.Tensor:
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    wire.reduce_scatter(out, x.contiguous(), axes, op, Request("reduce_scatter", None, name))
    return out


def _all_reduce(wire: Wire, axes: Axes, op: str, name: str, x: torch.Tensor) -> torch.Tensor:
    copy = x.clone(memory_format=torch.contiguous_format)
    return wire.all_reduce(copy, axes, op, Request("all_reduce", None, name))


def _may_be_under_way(node: fx.Node, wire: Wire, axes: Axes) -> bool:
    """Is it an all-reduce that is waited for, and that keeps nothing but its result meanwhile?"""
    value = node.meta["val"]
    return (
        node.target is ALL_REDUCE
        and node.args[1] == "sum"
        and value.dtype in wire.reduced_dtypes
        and wire.backend.way_of_sum(value, wire.mesh_size(axes)) == "own"
        and all(user.target is WAIT for user in node.users)
    )


def _begin_all_reduce(
    wire: Wire, axes: Axes, op: str, name: str, x: torch.Tensor
) -> tuple[torch.Tensor, PendingWork]:
    copy = x.clone(memory_format=torch.contiguous_format)
    return copy, wire._start_all_reduce(copy, axes, Request("all_reduce", None, name))


def _wait_for_collective(begun: tuple[torch.Tensor, PendingWork]) -> torch.Tensor:
    out, under_way = begun
    under_way.wait()
    return out


def _all_to_all(
    wire: Wire, axes: Axes, get: list[int], send: list[int], name: str, x: torch.Tensor
) -> torch.Tensor:
    rest = x[0].numel() if x.shape[0] else 1
    out = x.new_empty((sum(get), *x.shape[1:]))
    got, sent = [Splits.of(sizes).times(rest) for sizes in (get, send)]
    wire.all_to_all(out, x.contiguous(), axes, got, sent, Request("all_to_all", None, name))
    return out


def _even_all_to_all(wire: Wire, axes: Axes, size: int, name: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    each = Splits.evenly(size, x.numel() // size)
    wire.all_to_all(out, x.contiguous(), axes, each, each, Request("all_to_all", None, name))
    return out


def _broadcast_copy(wire: Wire, axes: Axes, src: int, name: str, x: torch.Tensor) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    flat = out.view(-1)
    wire._broadcast(flat, axes, src, Request("broadcast", None, name))
    return out


_COLLECTIVES: dict[Any, Callable[..., torch.Tensor]] = {
    ALL_GATHER: _all_gather,
    all_gather: _all_gather,
    all_to_all: _even_all_to_all,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_REDUCE: _all_reduce,
    ALL_TO_ALL: _all_to_all,
    BROADCAST: _broadcast_copy,
}
"""What carries each collective that a graph may have: bound but for the tensor that it carries."""
