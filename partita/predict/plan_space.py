"""The space of a plan: ways to spread a model over ranks, and bounds on what each costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .machine import Machine
from .strategy import ModelShape, Strategy

__all__ = ["Way", "least_bytes", "least_seconds", "ways_of"]

_WEIGHT, _STATE = 4, 8  # bytes of a float32 weight, and of what AdamW keeps of it


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
        said.append(f"{of.micro_batches} x {of.batch} sequences a rank")
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


def least_bytes(shape: ModelShape, way: Way) -> float:
    """Bytes that a rank holds between steps at least: its float32 weights and AdamW's state.

    A lower bound of the peak of a simulation, whatever else is held.
    """
    _, parameters = _count_parameters(shape, way.strategy.layers or shape.layers)
    of = way.strategy
    split = parameters / way.tp
    weights = split / (way.dp if of.zero == 3 else 1)
    state = split / (way.dp if of.zero else 1)
    return weights * _WEIGHT + state * _STATE


def least_seconds(shape: ModelShape, way: Way, machine: Machine) -> float:
    """Seconds of a step at least: the longest of what the processor and each link must do.

    The processor multiplies each matrix three times a token (forward, and for both gradients). Over
    dp each gradient is summed once a step; stage 3 also gathers each weight once a micro-batch.
    Over tp each block sums its results forward, once a micro-batch.
    """
    of = way.strategy
    layers, context = of.layers or shape.layers, of.context or shape.context
    matrices, parameters = _count_parameters(shape, layers)
    tokens = of.batch * of.micro_batches * context
    peak = machine.peak_flops(of.precision) * machine.efficiency["matmul"]
    compute = 6.0 * matrices * tokens / way.tp / peak
    dp, tp = way.dp, way.tp
    links = {a: machine.reached_link((a,), way.mesh).bandwidth for a in way.mesh}
    over_dp = over_tp = 0.0
    if dp > 1:
        # In two bytes an element: no precision has fewer.
        times = 1 + (of.micro_batches if of.zero == 3 else 0)
        over_dp = times * 2.0 * parameters / tp * (dp - 1) / dp / links["dp"]
    if tp > 1:
        activation = 2.0 * of.batch * context * shape.width
        passes = shape.sums * layers * of.micro_batches
        over_tp = passes * activation * (tp - 1) / tp / links["tp"]
    return max(compute, over_dp, over_tp)


@functools.lru_cache(maxsize=64)
def _count_parameters(shape: ModelShape, layers: int) -> tuple[int, int]:
    """Elements of a model's matrices in blocks, and of all of its parameters."""
    with torch.device("meta"):
        module = shape.make(layers, 8)
    named = list(module.named_parameters())
    matrices = sum(math.prod(p.shape) for n, p in named if p.ndim == 2 and "blocks" in n)
    return matrices, sum(math.prod(p.shape) for _, p in named)
