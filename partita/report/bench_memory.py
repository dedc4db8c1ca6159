"""How many bytes does sharded training hold at most, above the shards themselves?

Eight Linears of 16 MiB each train on two Gloo ranks by ZeRO-3 of partita and by FSDP2. Every byte
that torch's CPU allocator gives and takes back during a step is counted by torch's profiler, so
that nothing depends on what either library thinks it holds. The first steps, which make the
optimizer's state, are not looked at.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import partita as pt
from partita.train.allocated import counted

__all__ = ["counted", "main"]

MIB = 1 << 20


def _model(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()

    return step


def _rank(end: Any, store: str, rank: int, ranks: int, layers: int, width: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh = pt.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    x = torch.randn(32, width)
    theirs = _model(layers, width)
    for layer in theirs:
        fully_shard(layer, mesh=mesh)
    ways = {
        "partita zero 3": _step(
            pt.zero(_model(layers, width), mesh), pt.DTensor.from_local(x, mesh, [pt.Shard(0)])
        ),
        "FSDP2": _step(fully_shard(theirs, mesh=mesh), x),
    }
    found = {}
    for name, step in ways.items():
        for _ in range(2):
            step()
        found[name] = counted(step)
    end.send(found)
    end.close()
    dist.barrier()
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="partita bench memory", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048, help="a layer has 4 width^2 bytes")
    options = parser.parse_args(argv)
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ends = []
        for rank in range(options.ranks):
            ours, theirs = context.Pipe(duplex=False)
            context.Process(
                target=_rank,
                args=(theirs, store, rank, options.ranks, options.layers, options.width),
            ).start()
            theirs.close()
            ends.append(ours)
        told = [end.recv() for end in ends]
    layer = 4 * options.width**2
    print(
        f"{options.layers} Linears of {layer / MIB:.0f} MiB, {options.ranks} Gloo ranks, forward + "
        "backward + SGD\ncounted peak above what is held between steps"
    )
    for name in told[0]:
        most = max(t[name] for t in told)
        print(f"{name:<16}{most / MIB:>8.1f} MiB {most / layer:>6.2f} layers")
    return 0
