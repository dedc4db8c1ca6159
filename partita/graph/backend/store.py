"""The store of compiled programs: a folder with one file for each key, kept between runs.

A file has a header with a checksum, metadata as JSON, and the payload. The payload is code, so a
file is read only if only this user or root can have written it (`check_folder`, `_open_trusted`). A
file that is damaged, of another version or not trusted counts as missing, with one warning. The
size of the folder is bounded, the least recently used files are deleted first, and many processes
may use it at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_MAGIC = b"partita artifact 1\n"
"""The first line of a file; its number is raised when the format changes."""
SUFFIX, PART = ".artifact", ".part"
LIMIT = 2 << 30
_PART_LIVES = 3600.0  # seconds after which an unfinished file counts as abandoned
_HEADER = re.compile(rb"([0-9a-z-]+) ([0-9a-f]{64}) ([0-9]+) ([0-9]+)\n")
_HEADER_BYTES = 512
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Artifact:
    """The result of compiling a program.

    Attributes:
        payload: bytes that `inductor.load` turns into a function.
        metadata: facts that can be read without loading the payload, as JSON.
    """

    payload: bytes
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One file in a store of compiled programs.

    Attributes:
        path: the path of the file.
        key: the key of the program in the file, from the file's name.
        nbytes: the size of the file in bytes.
        used: the time of the last read or write, in seconds since 1970.
        metadata: the metadata of the artifact; empty if there is a problem.
        problem: why the file cannot be used; "" if no problem was found.
    """

    path: Path
    key: str
    nbytes: int
    used: float
    metadata: dict[str, Any]
    problem: str = ""


class Store:
    """A folder of compiled programs, which is kept between runs.

    Args:
        folder: the folder. The first `put` creates it, writable only by this user, because its
            files are executed. A folder or file that other users can write is not used.
        limit: the most bytes of all files together; 0 to keep nothing.
    """

    def __init__(self, folder: Path, limit: int = LIMIT):
        self.folder, self.limit = folder, limit

    def path(self, key: str) -> Path:
        """Returns the path of the file for a key, which consists of a-z, 0-9 and dashes."""
        if not re.fullmatch("[0-9a-z-]+", key):
            raise ValueError(f"a key consists of digits, lowercase letters and dashes, not {key!r}")
        return self.folder / (key + SUFFIX)

    # -- one artifact ------------------------------------------------------------------------------

    def get(self, key: str) -> Artifact | None:
        """Returns the stored program with this key; None if there is none.

        Warns and returns None if the file cannot be used.
        """
        path = self.path(key)
        try:
            check_folder(self.folder)
            with _open_trusted(path) as file:
                artifact = _read_artifact(file, key)
            os.utime(path)  # for the order of deletion
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (_Unusable, Untrusted, OSError) as problem:
            _warn_once(path, f"{path} is not used: {_explain(problem)}")
            return None
        return artifact

    def put(self, key: str, artifact: Artifact) -> bool:
        """Writes a compiled program under a key, replacing an older one.

        Returns False if that fails, with a warning; without one if the store's limit is 0. Other
        processes see the complete file or no file.

        Args:
            key: the key, by which `get` finds the program.
            artifact: the compiled program.
        """
        path = self.path(key)
        metadata = json.dumps(artifact.metadata).encode()
        digest = _digest_artifact(key, metadata, artifact.payload)
        header = f"{key} {digest} {len(metadata)} {len(artifact.payload)}\n".encode()
        parts = (_MAGIC, header, metadata, artifact.payload)
        nbytes = sum(map(len, parts))
        if nbytes > self.limit:
            text = f"{nbytes} bytes are over the limit of {self.limit} (PARTITA_CACHE_LIMIT)"
            if self.limit:
                _warn_once(path, f"{path} is not written: {text}")
            return False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_folder(self.folder)
            _write_atomically(path, parts)
        except Untrusted as problem:
            _warn_once(self.folder, f"{self.folder} is not written to: {problem}")
            return False
        except OSError as error:
            _warn_once(self.folder, f"{self.folder} cannot be written: {error.strerror}")
            return False
        _warned.discard(path)
        self._make_room(path)
        return True

    # -- all of them -------------------------------------------------------------------------------

    def entries(self, check: bool = False) -> list[Entry]:
        """Returns the files of the store, the most recently used first.

        Args:
            check: True to read each file completely and compare its checksum.
        """
        found = [_read_entry(path, check) for path in self._list_files(SUFFIX)]
        return sorted((e for e in found if e is not None), key=lambda e: -e.used)

    def clear(self) -> tuple[int, int]:
        """Deletes all files, unfinished ones too. Returns their number and bytes.

        Raises:
            OSError: a file cannot be removed.
        """
        count = nbytes = 0
        for path in [*self._list_files(SUFFIX), *self._list_files(PART)]:
            with suppress(FileNotFoundError):
                size = path.stat().st_size
                path.unlink()
                count, nbytes = count + 1, nbytes + size
        return count, nbytes

    def _list_files(self, suffix: str) -> list[Path]:
        try:
            return sorted(p for p in self.folder.iterdir() if p.name.endswith(suffix))
        except OSError:
            return []

    def _make_room(self, new: Path) -> None:
        sizes = {}
        for path in self._list_files(SUFFIX):
            with suppress(OSError):
                found = path.stat()
                sizes[path] = found.st_mtime_ns, found.st_size
        total = sum(size for _, size in sizes.values())
        for path in sorted(sizes, key=lambda p: sizes[p]):
            if total > self.limit and path != new:
                with suppress(OSError):
                    path.unlink()
                total -= sizes[path][1]
        for path in self._list_files(PART):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _PART_LIVES:
                    path.unlink()


