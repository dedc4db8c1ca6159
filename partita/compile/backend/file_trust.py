"""Trust in files that are executed: only this user, or root, can have written them.

A compiled artifact is code. So a file is read only if it and its folder belong to this user or
root, no other user may write to them, and nobody may put another folder in its place.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["Untrusted", "check_folder", "open_trusted"]

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """A file or folder is not trusted; the message says why."""


def open_trusted(path: Path) -> BinaryIO:
    """Open a file for reading, in a folder that `check_folder` has passed.

    Raises:
        Untrusted: it is a link or no file, or others could have written it.
        OSError: it cannot be opened.
    """
    if path.is_symlink():
        raise Untrusted("it is a symbolic link")
    # The opened file is checked, so that it cannot be exchanged; opening a pipe must not block.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    file = os.fdopen(os.open(path, flags | getattr(os, "O_BINARY", 0)), "rb")
    try:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Untrusted("it is no file")
        _check_owner_and_mode(found)
    except BaseException:
        file.close()
        raise
    return file


def check_folder(folder: Path) -> None:
    """Check that only this user can write into a folder, or replace it by another.

    Raises:
        Untrusted: others can.
        OSError: there is no such folder, or it cannot be read.
    """
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(20, "Not a directory", str(folder))
    _check_owner_and_mode(found)
    _check_owner_and_mode(folder.lstat(), link=True)
    for parent in folder.resolve().parents:
        above = parent.stat()
        # A sticky folder, such as /tmp, lets nobody rename what is another's.
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            raise Untrusted(f"anybody may write to {parent}, which it is in")


def _check_owner_and_mode(found: os.stat_result, link: bool = False) -> None:
    if not hasattr(os, "geteuid"):  # Windows has no such modes
        return
    if found.st_uid not in (os.geteuid(), 0):
        raise Untrusted("it belongs to another user")
    if found.st_mode & _OTHERS and not link:
        raise Untrusted("others may write to it: chmod go-w")
