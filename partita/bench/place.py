"""The device of a bench, on which its ranks compute.

`partita bench --device cuda NAME` sets an environment variable, which the processes of ranks
inherit. On an accelerator, times include waiting for its kernels.
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
    """Returns the device on which the ranks of a bench compute."""
    return choose_device(os.environ.get(DEVICE_VARIABLE, HOST.type))


def begin_ranks(rank: int, ranks: int, **meeting: Any) -> None:
    """Initializes torch.distributed in this process, as one rank of a bench with its own device.

    Args:
        rank, ranks: the number of this rank, and the number of all ranks.
        meeting: `store` or `init_method`, as in `torch.distributed.init_process_group`.
    """
    device = bench_device()
    os.environ["LOCAL_RANK"] = str(rank)
    device.select()
    backend = dist.get_default_backend_for_device(device.type)
    dist.init_process_group(backend, rank=rank, world_size=ranks, **meeting)


def make_rival_mesh(ranks: int) -> Any:
    """Returns torch's own mesh over all ranks, without making partita active in the process."""
    return dist.init_device_mesh(bench_device().type, (ranks,), mesh_dim_names=("dp",))


def make_dp_mesh(ranks: int) -> Any:
    """Returns a mesh with the axis "dp" over all ranks."""
    return pt.init_device_mesh(bench_device().type, (ranks,), mesh_dim_names=("dp",))


def end_rank() -> NoReturn:
    """Ends this process, even if its process group has threads that never end.

    The finalizers of multiprocessing run first. They remove semaphores, for example of progress
    bars in torch.compile, which the parent process would report as leaked.
    """
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    os._exit(0)
