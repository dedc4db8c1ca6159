"""The public collectives of torch.distributed, which would take a DTensor for a plain tensor: they
would exchange or sum the pieces as if each were the whole value.

Each is replaced, under its public name, by a function that inspects its arguments first. What
partita itself sends goes to the process groups directly and does not pass here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["COLLECTIVES", "inspect_collectives"]

COLLECTIVES = (
    """all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single
    all_reduce all_reduce_coalesced all_to_all all_to_all_single batch_isend_irecv broadcast
    broadcast_object_list gather gather_object recv recv_object_list reduce reduce_scatter
    reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list send send_object_list
    _all_gather_base _reduce_scatter_base"""
).split()
"""By name. Not `isend` and `irecv`, whose identity torch tests: the arguments of
`batch_isend_irecv` are inspected instead."""


def inspect_collectives(inspect: Callable[[str, Any], Any]) -> None:
    """Have each collective pass its arguments through `inspect(name, arguments)` from now on."""
    if not dist.is_available():
        return
    for name in COLLECTIVES:
        original = getattr(dist.distributed_c10d, name, None)
        if original is None:  # of another version of torch
            continue
        inspected_collective = _make_inspected_collective(name, original, inspect)
        for home in (dist.distributed_c10d, dist):
            if getattr(home, name, None) is original:
                setattr(home, name, inspected_collective)


def _make_inspected_collective(
    name: str, original: Callable[..., Any], inspect: Callable[[str, Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def inspected_collective(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = inspect(name, args), inspect(name, kwargs)
        if name == "batch_isend_irecv":
            lists = (*args, *kwargs.values())
            inspect(name, [getattr(op, "tensor", None) for ops in lists for op in ops])
        return original(*args, **kwargs)

    return inspected_collective
