"""A bench of sharded training.

What does sharded training cost over the same compute without communication?

A GPT is trained on Gloo ranks, each with its own rows of a batch, in turn: without communication
(every rank a model of its own), data parallel and ZeRO-3 by partita, DDP and FSDP2. All take turns
within each round of one run, and what is printed is the median over rounds of the ratio to the
step without communication of the same round.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.app.models import GPT
from partita.parallel.zero import zero
from partita.report import written_file

from .interleaved import Step, measure, table
from .place import bench_device, make_dp_mesh


@dataclass(frozen=True)
class Shape:
    """The model and the batch of one rank."""

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
        """(2, rows of all ranks, context): inputs and targets."""
        torch.manual_seed(0)
        return bench_device().place(torch.randint(0, 256, (2, ranks * self.batch, self.context)))


def training(model: nn.Module, capturable: bool = False) -> Callable[..., torch.Tensor]:
    """A step of AdamW as a plain loop has it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True, capturable=capturable)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


def fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    """The model sharded by FSDP2, block by block."""
    from torch.distributed.fsdp import fully_shard

    whole: Any = model
    for block in whole.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return model


def _steps(rank: int, ranks: int, shape: Shape, only: Sequence[str]) -> dict[str, Step]:
    """Each way to train, ready to step."""
    from torch.nn.parallel import DistributedDataParallel

    base = shape.model()
    x, y = (part.chunk(ranks)[rank].contiguous() for part in shape.tokens(ranks))
    mesh = make_dp_mesh(ranks)

    def plain(model: nn.Module) -> Step:
        step = training(model)
        return lambda: step(x, y)

    def spread(model: nn.Module) -> Step:
        step = training(model)
        rows = [pt.DTensor.from_local(part, mesh, [pt.Shard(0)]) for part in (x, y)]
        return lambda: step(*rows)

    ways: dict[str, Callable[[], Step]] = {
        "alone": lambda: plain(copy.deepcopy(base)),
        "partita dp": lambda: spread(zero(copy.deepcopy(base), mesh, stage=0)),
        "partita zero 3": lambda: spread(zero(copy.deepcopy(base), mesh, stage=3)),
        "DDP": lambda: plain(DistributedDataParallel(copy.deepcopy(base))),
        "FSDP2": lambda: plain(fsdp(copy.deepcopy(base), mesh)),
    }
    return {
        name: make() for name, make in ways.items() if not only or name == "alone" or name in only
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="partita bench zero", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=(), help="these ways, beside `alone`")
    parser.add_argument("--json", type=written_file, metavar="FILE")
    options = parser.parse_args(argv)
    shape, found = Shape(), {}
    for ranks in options.ranks:
        found[ranks] = measure(_steps, ranks, options.rounds, shape, options.only)
        print(f"\n{shape}, {ranks} ranks of {bench_device().type}, {options.rounds} rounds")
        print(table(found[ranks], "alone"))
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
