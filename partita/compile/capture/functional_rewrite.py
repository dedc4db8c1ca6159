"""Functionalization by rewriting: writes of a captured graph renamed, call by call, in one pass.

A write gives the written memory a new value, under which everything that shows the same part of it
is read from then on. What shows another part, and is read after the write, is made again from the
new value by the views that made it. Where that is not sure, as after a write through a slice, it
raises `UnsureOfWrites`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import facts_of

from ..graph_nodes import add_call, lazy_graph_module
from ..node_metadata import NOTE
from .equal_calls import call_without_memory, tensors_in
from .functional_calls import (
    PatternOperand,
    PatternResult,
    UnsureOfWrites,
    call_in_list,
    call_without_writes,
    calls_of_list,
    changes_without_writes,
    entering,
    pattern_of,
)
from .functional_memory import (
    is_plain_write,
    is_reshaped,
    lie_alike,
    part_of,
    view_of,
    without_view,
    writes,
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
        memory: for each node that shows memory which is written: which.
        makers: nodes that made memory.

    Returns:
        And for makers what their memory holds at the end.

    Raises:
        UnsureOfWrites: the graph has to be traced once more.
    """
    rewrite = _Rewrite(graph, memory, makers)
    return lazy_graph_module(graph, rewrite.graph_without_writes()), rewrite.shared


class _Rewrite:
    """One graph, and what its nodes are in another.

    Attributes:
        of: for each node its value in the new graph: a node, a `Scalar` of one, or a list.
        memory: of each node that shows memory which is written somewhere: which.
        made_at: of each such node, how often its memory had been written when `of` was made.
        written: how often each memory has been written.
        latest: for each memory, and each part of it that was written: at which count, and its
            value then.
        other_strides: nodes that lie otherwise than what they stand for.
        shared: of `makers` what they are at the end.
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
                values = [_node_of(v) for v in fx.node.map_arg(node.args[0], self.now)]
                for maker in self.makers:
                    with suppress(UnsureOfWrites):
                        self.shared[maker] = self.now(maker)
                self._write_inputs(dict(zip(inputs, taken, strict=True)))
                self.graph.output(values)
            else:
                raise UnsureOfWrites
        return self.graph

    def _copy_placeholder(self, node: fx.Node) -> fx.Node:
        new = self.graph.placeholder(str(node.target))
        new.meta = {k: v for k, v in node.meta.items() if not is_symbolic(v)}
        if is_symbolic(node.meta["val"]):
            new.meta["val"] = entering(node.meta["val"])
            self.of[node] = Scalar(new)  # type: ignore[arg-type]
        else:
            self.of[node] = new
        return new

    def _write_inputs(self, inputs: dict[fx.Node, fx.Node]) -> None:
        self._note = None
        for node, new in inputs.items():
            if self.written.get(self.memory.get(node, -1), 0):
                copy = add_call(self.graph, _aten.copy_.default, (new, self.now(node)))
                copy.meta["val"] = new.meta["val"]

    # -- calls -------------------------------------------------------------------------------------

    def _rewrite_call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is operator.getitem:
            whole = self.of[node.args[0]]  # type: ignore[index]
            if isinstance(whole, (list, tuple)):
                self.of[node] = whole[node.args[1]]  # type: ignore[index]
                return
        elif facts_of(target).shows_all:
            self.of[node] = self.now(node.args[0])  # type: ignore[arg-type]
            return
        elif getattr(target, "_opname", "").startswith("_foreach_"):
            self._call_list(node)
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.now)
        if changes_without_writes(target, args, kwargs) or writes(target):
            if writes(target) and not is_plain_write(target):
                raise UnsureOfWrites
            call = _bind_call(call_without_writes, target)
            given = node.args, node.kwargs
            self.of[node] = self._fill_in(call, target, given, node.meta.get("val"))
            if node in self.memory:  # it gives what it has written
                self.made_at[node] = self.written[self.memory[node]]
        elif target is not operator.getitem and not isinstance(target, torch._ops.OpOverload):
            raise UnsureOfWrites
        else:
            self.of[node] = self._add_call(target, args, kwargs, node)

    def _call_list(self, node: fx.Node) -> None:
        target, made = node.target, node.meta.get("val")
        found = []
        for name, args, kwargs, like in calls_of_list(target, node.args, node.kwargs, made):
            call = _bind_call(call_in_list, name)
            found.append(self._fill_in(call, ("each", name), (args, kwargs), like))
        self.of[node] = found

    def _fill_in(self, call: Callable[..., Any], what: Any, given: Any, like: Any) -> Any:
        """Put the pattern of a call into the graph; what it gives."""
        olds: list[fx.Node] = []
        operands: list[fx.Node] = []

        def enter_operand(node: fx.Node) -> Any:
            value = self.now(node)
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
        """A call more. It gives what `old` gave, unless it reads what lies otherwise."""
        name = getattr(target, "_opname", None)  # as a trace would call it
        new = add_call(self.graph, target, args, kwargs, name)
        if self._note is not None:
            new.meta[NOTE] = self._note
        if old is not None and self.other_strides.isdisjoint(new.all_input_nodes):
            new.meta["val"] = old.meta.get("val")
            return new
        if facts_of(target).by_strides:
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

    def now(self, node: fx.Node) -> Any:
        """What a node shows now, in the new graph."""
        memory = self.memory.get(node)
        if memory is None or self.made_at[node] == self.written[memory]:
            return self.of[node]
        value = self._remake_view(node, memory)
        self.of[node], self.made_at[node] = value, self.written[memory]
        return value

    def _remake_view(self, node: fx.Node, memory: int) -> fx.Node:
        """What a node shows of memory that was written since it was made."""
        part, count = part_of(node.meta["val"]), self.written[memory]
        latest = {p: value for p, (at, value) in self.latest[memory].items() if at == count}
        if part in latest:
            return latest[part]
        source = view_of(node)
        if source is not None and self.memory.get(source) == memory:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.now)
            return self._add_call(node.target, args, kwargs, node)
        for other, value in latest.items():
            if is_reshaped(other, part):
                return self._add_call(_aten.view.default, (value, list(part[0])), {}, node)
        raise UnsureOfWrites

    def _record_write(self, old: fx.Node, value: Any) -> None:
        """Have what a node shows be another value, and so what it is a view of."""
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
        """What a node is a view of, and that a view of, each with the value written into it.

        As far as views can be undone; what is not given is stale.
        """
        while (source := view_of(node)) is not None and self.memory.get(source) == memory:
            if part_of(source.meta["val"]) != part_of(node.meta["val"]):
                try:
                    call = without_view(node, value, self.now(source))
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
