"""The collectives of torch.distributed, which take a DTensor without asking it: they would exchange
or sum pieces as if each were the whole value.

Each is exchanged, under its public name, for one that looks at its arguments first. What partita
carries goes to the process groups and does not come by here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["COLLECTIVES", "look_before_collectives"]

COLLECTIVES = (
    """all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single
    all_reduce all_reduce_coalesced all_to_all all_to_all_single batch_isend_irecv broadcast
    broadcast_object_list gather gather_object recv recv_object_list reduce reduce_scatter
    reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list send send_object_list
    _all_gather_base _reduce_scatter_base"""
).split()
"""By name; not `isend` and `irecv`, which torch compares with functions by their identity:
what `batch_isend_irecv` is given is looked at instead."""


def look_before_collectives(look: Callable[[str, Any], Any]) -> None:
    """From now on each collective takes what `look` gives for its name and what it is given."""
    if not dist.is_available():
        return
    for name in COLLECTIVES:
        original = getattr(dist.distributed_c10d, name, None)
        if original is None:  # of another version of torch
            continue
        looking = _make_inspected_collective(name, original, look)
        for home in (dist.distributed_c10d, dist):
            if getattr(home, name, None) is original:
                setattr(home, name, looking)


def _make_inspected_collective(
    name: str, original: Callable[..., Any], look: Callable[[str, Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def looking(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = look(name, args), look(name, kwargs)
        if name == "batch_isend_irecv":
            lists = (*args, *kwargs.values())
            look(name, [getattr(op, "tensor", None) for ops in lists for op in ops])
        return original(*args, **kwargs)

    return looking
