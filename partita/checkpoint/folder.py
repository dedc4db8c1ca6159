"""Checkpoint folders: a checkpoint appears completely or not at all, and damage is detected.

Everything is written to the folder `.NAME.saving-*` beside the checkpoint NAME, and flushed to the
disk. Then that folder is renamed to NAME. An existing checkpoint of this name is first renamed to
`.NAME.previous`. If the process is killed at that moment, `find_checkpoint` finds it there. Two
lock files serialize jobs: `.NAME.lock` serializes saves, and `.NAME.reading` a save with loads.
`.checksums`, which torch ignores, has the CRC-32 of `.metadata`, of each chunk in each file, and of
itself.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# -- locks between jobs ----------------------------------------------------------------------------

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Lock:
    """A lock on a file. `acquire`, or `with`, waits until no other process has it.

    The operating system releases it when the process ends, even if it is killed. The last process
    that releases it removes the file.

    Args:
        path: the path of the file, beside the checkpoint.
        shared: True for a lock that several processes may share.

    Attributes:
        held: True if this process has the lock. False also if files cannot be locked, or the
            folder cannot be written.
    """

    def __init__(self, path: Path, *, shared: bool = False):
        self._path, self._shared = path, shared
        self._handle = -1

    @property
    def held(self) -> bool:
        return self._handle >= 0

    def acquire(self) -> None:
        """Wait for the lock. If files in this folder cannot be locked, return without it."""
        while fcntl is not None and not self.held:
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            except OSError:
                return
            try:
                fcntl.flock(handle, fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX)
            except BaseException as error:
                os.close(handle)
                if isinstance(error, OSError):
                    return
                raise
            if self._is_current(handle):
                self._handle = handle
            else:  # the last owner has removed the file: others lock a new one
                os.close(handle)

    def release(self) -> None:
        """Release the lock, and remove the file unless others share it."""
        if not self.held:
            return
        handle, self._handle = self._handle, -1
        with suppress(OSError):
            if self._shared:  # the file may be removed only if nobody else shares the lock
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_current(handle):
                os.unlink(self._path)
        # Closing is not enough: a process forked meanwhile has the file open, too.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_current(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.lstat(self._path))
        except OSError:
            return False


# -- checksums -------------------------------------------------------------------------------------

NAME = ".checksums"
_BUFFER = 1 << 20  # bytes that are read at a time

Place = tuple[str, int, int]
"""(file of the folder, offset, bytes) of a chunk."""


@dataclass
class Checksums:
    """The checksums of one checkpoint.

    A CRC-32 detects every error within 32 consecutive bits, and all but one in 2^32 of other
    errors. It does not protect against a deliberate change.

    Attributes:
        metadata: the size of `.metadata` in bytes, and its checksum.
        chunks: the checksum of each chunk, by `(file, offset, length)`.
    """

    metadata: tuple[int, int]
    chunks: dict[Place, int] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, chunks: dict[Place, int]) -> Checksums:
        """Returns the checksums of a checkpoint: of `.metadata` in `folder`, and of `chunks`.

        The checksum of `.metadata` is computed here. The checksums of the chunks are given.
        """
        content = (folder / ".metadata").read_bytes()
        return cls((len(content), zlib.crc32(content)), chunks)

    def to_bytes(self) -> bytes:
        """Returns the content of `.checksums`: a line of JSON, after a line with its checksum."""
        rows = [[*place, crc] for place, crc in self.chunks.items()]
        text = json.dumps({"format": 1, "metadata": self.metadata, "chunks": rows}).encode()
        return b"%08x\n" % zlib.crc32(text) + text + b"\n"

    def write(self, folder: Path) -> None:
        """Write the file `.checksums` into the checkpoint's folder, and flush it to the disk."""
        with (folder / NAME).open("wb") as file:
            file.write(self.to_bytes())
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Checksums | None:
        """Reads the file `.checksums` of the checkpoint `folder`. Returns None if there is no file.

        Raises:
            ValueError: the file is damaged.
        """
        path = folder / NAME
        if not path.exists():
            return None
        content = path.read_bytes()
        text = content[9:-1]
        if content != b"%08x\n" % zlib.crc32(text) + text + b"\n":
            raise ValueError(f"{path} is damaged: its own checksum is wrong")
        found: dict[str, Any] = json.loads(text)
        if found["format"] != 1:
            raise ValueError(f"{path} was written by another partita")
        nbytes, crc = found["metadata"]
        return cls(
            (nbytes, crc), {(name, at, size): crc for name, at, size, crc in found["chunks"]}
        )

    def check_metadata(self, path: Path, content: bytes) -> None:
        """Raises ValueError if `content`, read from the `.metadata` file `path`, is damaged.

        Its size and its checksum are compared with the stored ones. The error names `path`.
        """
        if (len(content), zlib.crc32(content)) != self.metadata:
            raise ValueError(f"{path} is damaged: its checksum is wrong")

    def check_chunks(self, folder: Path, places: Iterable[tuple[Place, str]]) -> None:
        """Compares the checksums of chunks, computed from files in `folder`, with the stored ones.

        Args:
            places: the (file, offset, length) of each chunk, and the name of its tensor or value.

        Raises:
            ValueError: a chunk has a wrong checksum, or its file is missing.
            OSError: a file cannot be read.
        """
        by_file: dict[str, dict[Place, str]] = {}
        for place, what in places:
            by_file.setdefault(place[0], {})[place] = what
        for name, wanted in by_file.items():
            try:
                crcs = compute_crcs(folder / name, [(at, size) for _, at, size in wanted])
            except FileNotFoundError:
                what = next(iter(wanted.values()))
                raise ValueError(f"{folder / name} is missing: it contains {what}") from None
            for (place, what), crc in zip(wanted.items(), crcs, strict=True):
                if crc != self.chunks.get(place):
                    _, at, size = place
                    why = "it is cut short" if crc is None else "its checksum is wrong"
                    raise ValueError(
                        f"{folder / name} is damaged: {why} at the bytes {at} to {at + size}, "
                        f"which belong to {what}"
                    )


