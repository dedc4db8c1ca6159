"""A `Trainer` of transformers that shards its model by ZeRO, and subclasses such as TRL's.

    from partita.integrations.trainer import Trainer

    Trainer(model, args, train_dataset=rows).train(resume_from_checkpoint=True)

`on_mesh(SFTTrainer)` does the same for a subclass.
"""

from __future__ import annotations

import os
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn

from partita.checkpoint import full_state_dict, is_checkpoint, load, save

from .accelerate import Accelerator
from .sharded_run import to_whole

try:
    import transformers
    from transformers.trainer import SCHEDULER_NAME
except ImportError as error:
    raise ImportError(
        "partita.integrations.trainer needs transformers: pip install transformers"
    ) from error

AnyTrainer = TypeVar("AnyTrainer")
_OPTIMIZER = "optimizer"  # the folder of the optimizer's shards within a checkpoint


@cache
def on_mesh(trainer: type[AnyTrainer]) -> type[AnyTrainer]:
    """Returns a subclass of a Trainer class that trains on a mesh.

        trainer = on_mesh(SFTTrainer)(model, args, train_dataset=rows)

    It takes two more arguments: `mesh` (by default all ranks of the job) and `stage`, the ZeRO
    stage (default 3) for a model that is not on a mesh yet.
    """
    if trainer.__module__.startswith("trl."):
        from .trl import patch_output_layer

        patch_output_layer()
    kind: Any = type(trainer.__name__, (_OnMesh, trainer), {"__module__": trainer.__module__})
    found: type[AnyTrainer] = kind
    return found


class _OnMesh(transformers.Trainer):  # type: ignore[misc, name-defined]
    """What a Trainer does differently on a mesh. It alone overrides private methods of Trainer."""

    def __init__(self, *args: Any, mesh: Any = None, stage: int = 3, **options: Any) -> None:
        self._placement = mesh, stage
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        self.args.device  # noqa: B018  found before the state says that there is one process
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        self.accelerator._start_run(*self._placement)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics,
            use_gather_object=self.args.eval_use_gather_object,
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        total: int = super().get_total_train_batch_size(args) * self.accelerator.joined_batches
        return total

    # -- the step ----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = to_whole(super().training_step(*args, **options))
        return loss

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        loss, *rest = to_whole(super().prediction_step(*args, **options))
        # The evaluation repeats a loss once for each row of a rank's batch, and gathers the ranks'.
        return None if loss is None else loss.repeat(self.accelerator.joined_batches), *rest

    # -- states ------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model: nn.Module = self.model
        theirs = isinstance(model, transformers.PreTrainedModel) or hasattr(model, "peft_config")
        if state_dict is None and not theirs:
            state_dict = full_state_dict(model, rank0_only=True)
        # Make all ranks call `save_pretrained`, which gathers, as for models transformers shards.
        self.is_distributed_loading_by_transformers = True
        try:
            super()._save(output_dir, state_dict=state_dict)
        finally:
            self.is_distributed_loading_by_transformers = False
        self.accelerator.wait_for_everyone()  # before another rank looks for the files

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        super()._save_checkpoint(*args, **options)
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save({"optimizer": self.optimizer.optimizer}, os.path.join(output_dir, _OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        shards = os.path.join(checkpoint or "", _OPTIMIZER)
        if checkpoint is None or not is_checkpoint(shards):  # saved by a Trainer without partita
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load({"optimizer": self.optimizer.optimizer}, shards)
        schedule = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the generators are equal on all ranks
            super()._save_rng_state(output_dir)


Trainer: Any = on_mesh(transformers.Trainer)
"""transformers' `Trainer`, on a mesh: `on_mesh(transformers.Trainer)`."""
