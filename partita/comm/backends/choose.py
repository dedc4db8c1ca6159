"""The backend of a mesh."""

from __future__ import annotations

import torch.distributed as dist

from .backend import Backend
from .gloo import Gloo

__all__ = ["backend_of", "installed_backends"]


def backend_of(device_type: str) -> Backend:
    """What serves a mesh of devices of this type ("cpu", "cuda") in this job."""
    if device_type == "cpu" and "cpu:gloo" in dist.get_backend_config():
        return Gloo()
    return Backend()


def installed_backends() -> list[str]:
    """The names of those that this torch was built with."""
    if not dist.is_available():
        return []
    return [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
