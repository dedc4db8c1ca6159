"""Memory in a graph without in-place writes: writes through views, and results that share memory.

In such a graph, results that share memory would become separate values: a returned view of an
argument would not change with the argument. `share_memory_of_results` makes such a result a view
again: it repeats the calls that made the view. `invert_views` returns the new base of a view after
a write to the view.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from partita.graph.errors import CaptureError, UnsureOfWrites, not_captured
from partita.graph.fake_values import call_without_memory
from partita.graph.graph_nodes import NOTE, add_call, copy_node, note_of
from partita.graph.shared_memory import (
    have_same_memory_format,
    last_element_offset,
    operands_written,
    overlapping_results,
    part_of_storage,
    shown_operand,
    views_of,
)
from partita.layout import Fix
from partita.tensor.aliasing import is_without_overlap
from partita.tensor.op_facts import facts_of

_aten = torch.ops.aten


def makers_of_shared(graph: fx.Graph, memory: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Returns the calls that allocate memory which several results share and a node writes.

    Args:
        graph: the graph with writes.
        memory: for each node whose memory some node writes, a number. Nodes with the same number
            share memory.
    """
    (end,) = graph.find_nodes(op="output")
    counts = Counter(memory[n] for n in end.args[0] if n in memory)
    first: dict[int, fx.Node] = {}
    for node, number in memory.items():
        first.setdefault(number, node)
    return [n for m, n in first.items() if counts[m] > 1 and n.op == "call_function"]


def view_of(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that a node is a view of; None if it is none, or has other operands."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not schema.returns:
        return None
    (source, *others) = node.all_input_nodes or (None,)
    if facts_of(node.target).by_storage and (source is None or shown_operand(source)[0]):
        return None
    alias = schema.returns[0].alias_info
    return source if alias is not None and not alias.is_write and not others else None


def drop_needless_sets(graph: fx.Graph) -> None:
    """Removes each `x.set_(y)` from `graph` if x and y are the same part of one storage.

    This `set_` changes nothing. `register_parametrization` makes these calls.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.set_.source_Tensor):
        x, y = node.args
        same = part_of_storage(x.meta["val"]) == part_of_storage(y.meta["val"])
        if same and views_of(x)[0] is views_of(y)[0]:
            node.replace_all_uses_with(x)
            graph.erase_node(node)


def refuse_lost_writes(graph: fx.Graph, traced: bool) -> None:
    """Raises CaptureError if the graph would lose a write through a view, or a write after `set_`.

    The graph has only the elements of an input that its shape and strides cover. `as_strided` may
    reach other elements of the storage. In an `expand`ed tensor, several elements share memory.

    Args:
        traced: True if torch traces the graph again. Writes through `unfold` and `expand` are then
            refused, too, because torch would compute wrong values for the base.
    """
    given_memory: set[fx.Node] = set()  # makers of memory that a `set_` has exchanged
    for node in graph.nodes:
        for operand in operands_written(node):
            first, calls = views_of(operand)
            lost = "set_" if first in given_memory else ""
            wide = first if node.target in _FILLS else operand
            if not all(is_without_overlap(n.meta.get("val")) for n in (first, wide)):
                lost = "expand"
            for call in calls if traced else ():
                if call.target is _aten.unfold.default or not is_without_overlap(call.meta["val"]):
                    lost = getattr(call.target, "_opname", lost or "view")
                    break
            strided = [call for call in calls if call.target is _aten.as_strided.default]
            if strided and first.op == "placeholder":
                covers = _shows_all_between(first.meta["val"], strided[-1].meta["val"])
                lost = lost if covers else "as_strided"
            if lost:
                raise not_captured(
                    f"the step writes through a view that it made with {lost}()",
                    "a graph cannot express a write through this view, so it would be lost",
                    Fix("x = x.clone()", "before that, to get its own memory"),
                    place=note_of(node).source,
                )
        if getattr(node.target, "_opname", "") == "set_" and len(node.all_input_nodes) > 1:
            given_memory.update(views_of(n)[0] for n in node.all_input_nodes)


def refuse_writes_before_reruns(graph: fx.Graph, regions: Collection[int]) -> None:
    """Raises CaptureError if a tensor that a checkpoint reads is written before its backward.

    Eager code runs the region again with the new value. The graph would use the value in forward.

    Args:
        regions: the numbers of the regions of torch's checkpoint.
    """
    read_by: dict[fx.Node, set[int]] = {}  # regions that have read the memory of a node
    written: dict[int, fx.Node] = {}  # by region, the first write of what it has read
    for node in graph.nodes:
        region = note_of(node).region
        for operand in operands_written(node):
            for other in read_by.get(views_of(operand)[0], set()) - {region}:
                written.setdefault(other, node)
        for read in node.all_input_nodes:
            if region in regions and note_of(read).region != region:
                read_by.setdefault(views_of(read)[0], set()).add(region)
            write = written.get(note_of(read).region)
            if write is not None and note_of(node).phase == "backward":
                raise not_captured(
                    "a tensor is written between a checkpoint that reads it and its backward",
                    "eager would run the checkpoint again with the new value, and a graph keeps "
                    "the values of forward",
                    Fix("write it after backward"),
                    Fix("pt.remat(function)", "which uses the values of forward in eager, too"),
                    place=note_of(write).source,
                )


def _shows_all_between(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """True if `whole` has each element of the memory from the first to the last of `part`."""
    first, last = whole.storage_offset(), last_element_offset(whole)
    if last - first + 1 != whole.numel() or not is_without_overlap(whole):
        return False
    return first <= part.storage_offset() and last_element_offset(part) <= last


def is_reshaped(part: Any, other: Any) -> bool:
    """True if two views have the same elements in the same order, without gaps, as after a reshape.

    Args:
        part, other: the results of `part_of_storage` for the views.
    """
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


_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)
"""Writes of one value to all elements, which may share memory."""


def invert_views(
    views: Sequence[fx.Node], value: fx.Node, before: fx.Node, make: Callable[..., fx.Node]
) -> fx.Node:
    """Returns the new value of the base of `views` after a write to the last of them.

    Args:
        views: the view calls, in order. Each takes the result of the call before. No value in
            between is computed: in an overlapping view (`expand`, `unfold`), a write to one element
            also changes others.
        value: the last view's value after the write.
        before: the base before the write, in the new graph.
        make: a function `make(target, args)` that adds a call to the new graph.

    Raises:
        UnsureOfWrites: no inverse of one of the views is known.
    """
    if any(len(view.all_input_nodes) != 1 or view.kwargs for view in views):
        raise UnsureOfWrites
    view, *others = views
    name, arguments = view.target._opname, view.args[1:]  # type: ignore[union-attr]
    if others or name in ("expand", "unfold"):
        return _invert_by_strides(views, value, before, make)
    source = view.all_input_nodes[0].meta["val"]
    shape = list(source.shape)
    if view.target is _aten.view.dtype:  # the same bits as another dtype of the same size
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
    raise UnsureOfWrites


def _invert_by_strides(
    views: Sequence[fx.Node], value: fx.Node, before: fx.Node, make: Callable[..., fx.Node]
) -> fx.Node:
    """Returns `before` with `value` in the elements that the last of `views` shows."""
    like = before.meta["val"]
    order = sorted(range(like.dim()), key=lambda d: -like.stride(d))
    back = [order.index(d) for d in range(like.dim())]
    with _disable_current_modes():
        shown = torch.empty([like.shape[d] for d in order], device="meta").permute(back)
        for view in views:
            by_strides = getattr(view.target, "_opname", "") in _BY_STRIDES
            if by_strides or view.meta["val"].dtype != like.dtype:
                raise UnsureOfWrites
            try:
                shown = view.target(shown, *view.args[1:])  # type: ignore[operator]
            except RuntimeError as error:  # a reshape of other strides
                raise UnsureOfWrites from error
        expanded = [d for d, n in enumerate(shown.shape) if n > 1 and not shown.stride(d)]
        for d in expanded:
            shown = shown.narrow(d, 0, 1)
    for d in expanded:  # it was filled, so all rows are equal
        value = make(_aten.slice.Tensor, (value, d, 0, 1))
    if not is_without_overlap(shown):
        raise UnsureOfWrites
    where = list(shown.shape), list(shown.stride()), shown.storage_offset()
    base = make(_aten.permute.default, (before, order))
    base = make(_aten.clone.default, (base,), {"memory_format": torch.contiguous_format})
    base = make(_aten.as_strided_scatter.default, (base, value, *where))
    return make(_aten.permute.default, (base, back))


_BY_STRIDES = ("as_strided", "_conj", "_neg_view")
"""Views that depend on their operand's strides, or whose elements are not those in memory."""


def base_on_makers(graph: fx.Graph) -> None:
    """Makes each `as_strided` in `graph` read the tensor that allocated the storage, not its view.

    The result is the same, because `as_strided` counts from the start of the storage. (If the
    tensor has another dtype than the view, nothing changes.) The change is needed for a write
    through the result. The write makes a new value of the operand, so the operand must cover
    everything that is written.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided.default):
        source = node.args[0]
        maker, _ = views_of(source)
        shown, whole = source.meta["val"], maker.meta["val"]
        if (
            not isinstance(whole, torch.Tensor)
            or part_of_storage(shown)[3:] != part_of_storage(whole)[3:]
        ):
            continue  # its strides and offset count elements of another size
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
    """Makes results of the functionalized graph share memory where they did in the original graph.

    Args:
        before: the graph with writes.
        after: the same graph without writes; it is changed in place.
        memory: for each node of `before` whose memory is written, a number. Nodes with the same
            number share memory.
        made: for each node of `before` that allocated memory in `memory`, the node of `after` with
            the memory's final value.

    Raises:
        CaptureError: a result cannot be made a view of the shared memory.
    """
    (old_end,), (new_end,) = before.find_nodes(op="output"), after.find_nodes(op="output")
    sharing: dict[int, Results] = defaultdict(list)
    for i, node in enumerate(old_end.args[0]):  # type: ignore[arg-type]
        if node in memory:
            sharing[memory[node]].append((i, node))
    olds, news = before.find_nodes(op="placeholder"), after.find_nodes(op="placeholder")
    inputs = {memory[o]: {o: n} for o, n in zip(olds, news, strict=True) if o in memory}
    values = list(new_end.args[0])  # type: ignore[arg-type]
    # A legal graph reads no input after it is written; a view sees later writes anyway.
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
    """Raises CaptureError if a result should be a view of an input, but loses its padding.

    Removing padding makes a copy. A result that has all elements of an input, in its form, is
    replaced by that input, and needs no copy.

    Args:
        graph: the graph, whose results are replaced in place.
        cut: the indices of the results whose padding is removed.
    """
    (end,) = graph.find_nodes(op="output")
    values = list(end.args[0])  # type: ignore[arg-type]
    for place in cut:
        first, calls = views_of(values[place])
        shown = [n.meta["val"] for n in (first, *calls)]
        if first.op == "placeholder" and all(
            have_same_memory_format(one, shown[0]) for one in shown
        ):
            values[place] = first
    end.args = (values,)
    for pair in overlapping_results(graph):
        last = max(pair & set(cut), default=None)
        is_one_value = min(pair) >= 0 and len({values[i] for i in pair}) == 1
        if last is not None and not is_one_value and values[last].op != "placeholder":
            raise not_captured(
                "the step returns a view whose pieces are uneven",
                "in a graph an uneven piece is padded. Without padding it is a copy, which would "
                "not change with the tensor that it was a view of",
                Fix("x.clone()", "of the result, to get its own memory"),
                place=note_of(values[place]).source,
            )


def _make_views(results: Results, bases: Mapping[fx.Node, fx.Node], values: list[Any]) -> None:
    """Sets results in `values` to views of `bases`, which map nodes of the old graph to new values.

    Raises:
        CaptureError: a result is a view of none of these.
    """
    for i, node in results:
        base, calls = views_of(node, bases)
        if base not in bases:
            raise _make_view_error(node)
        values[i] = _call_again(calls, bases[base])


def _call_again(calls: list[fx.Node], value: fx.Node) -> fx.Node:
    """Repeats the view calls `calls`, starting with `value` in place of their original operand."""
    if calls and not have_same_memory_format(
        value.meta["val"], _find_viewed_operand(calls[0]).meta["val"]
    ):
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
    """Returns the fake value of a view call on `shown`."""
    if call.target is operator.getitem:
        return shown[call.args[1]]
    return call_without_memory(call.target, (shown, *call.args[1:]), call.kwargs).value


def _make_view_error(node: fx.Node) -> CaptureError:
    return not_captured(
        "the step returns a view of a tensor that it also writes in place",
        "a graph returns values, and this view cannot be rebuilt from the values at its end",
        Fix("x.clone()", "of the result, to get its own memory"),
        place=note_of(node).source,
    )


# -- gathered parameters ---------------------------------------------------------------------------

_GATHERS = ("gather", "persistent")
"""Reasons (`Note.reason`) of the redistributions that gather a parameter of ZeRO."""


class ReplacedData(NamedTuple):
    """An assignment `old.data = new` of the step, as two nodes, and the user's line."""

    old: fx.Node
    new: fx.Node
    line: str


def refresh_gathered(graph: fx.Graph, replaced: Mapping[fx.Node, Sequence[ReplacedData]]) -> None:
    """Gathers parameters again that the step reads after a write to them.

    In one process there is only one memory, so backward reads what was written through `.data`.
    Here a gathered value is a copy, so it must be gathered again before the next read.

    Args:
        graph: the graph, which is changed in place.
        replaced: maps the last node before `p.data = y` to these assignments.

    Raises:
        CaptureError: a gathered value is read after `p.data = y`. In one process some calls of
            backward read the old memory, others the new.
    """
    values = {one.new for some in replaced.values() for one in some}
    freed: dict[fx.Node, str] = {}  # by memory of a gathered value, the line of `p.data = y`
    memory: dict[fx.Node, fx.Node] = {}  # by node, the one that made its memory
    moved_from: dict[fx.Node, set[fx.Node]] = {}  # the inputs whose elements a value has
    gathered: dict[fx.Node, dict[fx.Node, fx.Node]] = {}  # by input: values by memory
    stale: dict[fx.Node, fx.Node] = {}  # values by memory, of parameters that were written since
    for node in [n for n in graph.nodes if n.op != "output"]:
        shown, _ = shown_operand(node)
        memory[node] = node if shown is None else memory[shown]
        writes = operands_written(node)
        # Stages 1 and 2 gather what they have updated. A closure may run backward in an update.
        is_update = note_of(node).phase == "update" and bool(writes or note_of(node).move)
        for read in node.all_input_nodes if (shown is None or writes) and not is_update else ():
            if memory[read] in freed:
                raise _make_replaced_error(freed[memory[read]])
            if (value := stale.pop(memory[read], None)) is not None:
                with graph.inserting_before(node):
                    _gather_again(graph, value, note_of(node).phase)
        if node.op == "placeholder" or node in values:
            moved_from[node] = {node}
        elif _only_moves(node):
            reads = (moved_from.get(n, ()) for n in node.all_input_nodes)
            moved_from[node] = set(chain.from_iterable(reads))
        if note_of(node).reason in _GATHERS:
            for given in moved_from.get(node, ()):
                gathered.setdefault(given, {})[memory[node]] = node
        for one in replaced.get(node, ()):
            own = memory[one.old]  # which the operand of a gather shows
            freed |= dict.fromkeys(gathered.get(own, {}).keys() - {own}, one.line)
        if note_of(node).reason in _GATHERS:
            continue
        for given in {memory[n] for n in writes} & gathered.keys():
            for at, value in gathered[given].items():
                if not _is_cut_from(node, at, memory):
                    stale[at] = value


def _make_replaced_error(line: str) -> CaptureError:
    return not_captured(
        "p.data = x gives a parameter of ZeRO-3 other memory between its forward and its backward",
        "in one process some calls of backward read the old memory, which ZeRO has freed",
        Fix("p.data.copy_(x)"),
        Fix("p.data = x", "before the forward or after the backward"),
        place=line,
    )


def _only_moves(node: fx.Node) -> bool:
    facts = facts_of(node.target)
    return node.op == "call_function" and bool(note_of(node).move or facts.moves or facts.casts)


def _is_cut_from(write: fx.Node, made: fx.Node, memory: Mapping[fx.Node, fx.Node]) -> bool:
    """True if a call writes a shard of the gathered value `made` into the parameter."""
    if write.target is not _aten.copy_.default:
        return False
    value: Any = write.args[1]
    while memory.get(value) is not made and _only_moves(value):
        value = value.all_input_nodes[0]
    return memory.get(value) is made


def _gather_again(graph: fx.Graph, value: fx.Node, phase: str) -> None:
    """Writes the parameter's current value into its gathered value.

    Args:
        phase: the phase of the added nodes.
    """
    moves, waiting = {value}, [value]
    while waiting:
        found = [n for n in waiting.pop().all_input_nodes if _only_moves(n) and n not in moves]
        moves.update(found)
        waiting += found
    copies: dict[fx.Node, fx.Node] = {}
    for node in sorted(moves):
        copies[node] = copy_node(graph, node, lambda n: copies.get(n, n))
        copies[node].meta[NOTE] = replace(note_of(node), phase=phase)
    written = add_call(graph, _aten.copy_.default, (value, copies[value]))
    written.meta.update(copies[value].meta)
