"""What stands for a DTensor while a step is captured?

A FakeTensor (no memory, a shape and a device) that is re-tagged like any other shard. Its class is
both: a DTensor to Python, so that rules and moves run as ever, and a FakeTensor to the dispatcher,
which aborts where a tensor with a fake's keys has a class that cannot take its calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from partita.tensor.dtensor import PLAIN, TYPED, DTensor

from .symbolic import NumberEnv

__all__ = ["FakeDTensor", "fake_mode", "local_of"]


class FakeDTensor(DTensor, FakeTensor):
    """A shard that is traced. Never made: a FakeTensor is re-tagged."""

    __torch_dispatch__ = FakeTensor.__torch_dispatch__
    device = FakeTensor.device


PLAIN.add(FakeTensor)
TYPED[FakeTensor] = TYPED[FakeDTensor] = FakeDTensor


def fake_mode() -> FakeTensorMode:
    """A mode that takes every shape as it is: another shape is another capture.

    Its environment, without which Inductor's cache is bypassed too, traces Python numbers.
    """
    return FakeTensorMode(shape_env=NumberEnv(), static_shapes=True)


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of `x` on this rank, as a plain tensor without history."""
    with Local(), torch.no_grad():
        found: Any = x.detach()
    return found
