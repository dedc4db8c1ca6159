"""Fake tensors: what stands for a tensor, or a DTensor, while a step is captured.

A FakeTensor has metadata, a device and no memory. For a DTensor's local tensor it is re-tagged as
`FakeDTensor`, like any other shard. That class is both: a DTensor to Python, so that rules and
moves run as ever, and a FakeTensor to the dispatcher, which aborts where a tensor with a fake's
dispatch keys has a class that cannot take its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConfig, FakeTensorMode
from torch.autograd.graph import increment_version

from partita.comm.device import HOST
from partita.tensor.dtensor import PLAIN, TYPED, DTensor
from partita.tensor.op_facts import facts_of

from .symbolic import NumberEnv

_META = torch.device("meta")


class FakeDTensor(DTensor, FakeTensor):
    """A fake shard. Never constructed: a FakeTensor is re-tagged."""

    __torch_dispatch__ = FakeTensor.__torch_dispatch__
    device = FakeTensor.device


PLAIN.add(FakeTensor)
TYPED[FakeTensor] = TYPED[FakeDTensor] = FakeDTensor


def fake_mode() -> FakeTensorMode:
    """A mode in which shapes are static: another shape is another capture.

    Its shape environment traces Python numbers; without one Inductor's cache would be bypassed.
    """
    return FakeTensorMode(shape_env=NumberEnv(), static_shapes=True)


def fake_mode_of(inputs: Iterable[Any]) -> FakeTensorMode:
    """The mode in which a graph's inputs were made; a new one for a graph that has none."""
    return fake_mode_in(inputs) or FakeTensorMode()


