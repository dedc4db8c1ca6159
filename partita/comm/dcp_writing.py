"""The writer of torch's checkpoint format (`torch.distributed.checkpoint`).

A checkpoint is a folder: `.metadata` says of each name its shape, its dtype and which chunk of it
lies where in the `.distcp` files. torch's own planner and writer write it, so that torch reads what
is written; they get a rank's pieces in place of tensors. Plans and results go from rank to rank as
rows of numbers and text, not as pickles.

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
    "plan_from_rows",
    "plan_to_rows",
    "results_from_rows",
    "results_to_rows",
    "write_items",
]


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

    def write(self, plan: SavePlan, planner: SavePieces, rank: int) -> Sequence[WriteResult]:
        """Write the items of this rank's plan into files of its own."""
        # A plan's place among all plans decides what its files are called.
        mine = self.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
        results: Sequence[WriteResult] = self.write_data(mine, planner).wait()
        return results

    def __init__(self, folder: Path, home: Path):
        super().__init__(folder)
        self._home = home

    def storage_meta(self) -> StorageMeta:
        # The mark distinguishes a checkpoint that has lost its checksums from one of torch's own.
        return StorageMeta(checkpoint_id=str(self._home), save_id=MARK + self.save_id)
