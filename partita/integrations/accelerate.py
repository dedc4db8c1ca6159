"""An `Accelerator` whose `prepare` shards the model by ZeRO.

    from partita.integrations.accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of a script for accelerate stays the same. Losses and gradients are for the joint batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from partita.checkpoint import full_state_dict, is_checkpoint, load, load_safetensors, save
from partita.parallel.optimizer import clip_grad_norm_
from partita.parallel.zero import no_sync

from .sharded_run import ShardedRun

try:
    import accelerate
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType
    from accelerate.utils.constants import RNG_STATE_NAME, SAFE_MODEL_NAME
except ImportError as error:
    raise ImportError(
        "partita.integrations.accelerate needs accelerate: pip install accelerate"
    ) from error

_SHARDS = "partita"  # the folder of weights and optimizer state within a checkpoint


class Accelerator(accelerate.Accelerator):  # type: ignore[misc, name-defined]
    """accelerate's `Accelerator` for models on a mesh of partita.

    accelerate itself works as in one process: `num_processes` is 1, and it wraps and sends nothing.
    `is_main_process` is True on the first rank.

    Args:
        mesh: the mesh for models that `prepare` gets; all ranks of the job by default.
        stage: the ZeRO stage, 0 to 3, for a model that is not on a mesh yet.
        options: the options of accelerate's class.
    """

    _optimizers: list[Any]

    def __init__(self, *args: Any, mesh: Any = None, stage: int = 3, **options: Any) -> None:
        super().__init__(*args, **options)
        self._start_run(mesh, stage)

    def _start_run(self, mesh: Any, stage: int) -> None:
        self._run = ShardedRun.start(mesh, stage, self.device.type)
        self.register_save_state_pre_hook(self._save_shards)
        self.register_load_state_pre_hook(self._load_shards)
        if self._run.mesh is None:
            return
        for state in (accelerate.PartialState(), self.state):
            state.num_processes, state.process_index = 1, self._run.rank
            state.local_process_index = int(os.environ.get("LOCAL_RANK", self._run.rank))
            state.distributed_type = DistributedType.NO
        self.dataloader_config.dispatch_batches = False

    @property
    def joined_batches(self) -> int:
        """The number of a data loader's batches that form one global batch, over all ranks."""
        return 1 if self.split_batches else self._run.batches

    # -- prepare -----------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Move the model to the device and shard it, in place. Returns the same object."""
        return self._run.shard_model(super().prepare_model(model, *args, **options))

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """Returns a loader like `data_loader` that yields the same global batch on each rank.

        A global batch consists of `joined_batches` batches. With `split_batches=True` the loader's
        own batch is the global batch.
        """
        if not (self.split_batches or getattr(data_loader, "_is_accelerate_prepared", False)):
            data_loader = self._run.join_batches(data_loader)
        return super().prepare_data_loader(data_loader, *args, **options)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Returns a scheduler whose `step()` makes one step for each rank's batch.

        This is what accelerate's own scheduler does. With `split_batches=True` it makes one step.
        """
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, AcceleratedScheduler):
            prepared.__class__ = _SchedulerOfAllRanks
            prepared.batches = self.joined_batches
        return prepared

    # -- the step ----------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keeps gradients of `model` unreduced in backward passes inside the `with` block."""
        with no_sync(model):
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clips gradients by their global norm, and returns the norm as a plain tensor.

        Args:
            parameters: the parameters whose gradients are clipped, in place.
            max_norm: the largest norm of all gradients together.
            norm_type: the order of the norm, such as 2.0 or infinity.
        """
        self.unscale_gradients()
        norm: torch.Tensor = self._run.gather(clip_grad_norm_(parameters, max_norm, norm_type))
        return norm

    def gather(self, tensor: Any) -> Any:
        """Returns a copy of `tensor` (maybe nested) in which DTensors are whole plain tensors."""
        return self._run.gather(tensor)

    def reduce(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """Returns the same as `gather(tensor)`.

        Nothing has to be reduced, because each value covers the rows of all ranks already.
        """
        return self._run.gather(tensor)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have called this."""
        self._run.wait_for_all("accelerator.wait_for_everyone")

    # -- states ------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the model's state dict of whole plain tensors, on all ranks.

        With `unwrap=False` it returns `model.state_dict()`, which has DTensors.
        """
        return full_state_dict(model) if unwrap else model.state_dict()

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Save as accelerate does, but weights and optimizer state as shards, by `pt.save`."""
        with self._without_optimizers():
            where = super().save_state(*args, **options)
        self.wait_for_everyone()
        return where

    def load_state(self, *args: Any, **options: Any) -> None:
        """Load what `save_state` has saved, on any number of ranks and for any stage.

        A state that accelerate itself has saved in one process loads, too.
        """
        rank = self.state.process_index
        try:
            with self._without_optimizers():
                super().load_state(*args, **options)
        finally:
            self.state.process_index = rank

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        """Hide the optimizers from accelerate, which would write one rank's shards."""
        self._sharded_optimizers, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers = self._sharded_optimizers

    def _list_shards(self) -> dict[str, Any]:
        optimizers = [o.optimizer for o in self._sharded_optimizers]
        return {"models": self._models, "optimizers": optimizers}

    def _save_shards(self, models: Any, weights: list[Any], folder: str) -> None:
        weights.clear()  # so accelerate writes none
        save(self._list_shards(), os.path.join(folder, _SHARDS))

    def _load_shards(self, models: list[Any], folder: str) -> None:
        if not os.path.exists(os.path.join(folder, f"{RNG_STATE_NAME}_{self.process_index}.pkl")):
            self.state.process_index = 0  # saved by fewer ranks: their generators were equal
        shards = os.path.join(folder, _SHARDS)
        names = [f"{SAFE_MODEL_NAME}{f'_{i}' * (i > 0)}.safetensors" for i in range(len(models))]
        files = [os.path.join(folder, name) for name in names]
        models.clear()  # so accelerate reads none
        if is_checkpoint(shards) or not all(map(os.path.exists, files)):
            load(self._list_shards(), shards)
        else:  # saved by accelerate without partita
            for model, file in zip(self._models, files, strict=True):
                load_safetensors(model, file)
            self._optimizers += self._sharded_optimizers  # accelerate loads those in this list


class _SchedulerOfAllRanks(AcceleratedScheduler):  # type: ignore[misc]
    """A scheduler that steps once for each rank's batch in a batch of all ranks."""

    batches = 1

    def step(self, *args: Any, **options: Any) -> None:
        for _ in range(self.batches):
            super().step(*args, **options)
