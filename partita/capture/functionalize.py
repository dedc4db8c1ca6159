"""Functionalization: the traced graph without writes, in which each node is a value.

Passes may then move, merge or drop nodes. What a step writes in place (accumulated gradients,
parameters, optimizer state) becomes a new value. Writes into inputs become `copy_` nodes at the end
of the graph, the only nodes that write:

    add_(w, g); mul_(w, 2)     ->     a = add(w, g); b = mul(a, 2); copy_(w, b)

`rewrite_without_writes` does this call by call. A write makes a new value for the written part of
the memory. A node that is a view of another part is made again from the new value. If it is
uncertain which values a write changes, the graph is traced once more under torch's own
functionalization (`trace_without_writes`). That is correct for any graph, but takes as long as
capture.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from partita.graph.errors import UnsureOfWrites, not_captured
from partita.graph.fake_values import call_without_memory, fake_mode_in
from partita.graph.graph_nodes import (
    NOTE,
    add_call,
    add_input,
    drop_unused,
    lazy_graph_module,
    nodes_since,
    note_of,
    subgraph_calls,
    subgraph_of,
    written_operands,
)
from partita.graph.shared_memory import (
    have_same_memory_format,
    keep_apart,
    memory_that_is_written,
    overlapping_results,
    part_of_storage,
)
from partita.layout import Fix
from partita.tensor.aliasing import is_without_overlap
from partita.tensor.op_facts import facts_of

from .fakes import is_symbolic
from .functional_calls import (
    Scalar,
    call_in_list,
    call_without_writes,
    calls_of_list,
    changes_without_writes,
    pattern_of,
    trace_functional,
    unwrap_scalar,
    value_of_input,
)
from .functional_memory import (
    base_on_makers,
    drop_needless_sets,
    invert_views,
    is_reshaped,
    makers_of_shared,
    refuse_lost_writes,
    share_memory_of_results,
    view_of,
)
from .optimizers import share_equal_counts

__all__ = [
    "UnsureOfWrites",
    "functionalize_graph",
    "rewrite_without_writes",
    "trace_without_writes",
]

_aten = torch.ops.aten


def functionalize_graph(
    graph: fx.GraphModule, equal: Sequence[Sequence[int]] = ()
) -> fx.GraphModule:
    """Returns the graph in a form without in-place writes, except `copy_` into inputs at its end.

    Notes of nodes are kept.

    Args:
        equal: groups of inputs, by position, that hold the same number.

    Raises:
        CaptureError: the graph cannot return a result that is a view in eager code, or it would
            lose a write through a view.
        UnsureOfWrites: a subgraph's operand or result is written in a way that only a trace shows.
    """
    drop_needless_sets(graph.graph)
    refuse_lost_writes(graph.graph, traced=False)
    _without_views_in_place(graph.graph)
    base_on_makers(graph.graph)
    memory = memory_that_is_written(graph.graph)
    makers = makers_of_shared(graph.graph, memory)
    try:
        made, shared = rewrite_without_writes(graph, memory, makers)
    except UnsureOfWrites:
        if subgraph_calls(graph.graph):
            raise
        refuse_lost_writes(graph.graph, traced=True)
        made, shared = trace_without_writes(graph, makers)
    share_memory_of_results(graph.graph, made.graph, memory, shared)
    overlapping = overlapping_results(made.graph)
    inputs = made.graph.find_nodes(op="placeholder")
    share_equal_counts(made.graph, [[inputs[i] for i in places] for places in equal])
    _remove_redundant_nodes(made.graph)
    keep_apart(made.graph, overlapping)  # a dropped node may have been a copy between results
    return made


def _remove_redundant_nodes(graph: fx.Graph) -> None:
    """Drops aliases, copies into new memory, and a profiler's marks; then unused nodes."""
    for node in list(graph.nodes):
        if facts_of(node.target).is_alias:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is _aten.copy.default:
            into, value = (n.meta.get("val") for n in node.args[:2])
            alike = (
                into is not None
                and have_same_memory_format(into, value)
                and into.device == value.device
            )
            if alike and not node.args[2:]:
                node.replace_all_uses_with(node.args[1])
                graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)  # marks for a profiler, which torch's optimizers set
    drop_unused(graph)


