"""`partita plan`: the way to spread a named model that fits and is fastest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from partita.layout import LayoutError

from .autoplan import MOST, autoplan
from .simulate_command import add_model, machine_of, strategy_of

__all__ = ["add_plan", "run_plan"]


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of `partita plan`."""
    parser.description = (
        "Show the best five ways to spread a model: meshes, stages of ZeRO, tensor and sequence "
        "parallelism, remat and micro-batches, by simulation. All that is shown fits."
    )
    add_model(parser)
    parser.add_argument("--ranks", type=int, required=True, help="all of them")
    parser.add_argument("--memory", help="of a rank: 80GB, 64GiB (the machine's)")
    parser.add_argument("--batch", type=int, help="sequences of a step, all ranks (one a rank)")
    parser.add_argument(
        "--most",
        type=int,
        default=MOST,
        help=f"ways that are simulated: more find more, a few seconds each ({MOST})",
    )


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Within, what is simulated next is shown on standard error: as a bar on a terminal where rich
    is installed, else a line for each."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        is_bar = False
    else:
        is_bar = sys.stderr.isatty()
    if not is_bar:
        yield lambda done, most, said: print(f"{done}/{most} {said}", file=sys.stderr, flush=True)
        return
    columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, most, said: bar.update(
            task, completed=done, total=most, description=said
        )


def run_plan(options: argparse.Namespace) -> int:
    """Print the plan; the exit code is 2 where there is none."""
    try:
        if options.memory is not None and options.memory.strip().isdecimal():
            raise ValueError(
                f"--memory {options.memory} is without a unit: write {options.memory}GB or "
                f"{options.memory}GiB"
            )
        given = argparse.Namespace(**{k: v for k, v in vars(options).items() if k != "batch"})
        with _progress() as watch:
            found = autoplan(
                options.model,
                options.ranks,
                options.memory,
                machine_of(options),
                batch=options.batch,
                strategy=strategy_of(given),
                most=options.most,
                watch=watch,
            )
    except (ValueError, LayoutError, OSError) as error:
        print(f"partita plan: {error}", file=sys.stderr)
        return 2
    print(found)
    return 0
