"""Trust in files that are going to be run: that nobody but this user, or root, could write them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["Untrusted", "check_folder", "open_trusted"]

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """Why what is in a file or folder is not run."""


def open_trusted(path: Path) -> BinaryIO:
    """A file of a folder that `check_folder` has passed, to be read.

    Raises:
        Untrusted: it is a link or no file, or others could have written it.
        OSError: it cannot be opened.
    """
    if path.is_symlink():
        raise Untrusted("it is a symbolic link")
    # What was looked at is what is read; and to open a pipe is not to wait for who writes to it.
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
    """Raise Untrusted if others than this user could put a file into a folder, or another for it.

    Raises:
        OSError: there is no such folder, or it cannot be looked at.
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
