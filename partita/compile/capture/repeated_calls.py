"""Repeated calls: a call like one that was traced before is a node more, and is not traced again.

To trace a call takes the dispatcher three times through Python, half a millisecond; what it gives
is decided by its operands' shapes, strides, dtypes and devices, and by its numbers. So the second
call that is like a first becomes a node at once, and a tensor that is like the first's. Of a call
over lists, as optimizers make them over all parameters, the places that are alike are worked out
once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from partita.tensor.op_facts import facts_of

from ..graph_nodes import add_call
from .equal_calls import call_without_memory, key_of
from .symbolic import is_symbolic
from .traced_tensors import known_node_of, node_of_number, stands_for, tensors_of

__all__ = ["RepeatedCalls", "is_over_lists"]

_aten = torch.ops.aten
_BY_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class RepeatedCalls:
    """The calls of one capture, by what decides what they give."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode):
        self._graph, self._mode = graph, mode
        self._known: dict[Any, torch.Tensor] = {}

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What decides what a call gives; None where more does, or it is none of those here."""
        if not (_makes_one(func) or _writes_one(func)):
            return None
        with Local():
            return key_of(func, args, kwargs)

    def repeat(self, key: Any, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """What a call gives that is like one before, in the graph; None where none was."""
        like = self._known.get(key)
        if like is None:
            return None
        try:
            operands = _nodes_of(args)
            named = {name: _nodes_of(value) for name, value in kwargs.items()}
        except LookupError:
            return None
        node = add_call(self._graph, func, operands, named)
        if _writes_one(func):
            node.meta["val"] = like
            written: torch.Tensor = args[0]
            stands_for(written, node)
            return written
        (out,) = tensors_of([node], [like], self._mode)
        return out

    def call_over_lists(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call over lists gives, in the graph; `NotImplemented` where it has to be traced.

        Its places are worked out once for each kind of operands, whatever the lists' length.
        """
        with Local():
            places = _PlacesOfLists(args)
            if places.differ or kwargs:
                return NotImplemented
            try:
                operands = _nodes_of(args)
                with disable_proxy_modes_tracing():
                    made = call_without_memory(func, places.shorten(args), {}).value
            except Exception:  # a trace says what is wrong, and where
                return NotImplemented
        node = add_call(self._graph, func, operands)
        if made is None:  # it has written the first list
            return None
        node.meta["val"] = likes = [made[kind] for kind in places.kinds]
        parts = [add_call(self._graph, operator.getitem, (node, i)) for i in range(len(likes))]
        return tensors_of(parts, likes, self._mode)

    def learn(self, key: Any, func: Any, out: Any, first: fx.Node) -> None:
        """Remember a call that was traced, if it is one node, which comes behind `first`."""
        node: fx.Node = self._graph._root.prev
        if node.prev is not first or node.target is not func or not isinstance(out, FakeTensor):
            return
        if out.layout is torch.strided:  # what else there is to a sparse one is not in the key
            self._known[key] = node.meta["val"]


class _PlacesOfLists:
    """The places of the lists that a call is over, by what decides what it does there.

    Attributes:
        kinds: for each place the number of its kind.
        differ: are there as many kinds as places, or lists that are not of one length?
    """

    def __init__(self, args: Sequence[Any]):
        lists = [a for a in args if isinstance(a, (list, tuple))]
        self._first: list[int] = []
        self.kinds: list[int] = []
        self.differ = len({len(a) for a in lists}) != 1
        numbers: dict[Any, int] = {}
        for i, operands in enumerate(zip(*lists, strict=True) if not self.differ else ()):
            key = key_of(None, operands, {})
            if key is None:
                self.differ = True
                return
            number = numbers.setdefault(key, len(numbers))
            if number == len(self._first):
                self._first.append(i)
            self.kinds.append(number)
        self.differ |= len(self._first) == len(self.kinds)

    def shorten(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with lists of one place of each kind, and a float for a number that is
        not known: no dtype or shape hangs on which."""

        def shorten_argument(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [value[i] for i in self._first]
            return 0.5 if isinstance(value, torch.SymFloat) else value

        return tuple(map(shorten_argument, args))


def _nodes_of(value: Any) -> Any:
    """Operands as a node has them. Raises LookupError: no node makes one, or its value is known."""
    if isinstance(value, torch.Tensor):
        node = known_node_of(value)
        if node is None:
            raise LookupError
        return node
    if is_symbolic(value):
        node = node_of_number(value)
        if node is None:
            raise LookupError
        return node
    if isinstance(value, (tuple, list)):
        return type(value)(map(_nodes_of, value))
    if isinstance(value, Mapping):
        raise LookupError
    return value


@functools.lru_cache(maxsize=4096)
def is_over_lists(func: Any) -> bool:
    """Is it a call over lists that does to each place what another does to one tensor?"""
    returns = [str(r.type) for r in func._schema.returns]
    return func._opname.startswith("_foreach_") and returns in ([], ["List[Tensor]"])


@functools.lru_cache(maxsize=4096)
def _makes_one(func: Any) -> bool:
    """Does it give one tensor, of memory of its own, and write nothing?"""
    return _is_plain(func) and facts_of(func).makes_new


@functools.lru_cache(maxsize=4096)
def _writes_one(func: Any) -> bool:
    """Does it write its first operand, which it gives, and no other?"""
    writes = facts_of(func).writes
    return (
        _is_plain(func)
        and len(writes) == 1
        and writes[0].place == 0
        and not writes[0].is_list
        and torch.Tag.inplace_view not in func.tags
        and not func._opname.startswith(("resize", "set_"))
    )


def _is_plain(func: Any) -> bool:
    returns = func._schema.returns
    return (
        func.namespace == "aten"
        and not facts_of(func).lifts
        and len(returns) == 1
        and str(returns[0].type) == "Tensor"
        and not any(tag in func.tags for tag in _BY_DATA)
    )
