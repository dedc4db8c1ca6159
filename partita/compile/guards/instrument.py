"""Instrumented classes: a `__getattribute__` that tells the record of this thread what is read.

While a step is captured it is installed in nn.Module, optimizers, schedulers and each class of the
user's that is reached. Threads without a record read as ever; but a thread that reads a module
whose parameters are exchanged for fakes at the moment waits until they are back
(`exclusive_access`). `StateReader` is the record (`record.ReadRecord`) as those see it who tell it
what the step reads; the record imports them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

from torch import nn

from partita.layout import Fix

from ..capture.capture_context import attribute_set
from ..errors import CaptureError
from .places import Place


class _Recording(threading.local):
    """The record that is told what this thread reads."""

    record: StateReader | None = None


_recording = _Recording()
_LOCK = threading.RLock()
_FREED = threading.Condition(_LOCK)
_EXCHANGED: dict[int, int] = {}  # by id of a module: the thread that has exchanged its tensors
_INSTALLED: dict[type, int] = {}  # by class: how many captures have it instrumented
_PATIENCE = 5.0  # seconds to wait for threads that are within a read of an attribute


def instrument(kind: type) -> bool:
    """Have a class tell what is read of its instances; `uninstrument` undoes it.

    Returns:
        Whether that is possible: not for classes implemented in C.
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


def uninstrument(kinds: Iterable[type]) -> None:
    """Undo `instrument` of these classes, once each."""
    with _LOCK:
        for kind in kinds:
            _INSTALLED[kind] -= 1
            if _INSTALLED[kind]:
                continue
            del _INSTALLED[kind]
            installed = kind.__dict__.get("__getattribute__")
            if installed is None or not hasattr(installed, "_partita_own"):
                continue  # the program has replaced it
            if installed._partita_own is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = installed._partita_own  # type: ignore[method-assign]


def _make_recording_getter(kind: type) -> Callable[[Any, str], Any]:
    own = kind.__dict__.get("__getattribute__")
    usual: Any = own or kind.__getattribute__
    while hasattr(usual, "_partita_usual"):  # a base is instrumented, too
        usual = usual._partita_usual

    def __getattribute__(self: Any, name: str) -> Any:
        record = _recording.record
        if record is not None:
            record.read_attribute(self, name)
        elif _EXCHANGED and id(self) in _EXCHANGED:
            _wait_for((id(self),))
        return usual(self, name)

    __getattribute__._partita_own = own  # type: ignore[attr-defined]
    __getattribute__._partita_usual = usual  # type: ignore[attr-defined]
    return __getattribute__


def count_own_attributes(kind: type) -> int:
    """The number of attributes of a class, without what `instrument` has added."""
    held = vars(kind)
    added = getattr(held.get("__getattribute__"), "_partita_own", 0) is None
    return len(held) - added


def has_own_getattribute(kind: type) -> bool:
    """Has a class, or a base of it, its own `__getattribute__` in Python?"""
    usual = kind.__getattribute__
    return hasattr(getattr(usual, "_partita_usual", usual), "__code__")


_READERS = frozenset((nn.Module.__getattr__.__code__, _make_recording_getter(nn.Module).__code__))


def recorded_by(record: StateReader) -> AbstractContextManager[None]:
    """Within, `record` is told what this thread reads."""
    return attribute_set(_recording, "record", record)


@contextmanager
def exclusive_access(objects: Iterable[Any]) -> Iterator[None]:
    """Within, other threads wait before they read attributes of these modules or capture with them.

    The capture meanwhile exchanges their parameters for fake tensors.
    """
    ids = [id(o) for o in objects]
    with _FREED:
        _wait_for(ids)
        mine = [i for i in ids if i not in _EXCHANGED]
        _EXCHANGED.update(dict.fromkeys(mine, get_ident()))
    instrument(nn.Module)
    try:
        # A thread that is within a read now still gets the real parameter: wait until it is out.
        until = time.monotonic() + _PATIENCE
        while _others_read() and time.monotonic() < until:
            threading.Event().wait(0.001)
        yield
    finally:
        with _FREED:
            for i in mine:
                _EXCHANGED.pop(i, None)
            _FREED.notify_all()
        uninstrument([nn.Module])


def _others_read() -> bool:
    """Is another thread within a read of a module's attribute, and not waiting there?"""
    me = get_ident()
    return any(t != me and _is_reading(frame) for t, frame in sys._current_frames().items())


def _is_reading(frame: FrameType | None) -> bool:
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return _wait_for.__code__ not in codes and not _READERS.isdisjoint(codes)


def _wait_for(ids: Iterable[int]) -> None:
    thread = get_ident()
    with _FREED:
        while any(_EXCHANGED.get(i, thread) != thread for i in ids):
            _FREED.wait()  # releases the lock, however often this thread has taken it


# -- the record, as a protocol ---------------------------------------------------------------------


class StateReader(Protocol):
    """Records what a step reads.

    Attributes:
        huge: by id, containers that are not compared deeply.
        snapshots: `record.Snapshots` of what was reached.
        reached_by_name: see `reaching_by_name`.
        error: the refusal to raise when the step is over, whoever caught it meanwhile.
        before_backward: called where a backward begins, with the tensors whose gradients are asked.
    """

    huge: dict[int, Any]
    snapshots: Any
    reached_by_name: bool
    error: CaptureError | None
    before_backward: Callable[[Any], None]

    def read_attribute(self, owner: Any, name: str) -> None:
        """Record that an attribute is read."""

    def read_place(self, place: Place, value: Any, shallow: bool = False) -> None:
        """Record that a place is read, where `value` stands; reach that unless `shallow`."""

    def read_class_attribute(self, kind: type, name: str) -> Any:
        """Record that an attribute of a class is read; its value, or MISSING."""

    def reach_value(self, value: Any, name: str) -> None:
        """Record what the step can read of `value` without reading an attribute."""

    def reach_object(self, value: Any, name: str) -> None:
        """Record the attributes of an object from now on, as they are read."""

    def read_all_attributes(self, owner: Any) -> None:
        """Record all attributes of an object that was reached."""

    def ignore(self, value: Any) -> None:
        """Do not record what `value` leads to."""

    def reached_types(self) -> list[type]:
        """The types of the objects that were reached."""

    def refuse(self, fact: str, reason: str, name: str = "", fix: Fix | None = None) -> None:
        """Raise CaptureError: no guard can cover what the step reads."""

    def without_recording(self) -> AbstractContextManager[None]:
        """Within, reads of attributes are not the step's, and not recorded."""

    def reaching_by_name(self) -> AbstractContextManager[None]:
        """Within, values are reached since code uses their names; the step may not read them."""
