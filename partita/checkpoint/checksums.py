"""Checksums of a checkpoint: a file that says what was written, so that nothing else is loaded.

`.checksums` stands beside the files of torch.distributed.checkpoint, which ignores it. It has the
CRC-32 of `.metadata`, of each chunk in each file, and of itself. A CRC-32 detects every error of up
to 32 bits in a row, and of others all but one in four thousand million; it does not prove who wrote
a file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["NAME", "Checksums", "Place", "compute_crcs"]

NAME = ".checksums"
_BUFFER = 1 << 20  # bytes that are read at a time

Place = tuple[str, int, int]
"""(file of the folder, offset, bytes) of a chunk."""


@dataclass
class Checksums:
    """The checksums of one checkpoint.

    Attributes:
        metadata: the size of `.metadata` in bytes, and its checksum.
        chunks: the checksum of each chunk.
    """

    metadata: tuple[int, int]
    chunks: dict[Place, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of `.checksums`: the checksum of its second line, and that line."""
        rows = [[*place, crc] for place, crc in self.chunks.items()]
        text = json.dumps({"format": 1, "metadata": self.metadata, "chunks": rows}).encode()
        return b"%08x\n" % zlib.crc32(text) + text + b"\n"

    @classmethod
    def read(cls, folder: Path) -> Checksums | None:
        """The checksums of the checkpoint in `folder`; None where it has none, as torch's own.

        Raises:
            ValueError: the file is damaged.
        """
        path = folder / NAME
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
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
        """Raise ValueError unless `content`, of `.metadata`, is what was written."""
        if (len(content), zlib.crc32(content)) != self.metadata:
            raise ValueError(f"{path} is damaged: its checksum is wrong")

    def check_chunks(self, folder: Path, places: Iterable[tuple[Place, str]]) -> None:
        """Read these chunks, each with the name of its tensor or value, and compare.

        Raises:
            ValueError: one is not what was written.
            OSError: a file cannot be read.
        """
        by_file: dict[str, dict[Place, str]] = {}
        for place, what in places:
            by_file.setdefault(place[0], {})[place] = what
        for name, wanted in by_file.items():
            crcs = compute_crcs(folder / name, [(at, size) for _, at, size in wanted])
            for (place, what), crc in zip(wanted.items(), crcs, strict=True):
                if crc != self.chunks.get(place):
                    _, at, size = place
                    why = "it is cut short" if crc is None else "its checksum is wrong"
                    raise ValueError(
                        f"{folder / name} is damaged: {why} at the bytes {at} to {at + size}, "
                        f"which are of {what}"
                    )


def compute_crcs(path: Path, parts: Iterable[tuple[int, int]]) -> list[int | None]:
    """The CRC-32 of each part of a file, given as offset and length; None where the file is short.

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