# -- tracing the graph again -----------------------------------------------------------------------


def trace_without_writes(
    graph: fx.GraphModule, makers: Sequence[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Returns the graph without writes: traces it again under torch's functionalization.

    Notes of nodes are kept.

    Args:
        makers: nodes that allocated memory which several results are views of.

    Returns:
        The graph module, and for each of `makers` the node with the final content of its memory.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    fakes = [value_of_input(n.meta["val"]) for n in inputs]
    made = trace_functional(lambda *given: _Noting(graph, makers).run(*given), fakes)
    for old, new in zip(inputs, made.graph.find_nodes(op="placeholder"), strict=True):
        given = {k: v for k, v in old.meta.items() if not is_symbolic(v)}
        new.meta.update({k: v for k, v in given.items() if k not in new.meta or k == NOTE})
    for node in made.graph.nodes:
        if node.op == "call_function":
            node.meta.setdefault("val", None)  # torch sets none for a call that returns nothing
    (end,) = made.graph.find_nodes(op="output")
    values: Any = end.args[0]
    results = len(values) - len(makers)
    end.args = (values[:results],)
    return made, dict(zip(makers, values[results:], strict=True))


class _Noting(fx.Interpreter):
    """Interprets a graph while another is traced from it; new nodes get the notes of the old.

    Its results are the graph's results, then the values of the nodes in `makers`.
    """

    def __init__(self, graph: fx.GraphModule, makers: Sequence[fx.Node]):
        super().__init__(graph)
        self._given: dict[fx.Node, Any] = dict.fromkeys(makers)
        self.extra_traceback = False  # errors here are explained in another way

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        graph = mode.tracer.graph
        before = graph._root.prev
        self._made = n.meta.get("val")
        try:
            out = super().run_node(n)
        except (RuntimeError, ValueError) as error:
            raise not_captured(
                "the step writes through a view in a way that a graph cannot express",
                f"torch's functionalization says: {str(error).partition('. ')[0]}",
                Fix("x = x.clone()", "of what is written, to get its own memory"),
                place=note_of(n).source,
            ) from error
        if n in self._given:
            self._given[n] = out
        if n.op == "call_function" and n.meta.get(NOTE) is not None:
            for node in nodes_since(graph, before):
                node.meta[NOTE] = n.meta[NOTE]
        return out

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().placeholder(target, args, kwargs)
        return Scalar(found) if is_symbolic(self._made) else found

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        values = super().output(target, args, kwargs)
        values = [*values, *self._given.values()]
        return [*map(unwrap_scalar, values)]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "_opname", "")
        if name.startswith("_foreach_"):
            calls = calls_of_list(target, args, kwargs, self._made)
            return [call_in_list(*call) for call in calls]
        if changes_without_writes(target, args, kwargs):
            return call_without_writes(target, args, kwargs, self._made)
        return super().call_function(target, args, kwargs)


# -- views in place --------------------------------------------------------------------------------


def _without_views_in_place(graph: fx.Graph) -> None:
    """Replaces calls that change a tensor's metadata in place (`x.t_()`) by views (`x.t()`).

    They write no values: later readers of `x` read what the call returns. They stay if `x` itself
    is read afterwards, or is an input. Pooling channels-last images to one place makes such a call,
    too.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node, i in place.items():
        if node.op != "call_function":
            continue
        if facts_of(node.target).is_undeclared_view:
            node.target = _safe_view_of(node.target)
        if torch.Tag.inplace_view not in getattr(node.target, "tags", ()):
            continue
        view, shown = _view_like(node.target), node.args[0]
        if view is None or not isinstance(shown, fx.Node) or shown.op != "call_function":
            continue
        if all(place[user] <= i for user in shown.users):
            node.target = view


def _safe_view_of(target: Any) -> Any:
    """Returns the op that computes the same as `target` and declares its results as views.

    For ops other than `unsafe_split` and similar ones, returns `target`.
    """
    if not target._opname.startswith("unsafe_"):
        return target
    return getattr(getattr(_aten, target._opname.removeprefix("unsafe_")), target._overloadname)


@lru_cache(maxsize=64)
def _view_like(target: Any) -> Any:
    """Returns the out-of-place view op with the arguments of `target`, or None."""
    packet = getattr(_aten, target._opname.removesuffix("_"), None)
    for name in packet.overloads() if packet is not None else ():
        found = getattr(packet, name)
        if _arguments_of_schema(found) == _arguments_of_schema(target):
            return found
    return None


def _arguments_of_schema(target: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in target._schema.arguments]


# -- rewriting call by call ------------------------------------------------------------------------


def rewrite_without_writes(
    graph: fx.GraphModule, memory: dict[fx.Node, int], makers: Sequence[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Returns the graph without in-place writes, rewritten call by call.

    Only `copy_` into inputs at its end writes. Notes of nodes are kept.

    Args:
        memory: for each node whose memory some node writes, a number. Nodes with the same number
            share memory.
        makers: nodes that allocated memory which several results are views of.

    Returns:
        The graph module, and for each of `makers` the node with the final content of its memory.

    Raises:
        UnsureOfWrites: the graph must be traced again.
    """
    rewrite = _Rewrite(graph, memory, makers)
    return lazy_graph_module(graph, rewrite.graph_without_writes()), rewrite.shared


class _Rewrite:
    """The rewrite of one graph.

    Attributes:
        of: the value of each old node in the new graph: a node, a `Scalar` of one, or a list.
        memory: the number of the memory of each old node whose memory is written.
        written: how often each memory has been written so far.
        made_at: `written` of each old node's memory when its value in `of` was made.
        latest: the count at the last write of a part, and its value, by memory and part.
        other_strides: new nodes whose strides differ from those of the old ones.
        shared: the final value of each node of `makers`.
        closed: memory that a subgraph has written, and that must not be used any more.
    """

    def __init__(
        self, graph: fx.GraphModule, memory: dict[fx.Node, int], makers: Sequence[fx.Node]
    ):
        self.makers = makers
        self.module, self.graph = graph, fx.Graph()
        self.of: dict[fx.Node, Any] = {}
        self.memory = memory
        self.made_at: dict[fx.Node, int] = {}
        self.written = dict.fromkeys(self.memory.values(), 0)
        self.latest: dict[int, dict[Any, tuple[int, fx.Node]]] = {m: {} for m in self.written}
        self.other_strides: set[fx.Node] = set()
        self.shared: dict[fx.Node, fx.Node] = {}
        self.mode = fake_mode_in(n.meta.get("val") for n in graph.graph.nodes if n.op != "output")
        if self.mode is None:
            raise UnsureOfWrites
        self.closed: set[int] = set()
        self._note: Any = None

    def graph_without_writes(self) -> fx.Graph:
        inputs, taken = self.module.graph.find_nodes(op="placeholder"), list[fx.Node]()
        for node in self.module.graph.nodes:
            self._note = node.meta.get(NOTE) if node.op == "call_function" else None
            if node in self.memory:
                self.made_at[node] = self.written[self.memory[node]]
            if node.op == "placeholder":
                taken.append(self._copy_placeholder(node))
            elif node.op == "get_attr":
                self.of[node] = new = self.graph.get_attr(str(node.target))
                new.meta = dict(node.meta)
            elif node.op == "call_function":
                self._rewrite_call(node)
            elif node.op == "output":
                values = [
                    unwrap_scalar(v) for v in fx.node.map_arg(node.args[0], self.current_value)
                ]
                for maker in self.makers:
                    with suppress(UnsureOfWrites):
                        self.shared[maker] = self.current_value(maker)
                self._write_inputs(dict(zip(inputs, taken, strict=True)))
                self.graph.output(values)
            else:
                raise UnsureOfWrites
        return self.graph

    def _copy_placeholder(self, node: fx.Node) -> fx.Node:
        new = add_input(self.graph, str(node.target))
        new.meta.update((k, v) for k, v in node.meta.items() if not is_symbolic(v))
        if is_symbolic(node.meta["val"]):
            new.meta["val"] = value_of_input(node.meta["val"])
            self.of[node] = Scalar(new)  # type: ignore[arg-type]
        else:
            self.of[node] = new
        return new

    def _write_inputs(self, inputs: dict[fx.Node, fx.Node]) -> None:
        self._note = None
        for node, new in inputs.items():
            if self.written.get(self.memory.get(node, -1), 0):
                copy = add_call(self.graph, _aten.copy_.default, (new, self.current_value(node)))
                copy.meta["val"] = new.meta["val"]

    # -- calls -------------------------------------------------------------------------------------

    def _rewrite_call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is operator.getitem:
            whole = self.of[node.args[0]]  # type: ignore[index]
            if isinstance(whole, (list, tuple)):
                self.of[node] = whole[node.args[1]]  # type: ignore[index]
                return
        elif facts_of(target).is_alias:
            self.of[node] = self.current_value(node.args[0])  # type: ignore[arg-type]
            return
        elif getattr(target, "_opname", "").startswith("_foreach_"):
            self._call_list(node)
            return
        elif subgraph_of(node) is not None:
            self._call_part(node)
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.current_value)
        facts = facts_of(target)
        if changes_without_writes(target, args, kwargs) or facts.writes:
            if facts.writes and (target.namespace != "aten" or facts.changes_metadata):
                raise UnsureOfWrites
            call = partial(call_without_writes, target)
            given = node.args, node.kwargs
            self.of[node] = self._fill_in(call, target, given, node.meta.get("val"))
            if node in self.memory:  # its value is what it has written
                self.made_at[node] = self.written[self.memory[node]]
        elif target is operator.getitem or isinstance(target, torch._ops.OpOverload):
            self.of[node] = self._add_call(target, args, kwargs, node)
        elif not facts.makes_new:
            raise UnsureOfWrites
        else:
            self.of[node] = new = self._add_call(target, args, kwargs, node)
            new.meta = {**node.meta, **new.meta}

    def _call_part(self, node: fx.Node) -> None:
        """Adds the call of a subgraph. Memory that it writes must not be used later.

        Raises:
            UnsureOfWrites: it writes a value that is not an input, or that was written before.
        """
        args: Any = fx.node.map_arg(node.args, lambda n: unwrap_scalar(self.current_value(n)))
        self.of[node] = new = self._add_call(node.target, args, {}, node)
        new.meta = {**node.meta, **new.meta}
        if any(n.op != "placeholder" for n in written_operands(new)):
            raise UnsureOfWrites
        self.closed.update(self.memory[n] for n in written_operands(node))

    def _call_list(self, node: fx.Node) -> None:
        target, made = node.target, node.meta.get("val")
        found = []
        for name, args, kwargs, like in calls_of_list(target, node.args, node.kwargs, made):
            call = partial(call_in_list, name)
            found.append(self._fill_in(call, ("each", name), (args, kwargs), like))
        self.of[node] = found

    def _fill_in(self, call: Callable[..., Any], what: Any, given: Any, like: Any) -> Any:
        """Adds the calls of a pattern to the new graph; returns the value of the original call."""
        olds: list[fx.Node] = []
        operands: list[fx.Node] = []

        def enter_operand(node: fx.Node) -> Any:
            value = self.current_value(node)
            if not isinstance(value, (fx.Node, Scalar)):
                raise UnsureOfWrites
            olds.append(node)
            operands.append(unwrap_scalar(value))
            shown = operands[-1].meta["val"]
            return Scalar(shown) if isinstance(value, Scalar) else shown

        args, kwargs = fx.node.map_arg(given, enter_operand)
        pattern = pattern_of(call, what, args, kwargs, like, self.mode)
        of = dict(zip(pattern.operands, operands, strict=True))
        for part in pattern.calls:
            args, kwargs = fx.node.map_arg((part.args, part.kwargs), of.__getitem__)
            of[part] = self._add_call(part.target, args, kwargs, None)
        for number, value in pattern.writes.items():
            self._record_write(olds[number], of[value])

        def resolve_value(value: Any) -> Any:
            new: Any = of.get(unwrap_scalar(value))
            return Scalar(new) if isinstance(value, Scalar) else new

        return pytree.tree_map(resolve_value, pattern.gives)

    def _add_call(self, target: Any, args: Any, kwargs: Any, old: fx.Node | None) -> fx.Node:
        """Adds a call to the new graph, with the metadata of `old` unless strides differ."""
        name = getattr(target, "_opname", None)  # as a trace would call it
        new = add_call(self.graph, target, args, kwargs, name)
        if self._note is not None:
            new.meta[NOTE] = self._note
        if old is not None and self.other_strides.isdisjoint(new.all_input_nodes):
            new.meta["val"] = old.meta.get("val")
            return new
        if facts_of(target).by_storage and not self.other_strides.isdisjoint(new.all_input_nodes):
            raise UnsureOfWrites
        given = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        try:
            value = call_without_memory(target, *given, old and old.meta.get("val")).value
        except Exception as error:
            raise UnsureOfWrites from error
        new.meta["val"] = value
        if old is not None and not have_same_memory_format(value, old.meta.get("val")):
            self.other_strides.add(new)
        return new

    def _make_call(self, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        return self._add_call(target, args, kwargs or {}, None)

    # -- memory ------------------------------------------------------------------------------------

    def current_value(self, node: fx.Node) -> Any:
        """Returns the node of the new graph that has the current value of a node of the old graph.

        If the old node is a view of memory that was written since, the new graph gets another view.
        """
        memory = self.memory.get(node)
        if memory is not None and memory in self.closed:
            raise UnsureOfWrites
        if memory is None or self.made_at[node] == self.written[memory]:
            return self.of[node]
        value = self._remake_view(node, memory)
        self.of[node], self.made_at[node] = value, self.written[memory]
        return value

    def _remake_view(self, node: fx.Node, memory: int) -> fx.Node:
        """Returns the value of a node whose memory was written since it was made."""
        part, count = part_of_storage(node.meta["val"]), self.written[memory]
        latest = {p: value for p, (at, value) in self.latest[memory].items() if at == count}
        if part in latest:
            return latest[part]
        source = view_of(node)
        if source is not None and self.memory.get(source) == memory:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.current_value)
            return self._add_call(node.target, args, kwargs, node)
        for other, value in latest.items():
            if is_reshaped(other, part):
                return self._add_call(_aten.view.default, (value, list(part[0])), {}, node)
        raise UnsureOfWrites

    def _record_write(self, old: fx.Node, value: Any) -> None:
        """Sets the new values of a written node, and of the tensors that it is a view of."""
        memory = self.memory.get(old)
        if memory is None or not isinstance(value, fx.Node):
            raise UnsureOfWrites
        shown = [(old, value), *self._without_views(old, value, memory)]
        self.written[memory] += 1
        for node, now in shown:
            if not have_same_memory_format(now.meta["val"], node.meta["val"]):
                self.other_strides.add(now)
            self.latest[memory][part_of_storage(node.meta["val"])] = self.written[memory], now
            self.of[node], self.made_at[node] = now, self.written[memory]

    def _without_views(
        self, node: fx.Node, value: fx.Node, memory: int
    ) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yields each tensor that `node` is a view of, nearest first, with its value after a write.

        Stops at a view that cannot be inverted. Tensors beyond it are made again, or refused, when
        read. A tensor whose own elements share memory is made again when it is read, too.
        """
        views: list[fx.Node] = []
        while (source := view_of(node)) is not None and self.memory.get(source) == memory:
            views.insert(0, node)
            node = source
            if not is_without_overlap(source.meta["val"]):
                continue
            if part_of_storage(source.meta["val"]) != part_of_storage(views[-1].meta["val"]):
                try:
                    value = invert_views(views, value, self.current_value(source), self._make_call)
                except UnsureOfWrites:
                    return
            views = []
            yield source, value
