"""Phases of a compiled step ("capture", "compile", "graph"), for whoever shows its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["begin_phase", "told_of_phases"]

_listeners: list[Callable[[str], None]] = []


@contextmanager
def told_of_phases(tell: Callable[[str], None]) -> Iterator[None]:
    """Within, `tell` is called with "capture", "compile" and "graph" as each begins."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


def begin_phase(name: str) -> None:
    """Tell the listeners."""
    for tell in _listeners:
        tell(name)
