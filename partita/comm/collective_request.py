"""Why a collective runs: what ranks compare and what errors print."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from partita.redistribute import Move

__all__ = ["Ask"]


class Ask(NamedTuple):
    """Why a collective runs."""

    kind: str
    move: Move | None
    op: str

    def describe(self) -> str:
        """`all_gather over dp: 8@dp 16 -> 8 16, for matmul`."""
        if self.move is None:
            return self.kind
        return f"{self.move}, for {self.op}"
