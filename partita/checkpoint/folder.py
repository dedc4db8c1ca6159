"""Checkpoint folders: one becomes a checkpoint all at once, or not at all.

Everything is written to a folder beside it, `.NAME.saving-*`, and flushed to the disk; then that
folder is renamed. A checkpoint that has the name already is first renamed to `.NAME.previous`,
where `find_checkpoint` finds it if the process is killed at that very moment. Jobs that save to one
name do so one after the other (`.NAME.lock`), and a name changes hands while nobody reads
(`.NAME.reading`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from .locks import Lock

__all__ = [
    "Replacement",
    "begin_replacement",
    "find_checkpoint",
    "is_checkpoint",
    "lock_for_reading",
]


class Replacement:
    """A file or folder that is being written, and will be renamed to `home`.

    One rank makes it, and waits until no other job saves to that name. What killed saves have left
    is removed.

    Attributes:
        written: where to write it.
    """

    def __init__(self, home: Path):
        home.parent.mkdir(parents=True, exist_ok=True)
        self.home = home
        self._lock = Lock(_make_sibling_path(home, "lock"))
        self._lock.acquire()
        try:
            if self._lock.held:  # else somebody may be writing what is there
                for other in home.parent.iterdir():
                    if other.name.startswith(_make_sibling_path(home, "saving-").name):
                        _remove_path(other)
        except BaseException:
            self._lock.release()
            raise
        self.written = _make_sibling_path(home, f"saving-{uuid.uuid4().hex[:8]}")

    def publish(self) -> None:
        """Rename what was written, and flushed to the disk, to `home`."""
        written, home = self.written, self.home
        with _without_readers(home):
            if written.is_dir():
                _sync_folder(written)
                if home.exists():
                    os.rename(home, _path_of_previous(home))
            os.replace(written, home)
            _sync_folder(home.parent)
        shutil.rmtree(_path_of_previous(home), ignore_errors=True)
        self._lock.release()

    def discard(self) -> None:
        """Remove what was written, after an error; does nothing after `publish`."""
        _remove_path(self.written)
        self._lock.release()


def begin_replacement(home: Path) -> Replacement:
    """Make an empty folder to write the checkpoint `home` into.

    Raises:
        ValueError: there is something at `home` that is no checkpoint.
        OSError: the folder cannot be made.
    """
    new = Replacement(home)
    try:
        if home.exists() and not (home / ".metadata").is_file() and not _is_empty(home):
            raise ValueError(f"{home} is there already, and is no checkpoint: it is left as it is")
        if _path_of_previous(home).exists():
            if home.exists():
                shutil.rmtree(_path_of_previous(home))
            else:
                with _without_readers(home):
                    os.rename(_path_of_previous(home), home)
        new.written.mkdir()
    except BaseException:
        new.discard()
        raise
    return new


@contextlib.contextmanager
def lock_for_reading(home: Path) -> Iterator[None]:
    """Within, what has the name `home` is not replaced."""
    with Lock(_make_sibling_path(home, "reading"), shared=True):
        yield


def find_checkpoint(home: Path) -> Path:
    """The folder of the checkpoint `home`: `home`, or beside it if a save was killed as it renamed.

    Raises:
        ValueError: there is none.
    """
    # `home` once more: without a lock, it may have been renamed there after the first look.
    for place in (home, _path_of_previous(home), home):
        if (place / ".metadata").is_file():
            return place
    raise ValueError(f"there is no checkpoint at {home}")


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Would `load` find a checkpoint at `path`? For a run that goes on if it can."""
    try:
        find_checkpoint(Path(os.path.abspath(path)))
    except ValueError:
        return False
    return True


def _make_sibling_path(home: Path, what: str) -> Path:
    return home.parent / f".{home.name}.{what}"


def _path_of_previous(home: Path) -> Path:
    return _make_sibling_path(home, "previous")


def _without_readers(home: Path) -> Lock:
    return Lock(_make_sibling_path(home, "reading"))


def _remove_path(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())


def _sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
