"""Instrumented classes, whose attributes are seen to be read while a step is captured.

`__getattribute__` of nn.Module, of optimizers and schedulers, and of each class of the user's that
is reached tells the capture of this thread what is read. To other threads the classes are as ever;
but one that reads an object whose tensors are exchanged at the moment waits until they are back.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = [
    "exclusive",
    "instrument",
    "own_attributes",
    "reads_by_itself",
    "recorded_by",
    "release",
]

_RECORDS: dict[int, StateReader] = {}  # by thread
_LOCK = threading.RLock()
_FREED = threading.Condition(_LOCK)
_EXCHANGED: dict[int, int] = {}  # the thread that has exchanged the tensors of an object, by its id
_INSTALLED: dict[type, int] = {}  # how many captures read a class
_PATIENCE = 5.0  # seconds in which a thread has left the reading of an attribute


def instrument(kind: type) -> bool:
    """Have instances of a class tell what is read of them; `release` undoes it.

    Returns:
        Whether that is possible: not of classes that are made in C.
    """
    with _LOCK:
        if kind not in _INSTALLED:
            try:
                kind.__getattribute__ = _make_recording_getter(kind)  # type: ignore[assignment]
            except TypeError:
                return False
            _INSTALLED[kind] = 0
        _INSTALLED[kind] += 1
        return True


def release(kinds: Iterable[type]) -> None:
    """Undo `instrument` of these classes, once each."""
    with _LOCK:
        for kind in kinds:
            _INSTALLED[kind] -= 1
            if _INSTALLED[kind]:
                continue
            del _INSTALLED[kind]
            installed = kind.__dict__.get("__getattribute__")
            if installed is None or not hasattr(installed, "_partita_own"):
                continue  # the program has put another there
            if installed._partita_own is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = installed._partita_own  # type: ignore[method-assign]


def _make_recording_getter(kind: type) -> Callable[[Any, str], Any]:
    own = kind.__dict__.get("__getattribute__")
    usual: Any = own or kind.__getattribute__
    while hasattr(usual, "_partita_usual"):  # of a base that is instrumented, too
        usual = usual._partita_usual

    def __getattribute__(self: Any, name: str) -> Any:
        record = _RECORDS.get(get_ident())
        if record is not None:
            record.read(self, name)
        elif _EXCHANGED and id(self) in _EXCHANGED:
            _wait_for((id(self),))
        return usual(self, name)

    __getattribute__._partita_own = own  # type: ignore[attr-defined]
    __getattribute__._partita_usual = usual  # type: ignore[attr-defined]
    return __getattribute__


def own_attributes(kind: type) -> int:
    """How many attributes a class has, without what `instrument` has put there."""
    held = vars(kind)
    added = getattr(held.get("__getattribute__"), "_partita_own", 0) is None
    return len(held) - added


def reads_by_itself(kind: type) -> bool:
    """Has a class, or one of its bases, a `__getattribute__` of its own, written in Python?"""
    usual = kind.__getattribute__
    return hasattr(getattr(usual, "_partita_usual", usual), "__code__")


_READERS = frozenset((nn.Module.__getattr__.__code__, _make_recording_getter(nn.Module).__code__))


@contextmanager
def recorded_by(record: StateReader) -> Iterator[None]:
    """Within, what this thread reads is told to `record`."""
    thread = get_ident()
    before = _RECORDS.get(thread)
    _RECORDS[thread] = record
    try:
        yield
    finally:
        if before is None:
            _RECORDS.pop(thread, None)
        else:
            _RECORDS[thread] = before


@contextmanager
def exclusive(objects: Iterable[Any]) -> Iterator[None]:
    """Within, other threads wait before they read attributes of `objects` or capture with them.

    Args:
        objects: modules.
    """
    ids = [id(o) for o in objects]
    thread = get_ident()
    with _FREED:
        while any(_EXCHANGED.get(i, thread) != thread for i in ids):
            _FREED.wait()
        mine = [i for i in ids if i not in _EXCHANGED]
        _EXCHANGED.update(dict.fromkeys(mine, thread))
    instrument(nn.Module)
    try:
        # One that has looked already has its parameter when it has left.
        until = time.monotonic() + _PATIENCE
        while _others_read() and time.monotonic() < until:
            threading.Event().wait(0.001)
        yield
    finally:
        with _FREED:
            for i in mine:
                _EXCHANGED.pop(i, None)
            _FREED.notify_all()
        release([nn.Module])


def _others_read() -> bool:
    """Is another thread within the reading of an attribute of a module, and does not wait there?"""
    me = get_ident()
    return any(t != me and _is_reading(frame) for t, frame in sys._current_frames().items())


def _is_reading(frame: FrameType | None) -> bool:
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return _wait_for.__code__ not in codes and not _READERS.isdisjoint(codes)


def _wait_for(ids: tuple[int, ...]) -> None:
    thread = get_ident()
    with _FREED:
        while any(_EXCHANGED.get(i, thread) != thread for i in ids):
            _FREED.wait()
