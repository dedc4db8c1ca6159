"""A bench of moves: the host's cost of each move, and of a ZeRO-3 layer, by the number of ranks.

It runs on dry meshes with meta tensors, so that only planning, capture and passes are measured, and
no copies or other ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import partita as pt
from partita.app.models.llama import Llama
from partita.layout import Layout, Mesh, Partial, Placement, Replicate, Shard
from partita.parallel.zero import zero

_R, _P = Replicate(), Partial()
_S = [Shard(0), Shard(1), Shard(2)]
_MOVES = [
    *((_S[0], _R), (_S[1], _R), (_P, _S[0]), (_P, _S[1]), (_P, _R), (_R, _S[0]), (_R, _S[1])),
    *((_S[0], _P), (_S[1], _P), (_R, _P), (_S[0], _S[1]), (_S[1], _S[0]), (_S[1], _S[2])),
]
_COLUMNS = {"eager": (1e6, "us"), "first": (1e6, "us"), "capture": (1e3, "ms")}


def moves(options: argparse.Namespace) -> dict[str, Any]:
    """Prints and returns the host's cost of moves by the number of ranks: graph nodes and seconds.

    Three times are measured for a move: for the first eager one (which is planned), for a later
    one, and for its capture with all passes. A layer of a model is captured, too. Each time is the
    least of `--times` runs, and meshes of all sizes take turns.

    Returns:
        For each move, by the number of ranks, the figures "eager", "first" and "capture" (seconds)
        and "nodes".
    """
    sizes = options.mesh_sizes
    torch.set_num_threads(1)
    found: dict[str, dict[int, dict[str, float]]] = {}
    cases: dict[str, Callable[[int], dict[str, float]]] = {}
    for length, said in ((8192, "even"), (8191, "uneven")):
        for before, after in _MOVES:
            name = f"{before} -> {after}, {said}"
            cases[name] = lambda n, c=(before, after, length): _of_move(n, *c)  # type: ignore[misc]
    if options.layer_width:
        cases["ZeRO-3 Llama layer"] = lambda n: _of_layer(n, options.layer_width)
    print(f"\n{'':<28}{'':<9}" + "".join(f"{n:>10}" for n in sizes) + f"{'ratio':>8}")
    for name, case in cases.items():
        case(2)  # warm-up: imports and compilation do not count
        runs = [{n: case(n) for n in sizes} for _ in range(max(1, options.times))]
        found[name] = {n: _least([run[n] for run in runs]) for n in sizes}
        _print(name, found[name], sizes)
    _print_most(found, sizes)
    return found


def _least(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {what: min(run[what] for run in runs) for what in runs[0]}


def _print(name: str, by_size: dict[int, dict[str, float]], sizes: Sequence[int]) -> None:
    few, many = by_size[min(sizes)], by_size[max(sizes)]
    for what in few:
        scale, unit = _COLUMNS.get(what, (1, ""))
        cells = "".join(f"{by_size[n][what] * scale:>10.0f}" for n in sizes)
        print(f"{name:<28}{what:<8}{cells} {unit:<3}{many[what] / few[what]:>6.2f}", flush=True)
        name = ""


def _print_most(found: dict[str, dict[int, dict[str, float]]], sizes: Sequence[int]) -> None:
    few, many = min(sizes), max(sizes)
    said = []
    for what in ("nodes", *_COLUMNS):
        ratios = [by[many][what] / by[few][what] for by in found.values() if what in by[few]]
        said.append(f"{what} {max(ratios):.2f} (median {statistics.median(ratios):.2f})")
    print(f"{many} ranks over {few}, at most: {', '.join(said)}")


def _of_move(ranks: int, before: Placement, after: Placement, length: int) -> dict[str, float]:
    mesh = pt.dry_mesh(ranks=ranks)
    shape = torch.Size((length, length, length))
    line = Mesh(("ranks",), (ranks,))
    local = Layout.of(line, shape, [before]).local_shape(line, (0,))
    stride = (length * length, length, 1)
    x = pt.DTensor.from_local(
        torch.empty(local, device="meta"), mesh, [before], shape=shape, stride=stride
    )

    def moved(x: Any) -> Any:
        return x.redistribute(placements=[after])

    step = pt.compile(moved, backend="graph")
    first = _seconds(lambda: moved(x))
    eager = min(_seconds(lambda: moved(x)) for _ in range(20))
    capture = _seconds(lambda: step(x))
    nodes = len(step.graph.nodes)
    return {"nodes": nodes, "eager": eager, "first": first, "capture": capture}


def _of_layer(ranks: int, width: int) -> dict[str, float]:
    mesh = pt.dry_mesh(dp=ranks)
    with torch.device("meta"):
        model = Llama(
            layers=1,
            width=width,
            heads=width // 128,
            groups=width // 1024,
            context=128,
            vocab=8192,
            hidden=7 * width // 2,  # as Llama 3 of 70 billion parameters has it
        )
        tokens = [torch.empty(1, 128, dtype=torch.int64) for _ in range(2)]
    zero(model, mesh, stage=3)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = [pt.DTensor.from_local(t, mesh, [Shard(0)]) for t in tokens]

    def train(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss

    step = pt.compile(train, backend="graph")
    capture = _seconds(lambda: step(*batch))
    return {"nodes": len(step.graph.nodes), "capture": capture}


def _seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line options of the bench `moves` to a parser."""
    parser.add_argument(
        "--mesh-sizes",
        type=int,
        nargs="+",
        default=[8, 64, 512, 4096],
        help="`moves`: numbers of ranks",
    )
    parser.add_argument(
        "--layer-width", type=int, default=8192, help="`moves`: width of the Llama; 0 leaves it out"
    )
