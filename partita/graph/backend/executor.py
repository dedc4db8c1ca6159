"""The executor of a graph that is not compiled by Inductor: Python code with a line for each node.

Targets, constants and collectives are bound to names once. The name of a value is deleted after the
last line that reads it.

    v3 = c0(v1, v2); del v1

Collectives run on the ranks' wires, so that a captured step runs wherever an eager step does: on
process groups, on ranks that are threads, on a dry mesh. An all-reduce runs until the graph waits
for it. Other collectives are complete when their line has run. If sections were compiled, the code
calls them and passes constants as inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch
from torch import fx

from partita.comm import PendingWork, Request, Wire
from partita.comm.collective import ALL_REDUCE, WAIT, all_gather, all_gather_pieces
from partita.comm.device import new_empty

from ..graph_nodes import COLLECTIVES, Subgraph, note_of, request_of_collective, subgraph_of
from ..program import Axes, Call, Groups

SectionCall = Callable[[list[Any]], Sequence[torch.Tensor]]
"""A compiled section: takes a list of its inputs, which it empties."""


def make_graph_function(
    graph: fx.GraphModule,
    groups: Groups | None,
    calls: Mapping[Subgraph, SectionCall] | None = None,
) -> Callable[..., Sequence[torch.Tensor]]:
    """Returns a Python function that runs a graph node by node.

    If a call raises an error, a note with the node and the user's line is added to the error. Its
    traceback does not keep the values of the graph alive.

    Args:
        groups: maps the name of each process group in the graph to its wire and axes. None uses
            torch's own collectives.
        calls: the function of each compiled section; other sections become part of the code.
    """
    written = GraphWriter(graph, groups, calls)
    run = written.function()
    nodes = {run.__code__: written.nodes, **written.nodes_of_sections}

    def call_noting_place(*inputs: Any) -> Sequence[torch.Tensor]:
        try:
            found: Sequence[torch.Tensor] = run(inputs)
            return found
        except BaseException as error:
            _note_place(error, nodes)
            raise

    return call_noting_place


def _note_place(error: BaseException, nodes: Mapping[CodeType, Sequence[fx.Node]]) -> None:
    """Adds a note of where an error comes from, and clears the values that the code held."""
    frames = walk_tb(error.__traceback__)
    found = [(frame, line) for frame, line in frames if frame.f_code in nodes]
    for frame, line in found[-1:]:  # within a section, if one was called
        node = nodes[frame.f_code][line - FIRST_LINE]
        if (source := note_of(node).source) and isinstance(error, Exception):
            error.add_note(f"in {node.name} of the captured step, from {source}")
    for frame, _ in found:
        frame.clear()


FILE = "<captured step>"
FIRST_LINE = 3
"""The line of the first node."""


class GraphWriter:
    """Writes a graph as Python code, with one line for each node after two lines at the beginning.

    Args:
        groups: maps the name of each process group in the graph to its wire and axes. None uses
            torch's own collectives, whose operands are kept alive until the graph waits for them.
        calls: the function of each compiled section; other sections become part of the code.
        drops_inputs: True if inputs are freed after their last read. The code then takes its inputs
            in a list, which it empties.

    Attributes:
        names: the name of each node's value.
        nodes: the node of each line, from `FIRST_LINE`.
        nodes_of_sections: the same list for each called section, by the section's code object.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        groups: Groups | None,
        calls: Mapping[Subgraph, SectionCall] | None = None,
        drops_inputs: bool = False,
    ):
        self.graph, self.groups, self.drops_inputs = graph, groups, drops_inputs
        self.nodes_of_sections: dict[CodeType, list[fx.Node]] = {}
        self._calls: dict[Subgraph, SectionCall] = dict(calls or {})
        self._bound: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self._of: dict[Any, str] = {}
        self.names: dict[fx.Node, str] = {}
        self._under_way: set[fx.Node] = set()
        self.nodes: list[fx.Node] = []

    def function(self) -> Callable[[Sequence[Any]], Any]:
        """Writes the whole code of the graph and compiles it to a function.

        The function takes its inputs as one sequence.
        """
        nodes = self.graph.graph.nodes
        inputs = [n for n in nodes if n.op == "placeholder"]
        self.names = {n: f"v{i}" for i, n in enumerate(nodes)}
        given = "".join(f"{self.names[n]}, " for n in inputs)
        emptied = "; inputs.clear()" if self.drops_inputs else ""
        lines = ["def run(inputs):", f" {given}= inputs{emptied}" if given else " pass"]
        dropped = self._find_last_reads(nodes)
        for node in nodes:
            if node.op != "placeholder":
                lines.append(f" {self.statements(node, dropped.get(node, ()))}")
                self.nodes.append(node)
        exec(compile("\n".join(lines), FILE, "exec"), self._bound)
        run: Callable[[Sequence[Any]], Any] = self._bound.pop("run")
        return run

    def statements(self, node: fx.Node, dropped: Iterable[fx.Node]) -> str:
        """Returns the Python code that runs a node and deletes the values that no later node reads.

        Values are deleted after a call, but operands of a section before it. The section gets them
        in a list, which it empties, so that it can free them.

        Args:
            dropped: the nodes whose values no later node reads.
        """
        if (section := subgraph_of(node)) is None:
            return "; del ".join([self.line(node), *(self.names[n] for n in dropped)])
        # In a list, which it empties: so it frees what it is the last to read.
        gone = "".join(f"del {self.names[n]}; " for n in dropped if n is not node)
        name = self.names[node]
        end = f"; del {name}" if node in dropped else ""
        call = self.bind(self.call_of(section))
        return f"taken = {self.text(node.args[1])}; {gone}{name} = {call}(taken){end}"

    def call_of(self, section: Subgraph) -> SectionCall:
        """Returns the function that runs a section.

        This is its compiled code if there is any, otherwise Python code that this writer generates.
        """
        if section not in self._calls:
            written = GraphWriter(section.graph, self.groups, drops_inputs=True)
            self._calls[section] = run = written.function()
            self.nodes_of_sections[run.__code__] = written.nodes
        return self._calls[section]

    def reads(self, node: fx.Node) -> Iterable[fx.Node]:
        """Returns the nodes whose values must not be freed before a node has run.

        These are its operands. For a wait after a collective of torch, they include the
        collective's operands.
        """
        if self.groups is not None or node.target is not WAIT:
            return node.all_input_nodes
        (begun,) = node.all_input_nodes
        if begun.op == "placeholder" or begun.target is all_gather:
            return (begun,)  # which has read its operand by then
        return (begun, *begun.all_input_nodes)

    def line(self, node: fx.Node) -> str:
        """Returns the Python statement that runs a node, without the deletion of values."""
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
            if target is WAIT:  # only an all-reduce may still be running
                is_begun = node.args[0] in self._under_way
                wait = self.bind(_wait_for_collective) if is_begun else ""
                return f"{name} = {wait}({args[0]})"
            if target in COLLECTIVES:
                target, args = self._make_collective(node), args[:1]
        args += [f"{k}={self.text(v)}" for k, v in node.kwargs.items()]
        return f"{name} = {self.bind(_WITHOUT_STRIDES.get(str(target), target))}({', '.join(args)})"

    def _make_collective(self, node: fx.Node) -> Callable[[torch.Tensor], Any]:
        """Returns the function that runs a collective on its operand."""
        wire, axes = self.groups[str(node.args[-1])]  # type: ignore[index]
        request = request_of_collective(node)
        if request.kind in _IN_PLACE:
            if _may_be_under_way(node, wire, axes):
                self._under_way.add(node)
                return partial(_begin_in_copy, wire, axes, request)
            return partial(_run_in_copy, wire, axes, request)
        if node.target is all_gather_pieces:
            sizes: Any = node.args[1]
            return partial(_gather_pieces, wire, axes, request, sizes)
        return partial(_run_into_new, wire, axes, request, node.meta["val"].shape)

    def _find_last_reads(self, nodes: fx.graph._node_list) -> dict[fx.Node, list[fx.Node]]:
        """Returns for each node the values to delete after it: those that no later node reads.

        Inputs are included only if `drops_inputs` is True.
        """
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
                        if read.op != "placeholder" or self.drops_inputs:
                            found.setdefault(node, []).append(read)
        return found

    def text(self, value: Any) -> str:
        """Returns Python code for the operand `value`, which may be a list or a tuple of operands.

        A node is a variable, None or a plain number or text a literal, others a name from `bind`.
        """
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{self.text(v)}, " for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if value is None or (type(value) in (int, bool, float, str) and value == value):
            return repr(value)  # a NaN's text has no sign
        return self.bind(value)

    def bind(self, value: Any) -> str:
        """Names the object `value`, such as a constant, in the generated code. Returns the name."""
        name = self._of.get(id(value))
        if name is None:
            name = self._of[id(value)] = f"c{len(self._of)}"
            self._bound[name] = value  # kept alive, so that its id stays its own
        return name


