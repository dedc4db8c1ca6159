"""Calls without writes: what one call of a traced graph becomes in a graph without writes.

Three kinds of calls change: those that write, those over lists (`_foreach_*`, which become one call
for each tensor), and those with a number that is known only when the graph runs (`Scalar`).
`call_without_writes` and `call_in_list` make such a call for torch's functionalization. A `Pattern`
is what it traces to, cached for calls alike in operator, numbers, dtypes and dimensions (in shapes,
too, where the pattern contains sizes), which the rewrite puts into the graph. CTC loss, of which
torch's op has a result of unknown shape, is replaced while the step is traced (`REPLACED`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from partita.tensor.op_facts import facts_of

from ..graph_nodes import drop_unused, lazy_graph_modules
from .symbolic import (
    Scalar,
    call_with_scalars,
    compute_scalar,
    has_scalars,
    is_symbolic,
    unwrap_scalar,
)

_aten = torch.ops.aten
_PATTERNS_KEPT = 4096


class UnsureOfWrites(Exception):
    """Which values a write changes cannot be told by rewriting: the graph is traced again."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """The calls that replace one call.

    Attributes:
        operands: the nodes that stand for tensor operands of the original call, in order.
        calls: the nodes of the calls.
        gives: the value of the original call, as a tree of nodes, and of `Scalar`s of nodes.
        writes: by the number of an operand that is written, the node of its new value.
    """

    operands: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    gives: Any
    writes: dict[int, fx.Node]


_patterns: dict[Any, Pattern] = {}


def pattern_of(
    call: Callable[..., Any], what: Any, args: Any, kwargs: Any, like: Any, mode: Any
) -> Pattern:
    """The pattern of `call(args, kwargs, like)`, over fake tensors.

    Args:
        what: identifies `call` in the cache.
        like: the value that it had while it was captured.
        mode: of the fake tensors.

    Raises:
        UnsureOfWrites: it traces to what a pattern cannot express.
    """
    shapes = what, _key_of_operand((args, kwargs, like), _exact_tensor_key)
    kinds = what, _key_of_operand((args, kwargs, like), _rough_tensor_key)
    found = _patterns.get(kinds) or _patterns.get(shapes)
    if found is None:
        found = _trace_pattern(call, args, kwargs, like, mode)
        if len(_patterns) >= _PATTERNS_KEPT:
            _patterns.clear()
        _patterns[kinds if _is_general(found, args, kwargs) else shapes] = found
    return found


def _trace_pattern(
    call: Callable[..., Any], args: Any, kwargs: Any, like: Any, mode: Any
) -> Pattern:
    leaves, structure = pytree.tree_flatten((args, kwargs), is_leaf=_is_scalar)
    places = [i for i, leaf in enumerate(leaves) if isinstance(unwrap_scalar(leaf), torch.Tensor)]
    trees: list[Any] = []

    def run(*operands: torch.Tensor) -> list[torch.Tensor]:
        given = list(leaves)
        for i, operand in zip(places, operands, strict=True):
            given[i] = Scalar(operand) if _is_scalar(leaves[i]) else operand
        found = call(*pytree.tree_unflatten(given, structure), like)
        flat, tree = pytree.tree_flatten(found, is_leaf=_is_scalar)
        if not all(t is None or isinstance(unwrap_scalar(t), torch.Tensor) for t in flat):
            raise UnsureOfWrites
        trees[:] = [tree, [type(t) for t in flat]]
        return [unwrap_scalar(t) for t in flat if t is not None]

    with mode, torch.no_grad(), lazy_graph_modules():
        operands = [_without_memory(unwrap_scalar(leaves[i])) for i in places]
        made = make_fx(functionalize(run, remove="mutations"))(*operands)
    return _pattern_of_graph(made.graph, *trees)


def _pattern_of_graph(graph: fx.Graph, tree: Any, kinds: list[type]) -> Pattern:
    """Convert a traced graph to a pattern.

    Args:
        tree: the structure of the call's value.
        kinds: for each leaf of it its type: a tensor, `Scalar` or NoneType.
    """
    drop_unused(graph)
    operands = tuple(graph.find_nodes(op="placeholder"))
    writes: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        if node.args[0] in operands:
            writes[operands.index(node.args[0])] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    calls = tuple(n for n in graph.nodes if n.op not in ("placeholder", "output"))
    if any(n.op != "call_function" or facts_of(n.target).writes for n in calls):
        raise UnsureOfWrites
    for node in (*operands, *calls):
        node.meta.clear()  # a pattern outlives the fake tensors that it was traced of
    (end,) = graph.find_nodes(op="output")
    values = iter(end.args[0])
    flat: list[Any] = [None if kind is type(None) else next(values) for kind in kinds]
    flat = [Scalar(v) if kind is Scalar else v for v, kind in zip(flat, kinds, strict=True)]
    return Pattern(operands, calls, pytree.tree_unflatten(flat, tree), writes)


def _is_general(pattern: Pattern, args: Any, kwargs: Any) -> bool:
    """Does a pattern hold for other shapes? Not if it draws, or has numbers that may be sizes."""
    given = {(type(v), v) for v in pytree.tree_leaves((args, kwargs)) if _is_number(v)}
    for call in pattern.calls:
        if facts_of(call.target).draws:
            return False
        for part in pytree.tree_leaves((call.args, call.kwargs), is_leaf=_is_list_of_numbers):
            if isinstance(part, (list, tuple)):
                return False
            if _is_number(part) and (type(part), part) not in given:
                return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(map(_is_number, value))


def _is_scalar(value: Any) -> bool:
    return type(value) is Scalar


def _without_memory(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


# -- keys of patterns -----------------------------------------------------------------------------


def _exact_tensor_key(t: torch.Tensor) -> Any:
    return tuple(t.shape), t.stride(), t.dtype, t.device


def _rough_tensor_key(t: torch.Tensor) -> Any:
    return t.dim(), t.dtype, t.device


def _key_of_operand(value: Any, of_tensor: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if type(value) is Scalar:
        return Scalar, of_tensor(value.tensor)
    if isinstance(value, (list, tuple)):
        return tuple(_key_of_operand(v, of_tensor) for v in value)
    if isinstance(value, dict):
        return tuple((k, _key_of_operand(v, of_tensor)) for k, v in value.items())
    if is_symbolic(value):
        return type(value)
    return type(value), value.hex() if isinstance(value, float) else value  # 0.0 is not -0.0


# -- single calls ----------------------------------------------------------------------------------


def changes_without_writes(target: Any, args: Any, kwargs: Any) -> bool:
    """Has a call, if not over lists, to be another one in a graph without writes?"""
    name = getattr(target, "_opname", "")
    if name == "_local_scalar_dense" or has_scalars(args, kwargs) or name.endswith("_"):
        return True
    return target is _aten.native_batch_norm.default and args[3] is not None and bool(args[5])


def call_without_writes(target: Any, args: Any, kwargs: Any, like: Any) -> Any:
    """Make a call of a traced graph in the form that functionalization can handle.

    Args:
        like: the value that it had while it was captured.
    """
    name = getattr(target, "_opname", "")
    if name == "_local_scalar_dense" or has_scalars(args, kwargs):
        if not name:
            return compute_scalar(target, args, like)
        return call_with_scalars(name, args, kwargs, like)
    if target is _aten.native_batch_norm.default:
        # It writes the running statistics without saying so in its schema; this variant says it.
        return _aten._native_batch_norm_legit.default(*args, **kwargs)
    drawn = _draw_in_place(target, args, kwargs) if name.endswith("_") else None
    return target(*args, **kwargs) if drawn is None else drawn


Call = tuple[str, list[Any], dict[str, Any], Any]


def calls_of_list(target: Any, args: Any, kwargs: Any, made: Any) -> Iterator[Call]:
    """Split a call over lists into one for each place, so that each parameter's update is its own.

    Yields:
        What `call_in_list` takes: the name, args, kwargs, and the value at capture.
    """
    name = target._opname.removeprefix("_foreach_")
    if target._overloadname.startswith("Scalar"):  # with tensors these are called otherwise
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
    """Make one of the calls that `calls_of_list` gives."""
    if has_scalars(args, kwargs):
        return call_with_scalars(name, args, kwargs, like)
    return _find_single_op(name)(*args, **kwargs)


def _find_single_op(name: str) -> Any:
    if name == "norm":
        return torch.ops.aten.linalg_vector_norm
    if hasattr(torch.ops.aten, name):
        return getattr(torch.ops.aten, name)
    made = getattr(torch.ops.aten, name.removesuffix("_"))  # some have no in-place form
    return lambda x, *args, **kwargs: x.copy_(made(x, *args, **kwargs))


# -- inputs ----------------------------------------------------------------------------------------


def value_of_input(value: Any) -> torch.Tensor:
    """An input's value in the graph without writes, in which numbers are tensors."""
    if is_symbolic(value):
        return torch.empty((), dtype=torch.float64)
    found: torch.Tensor = value
    return found


