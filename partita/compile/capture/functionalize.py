"""Functionalization: the traced graph without writes, in which each node is a value.

Passes may then move, merge or drop nodes. What a step writes in place (accumulated gradients,
parameters, optimizer state) becomes a new value; writes into inputs become `copy_` nodes at the end
of the graph, the only nodes that write:

    add_(w, g); mul_(w, 2)     ->     a = add(w, g); b = mul(a, 2); copy_(w, b)

`functional_rewrite` does this call by call. Where it is not sure which values a write changes, the
graph is traced once more under torch's own functionalization (`trace_without_writes`), which is
right whatever the graph writes and takes as long as capture.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from partita.tensor.op_facts import facts_of

from ..graph_nodes import NOTE, drop_unused, lazy_graph_modules
from .block_nodes import is_block_node
from .equal_counts import share_equal_counts
from .functional_calls import (
    call_in_list,
    call_without_writes,
    calls_of_list,
    changes_without_writes,
    value_of_input,
)
from .functional_memory import makers_of_shared, memory_that_is_written
from .functional_rewrite import UnsureOfWrites, rewrite_without_writes
from .scalars import Scalar
from .shared_results import keep_apart, overlapping_results, share_memory_of_results
from .symbolic import is_symbolic

__all__ = ["functionalize_graph", "trace_without_writes", "without_views_in_place"]


_aten = torch.ops.aten


def functionalize_graph(
    graph: fx.GraphModule, equal: Sequence[Sequence[int]] = ()
) -> fx.GraphModule:
    """`graph` without writes but for `copy_` into inputs at its end. Notes are kept.

    Args:
        equal: groups of inputs, by place, that hold the same number.

    Raises:
        CaptureError: a result cannot be a view of what it is a view of in eager.
        UnsureOfWrites: what a block node takes or gives is written as only a trace could tell.
    """
    without_views_in_place(graph.graph)
    memory = memory_that_is_written(graph.graph)
    makers = makers_of_shared(graph.graph, memory)
    try:
        made, shared = rewrite_without_writes(graph, memory, makers)
    except UnsureOfWrites:
        if any(map(is_block_node, graph.graph.nodes)):
            raise
        made, shared = trace_without_writes(graph, makers)
    share_memory_of_results(graph.graph, made.graph, memory, shared)
    overlapping = overlapping_results(made.graph)
    inputs = made.graph.find_nodes(op="placeholder")
    share_equal_counts(made.graph, [[inputs[i] for i in places] for places in equal])
    _remove_redundant_nodes(made.graph)
    keep_apart(made.graph, overlapping)  # what was dropped may have been a copy between results
    return made


def _remove_redundant_nodes(graph: fx.Graph) -> None:
    """Drop aliases, copies into new memory, and a profiler's marks; then what nobody uses."""
    for node in list(graph.nodes):
        if facts_of(node.target).is_alias:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is _aten.copy.default:
            into, value = node.args[0], node.args[1]
            if _has_same_metadata(into, value) and not node.args[2:]:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)  # marks for a profiler, which torch's optimizers set
    drop_unused(graph)


def _has_same_metadata(a: Any, b: Any) -> bool:
    one, other = a.meta.get("val"), b.meta.get("val")
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )


# -- tracing the graph again -----------------------------------------------------------------------


