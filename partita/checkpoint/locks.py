"""Locks on a checkpoint's name, between jobs that save to it and those that read it.

A lock is the operating system's, on a file beside the checkpoint: it ends with its process, however
that ends. The last process that releases it removes the file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Lock"]


class Lock:
    """A lock on a file. `acquire`, or `with`, waits until no other process has it.

    Args:
        path: of the lock's file.
        shared: a lock that several processes may share.

    Attributes:
        held: this process has it; False where files cannot be locked or the folder not be written.
    """

    def __init__(self, path: Path, *, shared: bool = False):
        self._path, self._shared = path, shared
        self._handle = -1

    @property
    def held(self) -> bool:
        return self._handle >= 0

    def acquire(self) -> None:
        """Wait for the lock. Where files cannot be locked, return without it."""
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
        # Closing is not enough: a process that was forked meanwhile has the file open too.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _is_current(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.lstat(self._path))
        except OSError:
            return False