_WITHOUT_STRIDES = dict.fromkeys(["aten.view.default", "aten._unsafe_view.default"], torch.reshape)
"""Maps the text of an op that may refuse the strides of its operand to an op that then copies."""


# -- collectives -----------------------------------------------------------------------------------


_IN_PLACE = ("all_reduce", "broadcast")
"""The collectives that a wire runs in the memory of their operand."""


def _run_into_new(
    wire: Wire, axes: Axes, request: Request, shape: torch.Size, x: torch.Tensor
) -> torch.Tensor:
    out = new_empty(x, shape)
    wire.run_collective(out, x.contiguous(), axes, request)
    return out


def _gather_pieces(
    wire: Wire, axes: Axes, request: Request, sizes: Sequence[int], x: torch.Tensor
) -> torch.Tensor:
    n = wire.mesh_size(axes)
    out = new_empty(x, n * x.numel())
    for piece, into in zip(x.split(sizes), out.split([n * size for size in sizes]), strict=True):
        wire.run_collective(into, piece, axes, request)
    return out


def _run_in_copy(wire: Wire, axes: Axes, request: Request, x: torch.Tensor) -> torch.Tensor:
    copy = x.clone(memory_format=torch.contiguous_format)
    wire.run_collective(copy, copy, axes, request)
    return copy


