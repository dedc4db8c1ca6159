"""Checks of the files and folders that a command will write, before its work is done."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["check_outputs", "check_written_folder", "written_file"]


def check_outputs(outputs: Mapping[str, str | Path | None], inputs: Iterable[Path] = ()) -> None:
    """Raise ValueError where a file cannot be written, would be another's, or one that is read.

    Args:
        outputs: of each option the file that it asks for, if it does.
        inputs: files that the command reads.
    """
    asked = {option: Path(path) for option, path in outputs.items() if path is not None}
    for option, path in asked.items():
        folder = path.absolute().parent
        if not folder.is_dir() or path.is_dir():
            raise ValueError(f"{option}: {path} is no file in a folder that is there")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ValueError(f"{option}: {path} may not be written by this user")
    taken = {_resolve_path(path): "is what is read" for path in inputs}
    for option, path in asked.items():
        if path.exists() and not path.is_file():  # a terminal or a pipe takes all that comes
            continue
        if _resolve_path(path) in taken:
            raise ValueError(f"{option}: {path} {taken[_resolve_path(path)]}: name another file")
        taken[_resolve_path(path)] = f"is what {option} writes, too"


def written_file(text: str) -> Path:
    """The type of an argument that names a file to be written: refused where it cannot be."""
    try:
        check_outputs({"": text})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from None
    return Path(text)


def _resolve_path(path: Path) -> str:
    return os.path.realpath(path)


def check_written_folder(path: Path, option: str) -> None:
    """Raise ValueError where no folder is at `path` in which files can be made, nor can be made."""
    above = path.absolute()
    while not above.exists() and above.parent != above:
        above = above.parent
    if not above.is_dir():
        what = "is no folder" if above == path.absolute() else f"is in no folder: {above} is a file"
        raise ValueError(f"{option}: {path} {what}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: in {above} this user may make no files")
