"""Names of dimensions.

What are the dimensions of an operand called, in a rule that writes its sentence?
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

__all__ = ["Names"]


class Names(tuple[str, ...]):
    """The names of one operand's dimensions, outermost first; `str` is a term of a sentence."""

    def __str__(self) -> str:
        return " ".join(self)

    def __add__(self, other: object) -> Names:
        return Names(tuple(self) + tuple(other))  # type: ignore[arg-type]

    def at(self, dim: int) -> int:
        """`dim` as a non-negative index. Raises IndexError as torch does."""
        n = max(len(self), 1)
        if not -n <= dim < n:
            raise IndexError(f"Dimension out of range (expected [{-n}, {n - 1}], but got {dim})")
        return dim % n

    def dims(self, dim: int | Sequence[int] | None) -> tuple[int, ...]:
        """The dimensions that a `dim` argument means; None and `()` mean all."""
        if dim is None or (not isinstance(dim, int) and len(dim) == 0):
            return tuple(range(len(self)))
        found = tuple(self.at(d) for d in ((dim,) if isinstance(dim, int) else dim))
        return found if self else ()  # torch lets a tensor of no dimensions have dim 0

    def without(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Names:
        """What is left when `dim` is reduced; with `keepdim` a `1` stands in its place."""
        gone = self.dims(dim)
        if keepdim:
            return Names("1" if i in gone else n for i, n in enumerate(self))
        return Names(n for i, n in enumerate(self) if i not in gone)

    def whole(self, dim: int | Sequence[int] | None = None) -> Names:
        """The same names, those of `dim` marked `!`."""
        kept = self.dims(dim)
        return Names(f"{n}!" if i in kept and n[-1] not in "!1" else n for i, n in enumerate(self))

    def put(self, dim: int, text: str) -> Names:
        """The same names with `text` in the place of dimension `dim`."""
        i = self.at(dim)
        return Names((*self[:i], text, *self[i + 1 :]))

    def insert(self, dim: int, text: str) -> Names:
        """One more name: `text` becomes dimension `dim`."""
        i = dim if dim >= 0 else dim + len(self) + 1
        return Names((*self[:i], text, *self[i:]))

    @staticmethod
    @lru_cache(maxsize=256)
    def of(ndim: int, start: str = "a") -> Names:
        """`ndim` names: a b c ...; beyond z: a1 b1 ..."""
        first, out = ord(start) - 97, []
        for i in range(first, first + ndim):
            out.append(chr(97 + i % 26) + (str(i // 26) if i >= 26 else ""))
        return Names(out)
