"""A bench of compiled steps: their cost relative to compute without communication, and to rivals.

    train    a GPT on 2 and 4 Gloo ranks: each rank alone, DDP and FSDP2, ZeRO-3 and data parallel
             by partita, all of them eager and compiled, and SimpleFSDP (a parametrization that
             gathers), compiled; all in turn in one run. Rivals are compiled as their users do it:
             FSDP2 block by block, with its loss, and the others in one piece
    small    D=64, two layers, ZeRO-3 relative to one process that trains on the full batch
    tiny     4 blocks of d=16 on a fake group: the cost of a step with little to compute; called
             once in its turn, and ten times in a row
    guards   the share of a call that checks the Python state that the step read (and also tensors
             and arguments): a tiny GPT and a Llama of 24 layers, d=256, compiled
    start    the time until 4 ranks have made their first step, with a cold store and a warm one
    depth    the time of capture and passes for 4, 16 and 48 blocks (`--blocks`); with `--cold`
             also Inductor's
    dry      the time to plan 80 blocks of width 8192 for 1,024 x 8 ranks on one core
    moves    the cost of each move and of a ZeRO-3 layer of a Llama on the host, in nodes and time,
             on dry meshes of 8 to 4,096 ranks (`--mesh-sizes`), and the ratio

`partita bench memory` measures the memory of a compiled step.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import partita as pt
from partita.app.models.llama import Llama
from partita.parallel.zero import zero
from partita.report import written_file

from . import depth as bench_depth
from . import dry as bench_dry
from . import moves as bench_moves
from .interleaved import Step, in_turns, measure, on_ranks, readme_row, table
from .place import bench_device, make_dp_mesh, make_rival_mesh
from .rivals import make_rival, training
from .zero import Shape, choose_ways, measure_ways, sharded_step

SMALL = Shape(layers=2, width=64)
TINY = Shape(width=16, context=16, batch=2)


TRAIN_WAYS = (
    *("alone", "alone compiled", "DDP", "DDP compiled", "partita dp", "partita dp compiled"),
    *("FSDP2", "FSDP2 compiled", "SimpleFSDP compiled"),
    *("partita zero 3", "partita zero 3 compiled"),
)


_README_ROWS = {
    "a GPT step over the compute alone": {
        "DDP": "DDP",
        "partita dp": "partita's data parallel",
        "FSDP2": "FSDP2",
        "partita zero 3": "partita's ZeRO-3",
    },
    "the same, compiled, over the eager compute alone": {
        "alone compiled": "alone",
        "DDP compiled": "DDP",
        "partita dp compiled": "partita's data parallel",
        "FSDP2 compiled": "FSDP2",
        "SimpleFSDP compiled": "SimpleFSDP",
        "partita zero 3 compiled": "partita's ZeRO-3",
    },
}
"""What the README says of `train`: a way's name there, and here."""


def _small_rivals(names: Sequence[str], rank: int, ranks: int) -> dict[str, Step]:
    """Returns the rivals' steps: one process on all rows, or each rank on its own rows."""
    base, mesh = SMALL.model(), make_rival_mesh(ranks)
    mine, all_rows = SMALL.tokens_of(rank, ranks), list(SMALL.tokens(ranks))
    found: dict[str, Step] = {}
    for name in names:
        alone = name.startswith("one process")
        kind = name.replace("one process", "alone")
        if alone and rank:
            found[name] = lambda: None
        else:
            found[name] = make_rival(kind, copy.deepcopy(base), all_rows if alone else mine, mesh)
    return found


def _small_ours(rank: int, ranks: int) -> dict[str, Step]:
    base, mesh = SMALL.model(), make_dp_mesh(ranks)
    mine, (x, y) = SMALL.tokens_of(rank, ranks), SMALL.tokens(ranks)
    alone = pt.compile(training(copy.deepcopy(base)))
    return {
        "one process, pt.compile": (lambda: alone(x, y)) if rank == 0 else lambda: None,
        "partita zero 3": sharded_step(copy.deepcopy(base), mine, mesh, 3),
        "partita zero 3 compiled": sharded_step(copy.deepcopy(base), mine, mesh, 3, pt.compile),
    }


def _train(options: argparse.Namespace) -> dict[str, Any]:
    shape, ways = Shape(), choose_ways(TRAIN_WAYS, options.only)
    found = {}
    for ranks in options.ranks:
        found[str(ranks)] = measure_ways(ways, ranks, options.rounds, shape, warm=3)
        print(f"\n{shape}, AdamW, {ranks} ranks of {bench_device().type}, {options.rounds} rounds")
        print(table(found[str(ranks)], "alone"), flush=True)
    if len(ways) == len(TRAIN_WAYS):
        print()
        for ranks in options.ranks:
            for what, rows in _README_ROWS.items():
                row = readme_row(f"{what}, {ranks} ranks", rows, found[str(ranks)], "alone")
                print(row, flush=True)
    return found


