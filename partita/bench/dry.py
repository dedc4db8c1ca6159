"""A bench of dry captures: a step is planned for thousands of ranks on one core.

The model is a Llama on the "meta" device, and the mesh is dry: tensors have no memory, and there
are no other ranks.
"""

from __future__ import annotations

import argparse
import math
import resource
import time

import torch
from torch.nn import functional as F

import partita as pt
from partita.app.models.llama import Llama
from partita.parallel.plans import llama


def dry(options: argparse.Namespace) -> dict[str, float]:
    """Plans a first step for thousands of ranks, on meta tensors. Prints and returns the cost.

    Returns:
        "capture and passes" and "memory schedule": their CPU seconds. "GiB": the most memory that
        this process has used. "nodes": the nodes of the graph. "predicted peak, GiB": the peak
        memory of a rank in the step.
    """
    torch.set_num_threads(1)
    dp, tp = options.dry_mesh
    mesh = pt.dry_mesh(dp=dp, tp=tp, device_type="meta")
    with torch.device("meta"):
        model = Llama(
            layers=options.dry_blocks,
            width=options.dry_width,
            heads=options.dry_width // 128,
            groups=max(1, options.dry_width // 1024),
            context=4096,
        )
        tokens = torch.zeros(dp, 4096, dtype=torch.long)
    pt.zero(pt.parallelize(model, mesh, llama()), mesh, stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        return loss

    compiled = pt.compile(step, backend="graph")
    x = pt.distribute_tensor(tokens, mesh, [pt.Shard(0), pt.Replicate()])
    start = time.process_time()
    compiled(x)
    captured = time.process_time()
    peak = compiled.memory.peak
    end = time.process_time()
    parameters = sum(math.prod(p.shape) for p in model.parameters())
    found = {
        "capture and passes": captured - start,
        "memory schedule": end - captured,
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "nodes": float(len(compiled.program.graph.graph.nodes)),
        "predicted peak, GiB": peak / 2**30,
    }
    print(
        f"\n{options.dry_blocks} blocks of width {options.dry_width} ({parameters / 1e9:.1f} "
        f"billion parameters) on {dp} x {tp} ranks, ZeRO-3, AdamW: seconds of CPU, one thread"
    )
    for name, value in found.items():
        print(f"{name:<22}{value:>12.2f}", flush=True)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line options of the bench `dry` to a parser."""
    parser.add_argument("--dry-blocks", type=int, default=80, help="`dry`: number of blocks")
    parser.add_argument("--dry-width", type=int, default=8192, help="`dry`: width of the model")
    parser.add_argument(
        "--dry-mesh",
        type=int,
        nargs=2,
        default=[1024, 8],
        metavar=("DP", "TP"),
        help="`dry`: the mesh",
    )
