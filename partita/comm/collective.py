"""Collectives: what one is asked for, how its buffers are divided among ranks, what is waited for
while it is under way, and what it is called in a captured graph.

Shares that ranks exchange are added in the order of the ranks (`reduce_in_rank_order`; in graphs
`sum_of_shares`): the sum is the same bits whichever collective brought them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from partita.redistribute import Move


class Request(NamedTuple):
    """A collective of one rank, but for its tensors: what it does, and why.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"; or what is
            compared.
        move: that it is a part of; None where it serves none.
        op: that needs it, "matmul".
        reduce_op: "sum", "max" or "min", of a reduction.
        get, send: of an all_to_all, the segments of its two buffers.
        root: of a broadcast, the member whose tensor the others get.
    """

    kind: str
    move: Move | None
    op: str
    reduce_op: str = "sum"
    get: Splits | None = None
    send: Splits | None = None
    root: int = 0

    def describe(self) -> str:
        """`all_gather over dp: 8@dp 16 -> 8 16, for matmul`."""
        what = self.kind if self.move is None else str(self.move)
        return f"{what}, for {self.op}" if self.op else what


# -- how a buffer is divided -----------------------------------------------------------------------


class Splits:
    """Segments of a flat buffer, one for each rank of a group, end to end, in the group's order.

    A list of all sizes is made only where a backend asks for it.

    Attributes:
        count: the number of segments.
        total: elements of all of them.
        even: all are of one size.
        place: gives `(start, length)` of the i-th one.
    """

    def __init__(self, count: int, total: int, even: bool, place: Callable[[int], tuple[int, int]]):
        self.count, self.total, self.even, self.place = count, total, even, place

    @classmethod
    def evenly(cls, count: int, each: int) -> Splits:
        return cls(count, count * each, True, lambda i: (i * each, each))

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Splits:
        starts = [0, *itertools.accumulate(sizes)]
        return cls(len(sizes), starts[-1], False, lambda i: (starts[i], sizes[i]))

    @cached_property
    def sizes(self) -> list[int]:
        return [self.place(i)[1] for i in range(self.count)]

    def times(self, k: int) -> Splits:
        """These splits counted in units of which `k` make an element: bytes, say."""

        def scale_place(i: int) -> tuple[int, int]:
            start, length = self.place(i)
            return k * start, k * length

        return Splits(self.count, k * self.total, self.even, scale_place)


# -- collectives under way -------------------------------------------------------------------------


class PendingWork(Protocol):
    """A collective that the ranks have begun and that this rank has yet to wait for."""

    def wait(self) -> object:
        """Return when its result may be read (on a GPU: by work queued from now on)."""


class PendingList:
    """Pieces of work under way, waited for in order; none where all was complete at once."""

    def __init__(self, parts: Sequence[PendingWork] = ()):
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


@dataclass
class PendingCall:
    """Work under way whose wait is a function."""

    wait: Callable[[], object]


class PendingSum:
    """An exchange of shares that are summed when they have arrived.

    Each rank gets its piece of every rank's share and adds them in rank order, in the dtype of
    `out` but at least 32 bits: the sum is the same bits whichever collective brought the shares.
    """

    def __init__(self, exchange: PendingWork, shares: Sequence[torch.Tensor], out: torch.Tensor):
        self._exchange, self._shares, self._out = exchange, shares, out

    def wait(self) -> None:
        self._exchange.wait()
        with torch.no_grad():
            reduce_in_rank_order(self._shares, self._out)


_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduce_in_rank_order(
    shares: Sequence[torch.Tensor], out: torch.Tensor, reduce_op: str = "sum"
) -> torch.Tensor:
    """Reduce `shares`, in their order, into `out`, which may be the first; narrow floats in 32
    bits, and rounded once."""
    narrow = out.is_floating_point() and out.element_size() < 4
    total = shares[0].to(torch.float32 if narrow else out.dtype, copy=narrow)
    into = total if narrow else out
    for share in shares[1:]:
        total = _COMBINE[reduce_op](total, share, out=into)
    return out if total is out else out.copy_(total)


def shares_memory(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Do they lie in one storage? Also of tensors without memory, as of the meta device."""
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata


# -- in captured graphs ----------------------------------------------------------------------------
# Torch's functional ones by name, and three that it lacks. Compiled code finds a process group by
# name and waits with torch's own `wait_tensor`, at which the work of ours is registered.

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
    """The sum of shares that lie end to end, in their order.

    One operator and not additions: a compiler would defer those, and keep the shares until the sum
    is read.
    """
    rows = shares.view(count, -1)
    return reduce_in_rank_order(rows.unbind(), rows.new_empty(rows.shape[1]))


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
