"""The backend of a mesh."""

from __future__ import annotations

import torch.distributed as dist

from .backend import Backend
from .gloo import Gloo

__all__ = ["backend_of"]


def backend_of(device_type: str) -> Backend:
    """What serves a mesh of devices of this type ("cpu", "cuda") in this job."""
    if device_type == "cpu" and "cpu:gloo" in dist.get_backend_config():
        return Gloo()
    return Backend()
