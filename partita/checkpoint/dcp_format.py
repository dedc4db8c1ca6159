"""Torch's checkpoint format (`torch.distributed.checkpoint`): a safe reader, and a writer.

A checkpoint is a folder. Its `.metadata` has, for each name, the shape, the dtype, and the position
of each chunk in the `.distcp` files. Torch's own planners, reader and writer are used. They trust
the files, so these are checked first: unpickling the metadata creates only metadata and runs no
code, its chunks cover each shard to be read, and each chunk is in a file of the folder. Ranks
exchange messages, not pickles.

This module is imported only when used: torch.distributed.checkpoint takes a second to import.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo  # of its writer's results
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from partita.comm import Piece, Region, message

MARK = "partita-"
"""The prefix of a checkpoint's `save_id`, if it has a file of checksums."""


def chunks(region: Region, shape: Sequence[int]) -> list[ChunkStorageMetadata]:
    """Returns the shard that a rank holds, in the form of torch's metadata.

    It is a list with one chunk, or [] if the shard is empty.

    Args:
        region: `(offset, length)` of the rank's shard, in each dimension.
        shape: the global shape.
    """
    sizes = torch.Size(length for _, length in region)
    if sizes.numel() == 0 and torch.Size(shape).numel() > 0:
        return []
    return [ChunkStorageMetadata(torch.Size(offset for offset, _ in region), sizes)]


class LoadPieces(DefaultLoadPlanner):
    """A load planner for torch's checkpoint reader: it reads tensors in place into local shards.

    Other values are read into the dictionary `values`.

    Args:
        pieces: the local shard of each tensor, by name, into which the tensor is read.
        names: the names of the other values to read.
        reader: the reader of the checkpoint.
        weights_only: True reads values as `torch.load(weights_only=True)` does.
        classes: further classes that may be unpickled.

    Attributes:
        values: the values that were read, by name.
        trial: True only checks that tensors can be read: it reads them and drops the values.
    """

    def __init__(
        self,
        pieces: dict[str, Piece],
        names: Sequence[str],
        reader: Reader,
        weights_only: bool,
        classes: Sequence[type] = (),
    ):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces, self._names, self._reader = pieces, names, reader
        self._weights_only, self._classes = weights_only, list(classes)
        self.values: dict[str, Any] = {}
        self.trial = False

    def plan_tensors(self) -> LoadPlan:
        """Returns torch's `LoadPlan` for the parts of tensors that this rank needs.

        Raises:
            ValueError: the chunks in the metadata do not cover a shard.
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
        """Returns torch's `LoadPlan` for the values that are not tensors."""
        none = torch.Size((0,))
        indices = map(MetadataIndex, self._names)
        return LoadPlan([ReadItem(LoadItemType.BYTE_IO, i, none, i, none, none) for i in indices])

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
            with _allow_classes(self._classes):
                self.values[name] = torch.load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise _NotRead(
                f"{name} holds more than tensors and Python's own types, and its making may run "
                "code: name its classes with torch.serialization.add_safe_globals, or pass "
                f"weights_only=False if you trust the checkpoint ({str(error).splitlines()[0]})"
            ) from error
        except Exception as error:
            raise _NotRead(f"{name} cannot be read: {type(error).__name__}: {error}") from error


_lock = Lock()


@contextmanager
def _allow_classes(classes: list[Any]) -> Iterator[None]:
    """Allow `torch.load(weights_only=True)` to make these classes inside the `with` block."""
    if not classes:
        yield
        return
    with _lock, torch.serialization.safe_globals(classes):  # one list for all threads
        yield


class _NotRead(Exception):
    """A stored value that is not allowed to be read, or cannot be read."""


def _is_piece_covered(items: Sequence[ReadItem], sizes: Sequence[int]) -> bool:
    """True if the boxes of these read items together cover a shard of these sizes."""
    total = torch.Size(sizes).numel()
    if len(items) <= 1 or total == 0:
        return sum(item.lengths.numel() for item in items) >= total
    # Boxes may overlap. Their edges form a grid of few cells, and each cell must be covered.
    spans = [list(zip(i.dest_offsets, i.lengths, strict=True)) for i in items]
    cuts = [
        sorted({0, size, *(edge for span in spans for edge in (span[d][0], sum(span[d])))})
        for d, size in enumerate(sizes)
    ]
    grid = torch.zeros([len(edges) - 1 for edges in cuts], dtype=torch.bool)
    for span in spans:
        box = [
            slice(edges.index(at), edges.index(at + length))
            for (at, length), edges in zip(span, cuts, strict=True)
        ]
        grid[tuple(box)] = True
    return bool(grid.all())


