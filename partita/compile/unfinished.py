"""What does a compile leave behind that was killed?

Half a library, in the folder in which torch keeps what it compiles: it takes that for a whole one
the next time, and the process dies of it. So a note lies there while something is compiled. One
whose process is gone says from when on libraries are not to be trusted, and they are deleted.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["without_unfinished"]

_PREFIX = "partita-compiles-"


@contextmanager
def without_unfinished() -> Iterator[None]:
    """Within, there is no half library in torch's folder, nor is one left by what fails within."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    folder.mkdir(parents=True, exist_ok=True)
    for note in folder.glob(_PREFIX + "*"):
        _tidy(folder, note)
    fd, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # for as long as this process lives
        try:
            yield
        except BaseException:  # Ctrl-C reaches the compiler too
            _delete_since(folder, Path(name))
            raise
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(fd)


def _tidy(folder: Path, note: Path) -> None:
    with suppress(OSError), note.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody is at work
            return
        _delete_since(folder, note)
        note.unlink()


def _delete_since(folder: Path, note: Path) -> None:
    """Delete the libraries that are not older than `note`."""
    with suppress(OSError):
        begin = note.stat().st_mtime
        for library in folder.glob("*/*.so"):
            with suppress(OSError):
                if library.stat().st_mtime >= begin:
                    library.unlink()
