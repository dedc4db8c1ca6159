"""Functionalization by rewriting: writes of a captured graph renamed, call by call, in one pass.

A write gives the written memory a new value, under which everything that shows the same part of it
is read from then on. What shows another part, and is read after the write, is made again from the
new value by the views that made it. Where that is not sure, as after a write through a slice, it
raises `UnsureOfWrites`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .effects import NORMS
from .equal_calls import call_without_memory, tensors_in
from .functional_calls import Made, Operand, UnsureOfWrites, pattern_of
from .functional_trace import (
    call_in_list,
    call_without_writes,
    calls_of_list,
    changes_without_writes,
    entering,
)
from .graph_modules import lazy_graph_module
from .notes import NOTE
from .scalars import Scalar
from .symbolic import is_symbolic

__all__ = ["UnsureOfWrites", "rewrite_without_writes"]

_aten = torch.ops.aten
_BY_STRIDES = (_aten.as_strided.default, _aten.as_strided_scatter.default)
_SAME = (_aten.detach.default, _aten.alias.default)


def rewrite_without_writes(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph` without writes but for `copy_` into inputs at its end. Notes are kept.

    Raises:
        UnsureOfWrites: the graph has to be traced once more.
    """
    return lazy_graph_module(graph, _Rewrite(graph).graph_without_writes())


