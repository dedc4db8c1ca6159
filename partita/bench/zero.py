"""A bench of sharded training: its cost relative to the same compute without communication.

A GPT is trained on Gloo ranks, each with its own rows of a batch: without communication (each rank
has its own model), data parallel and ZeRO-3 by partita, DDP and FSDP2. All take turns in each
round. In each round, a step's time is divided by that of the step without communication. The bench
prints the median over rounds. Rivals run in processes without a mesh of partita.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import partita as pt
from partita.app.models import GPT
from partita.parallel.zero import zero
from partita.report import written_file

from .interleaved import Step, measure, table
from .place import bench_device, make_dp_mesh, make_rival_mesh
from .rivals import make_rival, training


@dataclass(frozen=True)
class Shape:
    """The sizes of a `GPT` (layers, width, heads, context), and the rows of a batch on a rank."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 4

    def model(self) -> GPT:
        torch.manual_seed(0)
        model = GPT(layers=self.layers, width=self.width, heads=self.heads, context=self.context)
        return bench_device().place(model)

    def tokens(self, ranks: int) -> torch.Tensor:
        """Returns the inputs and targets of all ranks: a tensor of shape (2, rows, context)."""
        torch.manual_seed(0)
        return bench_device().place(torch.randint(0, 256, (2, ranks * self.batch, self.context)))

    def tokens_of(self, rank: int, ranks: int) -> list[torch.Tensor]:
        """Returns this rank's rows of `tokens(ranks)`: inputs and targets."""
        return [part.chunk(ranks)[rank].contiguous() for part in self.tokens(ranks)]


def sharded_step(
    model: nn.Module, batch: Sequence[torch.Tensor], mesh: Any, stage: int, how: Any = None
) -> Step:
    """Returns a function that makes one training step under `pt.zero`.

    Args:
        model: the model. It is distributed in place.
        batch: this rank's samples.
        mesh: the mesh with the axis "dp".
        stage: the ZeRO stage.
        how: a function that is applied to the step, such as `pt.compile`, or None.
    """
    step = training(zero(model, mesh, stage=stage))
    rows = [pt.DTensor.from_local(part, mesh, [pt.Shard(0)]) for part in batch]
    ready = step if how is None else how(step)
    return lambda: ready(*rows)


def rival_steps(names: Sequence[str], rank: int, ranks: int, shape: Shape) -> dict[str, Step]:
    """Returns the training steps of rivals by name. The process must have no mesh of partita.

    Args:
        names: the names of rivals, as for `make_rival`.
        rank, ranks: the number of this rank, and the number of all ranks.
    """
    base, mesh = shape.model(), make_rival_mesh(ranks)
    mine = shape.tokens_of(rank, ranks)
    return {name: make_rival(name, copy.deepcopy(base), mine, mesh) for name in names}


STAGES = {"partita dp": 0, "partita zero 3": 3}


def partita_steps(names: Sequence[str], rank: int, ranks: int, shape: Shape) -> dict[str, Step]:
    """Returns partita's training steps by name.

    Args:
        names: keys of `STAGES`, maybe followed by " compiled".
        rank, ranks: the number of this rank, and the number of all ranks.
    """
    base, mesh = shape.model(), make_dp_mesh(ranks)
    mine = shape.tokens_of(rank, ranks)
    found = {}
    for name in names:
        stage, how = STAGES[name.removesuffix(" compiled")], None
        if name.endswith(" compiled"):
            how = pt.compile
        found[name] = sharded_step(copy.deepcopy(base), mine, mesh, stage, how)
    return found


def measure_ways(
    ways: Sequence[str], ranks: int, rounds: int, shape: Shape, warm: int = 2
) -> dict[str, list[float]]:
    """Times several ways to train, in turns. Returns the seconds per step of each, by round.

    Rivals have their own processes, and each compiled rival, too: Dynamo would reuse code that it
    compiled for another one, for example without the buckets of DDP.

    Args:
        ways: the names of the ways, such as "partita dp" or "FSDP2 compiled".
        ranks: the number of processes that make one step together.
        rounds: how often each way is timed.
        warm: the number of steps of each way that are not timed.
    """
    teams: dict[str, list[str]] = {}
    for name in ways:
        ours, compiled = name.startswith("partita"), name.endswith(" compiled")
        teams.setdefault("partita" if ours else name if compiled else "eager", []).append(name)
    makes = [
        partial(partita_steps if team == "partita" else rival_steps, names)
        for team, names in teams.items()
    ]
    found = measure(makes, ranks, rounds, shape, warm=warm)
    return {name: found[name] for name in ways}


def choose_ways(ways: Sequence[str], only: Sequence[str]) -> list[str]:
    """Returns the names in `only`, and "alone"; all of `ways` if `only` is empty.

    Raises:
        SystemExit: one of `only` is not in `ways`.
    """
    unknown = [name for name in only if name not in ways]
    if unknown:
        raise SystemExit(f"--only: the ways are {', '.join(ways)}, not {', '.join(unknown)}")
    return [name for name in ways if not only or name == "alone" or name in only]


WAYS = ("alone", "DDP", "partita dp", "FSDP2", "partita zero 3")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="partita bench zero", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=(), help="run only these ways, and `alone`")
    parser.add_argument("--json", type=written_file, metavar="FILE")
    options = parser.parse_args(argv)
    shape, found = Shape(), {}
    ways = choose_ways(WAYS, options.only)
    for ranks in options.ranks:
        found[ranks] = measure_ways(ways, ranks, options.rounds, shape)
        print(f"\n{shape}, {ranks} ranks of {bench_device().type}, {options.rounds} rounds")
        print(table(found[ranks], "alone"))
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
