"""Padded storage: memory of a rank's piece with room for padding behind it.

The graph that all ranks share takes pieces as large as the first rank's. Where a dimension is split
unevenly, what stays between steps (parameters, their gradients, an optimizer's state) is therefore
made that large on every rank. The storage that a tensor shows is as large as its piece and begins
at the same address: whoever copies it, shares it or writes it to a file never meets the padding.
And what gives a tensor other memory (`p.data = x`, `model.to(dtype)`) leaves the room behind.

    7 elements over 2 ranks    rank 0: 4    rank 1: 3, and room for 1 behind them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

from partita.comm.cuts import contiguous_strides
from partita.comm.device import is_seen_by_processes

from .dtensor import DTensor
from .engine import holders
from .spec import Spec
from .watch import HERE

__all__ = [
    "copy_with_room",
    "empty_with_room",
    "find_padded",
    "give_room",
    "show_front",
    "with_room",
]

Shape = tuple[int, ...]

_data: Any = torch._C.TensorBase.data


def empty_with_room(
    spec: Spec, dtype: torch.dtype, device: torch.device | str | None
) -> torch.Tensor:
    """Memory without values for this rank's piece of `spec`: a plain tensor, contiguous."""
    if not _has_room(spec, device):
        return torch.empty(spec.local_shape, dtype=dtype, device=device)
    whole = torch.empty(math.prod(spec.padded_shape), dtype=dtype, device=device)
    if type(whole) is not torch.Tensor:  # under a mode of the user's, which makes fakes
        return torch.empty(spec.local_shape, dtype=dtype, device=device)
    whole[spec.local_shape.numel() :] = 0
    return show_front(whole, spec.local_shape)


def copy_with_room(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """`local`, this rank's piece of `spec`, in memory of its own, contiguous."""
    if not _has_room(spec, local.device):
        return local.clone(memory_format=torch.contiguous_format)
    return empty_with_room(spec, local.dtype, local.device).copy_(local)


def with_room(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """`local`, this rank's piece of `spec`, contiguous: copied where it lacks the room."""
    if not _has_room(spec, local.device) or find_padded(local, spec.padded_shape) is not None:
        return local.contiguous()
    return copy_with_room(local, spec)


def _has_room(spec: Spec, device: torch.device | str | None) -> bool:
    """Is there padding behind this rank's piece, in memory on `device`?"""
    if spec.local_shape == spec.padded_shape or not spec.is_padded_behind:
        return False
    # What stands for tensors while a step is captured is padded itself.
    return not HERE.capturing and (device is None or torch.device(device).type != "meta")


def show_front(whole: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The first elements of contiguous memory, as a tensor whose storage has these alone."""
    count = math.prod(shape)
    # Through DLPack a storage can show a part of another one's memory, which it keeps.
    front = torch.from_dlpack(to_dlpack(whole.view(-1).view(torch.uint8)[: count * whole.itemsize]))
    storage = front.untyped_storage()
    # What is said of a storage stays with it, whichever tensor shows it.
    storage.padded = whole  # type: ignore[attr-defined]
    shown = torch.empty(0, dtype=whole.dtype, device=whole.device)
    return shown.set_(storage, 0, tuple(shape), contiguous_strides(shape))


def find_padded(local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """`local` and the room behind it as one tensor of `shape`; None where it has no such room.

    Args:
        shape: as `local`'s, but for one dimension in which it is larger; all before that are 1.
    """
    storage = local.untyped_storage()
    whole: torch.Tensor | None = vars(storage).get("padded")
    if (
        whole is None
        or not local.is_contiguous()
        or local.numel() * local.itemsize != (storage.nbytes())
    ):
        return None
    # Memory that was moved to where other processes see it (`share_memory_`) has no room there.
    if storage.nbytes() and storage.data_ptr() != whole.data_ptr():
        return None
    if whole.nbytes != math.prod(shape) * local.itemsize:
        return None
    if whole.is_inference() and not torch.is_inference_mode_enabled():
        return None
    if whole.dtype != local.dtype:
        whole = whole.view(-1).view(local.dtype)
    return whole.view(tuple(shape))


def give_room(x: torch.Tensor) -> None:
    """Exchange the memory of `x` for one with room for its padding, if it has none.

    Not where anybody else shows that memory, or it is not torch's own: they would not see any more
    what is written to `x`.
    """
    if not isinstance(x, DTensor) or not x._spec.is_padded_behind:
        return
    padded = x._spec.padded_shape
    # Memory that is made in inference mode could not be trained afterwards.
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        if x.shape == padded or not x.is_leaf or find_padded(x, padded) is not None:
            return
        storage = x.untyped_storage()
        is_alone = holders(storage) == 2 and x.numel() * x.itemsize == storage.nbytes()
        is_torchs = storage.resizable() and not is_seen_by_processes(storage)
        if is_alone and is_torchs and not x.is_inference():
            _data.__set__(x, copy_with_room(x.detach(), x._spec))
