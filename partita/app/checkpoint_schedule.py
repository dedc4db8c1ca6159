"""Checkpoint schedules: when a run's checkpoint is written, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import partita as pt

from .options import Options, flag, options_in

__all__ = ["CheckpointSchedule"]

FIXED = ("layers", "width", "heads", "context", "seed", "batch", "data")
"""Options that a run keeps when it goes on: another model, or other batches, would be another run.
The mesh, and how it is used, may change."""


class CheckpointSchedule:
    """The checkpoints of one run: model, optimizer, random numbers, and the step, which is the
    position in the data. Does nothing where `options.save` is None.

    Args:
        tell: told of "saved", with the step that a run would go on with.
    """

    def __init__(
        self,
        options: Options,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tell: Callable[..., None],
    ):
        self._options, self._tell, self._path = options, tell, options.checkpoint
        self._state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "random": pt.RandomState(),
            "step": 0,
            "options": options.to_toml(),
        }
        self._pending_save: Any = None
        self._saved = 0

    def resume(self) -> int:
        """Load the checkpoint, if the run is to go on from one and there is one.

        Returns:
            The step to begin with.

        Raises:
            ValueError: the checkpoint is of another model or other data.
        """
        if self._path is None or not self._options.resume or not pt.is_checkpoint(self._path):
            return 0
        made: dict[str, Any] = {"options": ""}
        pt.load(made, self._path, strict=False)
        before = Options(**options_in(made["options"], f"{self._path}: options"))
        for name in FIXED:
            was, now = getattr(before, name), getattr(self._options, name)
            if was != now:
                raise ValueError(
                    f"--resume: {self._path} was made with --{flag(name)} {was}, and this run has "
                    f"{now}"
                )
        pt.load(self._state, self._path)
        self._state["options"] = self._options.to_toml()
        self._saved = self._state["step"]
        return self._saved

    def after_step(self, step: int) -> None:
        """A step is over: save, if it is time to. Training goes on while the disk is written."""
        if self._pending_save is not None and self._pending_save.done():
            self._wait_for_save()
        every = self._options.save_every
        if self._path is not None and every and (step + 1) % every == 0:
            self._wait_for_save()
            self._tell("at", phase="save", step=step)
            self._state["step"] = step + 1
            self._pending_save = pt.async_save(self._state, self._path)

    def finish(self) -> None:
        """The run is over: save what has not been saved."""
        self._wait_for_save()
        steps = self._options.steps
        if self._path is not None and self._saved < steps:
            self._tell("at", phase="save", step=steps - 1)
            self._state["step"] = steps
            pt.save(self._state, self._path)
            self._tell_saved(steps)

    def _wait_for_save(self) -> None:
        if self._pending_save is not None:
            self._pending_save.result()
            self._pending_save = None
            self._tell_saved(self._state["step"])

    def _tell_saved(self, step: int) -> None:
        self._saved = step
        self._tell("saved", step=step, path=str(self._path))
