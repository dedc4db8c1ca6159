"""Checksums of tensors: three numbers by which ranks tell whether they hold the same tensor."""

from __future__ import annotations

import zlib

import torch
from torch._C import DisableTorchFunctionSubclass as Local

__all__ = ["checksum"]

_WORDS = 1 << 18
"""64-bit words that are weighted at a time, so that a large tensor is not copied whole."""


def checksum(value: torch.Tensor) -> tuple[int, int, int]:
    """Dimensions, a number for sizes and dtype, one for the bytes in their places, in 63 bits.

    Two tensors of one shape that differ in one 64-bit word differ in it: each word counts by an odd
    weight, modulo 2**64. Reads only; a tensor without memory (on "meta") counts as empty.
    """
    with Local(), torch.no_grad():
        shape = zlib.crc32(str(value.dtype).encode())
        for n in value.shape:
            shape = (shape * 1000003 + n + 1) & 0x7FFFFFFFFFFFFFFF
        if value.numel() == 0 or value.is_meta:
            return value.dim(), shape, 0
        flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if flat.stride(0) != 1:  # of one element, which is contiguous whatever its stride says
            flat = flat.as_strided(flat.shape, (1,))
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()  # words are read where words may begin
        data = flat.view(torch.uint8)
        whole = data.numel() // 8 * 8
        rest = int.from_bytes(bytes(data[whole:].tolist()), "little")
        total = (rest * 2 + 1) * 0x9E3779B97F4A7C15
        words = data[:whole].view(torch.int64)
        weights = torch.arange(1, min(_WORDS, words.numel()) + 1, device=data.device)
        # Odd, and without a pattern that the elements of tensors have too.
        weights = weights.mul_(-7046029254386353131).bitwise_or_(1)
        for i, part in enumerate(words.split(_WORDS)):
            total += int((part * weights[: part.numel()]).sum()) * (2 * i + 1)
        return value.dim(), shape, (total ^ (total >> 64)) & 0x7FFFFFFFFFFFFFFF
