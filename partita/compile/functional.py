"""How does a captured graph become one without writes?

What a step writes in place (gradients that are added up, parameters, optimizer state) becomes a new
value; what it wrote into its inputs is copied into them by the last nodes of the graph. Only these
`copy_` write. Then each node is a value, and a pass may move, merge or drop it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from .draws_in_place import draw_in_place
from .graph_modules import lazy_graph_modules
from .notes import NOTE
from .scalars import Scalar, call_with_scalars, has_scalars, reckon
from .symbolic import is_symbolic

__all__ = ["drop_unused", "functional", "has_effect"]

_aten = torch.ops.aten


def functional(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph` without writes but for `copy_` into inputs at its end. Notes are kept."""

    def run(*inputs: torch.Tensor) -> Any:
        return _Noting(graph).run(*inputs)

    fakes = [_entering(n.meta["val"]) for n in _inputs(graph.graph)]
    with torch.no_grad(), lazy_graph_modules():
        made: fx.GraphModule = make_fx(functionalize(run, remove="mutations"))(*fakes)
    for old, new in zip(_inputs(graph.graph), _inputs(made.graph), strict=True):
        given = {k: v for k, v in old.meta.items() if not is_symbolic(v)}
        new.meta.update({k: v for k, v in given.items() if k not in new.meta or k == NOTE})
    _simplify(made.graph)
    return made


def _entering(value: Any) -> torch.Tensor:
    """An input of the graph without writes, in which numbers are tensors."""
    if is_symbolic(value):
        return torch.empty((), dtype=torch.float64)
    found: torch.Tensor = value
    return found


class _Noting(fx.Interpreter):
    """Runs a graph while another is made of it; new nodes get the notes of the old."""

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.extra_traceback = False  # an error says what it is by itself

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        graph = mode.tracer.graph
        before = graph._root.prev
        self._made = n.meta.get("val")
        out = super().run_node(n)
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
        return [v.tensor if isinstance(v, Scalar) else v for v in values]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "_opname", "")
        if name.startswith("_foreach_"):
            name = name.removeprefix("_foreach_")
            if target._overloadname.startswith("Scalar"):  # of tensors they are other calls
                name = name.replace("maximum", "clamp_min").replace("minimum", "clamp_max")
            return _each(name, args, kwargs, self._made)
        if name == "_local_scalar_dense" or has_scalars(args, kwargs):
            if not name:
                return reckon(target, args, self._made)
            return call_with_scalars(name, args, kwargs, self._made)
        if target is _aten.native_batch_norm.default and args[3] is not None and args[5]:
            # It writes the running statistics, and its schema does not say so; this one's does.
            return _aten._native_batch_norm_legit.default(*args, **kwargs)
        drawn = draw_in_place(target, args, kwargs) if name.endswith("_") else None
        return super().call_function(target, args, kwargs) if drawn is None else drawn


def _each(name: str, args: Any, kwargs: Any, made: Any) -> list[Any]:
    """A call over lists, as one call for each place: each parameter's update is its own."""
    call = _single(name)
    if name == "norm" and len(args) > 2:
        args, kwargs = args[:2], dict(kwargs, dtype=args[2])
    if name.startswith(("addcmul", "addcdiv")) and len(args) > 3:
        args, kwargs = args[:3], dict(kwargs, value=args[3])
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]

    def at(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) else value

    found = []
    for i in range(len(lists[0])):
        given = [at(a, i) for a in args]
        named = {k: at(v, i) for k, v in kwargs.items()}
        if has_scalars(given, named):
            found.append(call_with_scalars(name, given, named, at(made, i)))
        else:
            found.append(call(*given, **named))
    return found


def drop_unused(graph: fx.Graph) -> None:
    """Erase every call whose value nobody reads, collectives too, but none that does something."""
    for node in reversed(graph.nodes):  # fx's own looks at the whole graph first
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """Does it do something though nobody reads its value: does it write, or draw a number?"""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if node.target in _NORMS:  # whose schemas do not say that they write running statistics
        return bool(node.args[3] is not None and node.args[5])
    schema = getattr(node.target, "_schema", None)
    writes = schema is not None and schema.is_mutable
    return writes or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _single(name: str) -> Any:
    if name == "norm":
        return torch.ops.aten.linalg_vector_norm
    if hasattr(torch.ops.aten, name):
        return getattr(torch.ops.aten, name)
    made = getattr(torch.ops.aten, name.removesuffix("_"))  # not all have a form in place
    return lambda x, *args, **kwargs: x.copy_(made(x, *args, **kwargs))


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default)
_SAME = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default)


def _simplify(graph: fx.Graph) -> None:
    """Drop what functionalization and autograd leave: aliases, and copies into fresh memory."""
    for node in list(graph.nodes):
        if node.target in _SAME:
            if node.target is _aten.lift_fresh_copy.default:
                continue
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is _aten.copy.default:
            into, value = node.args[0], node.args[1]
            if _alike(into, value) and not node.args[2:]:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)  # marks for a profiler, which torch's optimizers set
    drop_unused(graph)


def _alike(a: Any, b: Any) -> bool:
    one, other = a.meta.get("val"), b.meta.get("val")
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )
