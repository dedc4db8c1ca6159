"""Which forwards of blocks a checkpoint runs again in backward.

A checkpoint calls the same modules in the same order as in its forward. So the n-th forward of a
block in a rerun belongs to the n-th one since the checkpoint has begun. Forwards are noted in a
chain, of which only its end is kept. A checkpoint refers to the place where it began, so the chain
lives as long as the checkpoint. What else runs between two forwards does not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ForwardNote:
    """A link of the chain: a forward that has begun, or only a place between two.

    Attributes:
        block: identifies the block; None for a place.
        is_of_other_values: True if the forward found other values in the parameters' places.
        next: the next link.
    """

    __slots__ = ("block", "is_of_other_values", "next")

    def __init__(self, block: object = None, is_of_other_values: bool = False):
        self.block, self.is_of_other_values = block, is_of_other_values
        self.next: ForwardNote | None = None


class _Rerun:
    """One run of a checkpoint in backward."""

    def __init__(self, start: ForwardNote):
        self._start = start
        self._last: dict[object, ForwardNote] = {}

    def find_next(self, block: object) -> ForwardNote | None:
        note = self._last.get(block, self._start).next
        while note is not None and note.block is not block:
            note = note.next
        if note is not None:
            self._last[block] = note
        return note


class _Thread(threading.local):
    def __init__(self) -> None:
        self.last = ForwardNote()
        self.rerun: _Rerun | None = None


_THREAD = _Thread()


def _append_note(note: ForwardNote) -> None:
    _THREAD.last.next = note
    _THREAD.last = note


def note_forward(block: object, is_of_other_values: bool) -> None:
    """A forward of a block begins.

    Args:
        block: identifies the block. The chain keeps it, so it must not refer to the model.
    """
    _append_note(ForwardNote(block, is_of_other_values))


def note_end_of_forward() -> None:
    """A forward of a block has ended."""
    _append_note(ForwardNote())


def place_in_forward() -> ForwardNote:
    """Returns the place where a checkpoint begins now.

    If a block's forward has just begun, the checkpoint may be a hook of that block. Its rerun then
    calls the block itself, so the place is before that forward.
    """
    last = _THREAD.last
    if last.block is None:
        return last
    place = ForwardNote()
    place.next = last
    return place


def find_forward_of_rerun(block: object) -> ForwardNote | None:
    """Returns the note of the forward that is run again, where a rerun calls `block`; or None."""
    return None if _THREAD.rerun is None else _THREAD.rerun.find_next(block)


@contextmanager
def running_again(start: ForwardNote) -> Iterator[None]:
    """Run a checkpoint again, inside the block, that began at `start`."""
    before, _THREAD.rerun = _THREAD.rerun, _Rerun(start)
    try:
        yield
    finally:
        _THREAD.rerun = before


class Rerunnable:
    """A function that a checkpoint calls, which began when this object was made.

    Args:
        function: what the checkpoint calls.
        has_run: False if the first call is the forward.
    """

    def __init__(self, function: Callable[..., Any], has_run: bool):
        self._function, self._has_run = function, has_run
        self._start = place_in_forward()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_run:
            self._has_run = True
            return self._function(*args, **kwargs)
        with running_again(self._start):
            return self._function(*args, **kwargs)
