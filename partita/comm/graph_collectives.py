"""Collectives of captured graphs: torch's functional ones by name, and three that torch lacks.

Compiled code finds a process group by name, and waits for a collective with torch's own
`wait_tensor`; the work of ours is registered with it.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "BROADCAST",
    "REDUCE_SCATTER",
    "WAIT",
    "all_gather",
    "all_to_all",
    "sum_of_shares",
]

_functional = torch.ops._c10d_functional
ALL_GATHER = _functional.all_gather_into_tensor.default
ALL_REDUCE = _functional.all_reduce.default
ALL_TO_ALL = _functional.all_to_all_single.default
BROADCAST = _functional.broadcast.default
REDUCE_SCATTER = _functional.reduce_scatter_tensor.default
WAIT = _functional.wait_tensor.default

_library = torch.library.Library("partita", "DEF")
_library.define("all_gather(Tensor x, int group_size, str group_name) -> Tensor")
_library.define("all_to_all(Tensor x, int group_size, str group_name) -> Tensor")
_library.define("sum_of_shares(Tensor shares, int count) -> Tensor")


def _all_gather(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """The group's `x`, concatenated in group order; each rank broadcasts its own.

    On CPUs that takes half the processor time of a ring, and `x` is not read after this returns.
    """
    # Private torch: a functional collective's group and its work are known by name and by tensor.
    c10d: Any = torch._C._distributed_c10d
    group = c10d._resolve_process_group(group_name)
    out = x.new_empty((group_size * x.shape[0], *x.shape[1:]))
    pieces = out.view(group_size, *x.shape).unbind()
    pieces[group.rank()].copy_(x)
    for rank, piece in enumerate(pieces):
        c10d._register_work(out, group.broadcast(piece, rank))
    return out


def _shape_of_all_gather(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return x.new_empty((group_size * x.shape[0], *x.shape[1:]))


def _all_to_all(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Each member of the group gets its piece of every `x`, which are cut into equal ones.

    A graph holds no list of sizes, which would grow with the group.
    """
    sizes = [x.shape[0] // group_size] * group_size
    return ALL_TO_ALL(x, sizes, sizes, group_name)


def _sum_of_shares(shares: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of shares that lie end to end, in their order, in at least 32 bits.

    One operator and not additions: a compiler would defer those, and keep the shares until the sum
    is read.
    """
    rows = shares.view(count, -1).unbind()
    narrow = shares.dtype.itemsize < 4
    total = rows[0].float() if narrow else rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.to(shares.dtype) if narrow else total


def _shape_of_sum(shares: torch.Tensor, count: int) -> torch.Tensor:
    return shares.new_empty((shares.numel() // count,))


_library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
torch.library.register_fake("partita::all_gather", _shape_of_all_gather, lib=_library)
_library.impl("all_to_all", _all_to_all, "CompositeExplicitAutograd")
torch.library.register_fake("partita::all_to_all", lambda x, *_: torch.empty_like(x), lib=_library)
_library.impl("sum_of_shares", _sum_of_shares, "CompositeExplicitAutograd")
torch.library.register_fake("partita::sum_of_shares", _shape_of_sum, lib=_library)

all_gather = torch.ops.partita.all_gather.default
all_to_all = torch.ops.partita.all_to_all.default
sum_of_shares = torch.ops.partita.sum_of_shares.default
