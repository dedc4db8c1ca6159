"""Cleanup of stale libraries, which a killed compile leaves half-written.

They lie in the folder in which torch keeps what it compiles, and torch loads them as if they were
complete, which crashes the process. So while something is compiled, a locked marker file lies
there. A marker without a lock is of a process that was killed: half-written libraries that are not
older than it are deleted.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["cleaning_up_libraries"]

_PREFIX = "partita-compiles-"


@contextmanager
def cleaning_up_libraries() -> Iterator[None]:
    """Within, and after a failure, there is no half-written library in torch's folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    folder.mkdir(parents=True, exist_ok=True)
    for marker in folder.glob(_PREFIX + "*"):
        _delete_stale_libraries(folder, marker)
    fd, name = tempfile.mkstemp(dir=folder)
    file = Path(name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # until this process ends
        file = file.rename(folder / (_PREFIX + file.name))  # where others see it
        try:
            yield
        except BaseException:  # Ctrl-C reaches the compiler too
            _delete_incomplete(folder, file)
            raise
    finally:
        file.unlink(missing_ok=True)
        os.close(fd)


def _delete_stale_libraries(folder: Path, marker: Path) -> None:
    with suppress(OSError), marker.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its process still compiles
            return
        _delete_incomplete(folder, marker)
        marker.unlink()


def _delete_incomplete(folder: Path, marker: Path) -> None:
    """Delete the half-written libraries that are not older than the marker."""
    with suppress(OSError):
        begin = marker.stat().st_mtime
        for library in folder.glob("*/*.so"):
            with suppress(OSError):
                if library.stat().st_mtime >= begin and not _is_complete(library):
                    library.unlink()


def _is_complete(library: Path) -> bool:
    """Is a library complete? The table of sections, which its header locates, is written last."""
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
