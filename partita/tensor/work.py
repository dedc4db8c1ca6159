"""The work of a plan, as ledgers are told of it: which ranks repeat it, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from partita.comm import Wire, user_line
from partita.rules import Work

from .choose import Choice

__all__ = ["PlanWork", "work_of_plan"]


@dataclass(frozen=True, slots=True)
class PlanWork:
    """What a call does on this rank.

    Attributes:
        products: operations, and the axes along which every rank does the same.
        kernel: the plan's own; None where what runs is the function itself.
        run: what runs.
    """

    op: str
    wire: Wire
    products: tuple[tuple[float, tuple[str, ...]], ...]
    kernel: Callable[..., Any] | None
    run: Callable[..., Any]

    def noting(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and tell the ledgers that are open."""
        scope = self.wire.scope
        if not scope.recomputing:
            place = user_line()
            for log in scope.told_of_work:
                for operations, axes in self.products:
                    log.note_work(self.wire.rank, self.op, place, axes, operations)
        return self.run(*args, **kwargs)


def work_of_plan(
    op: str,
    wire: Wire,
    work: Sequence[Work],
    choice: Choice,
    kernel: Callable[..., Any] | None,
    run: Callable[..., Any],
) -> PlanWork:
    """The work of a call whose names are split as `choice` says.

    Args:
        kernel, run: as in `PlanWork`.
    """
    products = []
    for one in work:
        spread = {a for name in one.names for a in choice.splits.get(name, ())}
        repeated = [a for a in wire.mesh.names if a not in spread and wire.mesh.size(a) > 1]
        operations = one.operations / wire.mesh_size(tuple(spread))
        products.append((operations, tuple(repeated)))
    return PlanWork(op, wire, tuple(products), kernel, kernel or run)
