"""Nodes of FX graphs: how they are added, copied, dropped and ordered; notes; subgraphs.

Two slow parts of FX are replaced here. `fx.Graph` searches the operands of each new call for
symbolic numbers, which is half the cost of a node. A captured graph has none, so operands are
assigned afterwards. `fx.GraphModule` generates Python code whenever its graph is set. The code does
not run between capture and the last pass, so here it is generated on first use.

A `Note` has the user's line, the phase and the redistribution of a node. A `Subgraph` is called by
a node, and equal parts of a graph are calls of one subgraph:

    call = call_subgraph(part, [x, weight])       y = call[0]
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx import _lazy_graph_module

from partita.comm import Request
from partita.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    Splits,
    all_gather,
    all_gather_pieces,
    all_to_all,
)
from partita.tensor.op_facts import OpFacts, declare_facts, facts_of

_COPY = torch.ops.aten.copy_.default
_GRAPH = fx.Graph()


# -- where a node comes from -----------------------------------------------------------------------


NOTE = "partita"
"""The key of the note in a node's `meta`."""

BLOCK_RESULT = "result of a block"
"""A key in the `meta` of each node whose value a block returns. To keep a memory budget,
`passes.remat` recomputes such results last.
"""


BLOCK = "block"
"""A key in a traced node's `meta`. Its value is the number of the block call with that node."""


@dataclass(frozen=True)
class Note:
    """Where a node of a captured graph comes from: the user's line, the phase, the redistribution.

    Attributes:
        source: the user's "file:line".
        phase: "forward", "backward" or "update" (inside an optimizer's step).
        layout: the layout of the value, if it is a DTensor.
        kind, axes, nbytes, op, reason, before, after: the redistribution (move) to which the node
            belongs, as in a ledger's `Record`. If there is none, `kind` is "".
        move: the number of the move in the step; 0 for none.
        region: the number of the call of a `pt.remat` region; 0 outside.
        kept: True if the region's policy saves the value.
        again: True if a pass added the node, to recompute or regather a value of forward. Its
            `reason` is "free" if it is fused into the kernel that reads it (`free_remat`).
    """

    source: str = ""
    phase: str = "forward"
    layout: str = ""
    kind: str = ""
    axes: tuple[str, ...] = ()
    nbytes: int = 0
    op: str = ""
    reason: str = ""
    before: str = ""
    after: str = ""
    move: int = 0
    region: int = 0
    kept: bool = False
    again: bool = False


def note_of(node: fx.Node) -> Note:
    """Returns the `Note` of a node (user's line, phase, ...); an empty one if it has none."""
    found: Note = node.meta.get(NOTE, NO_NOTE)
    return found


NO_NOTE = Note()


# -- calls that are added, copied and compared -----------------------------------------------------

# As `node.args = args`, without `fx.Node.__setattr__`: that removes the node from the table of
# `find_nodes` and inserts it again, which takes half the time of making a node.
_set_args: Callable[[fx.Node, Any], None] = fx.Node.args.__set__  # type: ignore[attr-defined]
_set_kwargs: Callable[[fx.Node, Any], None] = fx.Node.kwargs.__set__  # type: ignore[attr-defined]


def add_call(
    graph: fx.Graph, target: Any, args: Any = (), kwargs: Any = None, name: str | None = None
) -> fx.Node:
    """Adds a call at the graph's insertion point, like `fx.Graph.call_function`, and returns it.

    Args:
        target, args, kwargs: the op or function of the call, and its arguments.
        name: the name of the node; None for a name made from `target`.
    """
    node = graph.create_node("call_function", target, name=name or name_of_call(target))
    _set_args(node, args)
    if kwargs:
        _set_kwargs(node, kwargs)
    return node


def add_input(graph: fx.Graph, name: str) -> fx.Node:
    """Adds an input with this name at the graph's insertion point, like `fx.Graph.placeholder`."""
    return graph.create_node("placeholder", name, name=name)  # without `name`, fx derives one


@lru_cache(maxsize=4096)
def name_of_call(target: Any) -> str:
    """Returns fx's name for a node with this target, before it appends a number. Private torch."""
    found: str = _GRAPH._target_to_str(target)
    return found


