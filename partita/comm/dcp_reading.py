"""The reader of torch's checkpoint format (`torch.distributed.checkpoint`), which never runs code.

torch's own reader and planner read. What they would trust is checked first: the metadata unpickles
to nothing but metadata, its chunks cover each piece that is to be read, and each chunk lies in a
file of the folder.

Imported where it is used: torch.distributed.checkpoint takes a second.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo  # of its writer's results
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .checkpoint_piece import Piece, Region

__all__ = ["MARK", "LoadPieces", "Metadata", "Reader", "TensorStorageMetadata", "chunks"]

MARK = "partita-"
"""The prefix of the `save_id` of checkpoints that have a file of checksums."""


def chunks(region: Region, shape: Sequence[int]) -> list[ChunkStorageMetadata]:
    """The chunks of a rank that holds `region` of a tensor: one, or none where it is empty."""
    sizes = torch.Size(length for _, length in region)
    if sizes.numel() == 0 and torch.Size(shape).numel() > 0:
        return []
    return [ChunkStorageMetadata(torch.Size(offset for offset, _ in region), sizes)]


class LoadPieces(DefaultLoadPlanner):
    """Plans the reading of named pieces, in place, and of values.

    Attributes:
        values: the values that were read, by name.
        trial: read tensors and drop them, to see whether they can be read.
    """

    def __init__(
        self, pieces: dict[str, Piece], names: Sequence[str], reader: Reader, weights_only: bool
    ):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces, self._names, self._reader = pieces, names, reader
        self._weights_only = weights_only
        self.values: dict[str, Any] = {}
        self.trial = False

    def plan_tensors(self) -> LoadPlan:
        """The chunks to read of tensors.

        Raises:
            ValueError: the chunks in the metadata do not cover a piece.
        """
        stored = self._reader.metadata.state_dict_metadata
        plan = LoadPlan([])
        for name, piece in self._pieces.items():
            wanted = chunks(piece.region, piece.shape)
            items = create_read_items_for_chunk_list(name, stored[name], wanted)  # type: ignore[arg-type]
            if wanted and not _is_piece_covered(items, wanted[0].sizes):
                raise self._reader.damaged(".metadata", f"it has lost chunks of {name}")
            plan.items += items
        return plan

    def plan_values(self) -> LoadPlan:
        """The chunks to read of values."""
        none = torch.Size((0,))
        return LoadPlan(
            [
                ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
                for index in map(MetadataIndex, self._names)
            ]
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if self.trial:
            return torch.empty(read_item.lengths, device="meta")
        resolved: torch.Tensor = super().resolve_tensor(read_item)
        return resolved

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._pieces[index.fqn].local

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.values[name] = torch.load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise _NotRead(
                f"{name} holds more than tensors and Python's own types, and its making may run "
                "code: name its classes with torch.serialization.add_safe_globals, or pass "
                f"weights_only=False if you trust the checkpoint ({str(error).splitlines()[0]})"
            ) from error
        except Exception as error:
            raise _NotRead(f"{name} cannot be read: {type(error).__name__}: {error}") from error


class _NotRead(Exception):
    """A value that must not be read, or cannot be."""


def _is_piece_covered(items: Sequence[ReadItem], sizes: Sequence[int]) -> bool:
    """Do the boxes that these items fill cover a piece of these sizes?"""
    total = torch.Size(sizes).numel()
    if sum(item.lengths.numel() for item in items) < total:
        return False
    if len(items) <= 1 or total == 0:
        return True
    # Boxes may overlap. Their edges form a grid of few cells, of which each must be filled.
    spans = [list(zip(i.dest_offsets, i.lengths, strict=True)) for i in items]
    cuts = [
        sorted({0, size, *(edge for span in spans for edge in (span[d][0], sum(span[d])))})
        for d, size in enumerate(sizes)
    ]
    grid = torch.zeros([len(edges) - 1 for edges in cuts], dtype=torch.bool)
    for span in spans:
        grid[
            tuple(
                slice(edges.index(at), edges.index(at + length))
                for (at, length), edges in zip(span, cuts, strict=True)
            )
        ] = True
    return bool(grid.all())


class Reader(FileSystemReader):
    """Reads the checkpoint in a folder, without running code from it.

    Args:
        content: of `.metadata`, where it has been read already.
        is_intact: the checksum of `content` was right.

    Raises:
        ValueError: it is no checkpoint's metadata.
    """

    def __init__(self, folder: Path, content: bytes | None = None, is_intact: bool = False):
        super().__init__(folder)
        self._folder = folder
        if content is None:
            content = (folder / ".metadata").read_bytes()
        try:
            if not is_intact:
                _check_sizes(content)
            self.metadata: Metadata = _Unpickler(io.BytesIO(content)).load()
        except _NotRead as error:
            raise ValueError(f"{folder / '.metadata'}: {error}") from None
        except Exception as error:
            raise self.damaged(".metadata", f"{type(error).__name__}: {error}") from error
        if (problem := _problem_of(self.metadata)) is not None:
            raise self.damaged(".metadata", problem)
        self.storage_data = self.metadata.storage_data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    @property
    def is_ours(self) -> bool:
        """Whether `pt.save` wrote it, with checksums."""
        about = self.metadata.storage_meta
        return str(getattr(about, "save_id", "")).startswith(MARK)

    def damaged(self, file: str, why: str) -> ValueError:
        return ValueError(f"{self._folder / file} is damaged: {why}")

    def places(self, plan: LoadPlan) -> list[tuple[tuple[str, int, int], str]]:
        """`((file, offset, length), name)` of each chunk that the plan reads.

        Raises:
            ValueError: the metadata does not say where a chunk is.
        """
        found: dict[tuple[str, int, int], str] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            info = self.storage_data.get(item.storage_index)
            if info is None:
                raise self.damaged(".metadata", f"it does not say where a chunk of {name} is")
            found[info.relative_path, info.offset, info.length] = name
        return list(found.items())

    def read(self, plan: LoadPlan, planner: LoadPieces) -> None:
        """Read the chunks of `plan`.

        Raises:
            ValueError: names the file that is damaged, or the value that would run code.
            OSError: a file cannot be read.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            by_file.setdefault(name, []).append(item)
        for name, items in by_file.items():
            try:
                self.read_data(LoadPlan(items), planner).wait()
            except _NotRead as error:
                raise ValueError(f"{self._folder / name}: {error}") from error.__cause__
            except OSError:
                raise
            except Exception as error:
                raise self.damaged(name, f"{type(error).__name__}: {error}") from error