def _small(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for ranks in options.ranks:
        teams = ("one process", "FSDP2"), ("one process compiled",), ("FSDP2 compiled",)
        makes: list[Any] = [*(partial(_small_rivals, names) for names in teams), _small_ours]
        found[str(ranks)] = measure(makes, ranks, 4 * options.rounds, warm=3)
        print(
            f"\n{SMALL}, AdamW, {ranks} ranks of {bench_device().type}; "
            "one process trains on all rows"
        )
        print(table(found[str(ranks)], "one process"), flush=True)
    return found


_IN_A_ROW = 10
"""Calls of a tiny step that follow each other in one turn."""


def _tiny(options: argparse.Namespace) -> dict[str, Any]:
    """Measures tiny steps on a group that sends nothing: the fixed cost of a step."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = make_dp_mesh(2)
    base = TINY.model()
    x, y = TINY.tokens(1)
    rows = [pt.DTensor.from_local(t, mesh, [pt.Shard(0)]) for t in (x, y)]
    plain = training(copy.deepcopy(base))

    def spread(stage: int, how: Callable[..., Any] = lambda step: step) -> Step:
        step = how(training(zero(copy.deepcopy(base), mesh, stage=stage)))
        return lambda: step(*rows)

    steps = {
        "plain PyTorch": lambda: plain(x, y),
        "torch.compile": make_rival("alone compiled", copy.deepcopy(base), [x, y], None),
        "partita dp": spread(0),
        "partita dp compiled": spread(0, pt.compile),
        "partita zero 3": spread(3),
        "partita zero 3 compiled": spread(3, pt.compile),
        "partita zero 3 as a graph": spread(3, lambda step: pt.compile(step, backend="graph")),
    }
    found = {}
    for calls, said in (
        (1, "each called once in its turn"),
        (_IN_A_ROW, "as a training loop does"),
    ):
        found[said] = in_turns(steps, 10 * options.rounds, 3, calls=calls)
        print(f"\n{TINY}, AdamW, a fake group of 2; {said}: {calls} in a row")
        print(table(found[said], "plain PyTorch"), flush=True)
    dist.destroy_process_group()
    return found


def _guards(options: argparse.Namespace) -> dict[str, Any]:
    """Measures `Guards.hold`, and all checks of a call, beside whole calls."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    llama = Shape(layers=24, width=256)
    models = {"tiny": (TINY, TINY.model), "llama": (llama, lambda: _llama(llama))}
    print(f"\n{'':<8}{'backend':<10}{'guards':>8}{'check':>11}{'call':>12}{'share':>8}{'all':>11}")
    for name, (shape, model) in models.items():
        for backend in options.backends:
            step = pt.compile(training(model()), backend=backend)
            found[f"{name} {backend}"] = one = _share(step, tuple(shape.tokens(1)), options.rounds)
            print(
                f"{name:<8}{backend:<10}{one['guards']:>8}{one['check'] * 1e6:>8.0f} us"
                f"{one['call'] * 1e3:>9.2f} ms{one['check'] / one['call']:>8.2%}"
                f"{one['all'] * 1e6:>8.0f} us",
                flush=True,
            )
    return found


def _llama(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    return Llama(
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        groups=shape.heads // 2,
        context=shape.context,
    )


def _share(step: Any, batch: Any, rounds: int) -> dict[str, float]:
    """Returns the seconds of a call of a step, and of what is checked before it."""
    for _ in range(3):
        step(*batch)
    guards, call = step.program.guards, step.call_guard
    return {
        "guards": len(guards),
        "check": _median(lambda: guards.hold((), ((), {}), are_the_same=True), 20 * rounds),
        "call": _median(lambda: step(*batch), rounds),
        "all": _median(lambda: call.tensors(batch, {}), 20 * rounds),
    }


def _median(run: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _first_step(rank: int, ranks: int, cache: str) -> tuple[float, str]:
    """Returns the seconds of a rank's first step, and how its code was compiled or loaded."""
    os.environ |= {"PARTITA_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor{rank}"}
    mesh = make_dp_mesh(ranks)
    step = pt.compile(training(zero(Shape().model(), mesh, stage=3)))
    rows = [pt.distribute_tensor(t, mesh, [pt.Shard(0)]) for t in Shape().tokens(ranks)]
    start = time.perf_counter()
    step(*rows)
    return time.perf_counter() - start, str(step.artifact)


def _start(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        print(
            f"\n{Shape()}, ZeRO-3, 4 ranks of {bench_device().type}: until the first step is made"
        )
        for run in ("cold store", "warm store"):
            shutil.rmtree(f"{cache}/inductor0", ignore_errors=True)  # only the store stays
            found[run] = on_ranks(_first_step, 4, cache)
            for rank, (seconds, how) in enumerate(found[run]):
                print(f"{run:<12} rank {rank} {seconds:>8.1f} s   {how}", flush=True)
    return found


PARTS = {
    "train": _train,
    "small": _small,
    "tiny": _tiny,
    "guards": _guards,
    "start": _start,
    "depth": bench_depth.depth,
    "dry": bench_dry.dry,
    "moves": bench_moves.moves,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="partita bench compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(PARTS)} (all)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", nargs="+", default=(), help="`train`: run only these ways, and `alone`"
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["inductor"],
        help="`guards`: backends to measure: inductor, graph",
    )
    bench_depth.add_options(parser)
    bench_dry.add_options(parser)
    bench_moves.add_options(parser)
    parser.add_argument("--json", type=written_file, metavar="FILE")
    options = parser.parse_args(argv)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"the parts are {', '.join(PARTS)}, not {', '.join(unknown)}")
    wanted = options.parts or list(PARTS)
    found = {name: part(options) for name, part in PARTS.items() if name in wanted}
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