def compute_crcs(path: Path, parts: Iterable[tuple[int, int]]) -> list[int | None]:
    """Returns the CRC-32 of each part of the file `path`; None for a part beyond the file's end.

    Args:
        parts: `(offset, length)` of each part, in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    buffer = memoryview(bytearray(_BUFFER))
    found: list[int | None] = []
    with path.open("rb", buffering=0) as file:
        for at, left in parts:
            file.seek(at)
            crc = 0
            while left and (n := file.readinto(buffer[: min(left, _BUFFER)])):
                crc, left = zlib.crc32(buffer[:n], crc), left - n
            found.append(None if left else crc)
    return found


# -- a folder's name -------------------------------------------------------------------------------


class Replacement:
    """A file or folder that is written under a temporary name and renamed to `home` when complete.

    One rank makes it. It first waits until no other job saves to that name, and then removes what
    killed saves have left.

    Attributes:
        written: the path to which to write.
    """

    def __init__(self, home: Path):
        home.parent.mkdir(parents=True, exist_ok=True)
        self.home = home
        self._lock = Lock(_make_sibling_path(home, "lock"))
        self._lock.acquire()
        try:
            if self._lock.held:  # otherwise another job may be writing what is there
                for other in home.parent.iterdir():
                    if other.name.startswith(_make_sibling_path(home, "saving-").name):
                        _remove_path(other)
        except BaseException:
            self._lock.release()
            raise
        self.written = _make_sibling_path(home, f"saving-{uuid.uuid4().hex[:8]}")

    def publish(self) -> None:
        """Rename the temporary file or folder to its final name `home`.

        Its content must have been flushed to the disk.
        """
        written, home = self.written, self.home
        with lock_for_reading(home, shared=False):
            if written.is_dir():
                _sync_folder(written)
                if home.exists():
                    os.rename(home, _path_of_previous(home))
            os.replace(written, home)
            _sync_folder(home.parent)
        _remove_path(_path_of_previous(home))
        self._lock.release()

    def discard(self) -> None:
        """Remove the temporary file or folder after an error. Does nothing after `publish`."""
        _remove_path(self.written)
        self._lock.release()


def begin_replacement(home: Path) -> Replacement:
    """Make a temporary folder for a checkpoint that is renamed to `home` when it is complete.

    If a killed save left `.NAME.previous`, it becomes `home` again, or is removed if `home` exists.

    Raises:
        ValueError: `home` exists and is not a checkpoint.
        OSError: the folder cannot be made.
    """
    new = Replacement(home)
    try:
        is_empty = home.is_dir() and not any(home.iterdir())
        if home.exists() and not (home / ".metadata").is_file() and not is_empty:
            raise ValueError(f"{home} exists already and is not a checkpoint: it was not changed")
        if home.exists():
            _remove_path(_path_of_previous(home))
        elif _path_of_previous(home).exists():
            with lock_for_reading(home, shared=False):
                os.rename(_path_of_previous(home), home)
        new.written.mkdir()
    except BaseException:
        new.discard()
        raise
    return new


def lock_for_reading(home: Path, *, shared: bool = True) -> Lock:
    """Returns the lock that keeps the checkpoint `home` from being replaced while it is loaded.

    The lock is not acquired yet. Loads hold it shared, and a replacement holds it exclusively.
    """
    return Lock(_make_sibling_path(home, "reading"), shared=shared)


def find_checkpoint(home: Path) -> Path:
    """Returns the folder of the checkpoint `home`.

    That is `home`, or `.NAME.previous` beside it if a save was killed while it renamed folders.

    Raises:
        ValueError: there is no checkpoint.
    """
    # Try `home` again: without a lock, another job may have renamed it after the first try.
    for place in (home, _path_of_previous(home), home):
        if (place / ".metadata").is_file():
            return place
    raise ValueError(f"there is no checkpoint at {home}")


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """True if `path` contains a checkpoint from which a run can resume."""
    try:
        find_checkpoint(Path(os.path.abspath(path)))
    except ValueError:
        return False
    return True


def _make_sibling_path(home: Path, what: str) -> Path:
    return home.parent / f".{home.name}.{what}"


def _path_of_previous(home: Path) -> Path:
    return _make_sibling_path(home, "previous")


def _remove_path(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
