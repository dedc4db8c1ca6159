"""The choice of a backend for a mesh, by its device type and the process groups of the job."""

from __future__ import annotations

import torch.distributed as dist

from .backend import Backend
from .gloo import Gloo, GlooOnDevice


def backend_of(device_type: str) -> Backend:
    """The backend of meshes of this device type ("cpu", "cuda") in this job."""
    if f"{device_type}:gloo" not in dist.get_backend_config():
        return Backend()
    return Gloo() if device_type == "cpu" else GlooOnDevice()


def backend_named(name: str) -> Backend:
    """What is known of a backend: "gloo", or any other."""
    return Gloo() if name == "gloo" else Backend()


def installed_backends() -> list[str]:
    """The names of the backends that this torch was built with."""
    if not dist.is_available():
        return []
    return [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
