"""Repeated calls: a call equal to one traced before becomes a node at once, without being traced.

Tracing a call takes the dispatcher through Python three times, half a millisecond. The key of
`equal_calls` decides its value, so the second equal call is added as a node with a new fake tensor.
Of a call over lists, as optimizers make over all parameters, the places that are alike are computed
once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from partita.tensor.op_facts import facts_of

from ..graph_nodes import add_call
from .equal_calls import call_without_memory, key_of
from .fakes import make_fake
from .symbolic import is_symbolic
from .traced_tensors import known_node_of, node_of_number, set_node_of, tensors_of

__all__ = ["DETACH", "RepeatedCalls", "is_over_lists"]

DETACH = torch.ops.aten.detach.default
_BY_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class RepeatedCalls:
    """The calls of one capture that were traced, by key."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode):
        self._graph, self._mode = graph, mode
        self._known: dict[Any, torch.Tensor] = {}

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The key of a call; None where it has none, or does not make or write just one tensor."""
        if not (_makes_one(func) or _writes_one(func)):
            return None
        with Local():
            return key_of(func, args, kwargs)

    def repeat(self, key: Any, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Add a node for a call whose key is known, and return its value; None where it is not."""
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
            set_node_of(written, node)
            return written
        (out,) = tensors_of([node], [like], self._mode)
        return out

    def detach(self, x: torch.Tensor) -> torch.Tensor | None:
        """Add a node for `x.detach()` and return its value, in the memory of x; None to trace it.

        Each gradient is detached once, when it is read.
        """
        if not isinstance(x, FakeTensor):
            return None
        with Unheard(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            if x.layout is not torch.strided or x.is_inference() or x.is_conj() or x.is_neg():
                return None
            node = known_node_of(x)
            like = None if node is None else node.meta.get("val")
            if not isinstance(like, FakeTensor) or not _have_same_strides(x, like):
                return None
            made = make_fake(self._mode, x.detach(), x.fake_device)
        detached = add_call(self._graph, DETACH, (node,))
        detached.meta["val"] = like
        set_node_of(made, detached)
        return made

    def call_over_lists(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Add a node for a call over lists, and return its value; `NotImplemented` to trace it.

        Its fake value is computed for one place of each kind of operands, however long the lists.
        """
        with Local():
            places = _PlacesOfLists(args)
            if places.differ or kwargs:
                return NotImplemented
            try:
                operands = _nodes_of(args)
                with disable_proxy_modes_tracing():
                    made = call_without_memory(func, places.shorten(args), {}).value
            except Exception:  # tracing raises it again, with its place
                return NotImplemented
        node = add_call(self._graph, func, operands)
        if made is None:  # it has written the first list
            return None
        node.meta["val"] = likes = [made[kind] for kind in places.kinds]
        parts = [add_call(self._graph, operator.getitem, (node, i)) for i in range(len(likes))]
        return tensors_of(parts, likes, self._mode)

    def learn(self, key: Any, func: Any, out: Any, first: fx.Node) -> None:
        """Remember a traced call if it is one node, the one after `first`."""
        node: fx.Node = self._graph._root.prev
        if node.prev is not first or node.target is not func or not isinstance(out, FakeTensor):
            return
        if out.layout is torch.strided:  # the key does not tell all of a sparse tensor
            self._known[key] = node.meta["val"]


class _PlacesOfLists:
    """The places of the lists that a call is over, grouped by the key of the operands there.

    Attributes:
        kinds: for each place the number of its group.
        differ: is nothing gained: as many groups as places, or lists of several lengths?
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
        """The arguments with one place of each kind in the lists, and 0.5 for symbolic floats.

        Metadata does not depend on which float it is.
        """

        def shorten_argument(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [value[i] for i in self._first]
            return 0.5 if isinstance(value, torch.SymFloat) else value

        return tuple(map(shorten_argument, args))


def _nodes_of(value: Any) -> Any:
    """Operands with nodes for tensors. Raises LookupError where one has none, or a known value."""
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


def _have_same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and one.dtype == other.dtype
    )


@functools.lru_cache(maxsize=4096)
def is_over_lists(func: Any) -> bool:
    """Is it an op that does to each place of lists what another op does to a tensor?"""
    returns = [str(r.type) for r in func._schema.returns]
    return func._opname.startswith("_foreach_") and returns in ([], ["List[Tensor]"])


@functools.lru_cache(maxsize=4096)
def _makes_one(func: Any) -> bool:
    """Does an op return one tensor in new memory, and write nothing?"""
    return _is_plain(func) and facts_of(func).makes_new


@functools.lru_cache(maxsize=4096)
def _writes_one(func: Any) -> bool:
    """Does an op write its first operand alone, and return it?"""
    facts = facts_of(func)
    writes = facts.writes
    return (
        _is_plain(func)
        and len(writes) == 1
        and writes[0].place == 0
        and not writes[0].is_list
        and not facts.changes_metadata
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
