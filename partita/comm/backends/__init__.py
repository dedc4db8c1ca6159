"""Backends: the differences between kinds of process groups. No other package names a backend.

In reading order: `backend` (the interface, with defaults for a backend that needs no changes),
`gloo` (Gloo, and the control groups, over which ranks compare texts). To add one, write a subclass
of `Backend` in its own file. Add a line to `backend_of`, which chooses by a mesh's device type and
the process groups of the job, and one to `backend_named`, for dry meshes. Code that depends on the
device belongs in `comm/device`. With every backend, ranks compare what they do over Gloo.
"""

from __future__ import annotations

import torch.distributed as dist

from ..device import HOST
from .backend import Backend, Native, begin_in_group
from .gloo import LOST as LOST
from .gloo import TIMED_OUT as TIMED_OUT
from .gloo import Gloo, GlooOnDevice
from .gloo import can_compare as can_compare
from .gloo import prepare_control as prepare_control
from .gloo import rendezvous_group as rendezvous_group
from .gloo import timeouts_of_job as timeouts_of_job


def backend_of(device_type: str, native: Native = begin_in_group) -> Backend:
    """Returns the backend of meshes of `device_type` ("cpu", "cuda") in this job.

    Args:
        native: the function that begins a collective of the process group. Only Gloo on the CPU
            uses it.
    """
    if f"{device_type}:gloo" not in dist.get_backend_config():
        return Backend()
    return Gloo(native) if device_type == "cpu" else GlooOnDevice()


def backend_named(name: str, device_type: str, native: Native = begin_in_group) -> Backend:
    """Returns the backend that has the name `name` in torch: "gloo", "cpu:gloo,cuda:nccl".

    The name "" means a backend whose collectives allocate no buffers of their own.

    Args:
        device_type: selects a part of a name such as "cpu:gloo,cuda:nccl".
        native: the function that begins a collective of the process group.

    Raises:
        ValueError: torch has no backend of this name.
    """
    parts = [part.strip().lower().rpartition(":") for part in name.split(",")]
    known = {*dist.Backend.backend_list, "", "undefined"} if dist.is_available() else {"", "gloo"}
    if any(kind not in known for _, _, kind in parts):
        raise ValueError(f"backend={name!r}: torch knows {', '.join(sorted(known - {''}))}")
    for device, _, kind in parts:
        if device in ("", device_type):
            return (Gloo if kind == "gloo" and device_type == HOST.type else Backend)(native)
    return Backend(native)


def installed_backends() -> list[str]:
    """Returns the names of the backends that this torch was built with."""
    if not dist.is_available():
        return []
    return [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