class Reader(FileSystemReader):
    """A reader of a checkpoint folder in torch's format, which runs no code from the files.

    Args:
        content: the content of `.metadata`, if it has been read already.
        is_intact: True if the checksum of `content` was correct.

    Raises:
        ValueError: `.metadata` is not the metadata of a checkpoint.
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

    def describe(self) -> dict[str, tuple[tuple[str | int, ...], torch.Size | None, Any]]:
        """Returns `{name: (path, size, dtype)}` for each entry of the checkpoint.

        `path` has the keys that lead to the entry in the state. For an entry that is not a tensor,
        `size` and `dtype` are None.
        """
        paths = self.metadata.planner_data or {}
        found: dict[str, tuple[tuple[str | int, ...], torch.Size | None, Any]] = {}
        for name, stored in self.metadata.state_dict_metadata.items():
            found[name] = paths.get(name, ()), None, None
            if isinstance(stored, TensorStorageMetadata):
                found[name] = paths.get(name, ()), stored.size, stored.properties.dtype
        return found

    @property
    def has_checksums(self) -> bool:
        """True if `pt.save` wrote the checkpoint, so that it should have checksums."""
        about = self.metadata.storage_meta
        return str(getattr(about, "save_id", "")).startswith(MARK)

    def damaged(self, file: str, why: str) -> ValueError:
        return ValueError(f"{self._folder / file} is damaged: {why}")

    def places(self, plan: LoadPlan) -> list[tuple[tuple[str, int, int], str]]:
        """Returns `((file, offset, length), name)` for each chunk of a plan.

        Raises:
            ValueError: the metadata has no position for a chunk.
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
        """Read the chunks of `plan` into the tensors and values of `planner`.

        Raises:
            ValueError: a file is damaged or missing, or a value would run code. The error names it.
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
            except FileNotFoundError:
                raise ValueError(f"{self._folder / name} is gone") from None
            except OSError:
                raise
            except Exception as error:
                raise self.damaged(name, f"{type(error).__name__}: {error}") from error


# -- metadata --------------------------------------------------------------------------------------


def _problem_of(metadata: Any) -> str | None:
    """Returns what is wrong with unpickled metadata, or None."""
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
            yield f"it has the path of {name!r}, which it does not have"
        if not all(isinstance(key, (str, int)) for key in path):
            yield f"the path to {name} is no path"


def _lies_in(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    spans = zip(chunk.offsets, chunk.sizes, size, strict=True)
    return all(_is_count(at) and _is_count(n) and at + n <= whole for at, n, whole in spans)


def _is_size(size: Any) -> bool:
    return isinstance(size, torch.Size) and all(map(_is_count, size))


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and n >= 0


def _check_sizes(content: bytes) -> None:
    """Raise ValueError if a pickle names sizes that are larger than its content."""
    value: Any
    for code, value, _ in pickletools.genops(content):
        is_size = code.name in ("PUT", "BINPUT", "LONG_BINPUT", "FRAME")
        if code.name == "BYTEARRAY8" or (is_size and int(value) > len(content)):
            raise ValueError(f"{code.name} {value if is_size else ''} is not allowed in it".strip())


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

# -- writing ---------------------------------------------------------------------------------------


@message
@dataclass(frozen=True)
class Offer:
    """A part of a tensor, or a value, that a rank could write into a checkpoint.

    If several ranks offer the same part, one of them writes it.

    Attributes:
        name: the name of the tensor or value.
        path: the keys that lead to it.
        region, shape, dtype: for a tensor: `(offset, length)` of the part in each dimension, and
            the whole tensor's shape and dtype. None for a value.
    """

    name: str
    path: tuple[str | int, ...] = ()
    region: Region | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def kind(self) -> str:
        """The tensor's dtype and shape as text, or "no tensor". Equal on ranks that offer it."""
        return "no tensor" if self.region is None else f"{self.dtype} {self.shape}"

    def make_item(self) -> WriteItem:
        if self.region is None or self.shape is None or self.dtype is None:
            return WriteItem(MetadataIndex(self.name), WriteItemType.BYTE_IO)
        (chunk,) = chunks(self.region, self.shape)
        data = TensorWriteData(chunk, TensorProperties(self.dtype), torch.Size(self.shape))
        return WriteItem(
            MetadataIndex(self.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data
        )


def offer_piece(name: str, piece: Piece, path: tuple[str | int, ...] = ()) -> list[Offer]:
    """Returns a list with the `Offer` of this rank's shard `piece`; [] if the shard is empty.

    Args:
        name: the name of the tensor.
        path: the keys that lead to the tensor in the state.
    """
    shape = tuple(piece.shape)
    return [
        Offer(name, path, piece.region, shape, piece.local.dtype)
        for _ in chunks(piece.region, shape)
    ]


def write_items(name: str, piece: Piece) -> list[WriteItem]:
    """Returns the `WriteItem`s by which torch's writer writes the shard `piece` of `name`."""
    return [offer.make_item() for offer in offer_piece(name, piece)]


class SavePieces(DefaultSavePlanner):
    """A save planner for torch's writer: it writes shards, and values as bytes.

    Args:
        pieces: this rank's shard of each tensor, by name.
        values: the pickled values, by name.
    """

    def __init__(self, pieces: dict[str, Piece], values: dict[str, bytes]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces, self._values = pieces, values

    def divide(self, offered: list[list[Offer]]) -> tuple[list[list[int]], Metadata]:
        """Decides which rank writes which parts and values. Each is written once.

        Of the ranks that offer the same part, the one with the fewest bytes so far writes it.

        Args:
            offered: the offers of each rank.

        Returns:
            For each rank, the indices of the offers that it writes; and the checkpoint's metadata.

        Raises:
            ValueError: ranks disagree about a shape, a dtype or a kind of value; or a part of a
                tensor is on no rank of this job.
        """
        first: dict[str, tuple[int, Offer]] = {}
        others: dict[str, str] = {}
        held: dict[str, set[Region]] = {}
        for rank, offers in enumerate(offered):
            for one in offers:
                name = one.name
                of, known = first.setdefault(name, (rank, one))
                if one.kind != known.kind:
                    text = f"{name}: {known.kind} on rank {of}, {one.kind} on rank {rank}"
                    others.setdefault(name, text)
                if one.region is not None:
                    held.setdefault(name, set()).add(one.region)
        _raise_listed("the ranks hold different things under one name", others.values())
        sizes = {name: math.prod(first[name][1].shape or ()) for name in held}
        counts = {
            name: sum(math.prod(length for _, length in region) for region in regions)
            for name, regions in held.items()
        }
        _raise_listed(
            "parts of tensors are on no rank that saves",
            [
                f"{n}: {counts[n]} of {size} elements"
                for n, size in sizes.items()
                if counts[n] != size
            ],
        )
        plans = [SavePlan([one.make_item() for one in offers]) for offers in offered]
        divided, metadata = self.create_global_plan(plans)
        metadata.planner_data = {name: one.path for name, (_, one) in first.items()}
        kept = [{item.index for item in plan.items} for plan in divided]
        return [
            [i for i, item in enumerate(plan.items) if item.index in its]
            for plan, its in zip(plans, kept, strict=True)
        ], metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._values[name])
        return self._pieces[name].local


def _raise_listed(fact: str, problems: Iterable[str]) -> None:
    if lines := list(problems):
        raise ValueError("\n  ".join([fact, *lines]))


Written = tuple[str, list[int] | None, str, int, int]
"""A written chunk: (name, offsets in its tensor, file, offset in the file, bytes)."""


class Writer(FileSystemWriter):
    """A writer of a checkpoint in torch's format.

    It writes into a temporary folder that is renamed to `home` at the end.
    """

    def __init__(self, folder: Path, home: Path):
        super().__init__(folder)
        self._home = home

    def write(self, offers: Sequence[Offer], planner: SavePieces, rank: int) -> list[Written]:
        """Writes the parts `offers` of this rank into files, and returns where each one is.

        Args:
            planner: supplies the data of the parts.
            rank: this rank's number, which becomes a part of the file names.
        """
        # Torch derives the file names from a plan's index, so this rank's plan is at its index.
        plans = [SavePlan([])] * rank + [SavePlan([one.make_item() for one in offers])]
        written = self.write_data(self.prepare_global_plan(plans)[rank], planner).wait()
        rows = []
        for one in written:
            offset, info = one.index.offset, one.storage_data
            at = None if offset is None else list(offset)
            rows.append((one.index.fqn, at, info.relative_path, info.offset, info.length))
        return rows

    def write_metadata(self, metadata: Metadata, written: Iterable[Written]) -> None:
        """Writes the file `.metadata`. Call it after all ranks have written their files.

        Args:
            metadata: the checkpoint's metadata, from `SavePieces.divide`.
            written: the results of `write` of all ranks, in one sequence.
        """
        results = [
            WriteResult(MetadataIndex(name, offset), length, _StorageInfo(file, at, length))
            for name, offset, file, at, length in written
        ]
        self.finish(metadata, [results])

    def storage_meta(self) -> StorageMeta:
        # With the mark, a checkpoint that has lost its checksums differs from one of torch's.
        return StorageMeta(checkpoint_id=str(self._home), save_id=MARK + self.save_id)
