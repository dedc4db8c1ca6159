"""Layout errors: a fact, a place, a reason, and the fixes that work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fix:
    """One way out that works: what to write, and what it moves ("all_reduce 12 MiB")."""

    write: str
    moves: str = ""

    def __str__(self) -> str:
        return f"{self.write:<44} {self.moves}".rstrip()


class LayoutError(ValueError):
    """Layouts that do not fit: a fact, a place, a reason, and the fixes that work.

    Args:
        fact: one sentence: what was asked and why it cannot be.
        place: the user's "file:line", if known.
        operands: lines about the values involved, in call order.
        reason: why the fact holds, one sentence.
        fixes: ways out, cheapest first.
    """

    def __init__(
        self,
        fact: str,
        *,
        place: str = "",
        operands: tuple[str, ...] = (),
        reason: str = "",
        fixes: tuple[Fix, ...] = (),
    ):
        self.fact, self.place, self.operands = fact, place, operands
        self.reason, self.fixes = reason, fixes
        lines = [f"{fact} (at {place})" if place else fact]
        lines += [f"  {line}" for line in operands]
        if reason:
            lines.append(f"  {reason}")
        lines += [f"  {'either' if i == 0 else 'or    '}  {fix}" for i, fix in enumerate(fixes)]
        super().__init__("\n".join(lines))

    def located(self, place: str) -> LayoutError:
        """This error with a `place`, for one who knows it; itself where it has one already."""
        if self.place or not place:
            return self
        return _rebuild_error(type(self), self.fact, place, self.operands, self.reason, self.fixes)

    # An error crosses process boundaries whole.
    def __reduce__(self) -> tuple[object, ...]:
        kind = type(self)
        return _rebuild_error, (kind, self.fact, self.place, self.operands, self.reason, self.fixes)


def _rebuild_error(
    kind: type[LayoutError],
    fact: str,
    place: str,
    operands: tuple[str, ...],
    reason: str,
    fixes: tuple[Fix, ...],
) -> LayoutError:
    return kind(fact, place=place, operands=operands, reason=reason, fixes=fixes)
