"""Memory of a traced graph: which nodes show the same, which part of it, how a view is inverted.

Read from the schemas and facts of ops, not from where fake tensors lie: equal calls share one fake
(`equal_calls`), so that two values may have one storage there and none in common when they run.
"""

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

from ..graph_nodes import GraphPart, written_operands
from .equal_calls import tensors_in
from .functional_calls import UnsureOfWrites

__all__ = [
    "invert_view",
    "is_plain_write",
    "is_reshaped",
    "is_write",
    "lie_alike",
    "makers_of_shared",
    "memory_that_is_written",
    "operands_written",
    "part_of",
    "shown_operand",
    "view_of",
]

_aten = torch.ops.aten


def is_write(target: Any) -> bool:
    """Does an op write operands, by its schema?"""
    return bool(facts_of(target).writes)


def is_plain_write(target: Any) -> bool:
    """Does an op that writes change values only, and no shape, stride or storage?"""
    return target.namespace == "aten" and not facts_of(target).changes_metadata


def memory_that_is_written(graph: fx.Graph) -> dict[fx.Node, int]:
    """By node, a number for the memory that it shows; only of memory that some call writes.

    Each input has a memory of its own, as in torch's functionalization.
    """
    shown: dict[fx.Node, list[int]] = {}  # for each tensor of a node's value, its memory
    written: set[int] = set()
    numbers = count()
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "call_function":
            shown[node] = _shown_by_call(node, shown, numbers)
        else:
            shown[node] = [next(numbers) for _ in tensors_in(_value_of(node))]
        for operand in operands_written(node):
            written.update(shown[operand])
    tensors = ((n, m) for n, m in shown.items() if isinstance(n.meta.get("val"), torch.Tensor))
    return {node: memory for node, (memory,) in tensors if memory in written}


