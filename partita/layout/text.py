"""Text for users: errors, and amounts, names, values and tables in ledgers, reports and errors."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass
from numbers import Number
from types import ModuleType
from typing import Any

# -- errors ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fix:
    """One way out that works: what to write, and what it moves ("all_reduce 12 MiB")."""

    write: str
    moves: str = ""

    def __str__(self) -> str:
        return f"{self.write:<44} {self.moves}".rstrip()


class LayoutError(ValueError):
    """An error about layouts: a fact, a place, a reason, and fixes that work.

    Args:
        fact: one sentence: what was requested, and why it is impossible.
        place: the user's "file:line", if known.
        operands: lines that describe the values involved, in call order.
        reason: one sentence: why the fact holds.
        fixes: what the user can do, cheapest first.
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

    @property
    def said(self) -> dict[str, Any]:
        """The parts of the message by name: the constructor's arguments."""
        return {name: getattr(self, name) for name in _PARTS}

    def located(self, place: str) -> LayoutError:
        """Returns this error with `place` added; the same error if it has a place already."""
        if self.place or not place:
            return self
        return _rebuild_error(type(self), self.said | {"place": place})

    # An error crosses process boundaries whole.
    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (type(self), self.said)


_PARTS = "fact", "place", "operands", "reason", "fixes"


def _rebuild_error(kind: type[LayoutError], said: dict[str, Any]) -> LayoutError:
    return kind(**said)


# -- amounts, names, values and tables -------------------------------------------------------------

_SHOWN = 80
"""Characters of a value that an error shows."""


def escape_controls(text: str) -> str:
    r"""Returns a name that comes from outside as one line that can do nothing: what is no printable
    character stands as Python writes it, "\x1b[31m".

    So a name of a module or of a file moves no cursor, begins no line and turns no text around.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def describe_value(value: object) -> str:
    """Returns a description of a refused argument: numbers and text as they are, otherwise the
    type.

    The value of a tensor must not be read here, and the `repr` of an object may be long.
    """
    kind = type(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is not None and not isinstance(value, Number | str | bytes):
        return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"
    try:
        text = escape_controls(repr(value))
    except ValueError:  # a whole number of too many digits
        return f"a number of type {kind.__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def human(nbytes: float, nothing: str = "-") -> str:
    """`1536` as "1.5 KiB"; 0 as `nothing`."""
    if nbytes == 0:
        return nothing
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 100 else f"{size:.1f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """`4.1e-05` as "41 us"; less than a tenth of a microsecond as "0"."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.1f} us" if seconds >= 1e-7 else "0"


def format_count(number: float, unit: str = "") -> str:
    """`65536.0` as "65.5 k"; of a unit, as "65.5 kFLOP"."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def format_table(
    rows: Sequence[Sequence[str]], right: Container[int] = (), widest: int = 1 << 20
) -> str:
    """Rows of equally many cells as lines; the columns of the numbers in `right` end in line.

    No column is made wider than `widest`: a longer cell stands out of it. What is no printable
    character in a cell is escaped.
    """
    rows = [[escape_controls(cell) for cell in row] for row in rows]
    widths = [min(widest, max(map(len, column))) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        line = "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in cells)
        lines.append(line.rstrip())
    return "\n".join(lines)


# -- names that are modules ------------------------------------------------------------------------


class _Uncallable(ModuleType):
    """A package that has the name of a function of torch's; a call says what to write."""

    _instead = ""

    def __call__(self, *_: object, **__: object) -> None:
        raise TypeError(f"{self.__name__} is a module, not a function: write {self._instead}")


def explain_calls(package: str, instead: str) -> None:
    """Make a call of the package `package` raise an error that shows what to write `instead`.

    The package is being imported.
    """
    module = sys.modules[package]
    module.__class__ = _Uncallable
    module._instead = instead  # type: ignore[attr-defined]
