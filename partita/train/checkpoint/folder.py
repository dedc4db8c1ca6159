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

__all__ = ["begin", "discard", "publish", "standing"]


def begin(home: Path) -> Path:
    """An empty folder to write the checkpoint `home` into; what killed saves left is removed.

    Raises:
        ValueError: there is something at `home` that is no checkpoint.
        OSError: the folder cannot be made.
    """
    if home.exists() and not (home / ".metadata").is_file() and not _is_empty(home):
        raise ValueError(f"{home} is there already, and is no checkpoint: it is left as it is")
    home.parent.mkdir(parents=True, exist_ok=True)
    if _previous(home).exists():
        if home.exists():
            shutil.rmtree(_previous(home))
        else:
            os.rename(_previous(home), home)
    for other in home.parent.iterdir():
        if other.name.startswith(_saving(home)):
            shutil.rmtree(other)
    folder = home.parent / (_saving(home) + uuid.uuid4().hex[:8])
    folder.mkdir()
    return folder


def publish(folder: Path, home: Path) -> None:
    """Give `folder`, of which every file has been brought to the disk, the name `home`."""
    _sync(folder)
    if home.exists():
        os.rename(home, _previous(home))
    os.rename(folder, home)
    _sync(home.parent)
    shutil.rmtree(_previous(home), ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove what an error has left."""
    shutil.rmtree(folder, ignore_errors=True)


def standing(home: Path) -> Path:
    """Where the checkpoint `home` is: there, or beside it if a save was killed between two names.

    Raises:
        ValueError: there is none.
    """
    for place in (home, _previous(home)):
        if (place / ".metadata").is_file():
            return place
    raise ValueError(f"there is no checkpoint at {home}")


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
