"""Memory of a traced graph: which nodes show the same, and which results do.

Read from the schemas and facts of ops, not from where fake tensors lie: equal calls share one fake
(`equal_calls`), so that two values may have one storage there and none in common when they run.

In a graph without writes, results of one memory would become values of their own: a view of an
argument would not follow the argument. `share_memory_of_results` makes such a result a view again,
by the calls that made it. `overlapping_results` finds the pairs that show common elements, which
passes must keep as they were; `keep_apart` copies new ones.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm.collective import WAIT
from partita.graph.errors import CaptureError, not_captured
from partita.graph.graph_nodes import NOTE, GraphPart, add_call, note_of, written_operands
from partita.layout import Fix
from partita.tensor.op_facts import facts_of

from .equal_calls import call_without_memory, tensors_in
from .functional_calls import UnsureOfWrites

_aten = torch.ops.aten


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
        shown[node] = [
            next(numbers) if source is None else shown[source[0]][source[1]]
            for source in _find_sources(node)
        ]
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


def _find_sources(node: fx.Node) -> list[tuple[fx.Node, int] | None]:
    """For each tensor of a node's value the operand whose memory it shows, and which of the tensors
    of that; None of a tensor in memory of its own."""
    made = tensors_in(_value_of(node))
    facts, schema = facts_of(node.target), getattr(node.target, "_schema", None)
    if node.op != "call_function" or not made or facts.makes_new:
        return [None for _ in made]
    if node.target is operator.getitem:
        whole, place = node.args
        assert isinstance(whole, fx.Node) and isinstance(place, int)
        first = len(tensors_in(_value_of(whole)[:place]))
        return [(whole, first + i) for i, _ in enumerate(made)]
    if facts.shows_unsaid:
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
    for value, returned in zip(values, schema.returns, strict=False):
        source = _shown_operand(node, schema, returned)
        # Chunks of one tensor, or of a list each the one at its place.
        is_list = source is not None and len(tensors_in(_value_of(source))) > 1
        for i, _ in enumerate(tensors_in(value)):
            found.append(None if source is None else (source, i if is_list else 0))
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
    written = [operand.find(node.args, node.kwargs) for operand in facts_of(target).writes]
    return [n for n in pytree.tree_leaves(written) if isinstance(n, fx.Node)]


def view_of(node: fx.Node) -> fx.Node | None:
    """The operand of which a node is a view, where it is its only operand; else None."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not schema.returns:
        return None
    (source, *others) = node.all_input_nodes or (None,)
    if facts_of(node.target).by_storage and (source is None or shown_operand(source)[0]):
        return None
    alias = schema.returns[0].alias_info
    return source if alias is not None and not alias.is_write and not others else None


