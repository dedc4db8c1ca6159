"""A `Strategy` of Lightning that shards the module by ZeRO.

    from partita.integrations.lightning import MeshStrategy

    Trainer(strategy=MeshStrategy(), devices=1)

This runs on each rank that torchrun starts.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from partita.checkpoint import full_state_dict
from partita.comm.device import HOST, choose_device

from .sharded_run import ShardedRun, split_rows, to_whole

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError(
        "partita.integrations.lightning needs lightning: pip install lightning"
    ) from error


def _log_whole(module: Any, name: Any, value: Any, *args: Any, **options: Any) -> None:
    """Call the `log` of the module's class. A copied or pickled module calls its own."""
    type(module).log(module, name, to_whole(value), *args, **options)


class MeshStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Lightning's strategy for a module on a mesh of partita, in processes started by torchrun.

    Lightning itself works as on one device.

    Args:
        mesh: the mesh for the module; all ranks of the job by default.
        stage: the ZeRO stage, 0 to 3, for a module that is not on a mesh yet.
        device: this rank's device. By default, it has the device type of the mesh, and the local
            rank's index. A job of one rank takes the accelerator, or the CPU if there is none.
        options: the options of Lightning's `SingleDeviceStrategy`.
    """

    strategy_name = "partita"

    def __init__(
        self, mesh: Any = None, stage: int = 3, device: Any = None, **options: Any
    ) -> None:
        self._run = ShardedRun.start(mesh, stage, device and torch.device(device).type)
        rank = self._run.rank
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        if device is None:
            mesh = self._run.mesh
            kind = choose_device("auto").type if mesh is None else mesh.device_type
            device = HOST if kind == HOST.type else torch.device(kind, local_rank)
        super().__init__(device, **options)
        self.global_rank, self.local_rank = rank, local_rank

    @property
    def is_global_zero(self) -> bool:
        """True on the first rank, which writes files and logs."""
        return self._run.rank == 0

    # -- the module and its batches ----------------------------------------------------------------

    def model_to_device(self) -> None:
        """Move the module to the device and shard it."""
        super().model_to_device()
        module: Any = self.lightning_module
        self._run.shard_model(module)
        if "log" not in module.__dict__:  # Lightning sums metrics in plain tensors
            module.log = partial(_log_whole, module)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader that yields the same global batch on each rank.

        A global batch consists of one batch of `dataloader` for each rank.
        """
        return self._run.join_batches(dataloader)

    def batch_to_device(self, *args: Any, **options: Any) -> Any:
        """Returns the batch as DTensors that are sharded by rows."""
        batch = super().batch_to_device(*args, **options)
        return batch if self._run.mesh is None else split_rows(batch, self._run.mesh)

    # -- results and states ------------------------------------------------------------------------

    def reduce(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """Returns a copy of `tensor` with whole plain tensors for DTensors, like `all_gather`.

        Nothing has to be reduced, because each value covers the rows of all ranks already.
        """
        return self._run.gather(tensor)

    def all_gather(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """Returns a copy of `tensor` (maybe nested) in which DTensors are whole plain tensors."""
        return self._run.gather(tensor)

    def barrier(self, *args: Any, **options: Any) -> None:
        """Wait until all ranks have called this."""
        self._run.wait_for_all("strategy.barrier")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state dict of whole plain tensors; empty on other ranks than 0."""
        module: Any = self.lightning_module
        return full_state_dict(module, rank0_only=True)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the optimizer's state dict of whole plain tensors, as on one device."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        module: Any = self.lightning_module
        return full_state_dict(module, inner, rank0_only=True)[1]
