"""Calls without writes: what one call of a captured graph becomes, as a pattern of calls.

A call that writes, one of a list of calls, and one that takes a number that is known when the graph
runs, are traced by themselves under torch's functionalization, once for all calls that are alike in
operator, numbers, dtypes and dimensions; a pattern that speaks of sizes is for equal shapes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from partita.tensor.op_facts import facts_of

from ..effects import drop_unused
from ..graph_modules import lazy_graph_modules
from .scalars import Scalar
from .symbolic import is_symbolic

__all__ = ["Pattern", "UnsureOfWrites", "pattern_of"]

_aten = torch.ops.aten
_KEPT = 4096  # patterns


class UnsureOfWrites(Exception):
    """What a write changes is not told from the graph alone."""


@dataclass(frozen=True)
class PatternOperand:
    """In a pattern: a tensor that the call is given, by number."""

    number: int


@dataclass(frozen=True)
class PatternResult:
    """In a pattern: what one of its calls gives, by number."""

    number: int


@dataclass(frozen=True, eq=False)
class Pattern:
    """What a call becomes.

    Attributes:
        calls: of each the target and the arguments, in which `PatternOperand`s and
            `PatternResult`s stand.
        gives: what the call gives, as a tree of these, and of `Scalar`s of these.
        writes: for each operand that is written what it becomes.
    """

    calls: tuple[tuple[Any, Any, Any], ...]
    gives: Any
    writes: dict[int, Any]


_patterns: dict[Any, Pattern] = {}


def pattern_of(
    call: Callable[..., Any], what: Any, args: Any, kwargs: Any, like: Any, mode: Any
) -> Pattern:
    """The pattern of `call(args, kwargs, like)`, in whose arguments tensors without memory stand.

    Args:
        what: tells what `call` does.
        like: what it gave while it was captured.
        mode: of the tensors.

    Raises:
        UnsureOfWrites: it is not one of single calls.
    """
    shapes = (
        what,
        _key_of_operand(args, _exact_tensor_key),
        _key_of_operand(kwargs, _exact_tensor_key),
        _key_of_operand(like, _exact_tensor_key),
    )
    kinds = (
        what,
        _key_of_operand(args, _rough_tensor_key),
        _key_of_operand(kwargs, _rough_tensor_key),
        _key_of_operand(like, _rough_tensor_key),
    )
    found = _patterns.get(kinds) or _patterns.get(shapes)
    if found is None:
        found = _trace_pattern(call, args, kwargs, like, mode)
        if len(_patterns) >= _KEPT:
            _patterns.clear()
        _patterns[kinds if _is_general(found, args, kwargs) else shapes] = found
    return found


def _trace_pattern(
    call: Callable[..., Any], args: Any, kwargs: Any, like: Any, mode: Any
) -> Pattern:
    leaves, structure = pytree.tree_flatten((args, kwargs), is_leaf=_is_scalar)
    places = [i for i, leaf in enumerate(leaves) if isinstance(_unwrap_scalar(leaf), torch.Tensor)]
    trees: list[Any] = []

    def run(*operands: torch.Tensor) -> list[torch.Tensor]:
        given = list(leaves)
        for i, operand in zip(places, operands, strict=True):
            given[i] = Scalar(operand) if _is_scalar(leaves[i]) else operand
        found = call(*pytree.tree_unflatten(given, structure), like)
        flat, tree = pytree.tree_flatten(found, is_leaf=_is_scalar)
        if not all(t is None or isinstance(_unwrap_scalar(t), torch.Tensor) for t in flat):
            raise UnsureOfWrites
        trees[:] = [tree, [type(t) for t in flat]]
        return [_unwrap_scalar(t) for t in flat if t is not None]

    with mode, torch.no_grad(), lazy_graph_modules():
        operands = [_without_memory(_unwrap_scalar(leaves[i])) for i in places]
        made = make_fx(functionalize(run, remove="mutations"))(*operands)
    return _pattern_of_graph(made.graph, *trees)


def _pattern_of_graph(graph: fx.Graph, tree: Any, kinds: list[type]) -> Pattern:
    """The pattern that a traced graph is.

    Args:
        tree, kinds: of what the call gives, and of each part of it whether it is a tensor, a number
            or nothing.
    """
    drop_unused(graph)
    of: dict[fx.Node, Any] = {}
    calls: list[tuple[Any, Any, Any]] = []
    writes: dict[int, Any] = {}
    (end,) = graph.find_nodes(op="output")
    for node in graph.nodes:
        if node.op == "placeholder":
            of[node] = PatternOperand(len(of))
        elif node.target is _aten.copy_.default and node.args[0].op == "placeholder":
            writes[of[node.args[0]].number] = of[node.args[1]]
            of[node] = of[node.args[1]]
        elif node.op == "call_function":
            if facts_of(node.target).writes:
                raise UnsureOfWrites
            calls.append((node.target, *_replace_nodes((node.args, node.kwargs), of)))
            of[node] = PatternResult(len(calls) - 1)
        elif node.op != "output":
            raise UnsureOfWrites
    values = iter(end.args[0])
    flat: list[Any] = [None if kind is type(None) else of[next(values)] for kind in kinds]
    flat = [Scalar(v) if kind is Scalar else v for v, kind in zip(flat, kinds, strict=True)]
    return Pattern(tuple(calls), pytree.tree_unflatten(flat, tree), writes)


def _replace_nodes(value: Any, of: dict[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return of[value]
    if isinstance(value, (list, tuple)):
        found = [_replace_nodes(v, of) for v in value]
        return tuple(found) if isinstance(value, tuple) else found
    if isinstance(value, dict):
        return {k: _replace_nodes(v, of) for k, v in value.items()}
    return value


def _is_general(pattern: Pattern, args: Any, kwargs: Any) -> bool:
    """Does a pattern hold for other shapes? It draws nothing, and has no number of its own."""
    given = {(type(v), v) for v in pytree.tree_leaves((args, kwargs)) if _is_number(v)}
    for target, *said in pattern.calls:
        if facts_of(target).draws:
            return False
        for part in pytree.tree_leaves(said, is_leaf=_is_list_of_numbers):
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


def _unwrap_scalar(value: Any) -> Any:
    return value.tensor if type(value) is Scalar else value


def _without_memory(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


# -- what calls are alike --------------------------------------------------------------------------


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
