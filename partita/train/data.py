"""What does the model read? The bytes of text files, in batches that depend on the seed alone."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Text", "read", "standard_library"]

SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
LARGEST = 512 * 1024 * 1024  # bytes: what a small model on one machine can make use of


@dataclass(frozen=True)
class Text:
    """The bytes of many files behind one another.

    Attributes:
        bytes: (n,), uint8.
        files: how many files.
        source: where from, for people.
    """

    bytes: Tensor
    files: int
    source: str

    def batch(self, step: int, *, seed: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Step `step`'s inputs and targets, (size, context) int64 each; a target is the next byte.

        The whole batch, the same on every rank and every mesh: which rows a rank works on is a
        matter of layout.
        """
        # Steps of one seed, and equal steps of two seeds, must not share a generator's state.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        last = len(self.bytes) - context
        start = torch.randint(last, (size, 1), generator=generator)
        rows = self.bytes[start + torch.arange(context + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def standard_library() -> Path:
    """The folder of Python's own sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def read(path: Path | None = None, *, context: int = 1) -> Text:
    """The text files below `path`, or Python's standard library without its tests.

    Files are taken in the order of their names, so every rank on every machine reads the same. A
    file with a zero byte in it is no text and is left out. Reading ends at 512 MiB.

    Raises:
        ValueError: no such path, or fewer than `context + 2` bytes of text in it.
    """
    if path is None:
        root, pattern, source = standard_library(), "*.py", "Python's standard library"
    else:
        root, pattern, source = path, "*", str(path)
    if not root.exists():
        raise ValueError(f"--data: there is no {root}")
    pieces: list[bytes] = []
    total = 0
    for file in [root] if root.is_file() else sorted(root.rglob(pattern)):
        if total >= LARGEST:
            break
        inside = file.relative_to(root).parts
        if not file.is_file() or (path is None and SKIPPED.intersection(inside)):
            continue
        if any(part.startswith(".") for part in inside):
            continue  # .git and the like
        content = file.read_bytes()
        if content and b"\0" not in content:
            pieces.append(content[: LARGEST - total])
            total += len(pieces[-1])
    if total < context + 2:
        raise ValueError(
            f"--data: {source} holds {total} bytes of text; a context of {context} needs "
            f"at least {context + 2}"
        )
    # A bytearray is writable, which torch.frombuffer wants.
    return Text(
        torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8), len(pieces), source
    )
