"""What can be asked on the command line? `partita train`, `partita bench`, `partita doctor`."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from .train import Options, cores, is_rank, joined, launch, make_progress, train, verify

__all__ = ["BENCHES", "main"]

BENCHES = {
    "dispatch": "partita.report.bench_dispatch:main",
    "ops": "partita.report.bench_ops:main",
    "memory": "partita.report.bench_memory:main",
    "zero": "partita.report.bench_zero:main",
}
"""What `partita bench NAME` runs: "module:function", called with the remaining arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "train":
            return _train(options, argv)
        if options.command == "bench":
            return _bench(options.name, rest)
        return _doctor()
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partita", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands.add_parser("train", help="train a byte-level GPT on a mesh of ranks"))
    bench = commands.add_parser("bench", help="measure, and compare with torch")
    bench.add_argument("name", choices=sorted(BENCHES))
    commands.add_parser("doctor", help="show what this machine offers")
    return parser


# -- train ----------------------------------------------------------------------------------------


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a byte-level GPT on this machine's own text: Python's standard library, or any "
        "folder. Starts its ranks itself; under torchrun it joins the ranks that are there."
    )
    usual = Options()
    add = parser.add_argument
    add("--ranks", type=_positive, help="processes to start (the mesh's size; else 4)")
    add("--mesh", type=_mesh, metavar="dp=2,tp=2", help="dp splits the batch, tp the weights")
    add("--data", type=Path, metavar="PATH", help="a folder of text, or a file")
    add("--steps", type=_positive, help=f"optimizer steps ({usual.steps}; 20 with --verify)")
    add("--verify", action="store_true", help="compare the losses with those of one rank")
    for name, kind, what in (
        ("seed", int, "of weights, batches and sample"),
        ("batch", _positive, "sequences per step"),
        ("context", _positive, "bytes per sequence"),
        ("layers", _positive, "blocks"),
        ("width", _positive, "of the residual stream"),
        ("heads", _positive, "of attention, per block"),
        ("lr", float, "highest learning rate"),
        ("sample", int, "bytes of text to write at the end"),
    ):
        add(f"--{name}", type=kind, default=getattr(usual, name), help=f"{what} (%(default)s)")


def _train(asked: argparse.Namespace, argv: list[str]) -> int:
    try:
        mesh = _fit(asked.mesh, int(os.environ["WORLD_SIZE"]) if is_rank() else asked.ranks)
        options = Options(
            mesh=mesh,
            data=asked.data,
            steps=asked.steps or (20 if asked.verify else Options.steps),
            seed=asked.seed,
            batch=asked.batch,
            context=asked.context,
            layers=asked.layers,
            width=asked.width,
            heads=asked.heads,
            lr=asked.lr,
            sample=asked.sample,
        )
        options.check()
    except ValueError as error:
        print(f"partita train: {error}", file=sys.stderr)
        return 2
    progress = make_progress(
        steps=options.steps,
        tokens=options.batch * options.context,
        mesh=",".join(f"{name}={size}" for name, size in options.mesh) or "one rank",
    )
    try:
        if not is_rank():
            progress.say(f"starting {options.ranks} rank{'s' * (options.ranks > 1)}")
            return launch(argv, options.ranks, progress.show)
        with joined(progress.show) as me:
            if not asked.verify:
                train(options, me.tell)
                return 0
            return 0 if verify(options, me.tell, compare=me.rank == 0) else 1
    finally:
        progress.stop()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def _mesh(text: str) -> tuple[tuple[str, int], ...]:
    """`dp=2,tp=2` as (("dp", 2), ("tp", 2))."""
    axes = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("dp", "tp") or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is no axis: write dp=N, tp=N or dp=N,tp=N")
        axes.append((name, int(size)))
    if len({name for name, _ in axes}) < len(axes):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    return tuple(axes)


def _fit(mesh: tuple[tuple[str, int], ...] | None, ranks: int | None) -> tuple:
    """The mesh for so many ranks; one rank needs none."""
    if mesh is None:
        n = 4 if ranks is None else ranks
        mesh = (("dp", n // 2), ("tp", 2)) if n % 2 == 0 and n > 2 else (("dp", n),)
    size = math.prod(n for _, n in mesh)
    if ranks is not None and size != ranks:
        shape = ",".join(f"{name}={n}" for name, n in mesh)
        raise ValueError(f"--mesh {shape} has {size} ranks, but there are {ranks}")
    return mesh if size > 1 else ()


# -- bench ----------------------------------------------------------------------------------------


def _bench(name: str, arguments: list[str]) -> int:
    module, _, function = BENCHES[name].partition(":")
    return getattr(importlib.import_module(module), function)(arguments) or 0


# -- doctor ---------------------------------------------------------------------------------------


def _doctor() -> int:
    import torch
    import torch.distributed as dist  # noqa: TID251  asked what it has, not used

    backends = [b for b in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(b)]
    gpus = torch.cuda.device_count()
    rows = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(terse=True),
        "cores": f"{cores()} usable of {os.cpu_count()}",
        "backends": ", ".join(backends) or "none: torch was built without torch.distributed",
        "gpus": ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) or "none",
        "world": (
            f"rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']}"
            if "WORLD_SIZE" in os.environ
            else "none: `partita train` starts its own ranks"
        ),
    }
    for name, value in rows.items():
        print(f"{name:<10}{value}")
    return 0 if "gloo" in backends else 1
