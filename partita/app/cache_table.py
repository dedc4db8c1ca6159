"""The table of compiled programs that are kept: `partita cache`."""

from __future__ import annotations

import sys
import time
from typing import Any

from partita.comm.ledger import human
from partita.compile.backend.store import Entry, Store, default_store

__all__ = ["ACTIONS", "cache"]

ACTIONS = {
    "list": "show what is kept",
    "clear": "remove all of it",
    "verify": "read all of it, and say what is damaged; exit code 1 if anything is",
}


def cache(action: str) -> int:
    """Do one of `ACTIONS` with the user's store, print what came of it, return the exit code."""
    try:
        store = default_store()
        if action == "clear":
            count, nbytes = store.clear()
            print(f"removed {_format_count(count)}, {_format_size(nbytes)}, from {store.folder}")
            return 0
    except (ValueError, OSError) as error:
        print(f"partita cache: {error}", file=sys.stderr)
        return 2
    entries = store.entries(check=action == "verify")
    damaged = [e for e in entries if e.problem]
    print(_format_table(entries), end="")
    print(_format_total(entries, store))
    if action == "verify":
        for entry in damaged:
            print(f"{entry.path}: {entry.problem}", file=sys.stderr)
        print(f"{len(damaged)} damaged" if damaged else "all as they were written")
        return 1 if damaged else 0
    return 0


def _format_table(entries: list[Entry]) -> str:
    if not entries:
        return ""
    head = ("KEY", "SIZE", "USED", "WHAT", "MESH", "TORCH", "COMPILED IN")
    rows = [head, *(_format_row(entry) for entry in entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in (1, 2) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _format_row(entry: Entry) -> tuple[str, ...]:
    def said(name: str) -> str:
        return str(entry.metadata.get(name, "-"))

    seconds: Any = entry.metadata.get("seconds")
    return (
        entry.key[:12],
        _format_size(entry.nbytes),
        _format_age(time.time() - entry.used),
        entry.problem or said("what").replace(".<locals>", ""),
        said("mesh"),
        said("torch"),
        f"{seconds:.1f} s" if isinstance(seconds, (int, float)) else "-",
    )


def _format_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


def _format_count(count: int) -> str:
    return f"{count} program{'s' * (count != 1)}"


def _format_total(entries: list[Entry], store: Store) -> str:
    total = sum(e.nbytes for e in entries)
    held = f"{_format_count(len(entries))}, {_format_size(total)}"
    return f"{held} of {_format_size(store.limit)}, in {store.folder}"


def _format_size(nbytes: int) -> str:
    return human(nbytes) if nbytes else "0 B"
