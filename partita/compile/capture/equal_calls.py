"""Fake values of calls, computed once for all equal calls.

A model is a few structures, repeated: of the thousands of calls in its graph about a hundred
differ. The fake value of a call is decided by its target, its numbers, and the shapes, strides,
dtypes and devices of its operands, which make its key. Equal calls share one fake tensor: a node's
`meta["val"]` says what the node makes, and not in which memory that lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from partita.comm.collective import WAIT
from partita.tensor.op_facts import facts_of

from .fakes import make_empty_fake

__all__ = ["MadeByCall", "call_without_memory", "key_of", "tensors_in"]


@dataclass(frozen=True, slots=True, eq=False)
class MadeByCall:
    """The fake value of a call, and the memory that it shows.

    Attributes:
        value: as the call returns it.
        shows: for each tensor of the value, the index of the operand (among the tensors of the
            call) whose memory it shows; -1 - i for the i-th new memory.
        nbytes: of each new memory.
    """

    value: Any
    shows: tuple[int, ...]
    nbytes: tuple[int, ...]


def call_without_memory(target: Any, args: Any, kwargs: Any, like: Any = None) -> MadeByCall:
    """`target(*args, **kwargs)` over fake tensors, computed or known from an equal call.

    Args:
        like: a value of the same fake mode, for calls without a tensor operand; of a part of a
            graph (`GraphPart`) what it gives.
    """
    if not isinstance(target, torch._ops.OpOverload) and facts_of(target).makes_new:
        nbytes = tuple(t.untyped_storage().nbytes() for t in tensors_in(like))
        return MadeByCall(like, tuple(-1 - i for i in range(len(nbytes))), nbytes)
    mode = _mode_of((args, kwargs, like))
    if mode is None:
        return _call_and_describe(target, args, kwargs, None)
    # The key has the shapes and strides of operands, and not their storages.
    key = None if facts_of(target).by_storage else key_of(target, args, kwargs)
    if key is None:
        return _call_and_describe(target, args, kwargs, mode)
    known: dict[Any, MadeByCall] | None = getattr(mode, "_partita_equal_calls", None)
    if known is None:
        known = mode._partita_equal_calls = {}  # type: ignore[attr-defined]  # as long as its fakes
    made = known.get(key)
    if made is None:
        # With operands that share no memory, so that what a view shows does not depend on theirs.
        def own_of(value: Any) -> Any:
            return make_empty_fake(value, mode) if isinstance(value, torch.Tensor) else value

        own: Any = fx.node.map_aggregate((args, kwargs), own_of)
        made = known[key] = _call_and_describe(target, own[0], own[1], mode)
    return made


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if value is None or isinstance(value, (int, float, str)):
        return ()
    if type(value) in (list, tuple) and all(isinstance(t, torch.Tensor) for t in value):
        return value  # type: ignore[no-any-return]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _call_and_describe(
    target: Any, args: Any, kwargs: Any, mode: FakeTensorMode | None
) -> MadeByCall:
    with torch.no_grad():
        if mode is None:
            value = target(*args, **kwargs)
        else:
            with mode:
                value = target(*args, **kwargs)
    if target is WAIT:  # it returns its operand, though its fake value is a new tensor
        return MadeByCall(value, (0,), ())
    # Private: one number for one storage, as long as it lives.
    known: dict[int, int] = {}
    for i, t in enumerate(tensors_in((args, kwargs))):
        known.setdefault(_storage_of(t)._cdata, i)
    shows: list[int] = []
    nbytes: list[int] = []
    for t in tensors_in(value):
        storage = _storage_of(t)
        if storage._cdata not in known:
            known[storage._cdata] = -1 - len(nbytes)
            nbytes.append(storage.nbytes())
        shows.append(known[storage._cdata])
    return MadeByCall(_without_bases(value), tuple(shows), tuple(nbytes))


def _without_bases(value: Any) -> Any:
    """The value with views detached from their bases.

    A view holds its base, which holds the mode, which holds the known calls: a cycle that Python's
    collector does not see.
    """
    views = any(t._is_view() for t in tensors_in(value))
    if not views:
        return value
    with torch.no_grad():
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def _storage_of(t: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor; of a sparse one that of its values."""
    if t.layout is torch.strided:
        return t.untyped_storage()
    with torch.no_grad():
        values = t._values() if t.layout is torch.sparse_coo else t.values()
    return values.untyped_storage()


def _mode_of(values: Iterable[Any]) -> FakeTensorMode | None:
    for v in values:
        if isinstance(v, FakeTensor):
            return v.fake_mode  # type: ignore[no-any-return]
        if isinstance(v, (list, tuple)):
            found = _mode_of(v)
        elif isinstance(v, dict):
            found = _mode_of(v.values())
        else:
            continue
        if found is not None:
            return found
    return None


def key_of(target: Any, args: Any, kwargs: Any) -> Any:
    """The key that decides the fake value of a call; None where more does."""
    try:
        key = (
            target,
            _describe_value(args),
            tuple((k, _describe_value(v)) for k, v in kwargs.items()) if kwargs else (),
        )
        hash(key)
    except (TypeError, RuntimeError):  # a number that is not known; a tensor without strides
        return None
    return key


_PLAIN = (
    *(int, float, bool, str, type(None), complex),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _describe_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.dtype.is_complex or value.is_quantized:
            raise TypeError("its fake value depends on more")
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(_describe_value(v) for v in value)
    if type(value) in _PLAIN:  # `type`: isinstance takes a symbolic float for a float
        return type(value), value
    raise TypeError("not known to be compared by value")