# -- the user's store ------------------------------------------------------------------------------


def default_store() -> Store:
    """Returns the user's store of compiled programs.

    It is the folder `PARTITA_CACHE`, or by default `partita` in the user's cache folder.

    Raises:
        ValueError: PARTITA_CACHE_LIMIT is not a size.
    """
    folder = os.environ.get("PARTITA_CACHE")
    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "partita")
    limit = os.environ.get("PARTITA_CACHE_LIMIT")
    return Store(Path(folder).expanduser().absolute(), read_limit(limit) if limit else LIMIT)


def read_limit(text: str) -> int:
    """Parses a number of bytes with an optional unit, such as "10G" or "512 MiB".

    The units are K, M, G and T (powers of 1024), which may be followed by B or iB.

    Raises:
        ValueError: `text` is not a size.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f'PARTITA_CACHE_LIMIT is a size such as "500M" or "2G", not {text!r}')
    return int(float(match[1]) * _UNITS[match[2].upper()])


# -- files -----------------------------------------------------------------------------------------


class _Unusable(Exception):
    """Raised if a file is not a valid artifact; the message says why."""


def _digest_artifact(key: str, metadata: bytes, payload: bytes) -> str:
    digest = hashlib.sha256(key.encode() + b"\n")
    for part in (metadata, payload):
        digest.update(part)
    return digest.hexdigest()


def _write_atomically(path: Path, parts: tuple[bytes, ...]) -> None:
    handle, name = tempfile.mkstemp(suffix=PART, prefix=path.stem[:16] + "-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _read_header(file: BinaryIO, key: str) -> tuple[str, int, int]:
    """Returns the digest, and the numbers of bytes of metadata and of payload that follow."""
    magic = file.readline(_HEADER_BYTES)
    if magic != _MAGIC:
        ours = magic.startswith(b"partita artifact ")
        if not ours and _MAGIC.startswith(magic):
            raise _Unusable("it is cut short")
        raise _Unusable("another partita wrote it" if ours else "it is no artifact")
    line = file.readline(_HEADER_BYTES)
    match = _HEADER.fullmatch(line)
    if match is None:
        raise _Unusable("its header is damaged" if line.endswith(b"\n") else "it is cut short")
    if match[1].decode() != key:
        raise _Unusable("it holds the program of another key")
    return match[2].decode(), int(match[3]), int(match[4])


def _read_artifact(file: BinaryIO, key: str) -> Artifact:
    digest, length, size = _read_header(file, key)
    rest = file.read()
    if len(rest) != length + size:
        raise _Unusable("it is cut short" if len(rest) < length + size else "it is too long")
    metadata, payload = rest[:length], rest[length:]
    if _digest_artifact(key, metadata, payload) != digest:
        raise _Unusable("its checksum is wrong: it was changed since it was written")
    return Artifact(payload, json.loads(metadata))


def _read_entry(path: Path, check: bool) -> Entry | None:
    key = path.name.removesuffix(SUFFIX)
    metadata, problem = dict[str, Any](), ""
    try:
        found = path.lstat()
    except OSError:
        return None
    try:
        check_folder(path.parent)
        with _open_trusted(path) as file:
            if check:
                metadata = _read_artifact(file, key).metadata
            else:
                metadata = json.loads(file.read(_read_header(file, key)[1]))
    except FileNotFoundError:
        return None
    except (_Unusable, Untrusted, OSError, ValueError) as error:
        problem = _explain(error)
    return Entry(path, key, found.st_size, found.st_mtime, metadata, problem)


def _explain(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or "unreadable"


_warned: set[Path] = set()


def _warn_once(about: Path, text: str) -> None:
    if about not in _warned:
        _warned.add(about)
        warnings.warn(f"compiled programs: {text}", RuntimeWarning, stacklevel=3)


# -- trust in files that are executed --------------------------------------------------------------

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """Raised for a file or folder that another user may have written, so its code must not run."""


def _open_trusted(path: Path) -> BinaryIO:
    """Opens a file for reading, in a folder that `check_folder` has passed.

    Raises:
        Untrusted: it is not a regular file, or others could have written it.
        OSError: it cannot be opened.
    """
    if path.is_symlink():
        raise Untrusted("it is a symbolic link")
    # The opened file is checked, so that it cannot be exchanged; opening a pipe must not block.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
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
    """Checks that only this user can write into a folder or replace it.

    Raises:
        Untrusted: other users can write into it or replace it.
        OSError: there is no such folder, or it cannot be read.
    """
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(20, "Not a directory", str(folder))
    _check_owner_and_mode(found)
    _check_owner_and_mode(folder.lstat(), link=True)
    for parent in folder.resolve().parents:
        above = parent.stat()
        # In a sticky folder, such as /tmp, a user cannot rename files of others.
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            raise Untrusted(f"anybody may write to {parent}, which it is in")


def _check_owner_and_mode(found: os.stat_result, link: bool = False) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise Untrusted("it belongs to another user")
    if found.st_mode & _OTHERS and not link:
        raise Untrusted("others may write to it: chmod go-w")