def _may_be_under_way(node: fx.Node, wire: Wire, axes: Axes) -> bool:
    """True for an all-reduce that can be waited for later and that needs no other memory."""
    value = node.meta["val"]
    return (
        node.target is ALL_REDUCE
        and node.args[1] == "sum"
        and value.dtype in wire.reduced_dtypes
        and wire.backend.way_of_sum(value, wire.mesh_size(axes)) == "own"
        and all(user.target is WAIT for user in node.users)
    )


def _begin_in_copy(
    wire: Wire, axes: Axes, request: Request, x: torch.Tensor
) -> tuple[torch.Tensor, PendingWork]:
    copy = x.clone(memory_format=torch.contiguous_format)
    return copy, wire.begin_collective(copy, copy, axes, request)


def _wait_for_collective(begun: tuple[torch.Tensor, PendingWork]) -> torch.Tensor:
    out, under_way = begun
    under_way.wait()
    return out


# -- graphs that call compiled sections ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sections:
    """A graph cut into sections (separately compiled parts), and the graph that calls them.

    Attributes:
        outer: a graph with the same inputs and outputs. It contains collectives, views, and a
            `call_subgraph` for each section.
        different: the different sections, in the order of their first call.
        calls: the number of calls of sections.
    """

    outer: fx.GraphModule
    different: list[Subgraph]
    calls: int

    @property
    def nodes(self) -> int:
        """The number of nodes that must be compiled. Equal sections count once."""
        return sum(len(s.graph.graph.nodes) for s in self.different)


# -- constants, which compiled code takes as inputs ------------------------------------------------


def constants_of(graph: fx.GraphModule) -> list[torch.Tensor]:
    """Returns the constant tensors of a graph, in the order in which it reads them."""
    return [getattr(graph, name) for name in names_of_constants(graph)]


def constants_as_inputs(graph: fx.GraphModule) -> None:
    """Turns a graph's constants into additional inputs, behind its other inputs.

    A compiled program that was stored in a file has lost its constants.
    """
    held = graph.graph.find_nodes(op="get_attr")
    names = names_of_constants(graph)
    last = graph.graph.find_nodes(op="placeholder")[-1:]
    for i, name in enumerate(names):
        place = graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before()
        with place:
            given = graph.graph.placeholder(f"constant_{i}")
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
    """Returns a function that calls `call` with its inputs, followed by the graph's constants."""
    constants = constants_of(graph)
    return (lambda *inputs: call(*inputs, *constants)) if constants else call


def names_of_constants(graph: fx.GraphModule) -> list[str]:
    """Returns the attribute names of a graph's constants, in the order in which it reads them."""
    found = graph.graph.find_nodes(op="get_attr", sort=True)
    return list(dict.fromkeys(str(node.target) for node in found))
