"""Fake values of nodes: the metadata of a call's result, computed once for equal calls.

Calls are equal if they have the same target, numbers, and shapes, strides, dtypes and devices of
operands (`key_of_call`). They share one FakeTensor (`call_without_memory`) as `node.meta["val"]`.
So two nodes may share a fake, and thus a fake storage, although their values share no memory.

Each capture has its own FakeTensorMode. A torch operator whose equal call ran in an earlier capture
under the same settings of torch does not run again: its recorded metadata are reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConfig, FakeTensorMode
from torch.utils import _pytree as pytree

from partita.comm.collective import WAIT
from partita.comm.device import HOST
from partita.tensor.op_facts import facts_of

from .torch_settings import read_settings

_META = torch.device("meta")


def fake_mode_of(inputs: Iterable[Any]) -> FakeTensorMode:
    """Returns the FakeTensorMode of a graph's inputs; a new one if no input is a fake."""
    return fake_mode_in(inputs) or FakeTensorMode()


def fake_mode_in(values: Iterable[Any]) -> FakeTensorMode | None:
    """Returns the mode of the first fake tensor in `values`, or None.

    Nested lists, tuples and dictionaries are searched.
    """
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode  # type: ignore[no-any-return]
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(value, (list, tuple, dict)) and (found := fake_mode_in(inner)) is not None:
            return found
    return None