def trace_without_writes(
    graph: fx.GraphModule, makers: Sequence[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """`graph` without writes, traced again under torch's functionalization. Notes are kept.

    Args:
        makers: nodes whose memory several results show.

    Returns:
        The graph module, and for each of `makers` the node of what its memory holds at the end.
    """

    def run_noting_graph(*inputs: torch.Tensor) -> Any:
        return _Noting(graph, makers).run(*inputs)

    inputs = graph.graph.find_nodes(op="placeholder")
    fakes = [value_of_input(n.meta["val"]) for n in inputs]
    with torch.no_grad(), lazy_graph_modules():
        made: fx.GraphModule = make_fx(functionalize(run_noting_graph, remove="mutations"))(*fakes)
    for old, new in zip(inputs, made.graph.find_nodes(op="placeholder"), strict=True):
        given = {k: v for k, v in old.meta.items() if not is_symbolic(v)}
        new.meta.update({k: v for k, v in given.items() if k not in new.meta or k == NOTE})
    for node in made.graph.nodes:
        if node.op == "call_function":
            node.meta.setdefault("val", None)  # torch notes no value of a call that returns nothing
    (end,) = made.graph.find_nodes(op="output")
    values: Any = end.args[0]
    results = len(values) - len(makers)
    end.args = (values[:results],)
    return made, dict(zip(makers, values[results:], strict=True))


class _Noting(fx.Interpreter):
    """Interprets a graph while another is traced of it; new nodes get the notes of the old.

    Its results are those of the graph, and then the values of the nodes in `makers`.
    """

    def __init__(self, graph: fx.GraphModule, makers: Sequence[fx.Node]):
        super().__init__(graph)
        self._given: dict[fx.Node, Any] = dict.fromkeys(makers)
        self.extra_traceback = False  # an error says what it is by itself

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        graph = mode.tracer.graph
        before = graph._root.prev
        self._made = n.meta.get("val")
        out = super().run_node(n)
        if n in self._given:
            self._given[n] = out
        node = graph._root.prev
        while node is not before and n.op == "call_function":
            node.meta[NOTE] = n.meta.get(NOTE)
            if node.meta[NOTE] is None:
                del node.meta[NOTE]
            node = node.prev
        return out

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().placeholder(target, args, kwargs)
        return Scalar(found) if is_symbolic(self._made) else found

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        values = super().output(target, args, kwargs)
        values = [*values, *self._given.values()]
        return [v.tensor if isinstance(v, Scalar) else v for v in values]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "_opname", "")
        if name.startswith("_foreach_"):
            calls = calls_of_list(target, args, kwargs, self._made)
            return [call_in_list(*call) for call in calls]
        if changes_without_writes(target, args, kwargs):
            return call_without_writes(target, args, kwargs, self._made)
        return super().call_function(target, args, kwargs)


# -- views in place --------------------------------------------------------------------------------


def without_views_in_place(graph: fx.Graph) -> None:
    """Replace calls that change how a tensor shows its memory (`x.t_()`) by views (`x.t()`).

    They write nothing: who reads `x` afterwards reads what the call returns. Left as they are where
    `x` itself is read afterwards, or is an input. Pooling channels-last images to one place makes
    such a call, too.
    """
    place: dict[fx.Node, int] = {}
    for i, node in enumerate(graph.nodes):
        place[node] = i
        node.target = _safe_view_of(node.target)
    for node, i in place.items():
        if node.op != "call_function" or torch.Tag.inplace_view not in getattr(
            node.target, "tags", ()
        ):
            continue
        view, shown = _view_like(node.target), node.args[0]
        if view is None or not isinstance(shown, fx.Node) or shown.op != "call_function":
            continue
        if all(place[user] <= i for user in shown.users):
            node.target = view


def _safe_view_of(target: Any) -> Any:
    """For `unsafe_split` and the like, the op whose schema says that it gives views."""
    if not facts_of(target).shows_unsaid or not target._opname.startswith("unsafe_"):
        return target
    return getattr(getattr(_aten, target._opname.removeprefix("unsafe_")), target._overloadname)


@functools.lru_cache(maxsize=64)
def _view_like(target: Any) -> Any:
    """The out-of-place view op with the arguments of `target`; None where there is none."""
    packet = getattr(_aten, target._opname.removesuffix("_"), None)
    for name in packet.overloads() if packet is not None else ():
        found = getattr(packet, name)
        if _arguments_of_schema(found) == _arguments_of_schema(target):
            return found
    return None


def _arguments_of_schema(target: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in target._schema.arguments]
