"""Reruns: finds out which forward of a block an activation checkpoint is running again in backward.

A checkpoint calls the same modules in the same order as in its forward. So the n-th forward of a
block in a rerun is the n-th forward of that block since the checkpoint began.

Forwards are recorded in a linked list, and this module refers only to its last link. A checkpoint
refers to the link where it began, so links are freed with the last checkpoint that needs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary


class ForwardNote:
    """A link in the list of block forwards: a forward that has begun, or a position.

    Attributes:
        block: an object that identifies the block; None for a position.
        is_of_other_values: True if the block's parameters had been replaced by other values.
        saves_unseen: True if hooks of a checkpoint took all saved tensors of the forward, so that
            the block's own hooks got none. The rerun also gives the block's own hooks none.
        call: a weak reference to what the block itself has recorded of the forward.
        next: the next link.
    """

    __slots__ = ("block", "call", "is_of_other_values", "next", "saves_unseen")

    def __init__(self, block: object = None, is_of_other_values: bool = False):
        self.block, self.is_of_other_values = block, is_of_other_values
        self.saves_unseen = False
        self.call: Callable[[], Any] = lambda: None
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
        self.blocks = WeakKeyDictionary[Any, None]()


_THREAD = _Thread()


def _append_note(note: ForwardNote) -> None:
    _THREAD.last.next = note
    _THREAD.last = note


def note_forward(block: object, is_of_other_values: bool) -> ForwardNote:
    """Records that a forward of a block begins. Returns the record.

    Args:
        block: an object that identifies the block. It must not refer to the model, because the
            list keeps it alive.
        is_of_other_values: True if the block's parameters were replaced by other values.
    """
    note = ForwardNote(block, is_of_other_values)
    _append_note(note)
    return note


def note_end_of_forward() -> None:
    """Record that the forward of the current block has ended."""
    _append_note(ForwardNote())


def place_in_forward() -> ForwardNote:
    """Returns the current position in the list of block forwards, for a checkpoint that begins now.

    In backward, the checkpoint's rerun repeats the forwards after this position. If a forward has
    just begun, the position is before it. The reason: a hook of that block may have begun the
    checkpoint. In this case the rerun calls the block, too.
    """
    last = _THREAD.last
    if last.block is None:
        return last
    place = ForwardNote()
    place.next = last
    return place


def find_forward_of_rerun(block: object) -> ForwardNote | None:
    """Returns the original forward that a block now repeats in a checkpoint's rerun.

    None if no rerun is in progress or the forward was not recorded.
    """
    return None if _THREAD.rerun is None else _THREAD.rerun.find_next(block)


def note_partial_reruns(block: Any) -> None:
    """Records that a checkpoint may run a part of `block` again in the running backward pass.

    Args:
        block: an object whose methods `connect_shards` and `end_forward` are called before and
            after each rerun.
    """
    _THREAD.blocks[block] = None


@contextmanager
def running_again(start: ForwardNote) -> Iterator[None]:
    """Treats calls inside the `with` block as a rerun of the checkpoint that began at `start`.

    Args:
        start: the position that `place_in_forward` returned when the checkpoint began.
    """
    before, _THREAD.rerun = _THREAD.rerun, _Rerun(start)
    blocks = [*_THREAD.blocks] if before is None else []
    try:
        for block in blocks:
            block.connect_shards()
        yield
    finally:
        _THREAD.rerun = before
        for block in blocks:
            block.end_forward()


class Rerunnable:
    """Wraps a function under an activation checkpoint, so that its later calls count as reruns.

    Create it when the checkpoint begins.

    Args:
        function: the function that the checkpoint calls.
        has_run: False if the first call is the forward, and True if every call is a rerun.
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
