"""Writing checkpoints of torch (`torch.distributed.checkpoint`): its planner, and its writer.

A folder: `.metadata` says of each name its shape, its dtype and which pieces of it lie where in the
`.distcp` files. torch's planner and writer do the work, so that its own tools read what is written
here; this file gives them pieces instead of tensors.

Imported where it is used: torch.distributed.checkpoint takes a second.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo  # of its writer's results
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from .checkpoint_piece import Piece
from .dcp_reading import MARK, chunks

__all__ = [
    "SavePieces",
    "Writer",
    "plan_of_rows",
    "results_of_rows",
    "rows_of_plan",
    "rows_of_results",
    "write_items",
]


def write_items(name: str, piece: Piece) -> list[WriteItem]:
    """What a rank that holds `piece` offers to write."""
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


# -- saving ----------------------------------------------------------------------------------------


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
# What goes from rank to rank is lists of numbers and text, and no pickle.


def rows_of_plan(plan: SavePlan) -> list[list[Any]]:
    """What a rank offers to write, a row each, in the order of the plan's items."""
    rows = []
    for item in plan.items:
        row: list[Any] = [item.index.fqn]
        if (data := item.tensor_data) is not None:
            kind = data.properties
            row += [list(data.chunk.offsets), list(data.chunk.sizes), list(data.size)]
            row += [kind.dtype, kind.requires_grad, kind.pin_memory]
        rows.append(row)
    return rows


def plan_of_rows(rows: list[list[Any]], paths: dict[str, tuple[Any, ...]]) -> SavePlan:
    """The plan whose rows these are."""
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


def rows_of_results(results: Sequence[WriteResult]) -> list[list[Any]]:
    """What a rank has written where, a row each."""
    return [
        [
            one.index.fqn,
            None if one.index.offset is None else list(one.index.offset),
            one.size_in_bytes,
            *(getattr(one.storage_data, key) for key in ("relative_path", "offset", "length")),
        ]
        for one in results
    ]


def results_of_rows(rows: list[list[Any]]) -> list[WriteResult]:
    """The results whose rows these are."""
    return [
        WriteResult(MetadataIndex(name, offset), nbytes, _StorageInfo(*place))
        for name, offset, nbytes, *place in rows
    ]


class Writer(FileSystemWriter):
    """Writes into one folder a checkpoint that will be found in another, `home`."""

    def write(self, plan: SavePlan, planner: SavePieces, rank: int) -> Sequence[WriteResult]:
        """Write what this rank was told to, into files of its own."""
        # A plan's place among all plans decides what its files are called.
        mine = self.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
        results: Sequence[WriteResult] = self.write_data(mine, planner).wait()
        return results

    def __init__(self, folder: Path, home: Path):
        super().__init__(folder)
        self._home = home

    def storage_meta(self) -> StorageMeta:
        # The mark tells a checkpoint that has lost its checksums from one of torch's own.
        return StorageMeta(checkpoint_id=str(self._home), save_id=MARK + self.save_id)
