"""The device of a training run: where its ranks compute, one process to each."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DEVICES", "Device", "choose_device"]

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Device:
    """A kind of device, and what of a run depends on it.

    Attributes:
        type: as torch names it, "cpu" or "cuda".
    """

    type: str

    def select(self) -> None:
        """Have this process compute on one of its own: that of its number on this machine.

        Raises:
            ValueError: the machine has fewer than it has ranks.
        """
        if self.type == "cpu":
            return
        rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        found = torch.accelerator.device_count()
        if rank >= found:
            raise ValueError(
                f"--device {self.type}: rank {rank} of this machine has none of its own, there are "
                f"{found}; start at most {found} ranks here, or --device cpu"
            )
        torch.accelerator.set_device_index(rank)

    def place(self, t: torch.Tensor) -> torch.Tensor:
        """`t` on this device."""
        return t.to(self.type)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Within, kernels that profit from it compute in `dtype`."""
        return torch.autocast(self.type, dtype=dtype)


def choose_device(asked: str) -> Device:
    """The device for `asked`: "auto" is a CUDA device where this machine has one.

    Raises:
        ValueError: another name, or a device that this torch, or this machine, does not have.
    """
    if asked not in DEVICES:
        raise ValueError(f"--device {asked!r} is none of {', '.join(DEVICES)}")
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        built = torch.version.cuda is not None
        reason = "no GPU is visible to it" if built else "this torch is built without CUDA"
        raise ValueError(f"--device cuda: {reason}; --device cpu, or auto, runs here")
    return Device("cuda" if asked != "cpu" and has_cuda else "cpu")
