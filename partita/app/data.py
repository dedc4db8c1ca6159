"""Training data: bytes of text files, in batches that depend only on the seed."""

from __future__ import annotations

import errno
import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
LARGEST = 512 * 1024 * 1024  # bytes: more has no use for a small model on one machine


@dataclass(frozen=True)
class Text:
    """The concatenated bytes of many files.

    Attributes:
        bytes: a uint8 tensor of shape (n,).
        files: the number of files.
        source: a description of where they come from.
    """

    bytes: Tensor
    files: int
    source: str

    def batch(self, step: int, *, seed: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs and targets of a step: int64 tensors of shape (size, context).

        A target is the byte after its input. The result is the global batch, equal on every rank
        and every mesh. The batch's layout decides which rows a rank computes.

        Args:
            step: the number of the step. With `seed` it determines the batch.
            seed: a number that selects a sequence of batches.
            size: the number of rows.
            context: the number of bytes in a row.
        """
        # Steps of one seed, and equal steps of two seeds, must not share a generator's state.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        last = len(self.bytes) - context
        start = torch.randint(last, (size, 1), generator=generator)
        rows = self.bytes[start + torch.arange(context + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _standard_library() -> Path:
    """Returns the folder of Python's own sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def read(path: Path | None = None, *, context: int = 1) -> Text:
    """Returns the text files below `path`, or Python's standard library without its tests.

    Files are read in the order of their names, so every rank on every machine reads the same. Files
    with a zero byte are not text and are skipped, as are hidden files, pipes, devices and broken
    links. Reading stops at 512 MiB.

    Args:
        path: a folder or a file. None: the sources of Python's standard library.
        context: the bytes in a row of a batch; the text must have two more.

    Raises:
        ValueError: no such path; a file that cannot be read; fewer than `context + 2` bytes.
    """
    if path is None:
        root, pattern, source = _standard_library(), "*.py", "Python's standard library"
    else:
        root, pattern, source = path, "*", str(path)
    if not root.exists():
        raise ValueError(f"--data: there is no {root}")
    pieces: list[bytes] = []
    total = 0
    for file in sorted(root.rglob(pattern)) if root.is_dir() else [root]:
        if total >= LARGEST:
            break
        inside = file.relative_to(root).parts
        if path is None and _SKIPPED.intersection(inside):
            continue
        if any(part.startswith(".") for part in inside):
            continue  # .git and the like
        content = _read_text(file, LARGEST - total)
        if content:
            pieces.append(content)
            total += len(content)
    if total < context + 2:
        raise ValueError(
            f"--data: {source} holds {total} bytes of text; a context of {context} needs "
            f"at least {context + 2}"
        )
    # A bytearray is writable, which torch.frombuffer wants.
    return Text(
        torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8), len(pieces), source
    )


def _read_text(path: Path, most: int) -> bytes:
    """Returns the first `most` bytes of a file; b"" if it is not a regular file, or not text.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # links to nowhere, sockets
            return b""
        raise ValueError(f"--data: {path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return b""
    with os.fdopen(handle, "rb") as file:
        content = file.read(most)
    return b"" if b"\0" in content else content
