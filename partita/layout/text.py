"""Text for users: error messages, and how amounts, names and tables are printed."""

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
    """A fix that an error proposes.

    Attributes:
        write: the code to write, or what else to do.
        moves: what the fix would send ("all_reduce 12 MiB"), or a remark on it ("without a
            gradient").
    """

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
    def parts(self) -> dict[str, Any]:
        """The arguments with which this error was constructed, by name, to make a changed copy."""
        return {name: getattr(self, name) for name in _PARTS}

    def with_place(self, place: str) -> LayoutError:
        """Returns a copy with the user's line `place`; the error itself if it has a line."""
        if self.place or not place:
            return self
        return _rebuild_error(type(self), self.parts | {"place": place})

    # By default an exception is pickled with its message alone; this keeps the parts.
    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (type(self), self.parts)


_PARTS = "fact", "place", "operands", "reason", "fixes"


def _rebuild_error(kind: type[LayoutError], parts: dict[str, Any]) -> LayoutError:
    return kind(**parts)


# -- amounts, names, values and tables -------------------------------------------------------------

_SHOWN = 80
"""Characters of a value that an error shows."""


def escape_controls(text: str) -> str:
    r"""Returns `text` with each unprintable character as a Python escape: "\x1b[31m".

    Names of modules and files may contain line breaks or codes that control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def describe_value(value: object) -> str:
    """Returns a text for a wrong argument: a number or string itself, otherwise its type.

    Reading the value of a tensor may wait for other ranks, and a `repr` may be long.
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
    """Returns `nbytes` bytes as text: 1536 gives "1.5 KiB". For 0 it returns `nothing`."""
    if nbytes == 0:
        return nothing
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 100 else f"{size:.1f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """Returns a time as text: `seconds=4.1e-05` gives "41 us". Less than 0.1 us gives "0"."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.1f} us" if seconds >= 1e-7 else "0"


def format_count(number: float, unit: str = "") -> str:
    """Returns a number as text: 65536.0 is "65.5 k", and with the unit "FLOP" "65.5 kFLOP"."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def format_table(
    rows: Sequence[Sequence[str]], right: Container[int] = (), widest: int = 1 << 20
) -> str:
    """Returns a table as text with aligned columns. All rows have the same number of cells.

    Unprintable characters are escaped.

    Args:
        right: the indices of the columns that are aligned to the right.
        widest: the largest width of a column, in characters. A longer cell is not cut.
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
    """A package with the name of a torch function. A call raises the code to write instead."""

    _instead = ""

    def __call__(self, *_: object, **__: object) -> None:
        raise TypeError(f"{self.__name__} is a module, not a function: write {self._instead}")


def explain_calls(package: str, instead: str) -> None:
    """Make a call of a package itself (`partita.compile(...)`) raise an error that shows a fix.

    Call this while the package is being imported.

    Args:
        package: the full name of the package.
        instead: the code to write instead of the call.
    """
    module = sys.modules[package]
    module.__class__ = _Uncallable
    module._instead = instead  # type: ignore[attr-defined]