# -- random numbers --------------------------------------------------------------------------------

_library = torch.library.Library("partita", "FRAGMENT")
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)


def _without_gaps(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor without gaps, its dimensions in memory in the order of those of `like`."""
    order = sorted(range(like.dim()), key=lambda d: -like.stride(d))  # type: ignore[operator]
    return torch.empty_permuted(like.shape, order, dtype=like.dtype, device=like.device)


def _make_empty_draw(like: torch.Tensor, p: float) -> torch.Tensor:
    return _without_gaps(like)


def _draw_bernoulli(like: torch.Tensor, p: float) -> torch.Tensor:
    """Ones with probability `p`, else zeros, in memory that lies as that of `like`."""
    return _without_gaps(like).bernoulli_(p)


_library.define("bernoulli_like(Tensor like, float p) -> Tensor", tags=_TAGS)
_library.impl("bernoulli_like", _draw_bernoulli, "CompositeExplicitAutograd")
torch.library.register_fake("partita::bernoulli_like", _make_empty_draw, lib=_library)


def _draw_in_place(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Draw random numbers in place, in the order in which eager fills memory.

    Eager fills memory as it lies, torch's out-of-place forms as elements are counted; and these say
    of memory with gaps, as a slice has, that their result has the gaps too, which Inductor denies.

    Returns:
        None if `func` is no such draw, or needs no special treatment.
    """
    if not facts_of(func).fills or args[0].is_contiguous():
        return None
    x, *rest = args
    if func is _aten.bernoulli_.float and not kwargs:
        drawn = torch.ops.partita.bernoulli_like(x, *(rest or (0.5,)))
    else:
        drawn = _without_gaps(x)
        if drawn.stride() == x.stride():
            return None
        func(drawn, *rest, **kwargs)
    found: torch.Tensor = x.copy_(drawn)
    return found


# -- CTC loss --------------------------------------------------------------------------------------

# torch's op returns a table for backward whose size depends on the longest target. Here backward
# computes it again, so that it is the value of no node.


def _compute_loss(log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    """The loss of each sequence."""
    loss: torch.Tensor = _aten._ctc_loss(log_probs, *args)[0]
    return loss


def _compute_gradient(grad: torch.Tensor, log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    """The gradient of `log_probs`; `grad` is that of each sequence's loss."""
    *operands, blank, zero_infinity = args
    made = _aten._ctc_loss(log_probs, *args)
    given = (grad, log_probs, *operands, *made, blank, zero_infinity)
    found: torch.Tensor = _aten._ctc_loss_backward(*given)
    return found


def _shape_of_loss(log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _shape_of_gradient(grad: torch.Tensor, log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _define_operators(kind: str, overload: str) -> tuple[Any, Any]:
    operands = f"Tensor log_probs, Tensor targets, {kind} input_lengths, {kind} target_lengths"
    found = []
    for name, first, run, shape in (
        ("ctc_loss", "", _compute_loss, _shape_of_loss),
        ("ctc_gradient", "Tensor grad, ", _compute_gradient, _shape_of_gradient),
    ):
        full = f"{name}.{overload}"
        _library.define(f"{full}({first}{operands}, int blank, bool zero_infinity) -> Tensor")
        _library.impl(full, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"partita::{full}", shape, lib=_library)
        found.append(getattr(getattr(torch.ops.partita, name), overload))
    return found[0], found[1]


def _make_replacements(loss: Any, gradient: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Replacements of torch's loss op and of its backward op, with their signatures."""

    def forward(*args: Any, blank: int = 0, zero_infinity: bool = False) -> Any:
        given = (*args, *(blank, zero_infinity)[len(args) - 4 :])
        return loss(*given), args[0].new_empty(0)

    def backward(*args: Any, zero_infinity: bool = False) -> Any:
        grad, log_probs, targets, of_inputs, of_targets, _, _, blank, *last = args
        given = (log_probs, targets, of_inputs, of_targets, blank, *(last or [zero_infinity]))
        return gradient(grad, *given)

    return forward, backward


REPLACED: dict[Any, Callable[..., Any]] = {}
"""By the op that is called while a step is captured, what is called instead."""

for _kind, _overload in (("int[]", "default"), ("Tensor", "Tensor")):
    _name = "ints" if _overload == "default" else "tensors"
    _forward, _backward = _make_replacements(*_define_operators(_kind, _name))
    REPLACED[getattr(_aten._ctc_loss, _overload)] = _forward
    REPLACED[getattr(_aten._ctc_loss_backward, _overload)] = _backward