def make_fake(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """Returns `FakeTensor(mode, meta, device)`, but takes a third of the time.

    Private torch: most of that constructor handles arguments that are never passed.
    """
    is_unsure = device.index is None and device not in (HOST, _META)  # torch uses the current one
    if FakeTensorConfig.debug or is_unsure or (device == _META and not mode.allow_meta):
        return FakeTensor(mode, meta, device)
    attributes, device = _attributes_of_fakes(device)
    fake: FakeTensor = torch.Tensor._make_subclass(  # type: ignore[attr-defined]
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(attributes, fake_mode=mode)
    return fake


def make_empty_fake(t: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """Returns a fake tensor of `mode` with the metadata of `t` and a new storage."""
    with building_fakes():
        return make_fake(mode, make_empty_meta(t), t.device)


def make_distinct(value: Any, known: set[int]) -> Any:
    """Returns `value`, or a copy with a new storage if an earlier graph input has the same storage.

    Calls with equal operands share one fake value. But inputs are distinguished by their storages,
    so two inputs must not share one.

    Args:
        value: the fake value of a graph input.
        known: identifiers of the storages of earlier inputs. The storage of this input is added.
    """
    if isinstance(value, FakeTensor) and value.layout is torch.strided:
        if value.untyped_storage()._cdata in known:
            value = make_empty_fake(value, value.fake_mode)
        known.add(value.untyped_storage()._cdata)
    return value


@lru_cache
def _attributes_of_fakes(device: torch.device) -> tuple[dict[str, Any], torch.device]:
    """Returns the attributes of a new fake on a device, and the device with its index."""
    with building_fakes():
        fake = FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), device)
    return dict(fake.__dict__), fake.fake_device


@contextmanager
def building_fakes() -> Iterator[None]:
    """Disables all torch modes inside the `with` block, because they could intercept new fakes."""
    with torch._C._DisableTorchDispatch(), DisableTorchFunction():  # type: ignore[attr-defined]
        yield


def make_empty_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@dataclass(frozen=True, slots=True, eq=False)
class CallResult:
    """The fake result of a call, with the storage of each tensor: new, or an operand's.

    Attributes:
        value: the fake value that the call returns.
        storages: for each tensor in `value`, the number of its storage: i for the storage of the
            i-th tensor operand, -1 - i for the i-th new storage.
        nbytes: the bytes of each new storage.
    """

    value: Any
    storages: tuple[int, ...]
    nbytes: tuple[int, ...]


def call_without_memory(target: Any, args: Any, kwargs: Any, like: Any = None) -> CallResult:
    """Returns the metadata of a call's result, as a `CallResult`, by a run over fake tensors.

    Equal calls share one cached result.

    Args:
        target, args, kwargs: the op or function of the call, and its arguments.
        like: a value of the same fake mode, for calls without a tensor operand. A call of a
            `Subgraph` is not run: here `like` is its fake result.
    """
    if not isinstance(target, torch._ops.OpOverload) and facts_of(target).makes_new:
        nbytes = tuple(t.untyped_storage().nbytes() for t in tensors_in(like))
        return CallResult(like, tuple(-1 - i for i in range(len(nbytes))), nbytes)
    mode = fake_mode_in((args, kwargs, like))
    # The key has the shapes and strides of operands, and not their storages.
    by_key = mode is not None and not facts_of(target).by_storage
    key = key_of_call(target, args, kwargs) if by_key else None
    if mode is None or key is None:
        return call_and_describe(target, args, kwargs, mode)
    known: dict[Any, CallResult] | None = getattr(mode, "_partita_equal_calls", None)
    if known is None:
        known = mode._partita_equal_calls = {}  # type: ignore[attr-defined]  # as long as its fakes
        mode._partita_settings = read_settings()  # type: ignore[attr-defined]
    made = known.get(key)
    if made is None:
        made = known[key] = _make_once(target, args, kwargs, mode, key)
    return made


def _make_once(target: Any, args: Any, kwargs: Any, mode: FakeTensorMode, key: Any) -> CallResult:
    """Returns a call's result; if an equal call has run in another mode, from its metadata."""
    settings = mode._partita_settings  # type: ignore[attr-defined]
    key = type(mode), torch.get_default_dtype(), settings, key
    left = results_of_calls.get(key)  # read once, because other threads clear it, too
    if left is not None:
        value = pytree.tree_map_only(_Metadata, lambda of: of.make_fake(mode), left.value)
        return replace(left, value=value)

    # Operands get separate storages, so that `storages` does not depend on which of them share.
    def own_of(value: Any) -> Any:
        return make_empty_fake(value, mode) if isinstance(value, torch.Tensor) else value

    own: Any = fx.node.map_aggregate((args, kwargs), own_of)
    made = call_and_describe(target, own[0], own[1], mode)
    is_torchs = getattr(target, "namespace", "") == "aten"  # others may be defined again
    if is_torchs and all(map(_is_plain, pytree.tree_leaves(made.value))):
        if len(results_of_calls) >= _MOST_KEPT:
            results_of_calls.clear()
        value = pytree.tree_map_only(FakeTensor, _Metadata.of_tensor, made.value)
        results_of_calls[key] = replace(made, value=value)
    return made


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The shape, strides, offset, storage size, dtype and device of a fake tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of_tensor(cls, t: FakeTensor) -> _Metadata:
        offset, nbytes = int(t.storage_offset()), t.untyped_storage().nbytes()
        return cls(tuple(t.shape), t.stride(), offset, nbytes, t.dtype, t.device)

    def make_fake(self, mode: FakeTensorMode) -> FakeTensor:
        with building_fakes():
            storage = torch.UntypedStorage(self.nbytes, device=_META)
            meta = torch.empty(0, dtype=self.dtype, device=_META)
            meta.set_(storage, self.offset, self.shape, self.strides)  # type: ignore[call-overload]
            return make_fake(mode, meta, self.device)


results_of_calls: dict[Any, CallResult] = {}
_MOST_KEPT = 8192


def _is_plain(value: Any) -> bool:
    """True for None, and for a fake tensor that has nothing beside `_Metadata`."""
    if value is None:
        return True
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_quantized:
        return False
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    is_known = all(type(n) is int for n in (*sizes, value.untyped_storage().nbytes()))
    return is_known and value.constant is None and not value.dtype.is_complex


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    """Returns the tensors in `value` (nested lists, tuples and dictionaries), in order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if value is None or isinstance(value, (int, float, str)):
        return ()
    if type(value) in (list, tuple) and all(isinstance(t, torch.Tensor) for t in value):
        return value  # type: ignore[no-any-return]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def call_and_describe(
    target: Any, args: Any, kwargs: Any, mode: FakeTensorMode | None
) -> CallResult:
    with torch.no_grad(), mode or nullcontext():
        value = target(*args, **kwargs)
    if target is WAIT:  # it returns its operand, though its fake value is a new tensor
        return CallResult(value, (0,), ())
    # Private torch: `_cdata` identifies a storage while it exists.
    known: dict[int, int] = {}
    for i, t in enumerate(tensors_in((args, kwargs))):
        known.setdefault(_storage_of(t)._cdata, i)
    storages: list[int] = []
    nbytes: list[int] = []
    for t in tensors_in(value):
        storage = _storage_of(t)
        if storage._cdata not in known:
            known[storage._cdata] = -1 - len(nbytes)
            nbytes.append(storage.nbytes())
        storages.append(known[storage._cdata])
    return CallResult(_without_bases(value), tuple(storages), tuple(nbytes))


def _without_bases(value: Any) -> Any:
    """Returns the value with views detached from their bases.

    A view holds its base, which holds the fake mode, which holds the cached calls. The garbage
    collector of Python does not see this cycle.
    """
    if not any(t._is_view() for t in tensors_in(value)):
        return value
    with torch.no_grad():
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def _storage_of(t: torch.Tensor) -> torch.UntypedStorage:
    """Returns the storage of a tensor; for a sparse one that of its values."""
    if t.layout is torch.strided:
        return t.untyped_storage()
    with torch.no_grad():
        values = t._values() if t.layout is torch.sparse_coo else t.values()
    return values.untyped_storage()


def key_of_call(target: Any, args: Any, kwargs: Any) -> Any:
    """Returns a key that is equal for calls whose results have equal metadata.

    Returns None if the metadata depend on more than the operands' metadata.

    Args:
        target, args, kwargs: the op or function of the call, and its arguments.
    """
    try:
        key = (
            target,
            _describe_value(args),
            tuple((k, _describe_value(v)) for k, v in kwargs.items()) if kwargs else (),
        )
        hash(key)
    except (TypeError, RuntimeError):  # a symbolic number; a tensor without strides
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