class _Rewrite:
    """One graph, and what its nodes are in another.

    Attributes:
        of: for each node its value in the new graph: a node, a `Scalar` of one, or a list.
        memory: of each node that shows memory which is written somewhere: which.
        made_at: of each such node, how often its memory had been written when `of` was made.
        written: how often each memory has been written.
        latest: for each memory and each part of it that was written, or read since: at which
            count, and its value.
        other_strides: nodes that lie otherwise than what they stand for.
    """

    def __init__(self, graph: fx.GraphModule):
        self.module, self.graph = graph, fx.Graph()
        self.of: dict[fx.Node, Any] = {}
        self.memory = _memory_that_is_written(graph.graph)
        self.made_at: dict[fx.Node, int] = {}
        self.written = dict.fromkeys(self.memory.values(), 0)
        self.latest: dict[Any, tuple[int, fx.Node]] = {}
        self.other_strides: set[fx.Node] = set()
        self.mode = _mode_of(graph.graph)
        self._note: Any = None

    def graph_without_writes(self) -> fx.Graph:
        inputs, taken = self.module.graph.find_nodes(op="placeholder"), list[fx.Node]()
        for node in self.module.graph.nodes:
            self._note = node.meta.get(NOTE) if node.op == "call_function" else None
            if node in self.memory:
                self.made_at[node] = self.written[self.memory[node]]
            if node.op == "placeholder":
                taken.append(self._take(node))
            elif node.op == "get_attr":
                self.of[node] = new = self.graph.get_attr(str(node.target))
                new.meta = dict(node.meta)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                values = [_node_of(v) for v in fx.node.map_arg(node.args[0], self.now)]
                self._write_inputs(dict(zip(inputs, taken, strict=True)))
                self.graph.output(values)
            else:
                raise UnsureOfWrites
        return self.graph

    def _take(self, node: fx.Node) -> fx.Node:
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
                copy = self.graph.call_function(_aten.copy_.default, (new, self.now(node)))
                copy.meta["val"] = new.meta["val"]

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is operator.getitem:
            whole = self.of[node.args[0]]  # type: ignore[index]
            if isinstance(whole, (list, tuple)):
                self.of[node] = whole[node.args[1]]  # type: ignore[index]
                return
        elif target in _SAME:
            self.of[node] = self.now(node.args[0])  # type: ignore[arg-type]
            return
        elif getattr(target, "_opname", "").startswith("_foreach_"):
            self._call_list(node)
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.now)
        if changes_without_writes(target, args, kwargs) or _writes(target):
            if _writes(target) and not _is_plain_write(target):
                raise UnsureOfWrites
            call = _calling(call_without_writes, target)
            given = node.args, node.kwargs
            self.of[node] = self._fill_in(call, target, given, node.meta.get("val"))
            if node in self.memory:  # it gives what it has written
                self.made_at[node] = self.written[self.memory[node]]
        elif target is not operator.getitem and not isinstance(target, torch._ops.OpOverload):
            raise UnsureOfWrites
        else:
            self.of[node] = self._add(target, args, kwargs, node)

    def _call_list(self, node: fx.Node) -> None:
        target, made = node.target, node.meta.get("val")
        found = []
        for name, args, kwargs, like in calls_of_list(target, node.args, node.kwargs, made):
            call = _calling(call_in_list, name)
            found.append(self._fill_in(call, ("each", name), (args, kwargs), like))
        self.of[node] = found

    def _fill_in(self, call: Callable[..., Any], what: Any, given: Any, like: Any) -> Any:
        """Put the pattern of a call into the graph; what it gives."""
        olds: list[fx.Node] = []
        operands: list[fx.Node] = []

        def entered(node: fx.Node) -> Any:
            value = self.now(node)
            if not isinstance(value, (fx.Node, Scalar)):
                raise UnsureOfWrites
            olds.append(node)
            operands.append(_node_of(value))
            shown = operands[-1].meta["val"]
            return Scalar(shown) if isinstance(value, Scalar) else shown

        args, kwargs = fx.node.map_arg(given, entered)
        pattern = pattern_of(call, what, args, kwargs, like, self.mode)
        made: list[fx.Node] = []

        def part(value: Any) -> Any:
            if isinstance(value, Operand):
                return operands[value.number]
            return made[value.number] if isinstance(value, Made) else value

        for target, its_args, its_kwargs in pattern.calls:
            filled = _filled((its_args, its_kwargs), part)
            made.append(self._add(target, *filled, None))
        for number, value in pattern.writes.items():
            self._write(olds[number], part(value))
        return _filled(pattern.gives, part)

    def _add(self, target: Any, args: Any, kwargs: Any, old: fx.Node | None) -> fx.Node:
        """A call more. It gives what `old` gave, unless it reads what lies otherwise."""
        name = getattr(target, "_opname", None)  # as a trace would call it
        new = self.graph.create_node("call_function", target, args, kwargs, name)
        if self._note is not None:
            new.meta[NOTE] = self._note
        if old is not None and self.other_strides.isdisjoint(new.all_input_nodes):
            new.meta["val"] = old.meta.get("val")
            return new
        if target in _BY_STRIDES:
            raise UnsureOfWrites
        given = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        try:
            value = call_without_memory(target, *given, old and old.meta.get("val")).value
        except Exception as error:
            raise UnsureOfWrites from error
        new.meta["val"] = value
        if old is not None and not _alike(value, old.meta.get("val")):
            self.other_strides.add(new)
        return new

    # -- memory ------------------------------------------------------------------------------------

    def now(self, node: fx.Node) -> Any:
        """What a node shows now, in the new graph."""
        memory = self.memory.get(node)
        if memory is None or self.made_at[node] == self.written[memory]:
            return self.of[node]
        value = self._again(node, memory)
        self.of[node], self.made_at[node] = value, self.written[memory]
        return value

    def _again(self, node: fx.Node, memory: int) -> fx.Node:
        """What a node shows of memory that was written since it was made."""
        part = _part(node.meta["val"])
        at, value = self.latest.get((memory, part), (-1, None))
        if at == self.written[memory]:
            assert value is not None
            return value
        source = _view_of(node)
        by_strides = node.target in _BY_STRIDES
        if source is not None and self.memory.get(source) == memory and not by_strides:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.now)
            return self._add(node.target, args, kwargs, node)
        for (where, other), (at, value) in self.latest.items():
            if where == memory and at == self.written[memory] and _is_reshaped(other, part):
                return self._add(_aten.view.default, (value, list(part[0])), {}, node)
        raise UnsureOfWrites

    def _write(self, old: fx.Node, value: Any) -> None:
        memory = self.memory.get(old)
        if memory is None or not isinstance(value, fx.Node):
            raise UnsureOfWrites
        was = old.meta["val"]
        if not _alike(value.meta["val"], was):
            self.other_strides.add(value)
        self.written[memory] += 1
        self.latest[memory, _part(was)] = self.written[memory], value
        self.of[old], self.made_at[old] = value, self.written[memory]


