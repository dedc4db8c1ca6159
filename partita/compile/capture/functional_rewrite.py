"""Functionalization by rewriting: each write of a traced graph becomes a new value, in one pass.

For each node the rewrite knows which memory it shows (`functional_memory`) and how often that has
been written. A write gives the part of the memory that it writes a new value. A node that shows the
same part is read as that value from then on; one that shows another part is made again from it, by
the views that made it. Where that is not sure, it raises `UnsureOfWrites`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import facts_of

from ..graph_nodes import NOTE, GraphPart, add_call, lazy_graph_module, written_operands
from .equal_calls import call_without_memory, tensors_in
from .functional_calls import (
    PatternOperand,
    PatternResult,
    UnsureOfWrites,
    call_in_list,
    call_without_writes,
    calls_of_list,
    changes_without_writes,
    pattern_of,
    value_of_input,
)
from .functional_memory import (
    invert_view,
    is_plain_write,
    is_reshaped,
    is_write,
    lie_alike,
    part_of,
    view_of,
)
from .scalars import Scalar
from .symbolic import is_symbolic

__all__ = ["UnsureOfWrites", "rewrite_without_writes"]

_aten = torch.ops.aten


def rewrite_without_writes(
    graph: fx.GraphModule, memory: dict[fx.Node, int], makers: Sequence[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """`graph` without writes but for `copy_` into inputs at its end. Notes are kept.

    Args:
        memory: by node, a number for the memory that it shows; only of memory that is written.
        makers: nodes whose memory several results show.

    Returns:
        The graph module, and for each of `makers` the node of what its memory holds at the end.

    Raises:
        UnsureOfWrites: the graph has to be traced again.
    """
    rewrite = _Rewrite(graph, memory, makers)
    return lazy_graph_module(graph, rewrite.graph_without_writes()), rewrite.shared


class _Rewrite:
    """The rewrite of one graph.

    Attributes:
        of: by old node, its value in the new graph: a node, a `Scalar` of one, or a list.
        memory: by old node, the number of the memory that it shows, where that is written.
        written: by memory, how often it has been written so far.
        made_at: by old node, `written` of its memory when `of` was made.
        latest: by memory and part of it, the count at which that part was written, and its value.
        other_strides: new nodes whose strides are others than those of the old.
        shared: by node of `makers`, its value at the end.
        closed: memory that a part of the graph has written, which nobody may use any more.
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
        self.mode = _mode_of(graph.graph)
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
                values = [_node_of(v) for v in fx.node.map_arg(node.args[0], self.current_value)]
                for maker in self.makers:
                    with suppress(UnsureOfWrites):
                        self.shared[maker] = self.current_value(maker)
                self._write_inputs(dict(zip(inputs, taken, strict=True)))
                self.graph.output(values)
            else:
                raise UnsureOfWrites
        return self.graph

    def _copy_placeholder(self, node: fx.Node) -> fx.Node:
        new = self.graph.placeholder(str(node.target))
        new.meta = {k: v for k, v in node.meta.items() if not is_symbolic(v)}
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
        elif node.args and isinstance(node.args[0], GraphPart):
            self._call_part(node)
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.current_value)
        if changes_without_writes(target, args, kwargs) or is_write(target):
            if is_write(target) and not is_plain_write(target):
                raise UnsureOfWrites
            call = _bind_call(call_without_writes, target)
            given = node.args, node.kwargs
            self.of[node] = self._fill_in(call, target, given, node.meta.get("val"))
            if node in self.memory:  # its value is what it has written
                self.made_at[node] = self.written[self.memory[node]]
        elif target is operator.getitem or isinstance(target, torch._ops.OpOverload):
            self.of[node] = self._add_call(target, args, kwargs, node)
        elif not facts_of(target).makes_new:
            raise UnsureOfWrites
        else:
            self.of[node] = new = self._add_call(target, args, kwargs, node)
            new.meta = {**node.meta, **new.meta}

    def _call_part(self, node: fx.Node) -> None:
        """Add the call of a part of the graph. Nobody may use later what it writes.

        Raises:
            UnsureOfWrites: it writes what is no input, or was written before.
        """
        args: Any = fx.node.map_arg(node.args, lambda n: _node_of(self.current_value(n)))
        self.of[node] = new = self._add_call(node.target, args, {}, node)
        new.meta = {**node.meta, **new.meta}
        if any(n.op != "placeholder" for n in written_operands(new)):
            raise UnsureOfWrites
        self.closed.update(self.memory[n] for n in written_operands(node))

    def _call_list(self, node: fx.Node) -> None:
        target, made = node.target, node.meta.get("val")
        found = []
        for name, args, kwargs, like in calls_of_list(target, node.args, node.kwargs, made):
            call = _bind_call(call_in_list, name)
            found.append(self._fill_in(call, ("each", name), (args, kwargs), like))
        self.of[node] = found

    def _fill_in(self, call: Callable[..., Any], what: Any, given: Any, like: Any) -> Any:
        """Add the calls of a pattern to the new graph; the value of the original call."""
        olds: list[fx.Node] = []
        operands: list[fx.Node] = []

        def enter_operand(node: fx.Node) -> Any:
            value = self.current_value(node)
            if not isinstance(value, (fx.Node, Scalar)):
                raise UnsureOfWrites
            olds.append(node)
            operands.append(_node_of(value))
            shown = operands[-1].meta["val"]
            return Scalar(shown) if isinstance(value, Scalar) else shown

        args, kwargs = fx.node.map_arg(given, enter_operand)
        pattern = pattern_of(call, what, args, kwargs, like, self.mode)
        made: list[fx.Node] = []

        def resolve_part(value: Any) -> Any:
            if isinstance(value, PatternOperand):
                return operands[value.number]
            return made[value.number] if isinstance(value, PatternResult) else value

        for target, its_args, its_kwargs in pattern.calls:
            filled: tuple[Any, Any] = _fill_parts((its_args, its_kwargs), resolve_part)
            made.append(self._add_call(target, *filled, None))
        for number, value in pattern.writes.items():
            self._record_write(olds[number], resolve_part(value))
        return _fill_parts(pattern.gives, resolve_part)

    def _add_call(self, target: Any, args: Any, kwargs: Any, old: fx.Node | None) -> fx.Node:
        """Add a call to the new graph, with the metadata of `old` unless strides differ."""
        name = getattr(target, "_opname", None)  # as a trace would call it
        new = add_call(self.graph, target, args, kwargs, name)
        if self._note is not None:
            new.meta[NOTE] = self._note
        if old is not None and self.other_strides.isdisjoint(new.all_input_nodes):
            new.meta["val"] = old.meta.get("val")
            return new
        if facts_of(target).by_storage:
            raise UnsureOfWrites
        given = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        try:
            value = call_without_memory(target, *given, old and old.meta.get("val")).value
        except Exception as error:
            raise UnsureOfWrites from error
        new.meta["val"] = value
        if old is not None and not lie_alike(value, old.meta.get("val")):
            self.other_strides.add(new)
        return new

    # -- memory ------------------------------------------------------------------------------------

    def current_value(self, node: fx.Node) -> Any:
        """The value in the new graph of what an old node shows at this point."""
        memory = self.memory.get(node)
        if memory is not None and memory in self.closed:
            raise UnsureOfWrites
        if memory is None or self.made_at[node] == self.written[memory]:
            return self.of[node]
        value = self._remake_view(node, memory)
        self.of[node], self.made_at[node] = value, self.written[memory]
        return value

    def _remake_view(self, node: fx.Node, memory: int) -> fx.Node:
        """The value of a node whose memory was written since it was made."""
        part, count = part_of(node.meta["val"]), self.written[memory]
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
        """Give the memory that an old node shows a new value, and so what it is a view of."""
        memory = self.memory.get(old)
        if memory is None or not isinstance(value, fx.Node):
            raise UnsureOfWrites
        shown = [(old, value), *self._without_views(old, value, memory)]
        self.written[memory] += 1
        for node, now in shown:
            if not lie_alike(now.meta["val"], node.meta["val"]):
                self.other_strides.add(now)
            self.latest[memory][part_of(node.meta["val"])] = self.written[memory], now
            self.of[node], self.made_at[node] = now, self.written[memory]

    def _without_views(
        self, node: fx.Node, value: fx.Node, memory: int
    ) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Each tensor of which `node` is a view, in turn, with its value after the write.

        Ends at a view that cannot be inverted; what is further is made again or refused when read.
        """
        while (source := view_of(node)) is not None and self.memory.get(source) == memory:
            if part_of(source.meta["val"]) != part_of(node.meta["val"]):
                try:
                    call = invert_view(node, value, self.current_value(source))
                    value = self._add_call(*call, {}, None)
                except UnsureOfWrites:
                    return
            yield source, value
            node = source


def _bind_call(call: Callable[..., Any], what: Any) -> Callable[..., Any]:
    return lambda args, kwargs, like: call(what, args, kwargs, like)


def _fill_parts(value: Any, part: Callable[[Any], Any]) -> Any:
    if isinstance(value, Scalar):
        return Scalar(part(value.tensor))
    if isinstance(value, (list, tuple)):
        filled = [_fill_parts(v, part) for v in value]
        return filled if isinstance(value, list) else tuple(filled)
    if isinstance(value, dict):
        return {k: _fill_parts(v, part) for k, v in value.items()}
    return part(value)


def _node_of(value: Any) -> Any:
    return value.tensor if isinstance(value, Scalar) else value


def _mode_of(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        for t in tensors_in(node.meta.get("val")) if node.op != "output" else ():
            if hasattr(t, "fake_mode"):
                return t.fake_mode
    raise UnsureOfWrites
