"""A bench of memory: the peak bytes of a training step, predicted and counted, and those of rivals.

Eight Linears of 16 MiB each train on two Gloo ranks by ZeRO-3 (compiled and eager) and by FSDP2, in
one run. The peak counts all bytes that torch's CPU allocator has allocated above those held between
steps. With `--uneven` the ranks' shards of each weight differ by a row.

`partita bench memory predicted` compares predictions for many models with counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import partita as pt
from partita.testing.allocated_bytes import counted

from . import predicted as bench_predicted
from .interleaved import on_ranks
from .place import bench_device, make_dp_mesh

MIB = 1 << 20
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


def _model(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def _step(model: nn.Module, x: torch.Tensor, make: Any) -> Callable[[], None]:
    optimizer = make(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()

    return step


def _peaks(rank: int, ranks: int, layers: int, width: int) -> list[tuple[str, int, int | None]]:
    """Returns for each way its name, and its peak in bytes: counted, and predicted or None."""
    from torch.distributed.fsdp import fully_shard

    mesh = make_dp_mesh(ranks)
    x = bench_device().place(torch.randn(32, width))
    rows = pt.DTensor.from_local(x, mesh, [pt.Shard(0)])
    found: list[tuple[str, int, int | None]] = []
    for name, make in OPTIMIZERS.items():
        theirs = _model(layers, width)
        for layer in theirs:
            fully_shard(layer, mesh=mesh)
        ways = {
            "compiled": pt.compile(_step(pt.zero(_model(layers, width), mesh), rows, make)),
            "eager": _step(pt.zero(_model(layers, width), mesh), rows, make),
            "FSDP2": _step(fully_shard(theirs, mesh=mesh), x, make),  # type: ignore[arg-type]
        }
        for way in list(ways):
            step: Any = ways.pop(way)
            for _ in range(2):
                step()
            peak = counted(step, device=bench_device().type)
            found.append((f"{name}, {way}", peak, step.memory.peak if way == "compiled" else None))
            if way == "compiled" and rank == 0:
                print(f"{name}, compiled: {step.memory}\n", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    if argv and argv[0] == "predicted":
        return bench_predicted.main(argv[1:])
    parser = argparse.ArgumentParser(prog="partita bench memory", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048, help="a layer has 4 width^2 bytes")
    parser.add_argument(
        "--uneven",
        action="store_true",
        help="one row less, so that the ranks do not divide the rows",
    )
    options = parser.parse_args(argv)
    options.width -= options.uneven
    results = on_ranks(_peaks, options.ranks, options.layers, options.width)
    layer = 4 * options.width**2
    print(
        f"{options.layers} Linears of {layer / MIB:.0f} MiB, ZeRO-3, {options.ranks} ranks of "
        f"{bench_device().type}\n"
        f"{'peak above what is held':<24}{'counted':>12}{'layers':>8}{'predicted':>14}"
    )
    for rows in zip(*results, strict=True):
        name = rows[0][0]
        most = max(n for _, n, _ in rows)
        predicted = max((p for _, _, p in rows if p is not None), default=None)
        text = "" if predicted is None else f"{predicted / MIB:>10.1f} MiB"
        print(f"{name:<24}{most / MIB:>8.1f} MiB{most / layer:>8.2f}{text}")
    return 0