def _calling(call: Callable[..., Any], what: Any) -> Callable[..., Any]:
    return lambda args, kwargs, like: call(what, args, kwargs, like)


def _filled(value: Any, part: Callable[[Any], Any]) -> Any:
    if isinstance(value, Scalar):
        return Scalar(part(value.tensor))
    if isinstance(value, (list, tuple)):
        filled = [_filled(v, part) for v in value]
        return filled if isinstance(value, list) else tuple(filled)
    if isinstance(value, dict):
        return {k: _filled(v, part) for k, v in value.items()}
    return part(value)


def _node_of(value: Any) -> Any:
    return value.tensor if isinstance(value, Scalar) else value


def _writes(target: Any) -> bool:
    return bool(getattr(getattr(target, "_schema", None), "is_mutable", False))


def _is_plain_write(target: Any) -> bool:
    """Does it write the memory of its operands, and leave alone how they show it?"""
    shows = torch.Tag.inplace_view in target.tags or target._opname in ("set_", "resize_")
    return target.namespace == "aten" and not shows


def _memory_that_is_written(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node that shows memory which some call of the graph writes: which.

    Inputs have memory of their own each, as for torch's functionalization.
    """
    shown: dict[fx.Node, dict[int, int]] = {}  # of a storage, by its number, the memory
    written: set[int] = set()
    count = 0
    for node in graph.nodes:
        if node.op == "output":
            break
        reads = node.all_input_nodes
        of_node = shown[node] = {}
        for t in tensors_in(node.meta.get("val")):
            key = t.untyped_storage()._cdata  # private: a number for a storage, while it lives
            found = [shown[read][key] for read in reads if key in shown[read]]
            of_node[key] = found[0] if found else count
            count += not found
        for operand in _written_by(node):
            written.update(shown[operand].values())
    tensors = ((n, m) for n, m in shown.items() if isinstance(n.meta.get("val"), torch.Tensor))
    memory = ((node, number) for node, known in tensors for number in known.values())
    return {node: number for node, number in memory if number in written}


def _written_by(node: fx.Node) -> list[fx.Node]:
    target: Any = node.target
    if node.op != "call_function":
        return []
    if target in NORMS:
        return [node.args[3], node.args[4]] if node.args[5] else []  # type: ignore[list-item]
    if not _writes(target):
        return []
    arguments = target._schema.arguments
    given = {a.name: value for a, value in zip(arguments, node.args, strict=False)}
    given.update(node.kwargs)
    found: list[fx.Node] = []
    fx.node.map_arg([given.get(a.name) for a in arguments if _is_written(a)], found.append)
    return found


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _view_of(node: fx.Node) -> fx.Node | None:
    """Of what a node is a view, by its call."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not schema.returns:
        return None
    (source, *others) = node.all_input_nodes or (None,)
    alias = schema.returns[0].alias_info
    return source if alias is not None and not alias.is_write and not others else None


def _part(t: torch.Tensor) -> Any:
    """Which part of its memory a tensor shows, and how."""
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype


def _is_reshaped(one: Any, other: Any) -> bool:
    """Do two parts of a memory hold the same elements in the same order, without gaps?"""
    (shape, _, *rest), (shape_then, _, *rest_then) = one, other
    same = rest == rest_then and math.prod(shape) == math.prod(shape_then)
    return same and _is_packed(one) and _is_packed(other)


def _is_packed(part: Any) -> bool:
    shape, strides, *_ = part
    size = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != size:
            return False
        size *= n
    return True


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is None and b is None
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _mode_of(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        for t in tensors_in(node.meta.get("val")) if node.op != "output" else ():
            if hasattr(t, "fake_mode"):
                return t.fake_mode
    raise UnsureOfWrites