def makers_of_shared(graph: fx.Graph, memory: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The calls that made memory which is written and which several results show."""
    (end,) = graph.find_nodes(op="output")
    counts = Counter(memory[n] for n in end.args[0] if n in memory)
    first: dict[int, fx.Node] = {}
    for node, number in memory.items():
        first.setdefault(number, node)
    return [n for m, n in first.items() if counts[m] > 1 and n.op == "call_function"]


def _shown_by_call(
    node: fx.Node, shown: dict[fx.Node, list[int]], numbers: Iterator[int]
) -> list[int]:
    """For each tensor of a call's value the number of its memory."""
    made = tensors_in(node.meta.get("val"))
    if not made:
        return []
    if node.target is operator.getitem:
        whole, place = node.args
        assert isinstance(whole, fx.Node) and isinstance(place, int)
        first = len(tensors_in(_value_of(whole)[:place]))
        return shown[whole][first : first + len(made)]
    if facts_of(node.target).makes_new:
        return [next(numbers) for _ in made]
    schema = getattr(node.target, "_schema", None)
    if facts_of(node.target).shows_unsaid or schema is None:
        return _shown_by_memory(node, shown, numbers)
    found: list[int] = []
    for value, returned in zip(_values_of_node(node), schema.returns, strict=False):
        operand = _shown_operand(node, schema, returned)
        of_operand = shown[operand] if operand is not None else []
        for i, _ in enumerate(tensors_in(value)):
            if of_operand:  # chunks of one tensor, or of a list each the one at its place
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
    returned = schema.returns[0]
    operand = _shown_operand(node, schema, returned)
    return operand, operand is not None and returned.alias_info.is_write


def _values_of_node(node: fx.Node) -> Sequence[Any]:
    value = node.meta["val"]
    several = len(node.target._schema.returns) > 1  # type: ignore[union-attr]
    return value if several else (value,)


def _shown_operand(node: fx.Node, schema: Any, returned: Any) -> fx.Node | None:
    """The operand whose memory one of a call's results shows; None for new memory."""
    if returned.alias_info is None:
        return None
    arguments = zip(schema.arguments, node.args, strict=False)
    named = ((a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs)
    for argument, value in (*arguments, *named):
        own = argument.alias_info
        if own is None or not isinstance(value, fx.Node):
            continue
        # For a list of chunks the operand's alias set is "*" (`Tensor(a -> *)`).
        if own.before_set & returned.alias_info.before_set or "*" in own.after_set:
            return value
    return None


def _shown_by_memory(
    node: fx.Node, shown: dict[fx.Node, list[int]], numbers: Iterator[int]
) -> list[int]:
    """The same for a call whose schema does not say it: by its one operand, or by storage."""
    if facts_of(node.target).shows_unsaid:
        (operand,) = node.all_input_nodes
        return shown[operand] * len(tensors_in(node.meta["val"]))
    known: dict[int, int] = {}
    for read in node.all_input_nodes:
        for t, memory in zip(tensors_in(_value_of(read)), shown[read], strict=True):
            known[t.untyped_storage()._cdata] = memory  # private: a number for each storage
    storages = [t.untyped_storage()._cdata for t in tensors_in(node.meta["val"])]
    return [known[s] if s in known else next(numbers) for s in storages]


def _value_of(node: fx.Node) -> Any:
    if node.op == "get_attr" and "val" not in node.meta:
        return getattr(node.graph.owning_module, str(node.target))
    return node.meta.get("val")


def operands_written(node: fx.Node) -> list[fx.Node]:
    """The operands that a call writes, in a graph with writes."""
    target: Any = node.target
    if node.op != "call_function":
        return []
    if node.args and isinstance(node.args[0], GraphPart):
        return [*written_operands(node)]
    if facts_of(target).statistics:
        statistics = node.args[3:5] if node.args[5] else ()
        return [t for t in statistics if isinstance(t, fx.Node)]
    if not is_write(target):
        return []
    args, kwargs, found = node.args, node.kwargs, list[fx.Node]()
    for written in facts_of(target).writes:
        place = written.place
        value = args[place] if place < len(args) else kwargs.get(written.name)
        fx.node.map_arg(value, found.append)
    return found


def view_of(node: fx.Node) -> fx.Node | None:
    """The operand of which a node is a view, where it is its only operand; else None."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not schema.returns:
        return None
    if facts_of(node.target).by_storage:
        return None
    (source, *others) = node.all_input_nodes or (None,)
    alias = schema.returns[0].alias_info
    return source if alias is not None and not alias.is_write and not others else None


def part_of(t: torch.Tensor) -> Any:
    """Identifies the part of its memory that a tensor shows, and as what."""
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype


def is_reshaped(part: Any, other: Any) -> bool:
    """Do two parts of a memory hold the same elements in the same order, without gaps?"""
    (shape, _, *rest), (other_shape, _, *other_rest) = part, other
    same = rest == other_rest and math.prod(shape) == math.prod(other_shape)
    return same and _is_packed(part) and _is_packed(other)


def _is_packed(part: Any) -> bool:
    shape, strides, *_ = part
    size = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != size:
            return False
        size *= n
    return True


def lie_alike(a: Any, b: Any) -> bool:
    """Have tensors, or lists of them, equal shapes, strides and dtypes?"""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(lie_alike, a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is None and b is None
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def invert_view(view: fx.Node, value: fx.Node, before: Any) -> tuple[Any, tuple[Any, ...]]:
    """The call, as (target, args), that gives the base of `view` after `value` was written to it.

    Args:
        before: the base before the write, in the new graph.

    Raises:
        UnsureOfWrites: no inverse of such a view is known.
    """
    name, arguments = getattr(view.target, "_opname", ""), view.args[1:]
    if any(isinstance(a, fx.Node) for a in arguments) or view.kwargs:
        raise UnsureOfWrites
    shape = list(view.all_input_nodes[0].meta["val"].shape)
    if view.target is _aten.view.dtype:  # the same bits as another dtype of the same size
        source = view.all_input_nodes[0].meta["val"]
        if source.element_size() != view.meta["val"].element_size():
            raise UnsureOfWrites
        return _aten.view.dtype, (value, source.dtype)
    if name == "slice":
        return _aten.slice_scatter.default, (before, value, *arguments)
    if name == "select":
        return _aten.select_scatter.default, (before, value, *arguments)
    if name in ("t", "transpose"):
        return view.target, (value, *arguments)
    if name == "permute":
        dims = [d % len(shape) for d in arguments[0]]  # type: ignore[union-attr,operator]
        return _aten.permute.default, (value, [dims.index(d) for d in range(len(shape))])
    if name in ("view", "_unsafe_view", "unsqueeze", "squeeze"):
        return _aten.view.default, (value, shape)
    raise UnsureOfWrites
