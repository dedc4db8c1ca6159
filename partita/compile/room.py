"""Which tensor has room for padding behind its data, in its own memory?

What enters an uneven graph is as large as the first rank's piece. A smaller piece that is copied
into memory of that size would be there twice, all parameters and the optimizer's state at once.
So its storage grows in place, the first time: nothing is copied from then on, and every view of
the storage is what it was, as what was added is behind all of it. Who has only its address (what
was exported by DLPack before) is left behind, so nothing that a caller brings along grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["with_room"]


def with_room(local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """`local` and the padding behind it, as one contiguous tensor of `shape`.

    Args:
        shape: as `local`'s, but for one dimension in which it is larger; all before that are 1.

    Returns:
        None where `local` is part of something larger, or its memory cannot grow or be written:
        what is behind it is then not ours.
    """
    if not local.is_contiguous() or local.storage_offset():
        return None
    storage = local.untyped_storage()
    # Memory that processes share says that it is resizable, and resizing it ends the process.
    if storage.is_shared() or (local.is_inference() and not torch.is_inference_mode_enabled()):
        return None
    data = local.numel() * local.element_size()
    whole = math.prod(shape) * local.element_size()
    # What is said of a storage stays with it, whichever tensor shows it.
    ours = vars(storage).get("data_and_whole") == (data, storage.nbytes())
    if not ours and (storage.nbytes() != data or not storage.resizable()):
        return None
    if storage.nbytes() < whole:
        storage.resize_(whole)
        storage.data_and_whole = data, whole  # type: ignore[attr-defined]
        n = local.numel()
        local.as_strided((math.prod(shape) - n,), (1,), n).zero_()
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return local.as_strided(tuple(shape), strides)