# -- metadata --------------------------------------------------------------------------------------


def _problem_of(metadata: Any) -> str | None:
    """What is wrong with unpickled metadata; None where nothing is."""
    if not isinstance(metadata, Metadata):
        return f"it holds a {type(metadata).__name__}"
    try:
        return next(_problems_of(metadata), None)
    except (AttributeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _problems_of(metadata: Metadata) -> Iterator[str]:
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            if not isinstance(stored.properties.dtype, torch.dtype) or not _is_size(stored.size):
                yield f"it does not say what {name} is"
            for chunk in stored.chunks:
                if not _lies_in(chunk, stored.size):
                    yield f"a chunk of {name} is outside of it"
        elif not isinstance(stored, BytesStorageMetadata):
            yield f"it does not say what {name} is"
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
            yield "it does not say where chunks are"
        elif Path(info.relative_path).name != info.relative_path or not info.relative_path:
            yield f"{index.fqn} is in {info.relative_path!r}, which is no file of the folder"
        elif not (_is_count(info.offset) and _is_count(info.length)):
            yield f"it does not say where {index.fqn} is"
    for name, path in (metadata.planner_data or {}).items():
        if not isinstance(name, str) or name not in metadata.state_dict_metadata:
            yield f"it has a path to {name!r}, which it does not have"
        if not all(isinstance(key, (str, int)) for key in path):
            yield f"the path to {name} is no path"


def _lies_in(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    if not (len(chunk.offsets) == len(chunk.sizes) == len(size)):
        return False
    return all(
        _is_count(at) and _is_count(n) and at + n <= whole
        for at, n, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )


def _is_size(size: Any) -> bool:
    return isinstance(size, torch.Size) and all(map(_is_count, size))


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and n >= 0


def _check_sizes(content: bytes) -> None:
    """Raise ValueError where a pickle names sizes that it has no content for.

    Python's unpickler allocates as many entries as a damaged number says before it reads further.
    """
    value: Any
    for code, value, _ in pickletools.genops(content):
        is_size = code.name in ("PUT", "BINPUT", "LONG_BINPUT", "FRAME")
        if code.name == "BYTEARRAY8" or (is_size and int(value) > len(content)):
            raise ValueError(f"{code.name} {value if is_size else ''} has no place in it".strip())


class _Unpickler(pickle.Unpickler):
    """Unpickles the classes that torch's metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _MADE_OF.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise _NotRead(f"the metadata of the checkpoint refers to {module}.{name}")


_MADE_OF = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}
