"""Progress of a call that captures, on standard error if the call takes longer than five seconds.

On a terminal, one line shows the phase and the time, and is updated. Elsewhere one line is written
when the call begins to take long, and one with the times at its end. Only the first rank writes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from partita.layout.text import escape_controls

SHOWN_AFTER = 5.0  # seconds until anything is shown
SHOWN_EVERY = 1.0  # seconds between updates
_DOES = {"capture": "is captured", "compile": "is compiled", "graph": "runs as a graph"}

_listeners: list[Callable[[str], None]] = []
_lines: list[_Line] = []
"""The line that is shown, if there is one."""
_shows = threading.Lock()
"""Held by the thread whose step is shown; if ranks are threads, only one shows its step."""


@contextmanager
def phase_listener(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls `listener(name)` when a phase of a call begins, inside the `with` block.

    The phases of a call are "capture", "compile", and "graph", the run of the compiled graph.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def begin_phase(name: str) -> None:
    """Calls the functions of `phase_listener` with the name of a phase, such as "capture"."""
    for listener in _listeners:
        listener(name)


def note_section(number: int, count: int) -> None:
    """Shows on the progress line that section `number` (from 1) of `count` is compiled."""
    for line in _lines:
        line.detail = f" (section {number} of {count})" if count > 1 else ""


@contextmanager
def showing_progress(title: str, is_first: bool = True) -> Iterator[Callable[[Any], None]]:
    """Shows on standard error how long capture and compilation take, inside the `with` block.

    It shows nothing on ranks other than 0, and nothing if there is a listener (`phase_listener`) or
    another such block.

    Args:
        title: the name of the step.
        is_first: True if the step has no program yet.

    Yields:
        A function to call with the program's `Built`, or None if the graph runs as it is.
    """
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if _listeners or not is_first_rank or not _shows.acquire(blocking=False):
        yield lambda built: None
        return
    line = _Line(title, sys.stderr, "in its first call" if is_first else "again")
    try:
        with phase_listener(line.set_phase):
            _lines.append(line)
            yield line.set_result
    finally:
        _lines.clear()
        line.end()
        _shows.release()


class _Line:
    """The shown line, written by its own thread."""

    def __init__(self, title: str, stream: Any, when: str = "in its first call"):
        self._title, self._stream, self._phase = escape_controls(title), stream, "capture"
        self._when, self._result, self.detail = when, "", ""
        self._began, self._ended = time.monotonic(), threading.Event()
        self._captured: float | None = None  # when the capture ended
        self._width = 0
        self._thread = threading.Thread(target=self._show, daemon=True, name="partita-progress")
        self._thread.start()

    def set_phase(self, name: str) -> None:
        if name != "capture" and self._captured is None:
            self._captured = time.monotonic()
        self._phase, self.detail = name, ""

    def set_result(self, built: Any) -> None:
        """Notes that the call has its program, for the last line.

        Args:
            built: the compiled code, whose text says how long it took; None if there is none.
        """
        seconds = (self._captured or time.monotonic()) - self._began
        self._result = f"captured in {seconds:.1f} s" + (f", {built}" if built else "")

    def end(self) -> None:
        """Stops updating the progress line, and clears it on a terminal."""
        self._ended.set()
        self._thread.join()

    def _show(self) -> None:
        if self._ended.wait(SHOWN_AFTER):
            return
        if not self._stream.isatty():
            what = f"{self._title} {_DOES[self._phase]} {self._when}"
            self._write(f"partita: {what}; this may take minutes, once for each program\n")
            self._ended.wait()
            if self._result:
                self._write(f"partita: {self._title}: {self._result}\n")
            return
        while True:
            seconds = time.monotonic() - self._began
            text = f"partita: {self._title} {_DOES[self._phase]}{self.detail}, {seconds:.0f} s"
            self._write("\r" + text.ljust(self._width))
            self._width = len(text)
            if self._ended.wait(SHOWN_EVERY):
                break
        self._write("\r" + " " * self._width + "\r")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