def drop_needless_sets(graph: fx.Graph) -> None:
    """Drop each `x.set_(y)` where x and y show the same memory.

    `register_parametrization` makes such calls.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.set_.source_Tensor):
        x, y = node.args
        same = part_of(x.meta["val"]) == part_of(y.meta["val"])
        if same and views_of(x)[0] is views_of(y)[0]:
            node.replace_all_uses_with(x)
            graph.erase_node(node)


def refuse_lost_writes(graph: fx.Graph, traced: bool) -> None:
    """Raise CaptureError where what is written through a view, or a `set_`, would be lost.

    An input has the elements that it shows: others of its memory, which `as_strided` reaches, are
    no values of the graph.

    Args:
        traced: the graph is traced again by torch, whose inverse of `unfold` sets to zero what is
            in no window.
    """
    given_memory: set[fx.Node] = set()  # who shows memory that `set_` gave to another
    for node in graph.nodes:
        for operand in operands_written(node):
            first, calls = views_of(operand)
            lost = "set_" if first in given_memory else ""
            for call in calls:
                if call.target is _aten.unfold.default and traced:
                    lost = "unfold"
                if call.target is _aten.as_strided.default and first.op == "placeholder":
                    shown = call.meta["val"]
                    lost = "" if _shows_all_between(first.meta["val"], shown) else "as_strided"
            if lost:
                raise not_captured(
                    f"the step writes into memory that it shows by {lost}()",
                    "a graph has values and no memory: what is written there would be lost",
                    Fix("x = x.clone()", "before that, for memory of its own"),
                    place=note_of(node).source,
                )
        if getattr(node.target, "_opname", "") == "set_" and len(node.all_input_nodes) > 1:
            given_memory.update(views_of(n)[0] for n in node.all_input_nodes)


def _shows_all_between(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """True if `whole` shows each element of the memory from the first to the last of `part`."""
    first, last = whole.storage_offset(), _last_element_offset(whole)
    if last - first + 1 != whole.numel() or not _is_without_overlap(whole):
        return False
    return first <= part.storage_offset() and _last_element_offset(part) <= last


def part_of(t: torch.Tensor) -> Any:
    """Identifies the part of its memory that a tensor shows, and as what."""
    lazily = t.is_conj(), t.is_neg()
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, lazily


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


def invert_view(
    view: fx.Node, value: fx.Node, before: fx.Node, make: Callable[..., fx.Node]
) -> fx.Node:
    """The base of `view` after `value` was written to it.

    Args:
        before: the base before the write, in the new graph.
        make: adds a call to the new graph, as `make(target, args)`.

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
        return make(_aten.view.dtype, (value, source.dtype))
    if name == "slice":
        return make(_aten.slice_scatter.default, (before, value, *arguments))
    if name == "select":
        return make(_aten.select_scatter.default, (before, value, *arguments))
    if name == "diagonal":
        return make(_aten.diagonal_scatter.default, (before, value, *arguments))
    if name in ("t", "transpose", "_conj", "_neg_view"):
        return make(view.target, (value, *arguments))
    if name == "permute":
        dims = [d % len(shape) for d in arguments[0]]  # type: ignore[union-attr,operator]
        return make(_aten.permute.default, (value, [dims.index(d) for d in range(len(shape))]))
    if name in ("view", "_unsafe_view", "unsqueeze", "squeeze"):
        return make(_aten.view.default, (value, shape))
    if name == "as_strided":
        size, stride, offset = (*arguments, 0)[:3]
        return make(_aten.as_strided_scatter.default, (before, value, size, stride, offset))
    if name == "unfold":
        return _invert_unfold(arguments, value, before, make)
    raise UnsureOfWrites


def _invert_unfold(
    arguments: Sequence[Any], value: fx.Node, before: fx.Node, make: Callable[..., fx.Node]
) -> fx.Node:
    """`before`, into whose windows `value` was written. Torch's inverse loses what is in none."""
    like = before.meta["val"]
    order = sorted(range(like.dim()), key=lambda d: -like.stride(d))
    back = [order.index(d) for d in range(like.dim())]
    with _disable_current_modes():
        dense = torch.empty([like.shape[d] for d in order], device="meta")
        windows = dense.permute(back).unfold(*arguments)
    if not _is_without_overlap(windows):
        raise UnsureOfWrites
    shown = list(windows.shape), list(windows.stride()), 0
    base = make(_aten.permute.default, (before, order))
    base = make(_aten.clone.default, (base,), {"memory_format": torch.contiguous_format})
    base = make(_aten.as_strided_scatter.default, (base, value, *shown))
    return make(_aten.permute.default, (base, back))


def _is_without_overlap(t: torch.Tensor) -> bool:
    """True if the strides alone say that no two elements share memory."""
    end = 0
    for stride, n in sorted(zip(t.stride(), t.shape, strict=True)):
        if n > 1 and stride <= end:
            return False
        end += (n - 1) * stride
    return True


