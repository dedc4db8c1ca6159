"""Checkpoint pieces: what one rank holds of a named tensor of a checkpoint.

Apart from `dcp_writing`, which takes a second to import: saving makes these while training waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Piece", "Region"]

Region = Sequence[tuple[int, int]]
"""`(offset, length)` in elements, per dimension of the whole tensor."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a named tensor.

    Attributes:
        local: the values, a plain tensor.
        shape: of the whole tensor.
        region: where `local` lies in it.
    """

    local: torch.Tensor
    shape: Sequence[int]
    region: Region
