"""What does sharded training cost over the same compute without communication?

A GPT is trained on Gloo ranks, each with its own rows of a batch, in turn: without communication
(every rank a model of its own), data parallel and ZeRO-3 by partita, DDP and FSDP2. All take turns
within each round of one run, and what is printed is the median over rounds of the ratio to the
step without communication of the same round.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.train.models import GPT
from partita.train.zero import zero

__all__ = ["main"]

Step = Callable[[], float]


@dataclass(frozen=True)
class Shape:
    """The model and the batch of one rank."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 4


def _loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> float:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach()) if not isinstance(loss, pt.DTensor) else 0.0

    return step


def _steps(rank: int, ranks: int, shape: Shape, only: Sequence[str]) -> dict[str, Step]:
    """Each way to train, ready to step."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    base = GPT(layers=shape.layers, width=shape.width, heads=shape.heads, context=shape.context)
    rows = torch.randint(0, 256, (2, ranks * shape.batch, shape.context))
    x, y = (part.chunk(ranks)[rank].contiguous() for part in rows)
    mesh = pt.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    found: dict[str, Step] = {}

    def spread(part: torch.Tensor) -> torch.Tensor:
        return pt.DTensor.from_local(part, mesh, [pt.Shard(0)])

    def fsdp() -> nn.Module:
        model = copy.deepcopy(base)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    ways: dict[str, Callable[[], Step]] = {
        "alone": lambda: _loop(copy.deepcopy(base), x, y),
        "partita dp": lambda: _loop(zero(copy.deepcopy(base), mesh, stage=0), spread(x), spread(y)),
        "partita zero 3": lambda: _loop(
            zero(copy.deepcopy(base), mesh, stage=3), spread(x), spread(y)
        ),
        "DDP": lambda: _loop(DistributedDataParallel(copy.deepcopy(base)), x, y),
        "FSDP2": lambda: _loop(fsdp(), x, y),
    }
    for name, make in ways.items():
        if not only or name == "alone" or name in only:
            found[name] = make()
    return found


def _rank(
    end: Any, store: str, rank: int, ranks: int, rounds: int, shape: Shape, only: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    steps = _steps(rank, ranks, shape, only)
    for step in steps.values():
        for _ in range(2):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        names = list(steps)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    end.send(seconds)
    end.close()
    dist.barrier()
    os._exit(0)


def measure(ranks: int, rounds: int, shape: Shape, only: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds per step of each way, round by round, as the slowest rank had it."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ends, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, store, rank, ranks, rounds, shape, only)
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        told = [end.recv() for end in ends]
        for process in processes:
            process.join()
    return {name: [max(t) for t in zip(*(s[name] for s in told), strict=True)] for name in told[0]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="partita bench zero", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=(), help="these ways, beside `alone`")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    shape, found = Shape(), {}
    for ranks in options.ranks:
        seconds = found[ranks] = measure(ranks, options.rounds, shape, options.only)
        print(f"\n{shape}, {ranks} Gloo ranks, {options.rounds} rounds")
        print(f"{'':<18}{'ms':>8}{'over alone':>12}{'best':>8}")
        for name, times in seconds.items():
            ratios = [t / a for t, a in zip(times, seconds["alone"], strict=True)]
            print(
                f"{name:<18}{1e3 * median(times):>8.1f}{median(ratios):>12.2f}"
                f"{min(times) / min(seconds['alone']):>8.2f}"
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
