"""Shared memory: which nodes of a graph share memory, and which results overlap.

This follows from the ops' schemas, not from fake tensors: equal calls share one fake
(`fake_values`), so fakes may share a storage although the values do not. A value *shows* the memory
of another value if it is a view of it.

`overlapping_results` finds pairs of results with common elements, which passes must preserve.
`keep_apart` copies results that only a pass has made overlap.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm.collective import WAIT
from partita.tensor.op_facts import facts_of

from .fake_values import tensors_in
from .graph_nodes import NOTE, add_call, subgraph_of, written_operands

_aten = torch.ops.aten


def memory_that_is_written(graph: fx.Graph) -> dict[fx.Node, int]:
    """Maps the nodes whose memory some node writes to numbers; equal numbers mean shared memory.

    Each input has its own memory, as in torch's functionalization. `graph` is not functionalized
    yet.
    """
    shown: dict[fx.Node, list[int]] = {}  # for each tensor of a node's value, its memory
    written: set[int] = set()
    numbers = count()
    for node in graph.nodes:
        if node.op == "output":
            break
        shown[node] = [
            next(numbers) if source is None else shown[source[0]][source[1]]
            for source in _find_sources(node)
        ]
        for operand in operands_written(node):
            written.update(shown[operand])
    tensors = ((n, m) for n, m in shown.items() if isinstance(n.meta.get("val"), torch.Tensor))
    return {node: memory for node, (memory,) in tensors if memory in written}


def _find_sources(node: fx.Node) -> list[tuple[fx.Node, int] | None]:
    """Returns for each tensor of a node's value the tensor of an operand that it is a view of.

    The tensor is given as (operand, index among the operand's tensors); None for new memory.
    """
    made = tensors_in(_value_of(node))
    facts, schema = facts_of(node.target), getattr(node.target, "_schema", None)
    if node.op != "call_function" or not made or facts.makes_new:
        return [None for _ in made]
    if node.target is operator.getitem:
        whole, place = node.args
        assert isinstance(whole, fx.Node) and isinstance(place, int)
        first = len(tensors_in(_value_of(whole)[:place]))
        return [(whole, first + i) for i, _ in enumerate(made)]
    if facts.is_undeclared_view:
        return [(node.all_input_nodes[0], 0) for _ in made]
    if schema is None:
        known = {  # private: a number for each storage
            t.untyped_storage()._cdata: (read, i)
            for read in node.all_input_nodes
            for i, t in enumerate(tensors_in(_value_of(read)))
        }
        return [known.get(t.untyped_storage()._cdata) for t in made]
    found: list[tuple[fx.Node, int] | None] = []
    values = node.meta["val"] if len(schema.returns) > 1 else (node.meta["val"],)
    for value, places in zip(values, _find_shown_arguments(node.target), strict=False):
        source = _find_operand(node, places)
        # Results are chunks of one tensor; or, for a list operand, each is a view of one item.
        is_list = source is not None and len(tensors_in(_value_of(source))) > 1
        for i, _ in enumerate(tensors_in(value)):
            found.append(None if source is None else (source, i if is_list else 0))
    return found


def shown_operand(node: fx.Node) -> tuple[fx.Node | None, bool]:
    """Returns the operand that a node's value is a view of, and whether the call writes it.

    The operand is None if the value is no view.
    """
    if node.op != "call_function" or (facts := facts_of(node.target)).makes_new:
        return None, False
    if node.target is operator.getitem:
        whole: Any = node.args[0]
        source, is_written = shown_operand(whole)
        return (whole if source is not None else None), is_written
    if facts.is_undeclared_view:
        return node.all_input_nodes[0], False
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return None, False
    operand = _find_operand(node, _find_shown_arguments(node.target)[0])
    return operand, operand is not None and schema.returns[0].alias_info.is_write


@lru_cache(maxsize=4096)
def _find_shown_arguments(target: Any) -> list[list[tuple[int, str]]]:
    """Returns, for each result of an operator, the arguments that the result may be a view of.

    An argument is given as (position, name).
    """
    schema = target._schema
    arguments = [(i, a.name, a.alias_info) for i, a in enumerate(schema.arguments) if a.alias_info]
    found = []
    for result in (returned.alias_info for returned in schema.returns):
        # For a list of chunks the operand's alias set is "*" (`Tensor(a -> *)`).
        shown = [
            (i, name)
            for i, name, own in arguments
            if result and (own.before_set & result.before_set or "*" in own.after_set)
        ]
        found.append(shown)
    return found


def _find_operand(node: fx.Node, places: Sequence[tuple[int, str]]) -> fx.Node | None:
    """Returns the first of a call's operands at `places` that is a node; None if none is."""
    args, kwargs = node.args, node.kwargs
    for i, name in places:
        value = args[i] if i < len(args) else kwargs.get(name)
        if isinstance(value, fx.Node):
            return value
    return None


def _value_of(node: fx.Node) -> Any:
    if node.op == "get_attr" and "val" not in node.meta:
        return getattr(node.graph.owning_module, str(node.target))
    return node.meta.get("val")


def operands_written(node: fx.Node) -> list[fx.Node]:
    """Returns the operands that `node` writes in place, in a graph before functionalization."""
    if node.op != "call_function":
        return []
    if subgraph_of(node) is not None:
        return [*written_operands(node)]
    facts = facts_of(node.target)
    if facts.statistics:
        statistics: Any = node.args[3:5] if node.args[5] else ()
        return [t for t in statistics if isinstance(t, fx.Node)]
    found: list[Any] = []
    for written in facts.writes:
        operand = written.find(node.args, node.kwargs)
        found += operand if isinstance(operand, (list, tuple)) else (operand,)
    return [n for n in found if isinstance(n, fx.Node)]


def part_of_storage(t: torch.Tensor) -> Any:
    """Returns what part of its storage `t` covers, to compare it with the part of another tensor.

    The result is (shape, strides, offset, dtype, (`t.is_conj()`, `t.is_neg()`)).
    """
    lazily = t.is_conj(), t.is_neg()
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, lazily


def have_same_memory_format(a: Any, b: Any) -> bool:
    """True if two values have equal shapes, strides and dtypes.

    Args:
        a, b: tensors, or lists of tensors. They may also both be None.
    """
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(have_same_memory_format, a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is None and b is None
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


Pairs = frozenset[frozenset[int]]
"""Pairs of positions of outputs. If an output is a view of input i, the pair has -1 - i."""


def overlapping_results(graph: fx.Graph) -> Pairs:
    """Returns the pairs of outputs that share elements, and the pairs of an input and a view of it.

    The pairs are positions of outputs. A negative number is an input: -1 - i for the i-th one.
    """
    return frozenset(_find_overlapping_pairs(graph))


def _find_overlapping_pairs(graph: fx.Graph) -> Iterator[frozenset[int]]:
    (end,) = graph.find_nodes(op="output")
    together: dict[fx.Node, list[tuple[int, fx.Node]]] = defaultdict(list)
    for i, node in enumerate(end.args[0]):  # type: ignore[arg-type]
        if isinstance(node, fx.Node):  # else a number
            together[views_of(node)[0]].append((i, node))
    for first, results in together.items():
        if first.op == "placeholder":
            at = graph.find_nodes(op="placeholder").index(first)
            yield from (frozenset((i, -1 - at)) for i, _ in results)
        if len(results) > 1:
            yield from _find_overlaps_within(first, results)


def _find_overlaps_within(
    first: fx.Node, results: list[tuple[int, fx.Node]]
) -> Iterator[frozenset[int]]:
    """Yields the pairs that overlap among (index, node) in memory that the node `first` made."""
    shown = _replay_views([node for _, node in results], first)
    pairs = zip(shown, (i for i, _ in results), strict=True)
    ordered = sorted(pairs, key=lambda pair: (pair[0].storage_offset(), pair[1]))
    for at, (one, i) in enumerate(ordered):
        for other, j in ordered[at + 1 :]:
            if other.storage_offset() > last_element_offset(one):  # and so are all that follow
                break
            if _has_common_elements(one, other):
                yield frozenset((i, j))


def keep_apart(graph: fx.Graph, before: Pairs) -> None:
    """Copies outputs that share elements, with each other or with an input, only because of a pass.

    Args:
        graph: the graph after the pass. It is changed in place.
        before: the result of `overlapping_results` before the pass.
    """
    (end,) = graph.find_nodes(op="output")
    values = list(end.args[0])  # type: ignore[arg-type]
    now = overlapping_results(graph)
    if now <= before:
        return
    for place in sorted({max(pair) for pair in now - before}):
        shown = values[place]
        # It is copied where it is made: it may be a view of an input that is written later.
        behind = graph.find_nodes(op="placeholder")[-1] if shown.op == "placeholder" else shown
        with graph.inserting_after(behind):
            values[place] = copy = add_call(graph, _aten.clone.default, (shown,))
        copy.meta["val"] = shown.meta["val"].clone()
        if NOTE in shown.meta:
            copy.meta[NOTE] = shown.meta[NOTE]
    end.args = (values,)


def _replay_views(nodes: list[fx.Node], first: fx.Node) -> list[torch.Tensor]:
    """Returns for each of `nodes` a meta tensor with its strides and offset in `first`'s memory."""
    value = first.meta["val"]
    with _disable_current_modes(), torch.no_grad():
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        like = like.conj() if value.is_conj() else like  # because some views depend on it
        like = torch._neg_view(like) if value.is_neg() else like
        return [_apply_view_calls(like, views_of(node)[1]) for node in nodes]


def _has_common_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (a.numel() and b.numel()):
        return False
    if a.itemsize != b.itemsize:  # offsets count elements of different sizes: not compared
        return True
    begin, end = (
        max(a.storage_offset(), b.storage_offset()),
        min(last_element_offset(a), last_element_offset(b)),
    )
    if begin > end:
        return False
    with _disable_current_modes(), torch.no_grad():
        marks = torch.zeros(
            max(last_element_offset(a), last_element_offset(b)) + 1, dtype=torch.bool
        )
        marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
        return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def last_element_offset(t: torch.Tensor) -> int:
    steps = ((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.storage_offset() + sum(steps)  # type: ignore[return-value]


def views_of(node: fx.Node, known: Container[fx.Node] = ()) -> tuple[fx.Node, list[fx.Node]]:
    """Finds where a node's memory comes from.

    Args:
        known: nodes at which the search ends.

    Returns:
        The node that allocated the memory (or the node in `known`), and the view calls from there
        to `node`. In-place calls are left out.
    """
    calls: list[fx.Node] = []
    while True:
        if node in known:
            return node, calls
        source, is_written = shown_operand(node)
        if source is None:
            return node, calls
        if not is_written:
            calls.insert(0, node)
        node = source


def _apply_view_calls(shown: Any, calls: list[fx.Node]) -> Any:
    for call in calls:
        target: Any = call.target
        if target is operator.getitem:
            shown = shown[call.args[1]]
        elif target is not WAIT:
            shown = target(shown, *call.args[1:], **call.kwargs)
    return shown
