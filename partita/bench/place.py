"""The place of a bench: what its ranks compute on.

`partita bench --device cuda NAME` says so in the environment, which the processes of ranks have,
too. What is timed on an accelerator is timed until it is done there.
"""

from __future__ import annotations

import multiprocessing.util
import os
from typing import Any, NoReturn

import torch.distributed as dist

import partita as pt
from partita.comm.device import HOST, Device, choose_device

DEVICE_VARIABLE = "PARTITA_BENCH_DEVICE"


def bench_device() -> Device:
    """What ranks compute on."""
    return choose_device(os.environ.get(DEVICE_VARIABLE, HOST.type))


def begin_ranks(rank: int, ranks: int, **meeting: Any) -> None:
    """Have this process be one of the ranks, with a device of its own.

    Args:
        meeting: `store` or `init_method`, as `torch.distributed.init_process_group` takes them.
    """
    device = bench_device()
    os.environ["LOCAL_RANK"] = str(rank)
    device.select()
    backend = dist.get_default_backend_for_device(device.type)
    dist.init_process_group(backend, rank=rank, world_size=ranks, **meeting)


def make_rival_mesh(ranks: int) -> Any:
    """torch's mesh of one axis: a process that has no other has no mesh of partita."""
    return dist.init_device_mesh(bench_device().type, (ranks,), mesh_dim_names=("dp",))


def make_dp_mesh(ranks: int) -> Any:
    """A mesh of one axis, over so many ranks."""
    return pt.init_device_mesh(bench_device().type, (ranks,), mesh_dim_names=("dp",))


def end_rank() -> NoReturn:
    """Ends the process of a rank, whose process group may have threads that never end.

    The finalizers of multiprocessing run first. They remove semaphores, such as those of progress
    bars in torch.compile, which the parent process would report as leaked.
    """
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    os._exit(0)
