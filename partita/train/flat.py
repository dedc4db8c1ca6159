"""How do a block's shards lie so that one collective gathers them all, and how do they go again?

Each rank's shards stand end to end, each padded to the largest rank's, so that every rank sends
equally much. What arrives is ordered by parameter and each is a view of one storage, in its true
shape. Releasing empties that storage: no view, whoever holds it, keeps a byte of it alive.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import UnderWay, Wire
from partita.layout import Layout
from partita.redistribute import Move
from partita.tensor.spec import Spec

from .released import take_from_views

__all__ = ["Flat", "Piece"]


@dataclass(frozen=True)
class Piece:
    """One parameter's place.

    Attributes:
        whole: its layout when it is gathered; its local shape is what a kernel sees.
        shard: its layout at rest.
        strides: of the gathered parameter, contiguous.
        start: its first element in a rank's flat shard.
        place: its first element in what is gathered, aligned as an allocation is: how a kernel
            sums may depend on it.
        length: its elements in a rank's flat shard, padding included.
    """

    whole: Spec
    shard: Spec
    strides: tuple[int, ...]
    start: int
    place: int
    length: int


_ALIGNED = 64  # bytes


def _padded(shape: Sequence[int], n: int) -> int:
    """The elements of the largest of n pieces of a tensor of `shape`, split along dimension 0."""
    return -(-shape[0] // n) * math.prod(shape[1:])


class Flat:
    """Parameters of one dtype that travel together.

    Args:
        name, names: of the block, and of each parameter.
        wholes, shards: each parameter's spec gathered and at rest.
        axes: the mesh axes over which the parameters are sharded, in mesh order.
        dtype: in which they travel and are used.
        device: where they are.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        wholes: Sequence[Spec],
        shards: Sequence[Spec],
        axes: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.wire: Wire = wholes[0].wire
        if device.type == "meta":  # until `materialize`
            device = self.wire.device
        self.name, self.names, self.dtype, self.device = name, names, dtype, device
        mesh = self.wire.mesh
        self.n = math.prod(mesh.size(a) for a in axes)
        self.pieces: list[Piece] = []
        start = place = longest = 0
        for whole, shard in zip(wholes, shards, strict=True):
            shape = whole.local_shape
            length = _padded(shape, self.n)
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            self.pieces.append(Piece(whole, shard, strides, start, place, length))
            start += length
            place += -(-self.n * length * dtype.itemsize // _ALIGNED) * _ALIGNED // dtype.itemsize
            longest += _padded(whole.layout.local_shape(mesh, (0,) * mesh.ndim), self.n)
        self.length, self._room = start, place
        # Ranks along other axes hold other numbers: to the flat buffer they are pieces too, and
        # all are described as the first rank's, which no rank's exceeds.
        others = tuple(a for a in mesh.names if a not in axes)
        total = math.prod(mesh.size(a) for a in others) * self.n * longest
        at_rest = Layout((total,), ((*others, *axes),))
        self.gather = Move("all_gather", axes, at_rest, Layout((total,), (others,)))
        self.scatter = self.gather.transpose(mesh)
        self.sum = Move("all_reduce", axes, self.scatter.before, self.gather.after)
        self._full = torch.empty(0, dtype=dtype, device=device)
        self._arriving: tuple[UnderWay, torch.Tensor, torch.Tensor] | None = None
        self.here = False

    @property
    def nbytes(self) -> int:
        """Bytes of everything gathered, padding included."""
        return self._room * self.dtype.itemsize

    # -- gathered ----------------------------------------------------------------------------------

    def start(self, shards: Sequence[torch.Tensor], reason: str) -> None:
        """Begin to gather the local `shards`."""
        if self.here or self._arriving is not None:
            return
        with Local(), torch.no_grad():
            mine = self._end_to_end(shards)
            if len(self.pieces) == 1:
                self._allocate()
                out = self._full[: self.n * self.length]
            else:
                out = mine.new_empty(self.n * self.length)
            work = self.wire.start(self.gather, mine, out, op=self.name, reason=reason)
            self._arriving = (work, mine, out)

    def _end_to_end(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(shards) == 1:
            (only,) = shards
            if only.numel() == self.length and only.dtype == self.dtype and only.is_contiguous():
                return only.detach().view(-1)
        mine = torch.empty(self.length, dtype=self.dtype, device=self.device)
        into = []
        for p, s in zip(self.pieces, shards, strict=True):
            into.append(mine[p.start : p.start + s.numel()].view(s.shape))
            if s.numel() < p.length:
                mine[p.start + s.numel() : p.start + p.length] = 0
        torch._foreach_copy_(into, list(shards))
        return mine

    def finish(self) -> None:
        """Wait until everything is here."""
        if self._arriving is None:
            return
        out = self._arrived()
        if len(self.pieces) > 1:
            self._allocate()
            with torch.no_grad():
                torch._foreach_copy_(
                    [
                        self._full[p.place : p.place + self.n * p.length].view(self.n, -1)
                        for p in self.pieces
                    ],
                    [self._of_each(out, p) for p in self.pieces],
                )
        self.here = True

    def finish_into(self, wholes: Sequence[torch.Tensor]) -> None:
        """Wait, and write each parameter into memory of the caller's; nothing is kept here."""
        out = self._arrived()
        to, come = [], []
        for w, p in zip(wholes, self.pieces, strict=True):
            if p.length:
                rows = self._of_each(out, p)
                full, rest = divmod(w.numel(), p.length)
                flat = w.view(-1)
                to.append(flat[: full * p.length].view(full, p.length))
                come.append(rows[:full])
                if rest:
                    to.append(flat[full * p.length :])
                    come.append(rows[full, :rest])
        torch._foreach_copy_(to, come)
        self.release()

    def _arrived(self) -> torch.Tensor:
        assert self._arriving is not None
        work, _, out = self._arriving
        work.wait()
        self._arriving = None
        return out

    def views(self) -> list[torch.Tensor]:
        """Each parameter, plain, in its true local shape. Made afresh, with no common history."""
        return [self.view(self.dtype, p.place, p.whole.local_shape, p.strides) for p in self.pieces]

    def release(self) -> None:
        """Free what was gathered; or leave it, for good, to whoever keeps a plain view of it."""
        if self._arriving is not None:
            self._arrived()
        self.here = False
        held = self._full.untyped_storage().nbytes()
        if not held or take_from_views(self._full, self._name_at):
            self._full.untyped_storage().resize_(0)
        else:
            self.wire.note_kept(self.name, held)
            self._full = torch.empty(0, dtype=self.dtype, device=self.device)

    def _name_at(self, element: int) -> str:
        places = [piece.place for piece in self.pieces]
        return self.names[bisect_right(places, element) - 1]

    @property
    def alive(self) -> int:
        """Bytes that are held gathered, or on their way, now."""
        held = self._full.untyped_storage().nbytes()
        if self._arriving is not None and len(self.pieces) > 1:
            held += self._arriving[2].nbytes
        return held

    def holds(self, x: torch.Tensor) -> bool:
        """Is plain `x` a view of what is gathered?"""
        start = self._full.data_ptr()
        return self.here and start <= x.data_ptr() < start + self.nbytes

    def view(
        self, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """A view of what is gathered, as another view was made."""
        view = torch.empty(0, dtype=dtype, device=self.device)
        return view.set_(self._full.untyped_storage(), offset, size, stride)

    def _allocate(self) -> None:
        storage = self._full.untyped_storage()
        storage.resize_(self.nbytes)
        self._full.set_(storage, 0, (self._room,))

    def _of_each(self, flat: torch.Tensor, piece: Piece) -> torch.Tensor:
        return flat.view(self.n, -1)[:, piece.start : piece.start + piece.length]

    # -- gradients ---------------------------------------------------------------------------------

    def shares(
        self,
        grads: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        held: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gradients of what was gathered as (n, length), a row for each rank; added to `held`."""
        fits = all(
            g is not None and g.numel() == self.n * p.length
            for g, p in zip(grads, self.pieces, strict=True)
        )
        if fits and held is None and len(grads) == 1:
            (only,) = grads
            if only is not None and only.dtype == dtype and only.is_contiguous():
                return only.view(self.n, self.length)
        sums = held
        if sums is None:
            new = torch.empty if fits else torch.zeros
            sums = new(self.n, self.length, dtype=dtype, device=self.device)
        to, come = [], []
        for g, p in zip(grads, self.pieces, strict=True):
            if g is None or not p.length:
                continue
            place = self._of_each(sums, p)
            flat = g.reshape(-1)
            full, rest = divmod(flat.numel(), p.length)
            to.append(place[:full])
            come.append(flat[: full * p.length].view(full, p.length))
            if rest:
                to.append(place[full, :rest])
                come.append(flat[full * p.length :])
        if held is None:
            torch._foreach_copy_(to, come)
        else:
            for place, g in zip(to, come, strict=True):
                place.add_(g)
        return sums

    def total(self, grads: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begin to sum the ranks' gradients; what is returned waits for the sums."""
        flat = torch.cat([g.reshape(-1) for g in grads])
        work = self.wire.start(self.sum, flat, flat, op=self.name, reason="settle")

        def wait() -> list[torch.Tensor]:
            work.wait()
            pieces = flat.split([g.numel() for g in grads])
            return [piece.view(g.shape) for piece, g in zip(pieces, grads, strict=True)]

        return wait

    def reduce(self, sums: torch.Tensor, dtype: torch.dtype) -> Callable[[], list[torch.Tensor]]:
        """Begin to sum the ranks' `sums`, each keeping its piece, in `dtype`.

        Returns:
            What waits for this rank's piece of each gradient and returns them.
        """
        out = torch.empty(self.length, dtype=dtype, device=self.device)
        # Until it has come: what is under way holds as much as the parameters had gathered.
        on_the_way: list[Any] = [
            self.wire.start(self.scatter, sums.view(-1), out, op=self.name, reason="gradient"),
            sums,
        ]
        del sums

        def wait() -> list[torch.Tensor]:
            if on_the_way:
                on_the_way[0].wait()
                on_the_way.clear()
            shapes = [p.shard.local_shape for p in self.pieces]
            return [
                out[p.start : p.start + shape.numel()].view(shape)
                for p, shape in zip(self.pieces, shapes, strict=True)
            ]

        return wait
