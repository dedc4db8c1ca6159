"""Calls that are heard while a step is captured, and those that nobody need hear.

Python tells a profile function of every call of a thread. For each op torch makes about a thousand
over tensors without memory; none of them is the user's, and telling of them takes longer than they.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = ["heard_by", "unheard"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_here = threading.local()


@contextmanager
def heard_by(event: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Within, `event` is told of each call of this thread, but for those that `unheard` makes."""
    before = sys.getprofile(), getattr(_here, "event", None)
    _here.event = event
    sys.setprofile(event)
    try:
        yield
    finally:
        _here.event = before[1]
        sys.setprofile(before[0])


def unheard(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """`function(*args, **kwargs)`, which calls nothing of the user's."""
    event = getattr(_here, "event", None)
    if event is None:
        return function(*args, **kwargs)
    _here.event = None
    sys.setprofile(None)
    try:
        return function(*args, **kwargs)
    finally:
        _here.event = event
        sys.setprofile(event)
