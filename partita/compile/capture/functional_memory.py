"""Memory of a captured graph: which nodes show the same, what part of it, how a view is undone."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import facts_of

from .equal_calls import tensors_in
from .functional_calls import UnsureOfWrites

__all__ = [
    "is_plain_write",
    "is_reshaped",
    "lie_alike",
    "makers_of_shared",
    "memory_that_is_written",
    "part_of",
    "shown_operand",
    "view_of",
    "without_view",
    "writes",
]

_aten = torch.ops.aten


def writes(target: Any) -> bool:
    return bool(facts_of(target).writes)


def is_plain_write(target: Any) -> bool:
    """Does it write the memory of its operands, and leave alone how they show it?"""
    shows = torch.Tag.inplace_view in target.tags or target._opname in ("set_", "resize_")
    return target.namespace == "aten" and not shows


def memory_that_is_written(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node that shows memory which some call of the graph writes: which.

    Inputs have memory of their own each, as for torch's functionalization.
    """
    shown: dict[fx.Node, list[int]] = {}  # of each tensor of a node's value the memory
    written: set[int] = set()
    numbers = count()
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "call_function":
            shown[node] = _shown_by_call(node, shown, numbers)
        else:
            shown[node] = [next(numbers) for _ in tensors_in(_value_of(node))]
        for operand in _written_by(node):
            written.update(shown[operand])
    tensors = ((n, m) for n, m in shown.items() if isinstance(n.meta.get("val"), torch.Tensor))
    return {node: memory for node, (memory,) in tensors if memory in written}