def copy_node(
    graph: fx.Graph, node: fx.Node, of: Callable[[fx.Node], Any], name: str | None = None
) -> fx.Node:
    """Adds a copy of a node to `graph`, like `fx.Graph.node_copy`, and returns it.

    Args:
        of: a function that returns the copy of an operand.
        name: the name of the copy; by default the name of the node. If `graph` already has this
            name, fx appends a number.
    """
    made = graph.create_node(node.op, node.target, name=name or node.name, type_expr=node.type)
    _set_args(made, fx.node.map_arg(node.args, of))
    if node.kwargs:
        _set_kwargs(made, fx.node.map_arg(node.kwargs, of))
    made.meta.update(node.meta)
    return made


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Returns a copy of a graph, its output included."""
    made, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        of[node] = copy_node(made, node, of.__getitem__)
    return made


def extract_graph(
    module: fx.GraphModule, nodes: Collection[fx.Node], gives: Iterable[fx.Node]
) -> fx.GraphModule:
    """Returns a module that computes the values of the nodes `gives`.

    Args:
        module: the module with the graph that has the nodes.
        nodes: the nodes to copy; those that `gives` does not need are left out.
        gives: the nodes whose values the new module returns.
    """
    graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node in nodes:
            of[node] = copy_node(graph, node, of.__getitem__)
    graph.output([of[n] for n in gives])
    drop_unused(graph)
    return lazy_graph_module(module, graph)


def key_of_operands(value: Any) -> Any:
    """Returns a hashable key of a call's operands, to find equal calls.

    1, 1.0 and True have different keys. Floats and complex numbers are compared by their bits, so
    0.0 and -0.0 differ.

    Args:
        value: an operand, or nested lists, tuples and dictionaries of operands.
    """
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple([key_of_operands(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, key_of_operands(v)) for k, v in value.items()])
    if isinstance(value, (float, complex)):
        return type(value), struct.pack("dd", value.real, value.imag)
    return (type(value), value) if isinstance(value, (bool, int)) else value


# -- modules ---------------------------------------------------------------------------------------


def lazy_graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """Returns `fx.GraphModule(root, graph)`, but generates its Python code only when called."""
    # Private torch: its own class for this, which Inductor and Dynamo use.
    made: fx.GraphModule = _lazy_graph_module._LazyGraphModule(root, graph)
    return made


def lazy_graph_modules() -> AbstractContextManager[None]:
    """Returns a context manager in which `make_fx` makes modules like `lazy_graph_module`."""
    found: AbstractContextManager[None] = _lazy_graph_module._use_lazy_graph_module(True)
    return found


# -- effects ---------------------------------------------------------------------------------------


def written_inputs_of(graph: fx.Graph) -> tuple[int, ...]:
    """Returns the positions of the inputs that a captured graph writes in place, in order."""
    calls = [*graph.find_nodes(op="call_function", target=_COPY), *subgraph_calls(graph)]
    written = {operand for node in calls for operand in written_operands(node)}
    return tuple(i for i, n in enumerate(graph.find_nodes(op="placeholder")) if n in written)


def written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the operands that `node` writes, if it is a `copy_` or a call of a subgraph."""
    if node.target is _COPY:
        yield node.args[0]  # type: ignore[misc]
    elif (part := subgraph_of(node)) is not None and part.written:
        operands = part.operands(node)
        for place in part.written:
            yield operands[place]


