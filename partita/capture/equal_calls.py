"""Equal calls: of several equal calls only the first is traced, because tracing is slow.

Of the thousands of calls in a model's graph, about a hundred differ. `RepeatedCalls` adds a node at
once for a call whose key is known (`graph.fake_values`). In a call over lists, such as an
optimizer's over all parameters, positions with equal operands are computed once. `node_of` returns
the node that computes a fake tensor; `tensors_of` makes fake tensors for nodes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)

from partita.graph.fake_values import (
    call_without_memory,
    key_of_call,
    make_fake,
)
from partita.graph.graph_nodes import add_call
from partita.tensor.op_facts import facts_of

from .fakes import is_symbolic

# -- fakes and their nodes -------------------------------------------------------------------------


def node_of(t: torch.Tensor) -> fx.Node | None:
    """Returns the node that computes the fake tensor `t` in the traced graph; None if none does."""
    slot = get_proxy_slot(t, get_proxy_mode().tracer, None)  # type: ignore[union-attr]
    return None if slot is None else slot.proxy.node


def known_node_of(t: torch.Tensor) -> fx.Node | None:
    """Returns the node that computes the fake tensor `t`; None for a constant, unlike `node_of`.

    The tracer needs the value of a constant, so calls with it must be traced.
    """
    slot = get_proxy_slot(t, get_proxy_mode().tracer, None)  # type: ignore[union-attr]
    return None if slot is None or slot.constant is not None else slot.proxy.node


def _node_of_number(number: torch.SymFloat | torch.SymInt | torch.SymBool) -> fx.Node | None:
    """Returns the node that makes a symbolic number; None if none does."""
    slot = get_proxy_slot(number, get_proxy_mode().tracer, None)  # type: ignore[union-attr]
    return None if slot is None else slot.force().node  # type: ignore[union-attr]


def set_node_of(t: torch.Tensor, node: fx.Node) -> None:
    """Records that `node` computes the fake tensor `t`."""
    tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
    set_proxy_slot(t, tracer, _ProxyTensor(fx.Proxy(node, tracer), None))


def tensors_of(
    nodes: Sequence[fx.Node], likes: Sequence[torch.Tensor], mode: FakeTensorMode
) -> list[FakeTensor]:
    """Returns new fake tensors of `mode`, one for each of `nodes`, with the metadata of `likes`."""
    with torch._C._DisableTorchDispatch(), DisableTorchFunction():  # type: ignore[attr-defined]
        made = [_make_fake_like(t, mode) for t in likes]
    for node, fake, like in zip(nodes, made, likes, strict=True):
        node.meta.setdefault("val", like)
        set_node_of(fake, node)
    return made


def _make_fake_like(t: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    if offset := t.storage_offset():
        last = offset + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        meta = torch.empty(last + 1 if t.numel() else offset, dtype=t.dtype, device="meta")
        return make_fake(mode, meta.as_strided(t.shape, t.stride(), offset), t.device)
    meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return make_fake(mode, meta, t.device)


# -- calls that are not traced again ---------------------------------------------------------------

_BY_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class RepeatedCalls:
    """The calls that a capture has traced. A later equal call only gets a node, which is faster."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode):
        self._graph, self._mode = graph, mode
        self._known: dict[Any, torch.Tensor] = {}

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns a key that is equal for equal calls of an ATen op.

        Returns None if the call must always be traced. Only calls that make or write exactly one
        tensor have a key.
        """
        if not (_makes_one(func) or _writes_one(func)):
            return None
        with local_ops():
            return key_of_call(func, args, kwargs)

    def repeat(self, key: Any, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Adds a node for a call that equals an earlier one, without tracing it.

        Args:
            key: what the method `key` returned for this call.
            func, args, kwargs: the ATen op of the call, and its arguments.

        Returns:
            The call's fake value, or for an op that writes, the written tensor. None if no equal
            call was traced.
        """
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

    def call_over_lists(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Adds a node for a call over lists (`_foreach_*`), untraced. Returns the call's value.

        For positions of the lists with equal operands, the fake value is computed only once.
        Returns `NotImplemented` if the call must be traced.
        """
        with local_ops():
            places = _group_places(args)
            if places is None or kwargs:
                return NotImplemented
            groups, first = places
            try:
                operands = _nodes_of(args)
                with disable_proxy_modes_tracing():
                    made = call_without_memory(func, _shorten_lists(args, first), {}).value
            except Exception:  # tracing raises it again, with the user's line
                return NotImplemented
        node = add_call(self._graph, func, operands)
        if made is None:  # it has written the first list
            return None
        node.meta["val"] = likes = [made[kind] for kind in groups]
        parts = [add_call(self._graph, operator.getitem, (node, i)) for i in range(len(likes))]
        return tensors_of(parts, likes, self._mode)

    def learn(self, key: Any, func: Any, out: Any, first: fx.Node) -> None:
        """Stores a call that was traced, so that equal calls need no trace.

        It is stored only if it added exactly one node, directly after `first`.

        Args:
            key: what the method `key` returned for this call.
            func: the ATen op of the call.
            out: the call's fake value.
            first: the graph's last node before the call.
        """
        node: fx.Node = self._graph._root.prev
        if node.prev is not first or node.target is not func or not isinstance(out, FakeTensor):
            return
        if out.layout is torch.strided:  # the key does not describe a sparse tensor completely
            self._known[key] = node.meta["val"]


def _group_places(args: Sequence[Any]) -> tuple[list[int], list[int]] | None:
    """Returns the positions of the lists of a call, grouped by the key of the operands there.

    Returns:
        For each position the number of its group, and the first position of each group. None if
        grouping gains nothing: as many groups as positions, or lists of different lengths.
    """
    lists = [a for a in args if isinstance(a, (list, tuple))]
    if len({len(a) for a in lists}) != 1:
        return None
    keys = [key_of_call(None, operands, {}) for operands in zip(*lists, strict=True)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    if None in numbers or len(numbers) == len(keys):
        return None
    return [numbers[key] for key in keys], [keys.index(key) for key in numbers]


def _shorten_lists(args: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Returns arguments with only some positions of each list, and 0.5 in place of symbolic floats.

    Args:
        places: the positions to keep.
    """
    # Metadata does not depend on the value of a float.
    whole = [0.5 if isinstance(a, torch.SymFloat) else a for a in args]
    return [[a[i] for i in places] if isinstance(a, (list, tuple)) else a for a in whole]


def _nodes_of(value: Any) -> Any:
    """Returns operands with nodes in place of tensors; raises LookupError if one has none."""
    if isinstance(value, torch.Tensor):
        node = known_node_of(value)
        if node is None:
            raise LookupError
        return node
    if is_symbolic(value):
        node = _node_of_number(value)
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
    """True if `func` is an op over lists (`_foreach_*`), which does the same at each position."""
    returns = [str(r.type) for r in func._schema.returns]
    return func._opname.startswith("_foreach_") and returns in ([], ["List[Tensor]"])


@functools.lru_cache(maxsize=4096)
def _makes_one(func: Any) -> bool:
    """True if an op returns one tensor in new memory, and writes nothing."""
    return _is_plain(func) and facts_of(func).makes_new


@functools.lru_cache(maxsize=4096)
def _writes_one(func: Any) -> bool:
    """True if an op writes only its first operand, and returns it."""
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
