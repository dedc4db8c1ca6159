"""The process groups of the control plane, on which ranks compare what they do apart from their
tensors: Gloo, since every machine has it, whatever its devices are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOST = re.compile(
    r"(connection (closed|reset|refused)|broken pipe|socket closed|gloo/transport"
    r"|recvValue failed)",
    re.IGNORECASE,
)
"""The text of RuntimeErrors that Gloo and its store raise when a peer is gone."""
TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
"""The text of those that they raise when a peer has not come in time, though it may live."""


def can_compare() -> bool:
    """Was this torch built with Gloo?"""
    return dist.is_available() and dist.is_gloo_available()


def world_group() -> dist.ProcessGroup:
    """A new group of all ranks of the job; they all call this."""
    return dist.new_group(backend="gloo", group_desc="partita everyone")


def rendezvous_group(name: str, ranks: Sequence[int], limit: timedelta) -> Any:
    """A new group of some ranks of the job, which find each other by `name`.

    Not `new_group`: it names a group by how many groups its rank is in already, which may differ
    between the ranks.
    """
    store = dist.PrefixStore(name, dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    return dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), limit)


def prepare_control(environment: Any, loopback: str) -> None:
    """Before groups are made: let a job on one machine use its loopback interface."""
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE", ""):
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)


def timeouts_of_job() -> list[timedelta]:
    """The timeouts of the job's default group, one for each kind of device."""
    # Private torch: a timeout that was given is kept by the backends only.
    world: Any = dist.group.WORLD
    found = []
    for kind in world._device_types:
        backend = world._get_backend(kind)
        limit = getattr(getattr(backend, "options", None), "_timeout", None)
        if limit is not None:
            found.append(limit)
    return found