def nodes_since(graph: fx.Graph, first: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that were added to a graph after the node `first`, the newest first."""
    node = graph._root.prev
    while node is not first:
        yield node
        node = node.prev


def drop_unused(graph: fx.Graph) -> None:
    """Erases calls in `graph` whose value is not used, unless they have an effect.

    An unused collective is erased, too.
    """
    for node in reversed(graph.nodes):  # fx's own method first checks the whole graph
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """True if a node must stay in the graph even if its value is unused.

    This holds for inputs, the output, and calls that write memory, draw random numbers or check a
    value.
    """
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if (part := subgraph_of(node)) is not None:
        return part.has_effect
    facts = facts_of(node.target)
    if facts.statistics:
        return bool(node.args[3] is not None and node.args[5])
    return bool(facts.writes) or facts.draws or facts.checks


def checks_value(node: fx.Node) -> bool:
    """True if a node is an assertion: it returns nothing, and raises if a value is invalid."""
    return node.op == "call_function" and facts_of(node.target).checks


# -- facts of nodes --------------------------------------------------------------------------------


def examples_of(graph: fx.Graph) -> list[torch.Tensor]:
    """Returns the fake tensors of a graph's inputs, as example inputs for a compiler."""
    return [n.meta["val"] for n in graph.find_nodes(op="placeholder")]


def nbytes_of(node: fx.Node) -> int:
    """Returns the bytes of a node's value on a rank; 0 if it is not a tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


COLLECTIVES: dict[Any, str] = {
    ALL_GATHER: "all_gather",
    all_gather: "all_gather",
    all_gather_pieces: "all_gather",
    all_to_all: "all_to_all",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_REDUCE: "all_reduce",
    ALL_TO_ALL: "all_to_all",
    BROADCAST: "broadcast",
}
"""Maps each collective of a graph to the kind of request that runs it on a wire."""


def is_collective(node: fx.Node) -> bool:
    """True if a node calls a collective; False for `wait_tensor`."""
    return node.op == "call_function" and _sends(node.target)


@functools.lru_cache(maxsize=4096)
def _sends(target: Any) -> bool:
    """True if `target` is a collective."""
    named = getattr(target, "namespace", "") == "_c10d_functional"
    ours = (all_gather, all_gather_pieces, all_to_all)
    return (named and "wait_tensor" not in str(target)) or target in ours


def request_of_collective(node: fx.Node) -> Request:
    """Returns the `Request` by which a wire runs the collective of a node.

    It has the kind and the name of the process group, but no move. A reduction also has its op, an
    all-to-all its sizes, a broadcast its root.
    """
    args: Any = node.args
    operand, *given, name = args
    x, kind, more = operand.meta["val"], COLLECTIVES[node.target], dict[str, Any]()
    if node.target is all_to_all:
        even = Splits.evenly(given[0], x.numel() // given[0])
        more = {"get": even, "send": even}
    elif kind == "all_to_all":
        each = math.prod(x.shape[1:])
        got, sent = (Splits.of(sizes).times(each) for sizes in given)
        more = {"get": got, "send": sent}
    elif kind == "broadcast":
        more = {"root": given[0]}
    elif kind != "all_gather":
        more = {"reduce_op": given[0]}
    return Request(kind, None, name, **more)


# -- order -----------------------------------------------------------------------------------------


N = TypeVar("N", bound=Hashable)


def order_by_needs(
    wanted: Iterable[N], needs: Mapping[N, Sequence[N]], done: set[N]
) -> Iterator[N]:
    """Yields nodes in a topological order: each comes after the nodes on which it depends.

    Args:
        wanted: the nodes, in the preferred order. The nodes on which they depend are yielded, too.
        needs: maps each node to the nodes on which it depends. There are no cycles. Only nodes that
            are keys are yielded.
        done: nodes to skip; each yielded node is added.
    """
    stack = list(wanted)[::-1]
    while stack:
        node = stack[-1]
        waiting = [n for n in needs[node] if n in needs and n not in done]
        if waiting and node not in done:
            stack += reversed(waiting)
            continue
        stack.pop()
        if node not in done:
            done.add(node)
            yield node


# -- subgraphs -------------------------------------------------------------------------------------

DEEP = 3000
"""The number of calls above which a graph is cut into sections. A smaller graph compiles as fast
in one piece, and each call of a section costs some microseconds."""

LABELS = "labels"
"""A key in a `call_subgraph` node's `meta`. Its value replaces `Subgraph.labels` for that call."""


@dataclass(frozen=True)
class SectionSchedule:
    """The memory that a section (a separately compiled part) allocates, call by call, in bytes.

    The section's inputs are not included.

    Attributes:
        live: the bytes that are allocated while each call in the section runs.
        result_bytes: the bytes of the section's results, which are still allocated at its end.
        last_reads: for each input, the position of the last call that reads it.
    """

    live: Sequence[int]
    result_bytes: int
    last_reads: Sequence[int]

    @cached_property
    def workspace(self) -> int:
        """The most bytes that the section allocates at one time, minus the bytes of its results."""
        return max(self.live, default=0) - self.result_bytes


@dataclass(eq=False)
class Subgraph:
    """A graph that nodes of another graph call, such as one that equal blocks of a step share.

    A calling node has the subgraph as its first operand. A subgraph writes only by `copy_` into its
    inputs. A block with a backward is called twice: for forward (`call_subgraph`) and for backward
    (`call_backward`). A section is a part of a graph between two collectives, which is compiled
    separately. It is called once, and each of its results has its own storage.

    Attributes:
        graph: the FX graph. Its output is a list, with None for outputs that nothing reads.
        name: the class of a block; "AdamW of Block" for an update; "section_" and a hash.
        key: for a section, a hash of its text, equal for equal sections; "" for others.
        forward_input_count, forward_output_count: for a block with a backward, how many of its
            inputs and outputs belong to forward. These come first, then those of backward. None
            for other subgraphs.
        labels: the distinct names (`Note.op`) under which the ledger lists the redistributions of
            forward, in order.
        schedule: a section's memory if it runs call by call; None until computed (`memory`).
    """

    graph: fx.GraphModule
    name: str = ""
    key: str = ""
    forward_input_count: int | None = None
    forward_output_count: int | None = None
    labels: tuple[str, ...] = ()
    schedule: SectionSchedule | None = None

    def example(self) -> list[torch.Tensor]:
        """Returns fake tensors like the subgraph's inputs, as example inputs for a compiler."""
        return examples_of(self.graph.graph)

    def operands(self, call: fx.Node) -> Sequence[Any]:
        """Returns the operands of `call`, a node that calls this subgraph: one for each input."""
        given: Any = call.args[-1]
        return given  # type: ignore[no-any-return]

    @property
    def outputs(self) -> list[Any]:
        """The nodes whose values the subgraph returns; None for an output that nothing reads."""
        (end,) = self.graph.graph.find_nodes(op="output")
        return end.args[0]  # type: ignore[return-value]

    def inputs_of(self, is_late: bool) -> list[fx.Node]:
        """Returns the inputs of a block's backward if `is_late`, else of its forward."""
        inputs = self.graph.graph.find_nodes(op="placeholder")
        return inputs[self.forward_input_count :] if is_late else inputs[: self.forward_input_count]

    def outputs_of(self, is_late: bool) -> list[Any]:
        """Returns the outputs of a block's backward if `is_late`, else of its forward."""
        count = self.forward_output_count
        return self.outputs[count:] if is_late else self.outputs[:count]

    def nodes_of(self, is_late: bool) -> list[fx.Node]:
        """Returns the call nodes of a block's backward if `is_late`, else of its forward."""
        calls = (n for n in self.graph.graph.nodes if n.op == "call_function")
        return [n for n in calls if (n in self.backward_nodes) is is_late]

    @cached_property
    def backward_nodes(self) -> set[fx.Node]:
        """A block's backward nodes: inputs, calls of that phase, and calls that read these."""
        if self.forward_input_count is None:
            return set()
        late = set(self.inputs_of(True))
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and (
                note_of(node).phase == "backward" or not late.isdisjoint(node.all_input_nodes)
            ):
                late.add(node)
        return late

    @cached_property
    def written(self) -> tuple[int, ...]:
        """The positions of the inputs that the subgraph writes in place."""
        return written_inputs_of(self.graph.graph)

    @cached_property
    def has_effect(self) -> bool:
        """True if a call of the subgraph must stay even if its results are unused.

        This holds if the subgraph writes memory, draws random numbers or checks a value.
        """
        calls = self.graph.graph.nodes
        return any(n.op == "call_function" and has_effect(n) for n in calls)

    @cached_property
    def only_moves(self) -> bool:
        """True if the subgraph computes nothing: its calls are only views, copies and casts."""
        calls = (n for n in self.graph.graph.nodes if n.op == "call_function")
        facts = (facts_of(n.target) for n in calls)
        return all(f.moves or f.casts for f in facts)

    def __repr__(self) -> str:
        return f"section {self.key}" if self.key else f"a {self.name}"


@declare_facts(OpFacts(makes_new=True))
def call_subgraph(part: Subgraph, takes: Sequence[Any]) -> Any:
    """Marks a node as a call of a subgraph (for a block: of its forward). It is never executed.

    It is the `target` of the marked nodes in an FX graph.

    Args:
        part: the subgraph.
        takes: its operands.
    """
    raise RuntimeError("a call of a subgraph was run before it was replaced")


@declare_facts(OpFacts(makes_new=True))
def call_backward(part: Subgraph, forward: Any, takes: Sequence[Any]) -> Any:
    """Marks a node as a call of a block's backward. It is never executed.

    It is the `target` of the marked nodes in an FX graph.

    Args:
        part: the block's subgraph.
        forward: the node that calls its forward.
        takes: the operands of backward.
    """
    raise RuntimeError("a call of a block's backward was run before it was replaced")


def subgraph_of(node: fx.Node) -> Subgraph | None:
    """Returns the subgraph that a node calls, or None."""
    is_call = node.target is call_subgraph or node.target is call_backward
    return node.args[0] if is_call else None  # type: ignore[return-value]


def subgraph_calls(graph: fx.Graph) -> list[fx.Node]:
    """Returns the calls of subgraphs in a graph, in order."""
    return [n for n in graph.nodes if n.target is call_subgraph or n.target is call_backward]


def subgraphs_in(graph: fx.Graph) -> list[Subgraph]:
    """Returns the distinct subgraphs that a graph calls, in the order of their first call."""
    calls = graph.find_nodes(op="call_function", target=call_subgraph)
    return list(dict.fromkeys(n.args[0] for n in calls))  # type: ignore[misc]


def calls_within(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the call nodes of a graph and of the subgraphs that it calls, each subgraph once."""
    for graph_of_part in (graph, *(s.graph.graph for s in subgraphs_in(graph))):
        yield from (n for n in graph_of_part.nodes if n.op == "call_function")


class ByIdentity:
    """A hashable wrapper that is equal only to another wrapper of the same object."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"
