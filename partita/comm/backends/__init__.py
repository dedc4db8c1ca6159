"""Backends: what a kind of process group does in ways of its own. No other room knows one by name.

In reading order: `backend` (what a transport and a graph ask of one, and the answers of one that is
best used as it is), `gloo` (those of Gloo, and what ranks compare over, apart from their tensors).
A new one is a subclass of `Backend` in a file of its own, which says what differs, a line of
`backend_of`, which chooses by a mesh's device type and the process groups of the job, and one of
`backend_named`, for meshes without peers. What its device does otherwise stands in `comm/device`.
Whatever the backend, ranks compare what they do over Gloo.
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
    """The backend of meshes of this device type ("cpu", "cuda") in this job.

    Args:
        native: as of a `Backend` whose waits block the processor.
    """
    if f"{device_type}:gloo" not in dist.get_backend_config():
        return Backend()
    return Gloo(native) if device_type == "cpu" else GlooOnDevice()


def backend_named(name: str, device_type: str, native: Native = begin_in_group) -> Backend:
    """What is known of a backend by its name, as torch has it: "gloo", "cpu:gloo,cuda:nccl"; "" for
    one that holds nothing beside its operands.

    Raises:
        ValueError: no backend of torch's has this name.
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
    """The names of the backends that this torch was built with."""
    if not dist.is_available():
        return []
    return [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
