"""Sharded runs: what trainers of other packages need to train a model on a mesh.

The trainer's loop runs on every rank as if it were the only process. It reads the whole batch of
all ranks, and a hook before the model's forward keeps this rank's rows. So each plain tensor in the
loop is a whole value, and each DTensor has a global shape.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from partita.comm import check_equal_on_ranks, count_ranks, init_mesh_of_all_ranks, wire_of
from partita.fsdp import get_mesh
from partita.parallel.batch import (
    distribute_batch,
    find_data_axes,
    find_instances,
    replace_instances,
)
from partita.parallel.zero import zero
from partita.tensor.dtensor import DTensor


@dataclass(frozen=True)
class ShardedRun:
    """The mesh of another package's trainer, with methods for its model and batches.

    Attributes:
        mesh: the mesh; None in a job of one process.
        stage: the stage of ZeRO for models that are not on a mesh yet.
    """

    mesh: Any
    stage: int = 3

    @classmethod
    def start(cls, mesh: Any, stage: int, device: str | None) -> ShardedRun:
        """Returns a `ShardedRun` on `mesh`; if that is None, on a mesh of all ranks of the job.

        Args:
            stage: the stage of ZeRO for models that are not on a mesh yet.
            device: the device type of a new mesh, such as "cuda". None: the accelerator, or the
                CPU.
        """
        if mesh is None and (count_ranks() or 1) > 1:
            mesh = init_mesh_of_all_ranks(device)
        return cls(mesh, stage)

    @property
    def rank(self) -> int:
        """This rank's number in the mesh."""
        return 0 if self.mesh is None else self.mesh.get_rank()

    @property
    def batches(self) -> int:
        """The number of batches in a global batch: one for each rank with its own rows."""
        if self.mesh is None:
            return 1
        wire, count = wire_of(self.mesh), 1
        for axis in find_data_axes(wire):
            count *= wire.mesh.size(axis)
        return count

    def shard_model(self, model: nn.Module) -> nn.Module:
        """Shards a plain model by ZeRO, in place, and returns it.

        The model's forward afterwards takes global batches, and keeps this rank's rows of each.
        """
        if not any(isinstance(p, DTensor) for p in model.parameters()):
            if self.mesh is None:
                return model
            zero(model, self.mesh, stage=self.stage)
        if "partita_splits_rows" not in model.__dict__:
            model.register_forward_pre_hook(_split_inputs, prepend=True, with_kwargs=True)
            model.__dict__["partita_splits_rows"] = True
        return model

    def join_batches(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Returns a loader that yields global batches: one batch of `loader` for each rank, joined.

        The batch size of the given loader is the size on one rank. The last batch may be shorter;
        no row is repeated.
        """
        n = self.batches
        if n == 1:
            return loader
        new = copy.copy(loader)
        held = vars(new)  # the loader's own `__setattr__` refuses these attributes
        if isinstance(loader.sampler, BatchSampler):
            held["sampler"] = JoinedBatchSampler(loader.sampler, n)
        elif loader.batch_sampler is not None:
            held["batch_sampler"] = JoinedBatchSampler(loader.batch_sampler, n)
            if loader.batch_size is not None:  # which alone is used for an iterable dataset
                held["batch_size"] = n * loader.batch_size
        return new

    def gather(self, value: Any) -> Any:
        """Returns a copy of `value` (maybe nested) in which DTensors are whole plain tensors.

        A plain tensor is whole already. Ranks compare it the first time that a line calls this.
        """
        if self.mesh is None:
            return value
        plain = [
            t for t in find_instances(value, torch.Tensor, Mapping) if not isinstance(t, DTensor)
        ]
        distribute_batch(plain, self.mesh, {})
        return to_whole(value)

    def wait_for_all(self, why: str) -> None:
        """Wait until all ranks have called this.

        Args:
            why: the name of the call. It must be equal on all ranks.
        """
        if self.mesh is not None:
            check_equal_on_ranks(
                why, why, wire_of(self.mesh), fact="the ranks wait at different places"
            )


class JoinedBatchSampler(BatchSampler):
    """A batch sampler that joins `count` batches of another sampler into one.

    Attributes:
        batch_sampler: the other sampler.
        batch_size: the number of rows in a joined batch.
    """

    def __init__(self, batch_sampler: Any, count: int) -> None:
        self.batch_sampler, self.count = batch_sampler, count
        self.batch_size = count * (getattr(batch_sampler, "batch_size", None) or 1)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]

    def __iter__(self) -> Iterator[list[Any]]:
        rows: list[Any] = []
        joined = 0
        for batch in self.batch_sampler:
            rows += batch
            joined += 1
            if joined == self.count:
                yield rows
                rows, joined = [], 0
        if rows and not self.drop_last:
            yield rows

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self.count if self.drop_last else -(-batches // self.count)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the joined sampler, which determines the order of rows."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)


def to_whole(value: Any) -> Any:
    """Returns a copy of `value` (maybe nested) in which DTensors are whole plain tensors."""
    return replace_instances(value, DTensor, lambda x: x.full_tensor(), Mapping)


def split_rows(value: Any, mesh: Any) -> Any:
    """Returns a copy of the batch `value` in which tensors are DTensors on `mesh`, sharded by rows.

    A tensor that has another number of rows than the first tensor stays plain, and counts as whole.
    This changes communication, but no value. A batch without tensors, or with DTensors, is returned
    itself.
    """
    given = [t for t in find_instances(value, torch.Tensor, Mapping) if t.ndim]
    if not given or any(isinstance(t, DTensor) for t in given):
        return value
    rows = given[0].shape[0]
    split = iter(distribute_batch([t for t in given if t.shape[0] == rows], mesh))

    def place(t: torch.Tensor) -> torch.Tensor:
        return next(split) if t.ndim and t.shape[0] == rows else t

    return replace_instances(value, torch.Tensor, place, Mapping)


def _split_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return split_rows((args, kwargs), get_mesh(module))
