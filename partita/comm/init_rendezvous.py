"""Joining a job: how ranks find each other, and not those that they replace.

Ranks of `partita train` meet in a file. torchrun's store outlives the ranks (torch issue 135712):
after a restart, the addresses of the dead are still in it, and a rank that reads one too early
waits for nobody. TORCHELASTIC_RESTART_COUNT does not tell the rounds apart: each machine counts its
own. So rank 0 names the round, and goes on when every rank of this round has answered to that name.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from .backends.control import prepare_control

__all__ = ["LOOPBACK", "MEETING", "join"]

MEETING = "PARTITA_MEETING"
"""The environment's name for the file in which the ranks of one machine meet."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The network interface that no other machine can reach."""

_LOOK = 0.02  # seconds between two looks into the store
_GRACE = 0.2  # seconds that threads have to end what they do, when the process ends


def join(backend: str | None = None, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Begin the default process group of the job that the environment describes, as torchrun does.

    Args:
        backend: as torch's; None for one that serves every device.

    Raises:
        TimeoutError: the other ranks did not come within `timeout`.
    """
    # A thread of a group's may be the last to let go of a tensor, for which it needs Python: where
    # Python is ending just then, the process aborts.
    atexit.register(time.sleep, _GRACE)
    prepare_control(os.environ, LOOPBACK)
    if (meeting := os.environ.get(MEETING)) is not None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        file = dist.FileStore(meeting, world)
        dist.init_process_group(backend, store=file, rank=rank, world_size=world, timeout=timeout)
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    fresh = dist.PrefixStore(_agree_on_round_name(store, rank, world, timeout), store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=world, timeout=timeout)


def _agree_on_round_name(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """A name that all ranks of this round have, and none of an earlier one."""
    until = time.monotonic() + timeout.total_seconds()
    me = uuid.uuid4().hex
    name = me  # rank 0's
    if rank == 0:
        store.set("partita/round", name)
    while time.monotonic() < until:
        if rank == 0:
            answers = [f"partita/{name}/{other}" for other in range(1, world)]
            if not answers or store.check(answers):
                store.set(
                    f"partita/{name}/all", json.dumps([store.get(a).decode() for a in answers])
                )
                return name
        elif store.check(["partita/round"]):
            name = store.get("partita/round").decode()  # it may yet be that of an earlier round,
            store.set(f"partita/{name}/{rank}", me)
            everyone = f"partita/{name}/all"
            if store.check([everyone]) and me in json.loads(store.get(everyone)):  # without me
                return name
        time.sleep(_LOOK)
    raise TimeoutError(f"rank {rank} of {world} waited {timeout} for the other ranks to start")