def makers_of_shared(graph: fx.Graph, memory: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The nodes that made memory, of that in `memory`, which several results show."""
    (end,) = graph.find_nodes(op="output")
    counts = Counter(memory[n] for n in end.args[0] if n in memory)
    first: dict[int, fx.Node] = {}
    for node, number in memory.items():
        first.setdefault(number, node)
    return [n for m, n in first.items() if counts[m] > 1 and n.op == "call_function"]


def _shown_by_call(
    node: fx.Node, shown: dict[fx.Node, list[int]], numbers: Iterator[int]
) -> list[int]:
    """By what a call says of itself, not by where values lie: equal ones are one tensor."""
    made = tensors_in(node.meta.get("val"))
    if not made:
        return []
    if node.target is operator.getitem:
        whole, place = node.args
        assert isinstance(whole, fx.Node) and isinstance(place, int)
        first = len(tensors_in(_value_of(whole)[:place]))
        return shown[whole][first : first + len(made)]
    schema = getattr(node.target, "_schema", None)
    if facts_of(node.target).shows_unsaid or schema is None:
        return _shown_by_memory(node, shown, numbers)
    found: list[int] = []
    for value, told in zip(_values_of_node(node), schema.returns, strict=False):
        operand = _shown_operand(node, schema, told)
        of_operand = shown[operand] if operand is not None else []
        for i, _ in enumerate(tensors_in(value)):
            if of_operand:  # pieces of one, or each of a list the one at its place
                found.append(of_operand[i] if len(of_operand) > 1 else of_operand[0])
            else:
                found.append(next(numbers))
    return found


def shown_operand(node: fx.Node) -> tuple[fx.Node | None, bool]:
    """The operand whose memory the value of a call shows, and whether the call writes it.

    None where the call makes its own. A call that writes shows the part that its operand shows.
    """
    if node.op != "call_function":
        return None, False
    if node.target is operator.getitem:
        whole: Any = node.args[0]
        source, is_written = shown_operand(whole)
        return (whole if source is not None else None), is_written
    if facts_of(node.target).shows_unsaid:
        return node.all_input_nodes[0], False
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return None, False
    told = schema.returns[0]
    operand = _shown_operand(node, schema, told)
    return operand, operand is not None and told.alias_info.is_write


def _values_of_node(node: fx.Node) -> Sequence[Any]:
    value = node.meta["val"]
    several = len(node.target._schema.returns) > 1  # type: ignore[union-attr]
    return value if several else (value,)


def _shown_operand(node: fx.Node, schema: Any, told: Any) -> fx.Node | None:
    """The operand whose memory a call shows in one of its results."""
    if told.alias_info is None:
        return None
    arguments = zip(schema.arguments, node.args, strict=False)
    named = ((a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs)
    for argument, value in (*arguments, *named):
        own = argument.alias_info
        if own is None or not isinstance(value, fx.Node):
            continue
        # Of a list of pieces the schema says "*" where it says what they are pieces of.
        if own.before_set & told.alias_info.before_set or "*" in own.after_set:
            return value
    return None


def _shown_by_memory(
    node: fx.Node, shown: dict[fx.Node, list[int]], numbers: Iterator[int]
) -> list[int]:
    """Of a call that does not say it: its one operand's, or that in which its value lies."""
    if facts_of(node.target).shows_unsaid:
        (operand,) = node.all_input_nodes
        return shown[operand] * len(tensors_in(node.meta["val"]))
    known: dict[int, int] = {}
    for read in node.all_input_nodes:
        for t, memory in zip(tensors_in(_value_of(read)), shown[read], strict=True):
            known[t.untyped_storage()._cdata] = memory  # private: a number for a storage
    storages = [t.untyped_storage()._cdata for t in tensors_in(node.meta["val"])]
    return [known[s] if s in known else next(numbers) for s in storages]


def _value_of(node: fx.Node) -> Any:
    if node.op == "get_attr" and "val" not in node.meta:
        return getattr(node.graph.owning_module, str(node.target))
    return node.meta.get("val")


def _written_by(node: fx.Node) -> list[fx.Node]:
    target: Any = node.target
    if node.op != "call_function":
        return []
    if facts_of(target).statistics:
        statistics = node.args[3:5] if node.args[5] else ()
        return [t for t in statistics if isinstance(t, fx.Node)]
    if not writes(target):
        return []
    args, kwargs, found = node.args, node.kwargs, list[fx.Node]()
    for one in facts_of(target).writes:
        value = args[one.place] if one.place < len(args) else kwargs.get(one.name)
        fx.node.map_arg(value, found.append)
    return found


def view_of(node: fx.Node) -> fx.Node | None:
    """Of what a node is a view, by its call."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not schema.returns:
        return None
    if facts_of(node.target).by_strides:
        return None
    (source, *others) = node.all_input_nodes or (None,)
    alias = schema.returns[0].alias_info
    return source if alias is not None and not alias.is_write and not others else None


def part_of(t: torch.Tensor) -> Any:
    """Which part of its memory a tensor shows, and how."""
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype


def is_reshaped(one: Any, other: Any) -> bool:
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


def lie_alike(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(lie_alike, a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is None and b is None
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def without_view(view: fx.Node, value: fx.Node, before: Any) -> tuple[Any, tuple[Any, ...]]:
    """The call that gives what `view` is a view of, once `value` is written through it.

    Args:
        before: what that was, in the new graph.

    Raises:
        UnsureOfWrites: the view is of another kind.
    """
    name, said = getattr(view.target, "_opname", ""), view.args[1:]
    if any(isinstance(a, fx.Node) for a in said) or view.kwargs:
        raise UnsureOfWrites
    shape = list(view.all_input_nodes[0].meta["val"].shape)
    if view.target is _aten.view.dtype:  # of the same bits, where elements are as large
        source = view.all_input_nodes[0].meta["val"]
        if source.element_size() != view.meta["val"].element_size():
            raise UnsureOfWrites
        return _aten.view.dtype, (value, source.dtype)
    if name == "slice":
        return _aten.slice_scatter.default, (before, value, *said)
    if name == "select":
        return _aten.select_scatter.default, (before, value, *said)
    if name in ("t", "transpose"):
        return view.target, (value, *said)
    if name == "permute":
        dims = [d % len(shape) for d in said[0]]  # type: ignore[union-attr,operator]
        return _aten.permute.default, (value, [dims.index(d) for d in range(len(shape))])
    if name in ("view", "_unsafe_view", "unsqueeze", "squeeze"):
        return _aten.view.default, (value, shape)
    raise UnsureOfWrites