def fake_mode_in(values: Iterable[Any]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among values, in lists and dictionaries too."""
    for v in values:
        if isinstance(v, FakeTensor):
            return v.fake_mode  # type: ignore[no-any-return]
        if isinstance(v, (list, tuple)):
            found = fake_mode_in(v)
        elif isinstance(v, dict):
            found = fake_mode_in(v.values())
        else:
            continue
        if found is not None:
            return found
    return None


class FakeMaker:
    """Makes fakes of local tensors, each with a snapshot: another fake of the same memory.

    Most inputs of a step are dense tensors of a standard kind, of which shape, strides and memory
    say all. Other tensors are left to `FakeTensorMode.from_tensor`, which asks each for all that a
    tensor may be: that takes longer than all else that a capture does for an input.

    Args:
        tensors: of which fakes may be made. Those that share memory have fakes that do.
    """

    def __init__(self, mode: FakeTensorMode, tensors: Sequence[torch.Tensor]):
        self._mode = mode
        self._memory: dict[int, torch.UntypedStorage] = {}
        others = [t for t in tensors if not _is_dense(t) and t.layout is torch.strided]
        self._memory_of_others = {_storage_id(t) for t in others if not t.is_nested}

    def make(self, local: torch.Tensor) -> tuple[FakeTensor, FakeTensor]:
        """A fake of `local`, and its snapshot."""
        if device_at_capture(local) != local.device:
            return self.make_empty(local)
        if not _is_dense(local) or _storage_id(local) in self._memory_of_others:
            fake = self._mode.from_tensor(local, static_shapes=True)
            return fake, fast_detach(self._mode, fake)
        with _building():
            return self._make_pair(self._make_meta(local), local.device)

    def make_empty(
        self, local: torch.Tensor, shape: Sequence[int] | None = None
    ) -> tuple[FakeTensor, FakeTensor]:
        """A fake like `local` of other memory, and its snapshot; of another `shape` if given."""
        with _building():
            if shape is None:
                meta = _make_empty_meta(local)
            else:
                meta = torch.empty(shape, dtype=local.dtype, device="meta")
            return self._make_pair(meta, device_at_capture(local))

    def _make_pair(self, meta: torch.Tensor, device: torch.device) -> tuple[FakeTensor, FakeTensor]:
        return make_fake(self._mode, meta, device), make_fake(self._mode, meta, device)

    def _make_meta(self, local: torch.Tensor) -> torch.Tensor:
        """A meta tensor like `local`, in the memory of those that share its."""
        memory, offset = _storage_id(local), local.storage_offset()
        if memory not in self._memory:
            size = local.untyped_storage().nbytes()
            if not offset:
                meta = _make_empty_meta(local)
                if meta.untyped_storage().nbytes() == size:
                    self._memory[memory] = meta.untyped_storage()
                    return meta
            self._memory[memory] = torch.UntypedStorage(size, device="meta")
        meta = torch.empty(0, dtype=local.dtype, device="meta")
        return meta.set_(self._memory[memory], offset, local.shape, local.stride())


def make_fake(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """`FakeTensor(mode, meta, device)`, in a third of the time.

    Private torch: that constructor is Python, and most of it is for arguments that nobody gives.
    """
    is_unsure = device.index is None and device not in (HOST, _META)  # torch asks which is current
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
    """A fake like `t`, in memory of its own."""
    with _building():
        return make_fake(mode, _make_empty_meta(t), t.device)


def make_distinct(value: Any, known: set[int]) -> Any:
    """A value for an input, in memory of its own: equal calls have made several of them, which
    share one fake, and inputs are told apart by their fakes.

    Args:
        known: the memory of the inputs before; that of this one is added.
    """
    if isinstance(value, FakeTensor) and value.layout is torch.strided:
        if value.untyped_storage()._cdata in known:
            value = make_empty_fake(value, value.fake_mode)
        known.add(value.untyped_storage()._cdata)
    return value


@lru_cache
def _attributes_of_fakes(device: torch.device) -> tuple[dict[str, Any], torch.device]:
    """The attributes that torch gives each new fake of a device, and the device with its index."""
    with _building():
        fake = FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), device)
    return dict(fake.__dict__), fake.fake_device


@contextmanager
def _building() -> Iterator[None]:
    """Within, nobody hears of tensors that are made."""
    with torch._C._DisableTorchDispatch(), Unheard():  # type: ignore[attr-defined]
        yield


def _make_empty_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _storage_id(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_dense(x: torch.Tensor) -> bool:
    """Is it strided, and not quantized, nested, wrapped, of inference mode or yet to conjugate?"""
    keys = torch._C._dispatch_keys(x)
    return type(x) is torch.Tensor and bool(keys == _dense_keys(x.device.type))


@lru_cache
def _dense_keys(device: str) -> Any:
    """The dispatch keys of a dense tensor. Private torch: a tensor of another kind has others."""
    with torch.inference_mode(False), _building():
        return torch._C._dispatch_keys(torch.empty(0, device=device))


_TARGET: ContextVar[torch.device | None] = ContextVar("captured_for", default=None)


@contextmanager
def captured_for(device: torch.device | str) -> Iterator[None]:
    """Within, what lies on the meta device is captured as if it lay on `device`.

    So a graph that is never run has a device's own kernels, of attention above all, of which the
    meta device has none.
    """
    token = _TARGET.set(torch.device(device))
    try:
        yield
    finally:
        _TARGET.reset(token)


def device_at_capture(x: torch.Tensor) -> torch.device:
    """The device of the fake of `x`."""
    return (_TARGET.get() if x.is_meta else None) or x.device


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The local tensor of `x`, plain and without history."""
    with Local(), torch.no_grad():
        found: Any = x.detach()
    return found


def has_memory(x: Any) -> bool:
    """Is it a real tensor, for which no fake stands?"""
    return isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)


def tensors_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lists: bool = False
) -> list[torch.Tensor]:
    """The tensors that a call of an op writes; with `lists` only those within list operands."""
    found: list[torch.Tensor] = []
    for operand in facts_of(func).writes:
        given = operand.find(args, kwargs)
        if operand.is_list:
            found += [t for t in given or () if t is not None]
        elif given is not None and not lists:
            found.append(given)
    return found


def count_writes_of_lists(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Increment the versions of tensors in list operands that `func` has written.

    Torch counts writes of an op's own operands. For tensors in a list the kernels do, one by one,
    and fake tensors run no kernels.
    """
    written = tensors_written(func, args, kwargs, lists=True)
    with Local():
        increment_version([t for t in written if not t.is_inference()])
