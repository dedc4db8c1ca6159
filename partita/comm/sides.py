"""Sides of a collective: a rank's tensor, and where in it the pieces of each rank of a group lie.

The buffer of a collective holds the pieces end to end, in the order of the ranks. One strided copy
for each `PieceBlock` takes them there and back, so that the number of copies does not grow with the
number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from .cuts import (
    Cut,
    PieceBlock,
    contiguous_strides,
    ends_last,
    find_piece_blocks,
    padded_length,
    span,
    unravel,
)
from .splits import Splits
from .transport import Axes, Transport

__all__ = ["Side"]

Strides = Sequence[int]
Placing = Callable[[PieceBlock], tuple[tuple[int, ...], int]]


class Side:
    """A rank's local tensor, cut into a piece for each rank of a group.

    Attributes:
        shape: of the local tensor.
        piece: the shape of the largest piece.
        even: all pieces are of one shape.
        in_order: the pieces follow each other along one dimension, in the order of the ranks.
        in_memory: so they do in memory.
        rows_in_memory: so they do where each is padded to the largest: all padding is last.
    """

    def __init__(
        self, cuts: Sequence[Cut], shape: tuple[int, ...], transport: Transport, axes: Axes
    ):
        self.shape, self._cuts = shape, cuts
        self._grid = [a for a in axes if transport.mesh.size(a) > 1]
        self._sizes = [transport.mesh.size(a) for a in self._grid]
        self._lengths = [cut.length_at(transport.mesh, transport.at) for cut in cuts]
        piece = list(shape)
        for cut, length in zip(cuts, self._lengths, strict=True):
            piece[cut.dim] = padded_length(length, cut.parts)
        self.piece = tuple(piece)
        self.even = math.prod(self._sizes) * math.prod(piece) == math.prod(shape)
        self.in_order = len(cuts) == 1 and list(cuts[0].inner) == self._grid
        self.in_memory = self.in_order and math.prod(shape[: cuts[0].dim]) == 1
        self.rows_in_memory = self.in_memory and ends_last(self._lengths[0], cuts[0].parts)

    @property
    def pad(self) -> int:
        """Elements of the largest piece."""
        return math.prod(self.piece)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Of all pieces in order, each as large as the largest."""
        (cut,), n = self._cuts, math.prod(self._sizes)
        return (*self.shape[: cut.dim], n * self.piece[cut.dim], *self.shape[cut.dim + 1 :])

    def splits(self) -> Splits:
        """The pieces, in order, end to end and without padding."""
        n, (length,), (cut,) = math.prod(self._sizes), self._lengths, self._cuts
        if self.even:
            return Splits.evenly(n, self.pad)
        rest = math.prod(self.shape) // length if length else 0

        def place_of_part(i: int) -> tuple[int, int]:
            start, size = span(length, cut.parts, unravel(i, cut.parts))
            return rest * start, rest * size

        return Splits(n, math.prod(self.shape), False, place_of_part)

    # -- copies to and from a collective's buffer --------------------------------------------------

    def to_rows(self, pad: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that packs the pieces into a flat buffer, each padded with zeros to `pad`
        elements."""
        n = math.prod(self._sizes)
        return self._to_flat(n * pad, self._in_rows(pad), filled=n * pad == math.prod(self.shape))

    def from_rows(self, pad: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """What copies the pieces from such a buffer, the second argument, to where they belong."""
        return self._from_flat(self._in_rows(pad))

    def to_segments(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that packs the pieces, which are in order, end to end as in `splits`."""
        return self._to_flat(math.prod(self.shape), self._end_to_end, filled=True)

    def from_segments(self) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """What copies the pieces from such a buffer, the second argument, to where they belong."""
        return self._from_flat(self._end_to_end)

    def _find_piece_blocks(self) -> list[PieceBlock]:
        return find_piece_blocks(self._cuts, self._lengths, self.shape, self._grid)

    def _in_rows(self, pad: int) -> Placing:
        strides = [pad * math.prod(self._sizes[i + 1 :]) for i in range(len(self._sizes))]

        def strides_and_offset(block: PieceBlock) -> tuple[tuple[int, ...], int]:
            offset = sum(map(int.__mul__, block.first, strides))
            return (*strides, *contiguous_strides(block.piece)), offset

        return strides_and_offset

    def _end_to_end(self, block: PieceBlock) -> tuple[tuple[int, ...], int]:
        (cut,), (length,) = self._cuts, self._lengths
        rest = math.prod(self.shape) // length
        strides = (*(rest * step for step in block.steps), *contiguous_strides(block.piece))
        return strides, rest * block.start[cut.dim]

    def _to_flat(
        self, total: int, placed: Placing, filled: bool
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        blocks = self._find_piece_blocks()
        own = contiguous_strides(self.shape)
        sources = [(block.shape, *block.strided(own)) for block in blocks]
        places = [placed(block) for block in blocks]
        alone = len(blocks) == 1 and filled

        def pack_into_flat(x: torch.Tensor) -> torch.Tensor:
            views, first = sources, x.storage_offset()
            if not x.is_contiguous():
                views = [(block.shape, *block.strided(x.stride())) for block in blocks]
            if alone:
                ((size, strides, offset),) = views
                return x.as_strided(size, strides, first + offset).contiguous().view(-1)
            flat = x.new_empty(total) if filled else x.new_zeros(total)
            for (size, strides, offset), place in zip(views, places, strict=True):
                flat.as_strided(size, *place).copy_(x.as_strided(size, strides, first + offset))
            return flat

        return pack_into_flat

    def _from_flat(self, placed: Placing) -> Callable[[torch.Tensor, torch.Tensor], None]:
        own = contiguous_strides(self.shape)
        views = [
            (block.shape, block.strided(own), placed(block)) for block in self._find_piece_blocks()
        ]

        def unpack_from_flat(out: torch.Tensor, flat: torch.Tensor) -> None:
            for size, there, here in views:
                out.as_strided(size, *there).copy_(flat.as_strided(size, *here))

        return unpack_from_flat
