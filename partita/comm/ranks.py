"""In-process ranks: the wire between ranks that are threads of one process.

Every rank of the mesh brings its tensors to a collective; the last one to arrive does it for all of
them, group by group and in rank order, so that sums are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.layout import LayoutError, Mesh

from .collective_request import Request
from .ledger import Scope
from .mesh_handle import MeshHandle
from .splits import Splits
from .transport import Axes
from .wire import Wire
from .world import MeetingCall, Payload, World, running_rank

__all__ = ["RankWire", "World", "ranks", "running_wire"]

Action = Callable[[Sequence[Payload]], None]


def running_wire() -> RankWire | None:
    """The wire over the whole world of the rank that runs in this thread; None where none does."""
    mesh = running_rank()
    return None if mesh is None else mesh.wire  # type: ignore[return-value]


class RankWire(Wire):
    """The wire of one rank of a `World`."""

    moved_dtypes = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype))
    reduced_dtypes = frozenset(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        + (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    )
    kind = "of pt.ranks"

    def __init__(
        self, world: World, number: int, handle: MeshHandle, members: tuple[int, ...], own: Scope
    ):
        super().__init__(handle._layout, handle._at, own)
        self.device_mesh, self._world, self._number = handle, world, number
        self._mesh_ranks = members
        self._number_at = dict(zip(self.mesh.coordinates(), members, strict=True))
        self._numbers: dict[Axes, tuple[int, ...]] = {}

    def _meet_group(
        self, key: tuple[Any, ...], axes: Axes, request: Request, payload: Payload, action: Action
    ) -> None:
        group = self._numbers.get(axes)
        if group is None:
            group = tuple(self._number_at[m] for m in self.group(axes)[1])
            self._numbers[axes] = group
        self._world.meet(
            MeetingCall(self._number, self._mesh_ranks, group, key, request, payload), action
        )

    def check(self, text: str) -> None:
        # Moves are compared anyhow when ranks meet; a graph that is run makes none.
        if self.scope.check is not None and self.mesh.size() > 1:
            self.scope.check.compare(self, text)

    def exchange(self, why: str, mine: bytes, deadline: float | None = None) -> list[bytes]:
        def answer_with_all(brought: list[bytes]) -> list[list[bytes]]:
            return [brought] * len(brought)

        return self.together(mine, answer_with_all, why)  # type: ignore[no-any-return]

    def together(
        self, mine: Any, answer: Callable[[list[Any]], Sequence[Any]], why: str = "together"
    ) -> Any:
        """This rank's item of `answer(brought)`, where `brought` has every rank's `mine` and the
        first rank's `answer` is called."""
        got: list[Any] = []

        def perform_answer(all_: Sequence[Payload]) -> None:
            answers = all_[0][2]([theirs for _, theirs, _ in all_])
            for (to, _, _), one in zip(all_, answers, strict=True):
                to.append(one)

        request = Request(why, None, "")
        self._meet_group(
            ("together", "objects"), self.mesh.names, request, (got, mine, answer), perform_answer
        )
        return got[0]

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request) -> None:
        def perform_all_gather(all_: Sequence[Payload]) -> None:
            for to, _ in all_:
                torch.cat([x.reshape(-1) for _, x in all_], out=to.view(-1))

        # Groups may hold different amounts, except of compared numbers and of padded pieces.
        size = (
            x.numel()
            if request.kind in ("gather_ints", "all_gather") and not request.move
            else None
        )
        self._meet_group(("gather", x.dtype, size), axes, request, (out, x), perform_all_gather)

    def _all_reduce(self, x: torch.Tensor, axes: Axes, reduce_op: str, request: Request) -> None:
        def perform_all_reduce(all_: Sequence[Payload]) -> None:
            total = _reduce_in_rank_order([x for (x,) in all_], reduce_op)
            for (x,) in all_:
                x.copy_(total)

        self._meet_group(("reduce", x.dtype, reduce_op), axes, request, (x,), perform_all_reduce)

    def _reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, reduce_op: str, request: Request
    ) -> None:
        def perform_reduce_scatter(all_: Sequence[Payload]) -> None:
            total = _reduce_in_rank_order([x.reshape(-1) for _, x in all_], reduce_op)
            for (to, _), part in zip(all_, total.view(len(all_), -1), strict=True):
                to.view(-1).copy_(part)

        self._meet_group(
            ("reduce_scatter", x.dtype, reduce_op), axes, request, (out, x), perform_reduce_scatter
        )

    def _all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        axes: Axes,
        get: Splits,
        send: Splits,
        request: Request,
    ) -> None:
        def perform_all_to_all(all_: Sequence[Payload]) -> None:
            sent = [x.split(splits.sizes) for _, x, splits in all_]
            for i, (to, _, _) in enumerate(all_):
                torch.cat([parts[i] for parts in sent], out=to)

        self._meet_group(("all_to_all", x.dtype), axes, request, (out, x, send), perform_all_to_all)

    def _broadcast(self, x: torch.Tensor, axes: Axes, root: int, request: Request) -> None:
        def perform_broadcast(all_: Sequence[Payload]) -> None:
            (source,) = all_[root]
            for (x,) in all_:
                if x is not source:
                    x.copy_(source)

        self._meet_group(
            ("from_first", x.dtype, x.shape, root), axes, request, (x,), perform_broadcast
        )


def _reduce_in_rank_order(shares: list[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """The reduction of `shares` in rank order; 16-bit floats are summed in 32 bits."""
    dtype = shares[0].dtype
    narrow = dtype in (torch.float16, torch.bfloat16)
    total = shares[0].float() if narrow else shares[0].clone()
    for share in shares[1:]:
        if reduce_op == "sum":
            total += share
        elif reduce_op == "max":
            total = torch.maximum(total, share.to(total.dtype))
        else:
            total = torch.minimum(total, share.to(total.dtype))
    return total.to(dtype)


def ranks(**axes: int) -> World:
    """Ranks of one process, `ranks(dp=2, tp=2)`: a world whose `run` calls a function on each.

    They run one at a time, in an order that never changes, and a mismatch between them is an error
    on every rank that names both calls and both lines; it never hangs.

        with pt.ranks(dp=2, tp=2) as world:
            losses = world.run(train, data)      # train(mesh, data) on each of four ranks

    Args:
        axes: the size of each mesh axis, outermost first.
    """
    if not axes:
        raise LayoutError("ranks needs at least one axis", reason="write ranks(dp=2), for one")
    return World(Mesh(tuple(axes), tuple(axes.values())), RankWire)
