"""Functionalization by torch: a captured graph is run once more while another is traced of it.

Right whatever the graph writes, and as long as a capture. What single calls become without writes
is told here for both ways: see `functional`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from ..graph_modules import lazy_graph_modules
from ..node_metadata import NOTE
from .draws_in_place import draw_in_place
from .scalars import Scalar, call_with_scalars, has_scalars, reckon
from .symbolic import is_symbolic

__all__ = [
    "call_in_list",
    "call_without_writes",
    "calls_of_list",
    "changes_without_writes",
    "entering",
    "trace_without_writes",
]

_aten = torch.ops.aten


def trace_without_writes(
    graph: fx.GraphModule, makers: Sequence[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """`graph` without writes but for `copy_` into inputs at its end. Notes are kept.

    Args:
        makers: nodes that made memory.

    Returns:
        And for makers what their memory holds at the end.
    """

    def run_noting_graph(*inputs: torch.Tensor) -> Any:
        return _Noting(graph, makers).run(*inputs)

    inputs = graph.graph.find_nodes(op="placeholder")
    fakes = [entering(n.meta["val"]) for n in inputs]
    with torch.no_grad(), lazy_graph_modules():
        made: fx.GraphModule = make_fx(functionalize(run_noting_graph, remove="mutations"))(*fakes)
    for old, new in zip(inputs, made.graph.find_nodes(op="placeholder"), strict=True):
        given = {k: v for k, v in old.meta.items() if not is_symbolic(v)}
        new.meta.update({k: v for k, v in given.items() if k not in new.meta or k == NOTE})
    for node in made.graph.nodes:
        if node.op == "call_function":
            node.meta.setdefault("val", None)  # of what gives nothing torch says nothing
    (end,) = made.graph.find_nodes(op="output")
    values: Any = end.args[0]
    results = len(values) - len(makers)
    end.args = (values[:results],)
    return made, dict(zip(makers, values[results:], strict=True))


def entering(value: Any) -> torch.Tensor:
    """An input of the graph without writes, in which numbers are tensors."""
    if is_symbolic(value):
        return torch.empty((), dtype=torch.float64)
    found: torch.Tensor = value
    return found


class _Noting(fx.Interpreter):
    """Runs a graph while another is made of it; new nodes get the notes of the old.

    What the nodes in `makers` gave, it gives behind the graph's results.
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


# -- single calls ----------------------------------------------------------------------------------


def changes_without_writes(target: Any, args: Any, kwargs: Any) -> bool:
    """Is a call, but for those over lists, another one in a graph without writes?"""
    name = getattr(target, "_opname", "")
    if name == "_local_scalar_dense" or has_scalars(args, kwargs) or name.endswith("_"):
        return True
    return target is _aten.native_batch_norm.default and args[3] is not None and bool(args[5])


def call_without_writes(target: Any, args: Any, kwargs: Any, like: Any) -> Any:
    """Make a call of a captured graph, as functionalization is to see it.

    Args:
        like: what it gave while it was captured.
    """
    name = getattr(target, "_opname", "")
    if name == "_local_scalar_dense" or has_scalars(args, kwargs):
        if not name:
            return reckon(target, args, like)
        return call_with_scalars(name, args, kwargs, like)
    if target is _aten.native_batch_norm.default:
        # It writes the running statistics, and its schema does not say so; this one's does.
        return _aten._native_batch_norm_legit.default(*args, **kwargs)
    drawn = draw_in_place(target, args, kwargs) if name.endswith("_") else None
    return target(*args, **kwargs) if drawn is None else drawn


Call = tuple[str, list[Any], dict[str, Any], Any]


def calls_of_list(target: Any, args: Any, kwargs: Any, made: Any) -> Iterator[Call]:
    """A call over lists, as one call for each place: each parameter's update is its own.

    For `call_in_list`: a name, the arguments, and what it gave while it was captured.
    """
    name = target._opname.removeprefix("_foreach_")
    if target._overloadname.startswith("Scalar"):  # of tensors they are other calls
        name = name.replace("maximum", "clamp_min").replace("minimum", "clamp_max")
    if name == "norm" and len(args) > 2:
        args, kwargs = args[:2], dict(kwargs, dtype=args[2])
    if name.startswith(("addcmul", "addcdiv")) and len(args) > 3:
        args, kwargs = args[:3], dict(kwargs, value=args[3])
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]

    def item_at(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) else value

    for i in range(len(lists[0])):
        yield (
            name,
            [item_at(a, i) for a in args],
            {k: item_at(v, i) for k, v in kwargs.items()},
            item_at(made, i),
        )


def call_in_list(name: str, args: list[Any], kwargs: dict[str, Any], like: Any) -> Any:
    """One of the calls that a call over lists is."""
    if has_scalars(args, kwargs):
        return call_with_scalars(name, args, kwargs, like)
    return _find_single_op(name)(*args, **kwargs)


def _find_single_op(name: str) -> Any:
    if name == "norm":
        return torch.ops.aten.linalg_vector_norm
    if hasattr(torch.ops.aten, name):
        return getattr(torch.ops.aten, name)
    made = getattr(torch.ops.aten, name.removesuffix("_"))  # not all have a form in place
    return lambda x, *args, **kwargs: x.copy_(made(x, *args, **kwargs))
