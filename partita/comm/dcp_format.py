"""Torch's checkpoint format (`torch.distributed.checkpoint`): its reader, which runs no code, and
its writer.

A checkpoint is a folder: `.metadata` says of each name its shape, its dtype and which chunk of it
lies where in the `.distcp` files. torch's own planners, reader and writer work on a rank's pieces
in place of tensors. What they would trust is checked first: the metadata unpickles to nothing but
metadata, its chunks cover each piece to be read, and each lies in a file of the folder. Plans and
results go from rank to rank as rows of numbers and text, not as pickles.

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

from .torch_distributed import Piece, Region

__all__ = [
    "MARK",
    "LoadPieces",
    "Metadata",
    "Reader",
    "SavePieces",
    "TensorStorageMetadata",
    "Writer",
    "chunks",
    "plan_from_rows",
    "plan_to_rows",
    "results_from_rows",
    "results_to_rows",
    "write_items",
]

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

# -- writing ---------------------------------------------------------------------------------------


def write_items(name: str, piece: Piece) -> list[WriteItem]:
    """The items that a rank which holds `piece` offers to write: one, or none where it is empty."""
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties.create_from_tensor(piece.local),
                size=torch.Size(piece.shape),
            ),
        )
        for chunk in chunks(piece.region, piece.shape)
    ]


class SavePieces(DefaultSavePlanner):
    """Plans the writing of named pieces and of values that are bytes already.

    Of a piece that several ranks offer, the one that has the least to write so far writes it.
    """

    def __init__(
        self, pieces: dict[str, Piece], values: dict[str, bytes], paths: dict[str, tuple[Any, ...]]
    ):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces, self._values, self._paths = pieces, values, paths

    def create_local_plan(self) -> SavePlan:
        items = [item for name, piece in self._pieces.items() for item in write_items(name, piece)]
        items += [WriteItem(MetadataIndex(n), WriteItemType.BYTE_IO) for n in self._values]
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each rank's part, and the metadata.

        Raises:
            ValueError: ranks disagree about a shape, a dtype or a kind of value, or no rank of
                this job holds some part of a tensor.
        """
        problems = _find_conflicting_items(all_plans)
        if problems:
            raise ValueError(
                "\n  ".join(["the ranks hold different things by one name", *problems])
            )
        problems = _find_missing_elements(all_plans)
        if problems:
            raise ValueError("\n  ".join(["parts of tensors are on no rank that saves", *problems]))
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {n: p for plan in all_plans for n, p in plan.planner_data.items()}
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._values[name])
        return self._pieces[name].local


def _find_conflicting_items(plans: list[SavePlan]) -> list[str]:
    seen: dict[str, tuple[int, str]] = {}
    problems: dict[str, str] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, name = item.tensor_data, item.index.fqn
            kind = "no tensor"
            if data is not None:
                kind = f"{data.properties.dtype} {tuple(data.size)}"
            first, what = seen.setdefault(name, (rank, kind))
            if kind != what:
                problems.setdefault(name, f"{name}: {what} on rank {first}, {kind} on rank {rank}")
    return list(problems.values())


def _find_missing_elements(plans: list[SavePlan]) -> list[str]:
    sizes: dict[str, int] = {}
    held: dict[MetadataIndex, int] = {}
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        if data is not None:
            sizes[item.index.fqn] = data.size.numel()
            held[item.index] = data.chunk.sizes.numel()
    totals = dict.fromkeys(sizes, 0)
    for index, count in held.items():
        totals[index.fqn] += count
    return [
        f"{n}: {totals[n]} of {size} elements" for n, size in sizes.items() if totals[n] != size
    ]


# -- plans and results as rows ---------------------------------------------------------------------


def plan_to_rows(plan: SavePlan) -> list[list[Any]]:
    """The items of a plan as rows of plain values, in their order."""
    rows = []
    for item in plan.items:
        row: list[Any] = [item.index.fqn]
        if (data := item.tensor_data) is not None:
            kind = data.properties
            row += [list(data.chunk.offsets), list(data.chunk.sizes), list(data.size)]
            row += [kind.dtype, kind.requires_grad, kind.pin_memory]
        rows.append(row)
    return rows


def plan_from_rows(rows: list[list[Any]], paths: dict[str, tuple[Any, ...]]) -> SavePlan:
    """The plan that `plan_to_rows` made rows of."""
    items = []
    for name, *data in rows:
        if not data:
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
            continue
        offsets, sizes, size, dtype, requires_grad, pinned = data
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        kind = TensorProperties(dtype, requires_grad=requires_grad, pin_memory=pinned)
        items.append(
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, kind, torch.Size(size)),
            )
        )
    return SavePlan(items, planner_data=paths)


def results_to_rows(results: Sequence[WriteResult]) -> list[list[Any]]:
    """What a rank has written, and where, as rows of plain values."""
    return [
        [
            one.index.fqn,
            None if one.index.offset is None else list(one.index.offset),
            one.size_in_bytes,
            *(getattr(one.storage_data, key) for key in ("relative_path", "offset", "length")),
        ]
        for one in results
    ]


def results_from_rows(rows: list[list[Any]]) -> list[WriteResult]:
    """The results that `results_to_rows` made rows of."""
    return [
        WriteResult(MetadataIndex(name, offset), nbytes, _StorageInfo(*place))
        for name, offset, nbytes, *place in rows
    ]


class Writer(FileSystemWriter):
    """Writes a checkpoint into a folder that will then be renamed to `home`."""

    def __init__(self, folder: Path, home: Path):
        super().__init__(folder)
        self._home = home

    def write(self, plan: SavePlan, planner: SavePieces, rank: int) -> Sequence[WriteResult]:
        """Write the items of this rank's plan into files of its own."""
        # A plan's place among all plans decides what its files are called.
        mine = self.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
        results: Sequence[WriteResult] = self.write_data(mine, planner).wait()
        return results

    def storage_meta(self) -> StorageMeta:
        # The mark distinguishes a checkpoint that has lost its checksums from one of torch's own.
        return StorageMeta(checkpoint_id=str(self._home), save_id=MARK + self.save_id)
