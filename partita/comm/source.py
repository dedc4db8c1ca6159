"""Source lines: the line of the user's program that the running call comes from, found by walking
the stack past the frames of partita, torch, NumPy and the standard library.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

import torch

_PARTITA = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_NUMPY = os.path.join("site-packages", "numpy", "")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
# Our own models and training loop stand where a user's program would when no user is above them.
_OURS_TO_SHOW = (os.path.join(_PARTITA, "app") + os.sep,)
_SHOWN: ContextVar[tuple[str, ...]] = ContextVar("own lines that are shown", default=())


@contextmanager
def own_lines_shown(*files: str) -> Iterator[None]:
    """Within, lines of partita's own models, and of these files, are shown as a user's are: of a
    model that the user has only named."""
    token = _SHOWN.set((*_OURS_TO_SHOW, *files))
    try:
        yield
    finally:
        _SHOWN.reset(token)


def user_line(frame: FrameType | None = None, here: str = "") -> str:
    """`"file:line"` of the innermost frame outside partita, torch, numpy and Python's library.

    Walks the stack, so call it only when somebody will read the answer.

    Args:
        frame: where to begin; the caller where None.
        here: the working directory, where the caller knows it: to ask for it takes long.

    Returns:
        The line, or the innermost line of partita's own training code where no user is above it,
        or "" where there is neither (an autograd thread, for one).
    """
    if frame is None:
        frame = sys._getframe(1)
    fallback, shown = "", _SHOWN.get()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PARTITA):
            if shown and name.startswith(shown):
                return f"{_shorten_path(name, here)}:{frame.f_lineno}"
            if not fallback and name.startswith(_OURS_TO_SHOW):
                fallback = f"{_shorten_path(name, here)}:{frame.f_lineno}"
        elif not _is_plumbing(frame):
            return f"{_shorten_path(name, here)}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback


def user_line_of_error(error: BaseException) -> str:
    """As `user_line`, of where an error was raised.

    Of the frames that it went through not each is reached from the innermost: what C has called
    may have none behind it any more.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, map(user_line, reversed(frames))), "")


def place_of_user() -> str:
    """`"file:line"` of the user's frame, without folders, which may differ from host to host."""
    site = call_site(sys._getframe(1))
    return f"{os.path.basename(site[0])}:{site[1]}" if site else ""


def call_site(frame: FrameType | None = None) -> tuple[Any, ...]:
    """Which call of the user's program this is: equal on all ranks, and for each call of a line its
    own. As `user_line`, but nothing is written out, so that it can be asked for often.

    Returns:
        File, line and instruction of the user's frame, and of the innermost one outside partita.
    """
    if frame is None:
        frame = sys._getframe(1)
    inner: tuple[Any, ...] = ()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PARTITA):
            here = (name, frame.f_lineno, first_instruction(frame.f_code, frame.f_lasti))
            if not _is_plumbing(frame):
                return here + inner
            inner = inner or here
        frame = frame.f_back
    return inner


def first_instruction(code: CodeType, at: int) -> int:
    """Where the call begins that is at work at the instruction `at` of some code.

    A call is several instructions, and which of them is at work the interpreter says otherwise
    once it has met the call often enough: in a second run, or on another rank, it may not have.
    """
    known = _begins.get((id(code), at))
    if known is None:
        places = list(code.co_positions())
        first = at // 2
        while first and None not in places[first] and places[first - 1] == places[first]:
            first -= 1
        if len(_begins) >= _KEPT:
            _begins.clear()
        known = _begins[id(code), at] = code, 2 * first
    return known[1]


_KEPT = 1 << 16
_begins: dict[tuple[int, int], tuple[CodeType, int]] = {}
"""By a code's id, which it keeps as long as it is held here."""


def _is_plumbing(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if name.startswith("<"):  # of no file: made by a library, but for `python -c` and notebooks
        return name.startswith("<frozen ") or frame.f_globals.get("__name__") != "__main__"
    return _is_library_file(name)


@functools.lru_cache(maxsize=4096)
def _is_library_file(name: str) -> bool:
    """Is it a file of torch, numpy or Python's library?"""
    if name.startswith(_TORCH) or _NUMPY in name:
        return True
    return name.startswith(_STDLIB) and "site-packages" not in name


def _shorten_path(name: str, here: str) -> str:
    """The path from here where that is shorter; the whole path otherwise."""
    here = (here or os.getcwd()) + os.sep
    return name[len(here) :] if name.startswith(here) else name
