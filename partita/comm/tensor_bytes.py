"""The bytes of tensors, read where they lie: torch's own way there, `x.numpy()`, wants numpy, which
torch neither needs nor brings."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["copy_bytes", "view_bytes"]


def view_bytes(x: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    if x.nbytes == 0:
        return memoryview(b"")
    x = x.resolve_conj().resolve_neg()
    memory = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    memory.owner = x  # type: ignore[attr-defined]  # the view keeps the array alive, and that the tensor
    return memoryview(memory).cast("B")


def copy_bytes(x: torch.Tensor) -> bytes:
    """What a contiguous tensor on the CPU holds."""
    x = x.resolve_conj().resolve_neg()
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""