def base_on_makers(graph: fx.Graph) -> None:
    """Have each `as_strided` take the value that made the memory, not a view of it.

    It depends on the memory alone, and its inverse is known of what shows all of that.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided.default):
        source = node.args[0]
        maker, _ = views_of(source)
        shown, whole = source.meta["val"], maker.meta["val"]
        if not isinstance(whole, torch.Tensor) or part_of(shown)[3:] != part_of(whole)[3:]:
            continue  # its numbers count elements of another size
        offset = (*node.args, None)[3]
        node.args = (maker, *node.args[1:3], shown.storage_offset() if offset is None else offset)


# -- results that share memory ---------------------------------------------------------------------

Results = list[tuple[int, fx.Node]]


def share_memory_of_results(
    before: fx.Graph,
    after: fx.Graph,
    memory: Mapping[fx.Node, int],
    made: Mapping[fx.Node, fx.Node],
) -> None:
    """Make results of `after` views of what they were views of in `before`.

    Args:
        before: the graph with writes.
        after: the same graph without; changed in place.
        memory: by node of `before`, the number of the memory that it shows, where it is written.
        made: by node of `before` that made such memory, its value at the end of `after`.

    Raises:
        CaptureError: a result cannot be made such a view.
    """
    (old_end,), (new_end,) = before.find_nodes(op="output"), after.find_nodes(op="output")
    sharing: dict[int, Results] = defaultdict(list)
    for i, node in enumerate(old_end.args[0]):  # type: ignore[arg-type]
        if node in memory:
            sharing[memory[node]].append((i, node))
    olds, news = before.find_nodes(op="placeholder"), after.find_nodes(op="placeholder")
    inputs = {memory[o]: {o: n} for o, n in zip(olds, news, strict=True) if o in memory}
    values = list(new_end.args[0])  # type: ignore[arg-type]
    # A legal graph reads no input behind what writes it; a view shows what is written later, too.
    first_write = next(iter(after.find_nodes(op="call_function", target=_aten.copy_.default)), None)
    with after.inserting_before(first_write or new_end):
        for number, results in sharing.items():
            if number in inputs:
                _make_views(results, inputs[number], values)
            elif len(results) > 1:
                makers = {o: n for o, n in made.items() if memory[o] == number}
                _make_views(results, makers, values)
    new_end.args = (values,)


def refuse_cut_views(graph: fx.Graph, cut: Collection[int]) -> None:
    """Raise CaptureError if a result in `cut`, whose padding is cut off, is a view.

    What is left is a copy. A result that shows all of an input is replaced by that input.
    """
    (end,) = graph.find_nodes(op="output")
    values = list(end.args[0])  # type: ignore[arg-type]
    for place in cut:
        first, calls = views_of(values[place])
        shown = [n.meta["val"] for n in (first, *calls)]
        if first.op == "placeholder" and all(lie_alike(one, shown[0]) for one in shown):
            values[place] = first
    end.args = (values,)
    for pair in overlapping_results(graph):
        last = max(pair & set(cut), default=None)
        is_one_value = min(pair) >= 0 and len({values[i] for i in pair}) == 1
        if last is not None and not is_one_value and values[last].op != "placeholder":
            raise not_captured(
                "the step returns a view whose pieces are uneven",
                "in a graph pieces are padded, and what is left when the padding is cut off is a "
                "copy, which would not follow what it was a view of",
                Fix("x.clone()", "of what is returned, for memory of its own"),
                place=note_of(values[place]).source,
            )


def _make_views(results: Results, bases: Mapping[fx.Node, fx.Node], values: list[Any]) -> None:
    """Make results in one memory views of `bases`: nodes of the graph before, by their new value.

    Raises:
        CaptureError: one of them is a view of none of these.
    """
    for i, node in results:
        base, calls = views_of(node, bases)
        if base not in bases:
            raise _make_view_error(node)
        values[i] = _call_again(calls, bases[base])


def _call_again(calls: list[fx.Node], value: fx.Node) -> fx.Node:
    """Repeat the view calls `calls`, beginning with `value` in place of what they showed."""
    if calls and not lie_alike(value.meta["val"], _find_viewed_operand(calls[0]).meta["val"]):
        raise _make_view_error(calls[0])
    for call in calls:
        if facts_of(call.target).is_alias:
            continue
        if call.all_input_nodes != [_find_viewed_operand(call)]:
            raise _make_view_error(call)
        target: Any = call.target
        given: Any = (call.args, call.kwargs)
        args, kwargs = fx.node.map_arg(given, lambda _, value=value: value)  # type: ignore[misc]
        value = add_call(value.graph, target, args, kwargs)
        value.meta["val"] = _call_view(call, args[0].meta["val"])
        if NOTE in call.meta:
            value.meta[NOTE] = call.meta[NOTE]
    return value


def _find_viewed_operand(call: fx.Node) -> fx.Node:
    found = shown_operand(call)[0]
    assert found is not None
    return found


def _call_view(call: fx.Node, shown: Any) -> Any:
    """The fake value of a view call on `shown`."""
    if call.target is operator.getitem:
        return shown[call.args[1]]
    return call_without_memory(call.target, (shown, *call.args[1:]), call.kwargs).value


def _make_view_error(node: fx.Node) -> CaptureError:
    return not_captured(
        "the step returns a view of what it writes",
        "a graph has values: this view cannot be told as one of what the memory holds at its end",
        Fix("x.clone()", "of what is returned, for memory of its own"),
        place=note_of(node).source,
    )


# -- results that overlap --------------------------------------------------------------------------


Pairs = frozenset[frozenset[int]]
"""Pairs of places of results; for a result that shows input i, its place and -1 - i."""


def overlapping_results(graph: fx.Graph) -> Pairs:
    """The pairs of results that overlap, or of a result and the input that it shows."""
    return frozenset(_find_overlapping_pairs(graph))


def _find_overlapping_pairs(graph: fx.Graph) -> Iterator[frozenset[int]]:
    (end,) = graph.find_nodes(op="output")
    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    together: dict[fx.Node, list[tuple[int, fx.Node]]] = defaultdict(list)
    for i, node in enumerate(end.args[0]):  # type: ignore[arg-type]
        if isinstance(node, fx.Node):  # else a number
            together[views_of(node)[0]].append((i, node))
    for first, results in together.items():
        if first in inputs:
            yield from (frozenset((i, -1 - inputs[first])) for i, _ in results)
        if len(results) > 1:
            yield from _find_overlaps_within(first, results)


def _find_overlaps_within(
    first: fx.Node, results: list[tuple[int, fx.Node]]
) -> Iterator[frozenset[int]]:
    """The pairs that overlap among results in the memory that `first` made."""
    shown = _replay_views([node for _, node in results], first)
    pairs = zip(shown, (i for i, _ in results), strict=True)
    ordered = sorted(pairs, key=lambda pair: (pair[0].storage_offset(), pair[1]))
    for at, (one, i) in enumerate(ordered):
        for other, j in ordered[at + 1 :]:
            if other.storage_offset() > _last_element_offset(one):  # and so do all behind it
                break
            if _has_common_elements(one, other):
                yield frozenset((i, j))


def keep_apart(graph: fx.Graph, before: Pairs) -> None:
    """Copy results that overlap now, and did not in `before`."""
    (end,) = graph.find_nodes(op="output")
    values = list(end.args[0])  # type: ignore[arg-type]
    now = overlapping_results(graph)
    if now <= before:
        return
    for place in sorted({max(pair) for pair in now - before}):
        shown = values[place]
        # Where it is made: it may show an input, into which the graph writes later.
        behind = graph.find_nodes(op="placeholder")[-1] if shown.op == "placeholder" else shown
        with graph.inserting_after(behind):
            values[place] = copy = add_call(graph, _aten.clone.default, (shown,))
        copy.meta["val"] = shown.meta["val"].clone()
        if NOTE in shown.meta:
            copy.meta[NOTE] = shown.meta[NOTE]
    end.args = (values,)


def _replay_views(nodes: list[fx.Node], first: fx.Node) -> list[torch.Tensor]:
    """Meta tensors that lie in the memory of `first` as the values of the nodes do."""
    value = first.meta["val"]
    with _disable_current_modes(), torch.no_grad():
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        like = like.conj() if value.is_conj() else like  # which decides what some views are
        like = torch._neg_view(like) if value.is_neg() else like
        return [_apply_view_calls(like, views_of(node)[1]) for node in nodes]


def _has_common_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (a.numel() and b.numel()):
        return False
    if a.itemsize != b.itemsize:  # offsets count elements of different sizes: not compared
        return True
    begin, end = (
        max(a.storage_offset(), b.storage_offset()),
        min(_last_element_offset(a), _last_element_offset(b)),
    )
    if begin > end:
        return False
    with _disable_current_modes(), torch.no_grad():
        marks = torch.zeros(
            max(_last_element_offset(a), _last_element_offset(b)) + 1, dtype=torch.bool
        )
        marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
        return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _last_element_offset(t: torch.Tensor) -> int:
    steps = ((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.storage_offset() + sum(steps)  # type: ignore[return-value]


def views_of(node: fx.Node, known: Container[fx.Node] = ()) -> tuple[fx.Node, list[fx.Node]]:
    """The node that made the memory which a node shows, and the view calls from there to the node.

    Args:
        known: nodes at which to stop before that.
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
