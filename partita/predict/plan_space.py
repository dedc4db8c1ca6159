"""The space of a plan: ways to spread a model over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from .machine import Machine
from .strategy import ModelShape, Strategy

__all__ = ["Way", "ways_of"]


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        dp, tp: ranks of each axis.
        strategy: how the model is spread over them, and stepped.
    """

    dp: int
    tp: int
    strategy: Strategy

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes of more than one rank; dp=1 where there is one rank."""
        sizes = {name: n for name, n in (("dp", self.dp), ("tp", self.tp)) if n > 1}
        return sizes or {"dp": 1}

    def __str__(self) -> str:
        of = self.strategy
        axes = ",".join(f"{name}={n}" for name, n in self.mesh.items())
        said = [axes, f"ZeRO-{of.zero}" if self.dp > 1 else "no ZeRO"]
        said += ["remat"] * of.remat + ["sequence parallel"] * of.sequence
        each = f"{of.batch} sequence{'s' * (of.batch != 1)} a rank"
        said.append(f"{of.micro_batches} x {each}" if of.micro_batches > 1 else each)
        return ", ".join(said)


def ways_of(
    shape: ModelShape, ranks: int, batch: int, machine: Machine, base: Strategy
) -> Iterator[Way]:
    """All ways to step a model on so many ranks, `batch` sequences on all of them together.

    Tensor parallelism stays within a host, and divides the heads; micro-batches are powers of two.
    """
    context = base.context or shape.context
    for tp in range(1, min(ranks, machine.ranks_per_host) + 1):
        dp = ranks // tp
        if ranks % tp or shape.heads % tp or shape.groups % tp or batch % dp:
            continue
        mine = batch // dp
        counts = [m for m in (2**k for k in range(mine.bit_length())) if mine % m == 0]
        for sequence in (False, True)[: 1 + (shape.has_sequence and tp > 1 and context % tp == 0)]:
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                for remat in (False, True)[: 1 + shape.has_blocks]:
                    for count in counts:
                        strategy = dataclasses.replace(
                            base,
                            zero=zero,
                            remat=remat,
                            sequence=sequence,
                            batch=mine // count,
                            micro_batches=count,
                        )
                        yield Way(dp, tp, strategy)
