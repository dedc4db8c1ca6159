"""Stale libraries: what does a compile leave behind that was killed?

Half a library, in the folder in which torch keeps what it compiles: it takes that for a whole one
the next time, and the process dies of it. So a note lies there while something is compiled. One
whose process is gone says since when there may be half libraries, and these are deleted.
"""

from __future__ import annotations

import fcntl
import os
import struct
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
        _delete_stale_halves(folder, note)
    fd, name = tempfile.mkstemp(dir=folder)
    file = Path(name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # for as long as this process lives
        file = file.rename(folder / (_PREFIX + file.name))  # where others see it
        try:
            yield
        except BaseException:  # Ctrl-C reaches the compiler too
            _delete_halves(folder, file)
            raise
    finally:
        file.unlink(missing_ok=True)
        os.close(fd)


def _delete_stale_halves(folder: Path, note: Path) -> None:
    with suppress(OSError), note.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody is at work
            return
        _delete_halves(folder, note)
        note.unlink()


def _delete_halves(folder: Path, note: Path) -> None:
    """Delete the half libraries that are not older than `note`."""
    with suppress(OSError):
        begin = note.stat().st_mtime
        for library in folder.glob("*/*.so"):
            with suppress(OSError):
                if library.stat().st_mtime >= begin and not _is_whole(library):
                    library.unlink()


def _is_whole(library: Path) -> bool:
    """Does it end where its header says? The table of its sections is written last."""
    with library.open("rb") as file:
        header = file.read(64)
    if header[:4] != b"\x7fELF" or len(header) < 64:
        return header[:4] == b"\xcf\xfa\xed\xfe"  # on macOS libraries are of another kind
    bits, order = header[4], "<" if header[5] == 1 else ">"
    # e_shoff, and e_shentsize and e_shnum: https://refspecs.linuxfoundation.org/elf/gabi4+
    at, sizes = (40, 58) if bits == 2 else (32, 46)
    (start,) = struct.unpack_from(order + ("Q" if bits == 2 else "I"), header, at)
    size, count = struct.unpack_from(order + "HH", header, sizes)
    return bool(start) and start + size * count <= library.stat().st_size
