"""Requests of collectives: why one runs, for the comparison of ranks and for errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from partita.redistribute import Move

__all__ = ["Request"]


class Request(NamedTuple):
    """Why a collective runs.

    Attributes:
        kind: of the collective, or what is compared: "all_gather", "gather_ints".
        move: that it is a part of; None where it serves a comparison of ranks.
        op: that needs the move, "matmul".
    """

    kind: str
    move: Move | None
    op: str

    def describe(self) -> str:
        """`all_gather over dp: 8@dp 16 -> 8 16, for matmul`."""
        if self.move is None:
            return self.kind
        return f"{self.move}, for {self.op}"
