"""How does a folder become a checkpoint all at once, or not at all?

Everything is written to a folder beside it, `.NAME.saving-*`, and brought to the disk; then that
folder takes the name. A checkpoint that has the name already steps aside to `.NAME.previous` in
between, where `standing` finds it if the process is killed at that very moment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

__all__ = ["begin", "beside", "discard", "is_checkpoint", "publish", "standing"]


def beside(home: Path) -> Path:
    """A new name beside `home` to write it under; what killed saves left there is removed."""
    home.parent.mkdir(parents=True, exist_ok=True)
    for other in home.parent.iterdir():
        if other.name.startswith(_saving(home)):
            discard(other)
    return home.parent / (_saving(home) + uuid.uuid4().hex[:8])


def begin(home: Path) -> Path:
    """An empty folder to write the checkpoint `home` into.

    Raises:
        ValueError: there is something at `home` that is no checkpoint.
        OSError: the folder cannot be made.
    """
    if home.exists() and not (home / ".metadata").is_file() and not _is_empty(home):
        raise ValueError(f"{home} is there already, and is no checkpoint: it is left as it is")
    if _previous(home).exists():
        if home.exists():
            shutil.rmtree(_previous(home))
        else:
            os.rename(_previous(home), home)
    folder = beside(home)
    folder.mkdir()
    return folder


def publish(written: Path, home: Path) -> None:
    """Give what was `written`, and brought to the disk, the name `home`: a folder or a file."""
    if written.is_dir():
        _sync(written)
        if home.exists():
            os.rename(home, _previous(home))
    os.replace(written, home)
    _sync(home.parent)
    shutil.rmtree(_previous(home), ignore_errors=True)


def discard(written: Path) -> None:
    """Remove what an error or a killed save has left."""
    if written.is_dir():
        shutil.rmtree(written, ignore_errors=True)
    else:
        written.unlink(missing_ok=True)


def standing(home: Path) -> Path:
    """Where the checkpoint `home` is: there, or beside it if a save was killed between two names.

    Raises:
        ValueError: there is none.
    """
    for place in (home, _previous(home)):
        if (place / ".metadata").is_file():
            return place
    raise ValueError(f"there is no checkpoint at {home}")


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `load` would find a checkpoint at `path`: for a run that goes on if it can."""
    try:
        standing(Path(os.path.abspath(path)))
    except ValueError:
        return False
    return True


def _previous(home: Path) -> Path:
    return home.parent / f".{home.name}.previous"


def _saving(home: Path) -> str:
    return f".{home.name}.saving-"


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())


def _sync(folder: Path) -> None:
    """Bring the names in `folder` to the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
