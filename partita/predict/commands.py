"""Commands of predictions: `partita explain`, `simulate`, `plan` and `calibrate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from partita.comm import dry_mesh
from partita.layout import LayoutError
from partita.report import check_outputs, check_plotly

from .autoplan import MOST, autoplan
from .calibrate import calibrate, machine_toml
from .call_text import describe_raised, read_call, read_mesh
from .explain import explain
from .machine import Machine, load_machine, read_link, shipped_machines
from .simulate import simulate, with_links
from .strategy import MODELS, Strategy

__all__ = [
    "add_calibrate",
    "add_explain",
    "add_model",
    "add_plan",
    "add_simulate",
    "machine_of",
    "run_calibrate",
    "run_explain",
    "run_plan",
    "run_simulate",
    "strategy_of",
]

# -- explain ---------------------------------------------------------------------------------------


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the options of `partita explain`."""
    parser.description = (
        "Show how a call on DTensors is run: its rule, the ways that were priced, what moves. "
        "Nothing is computed and nothing sent."
    )
    parser.add_argument(
        "call", help='"F.linear(f32[8@dp, 16], f32[32@tp, 16])", "torch.sum", "my_module:function"'
    )
    parser.add_argument("--mesh", required=True, help="the ranks of each axis: dp=2,tp=4")
    parser.add_argument("--args", default="", help="the arguments, where CALL has none")
    parser.add_argument("--rank", type=int, default=0, help="which rank to be (0)")


def run_explain(options: argparse.Namespace) -> int:
    """Print the explanation; the exit code is 2 where the call cannot be read or made."""
    try:
        mesh = dry_mesh(options.rank, **read_mesh(options.mesh))  # type: ignore[arg-type]
        fn, args, kwargs = read_call(options.call, options.args, mesh)
        print(explain(fn, *args, **kwargs))
    except KeyboardInterrupt:
        raise
    except LayoutError as error:  # all its lines count: place, reason and fixes
        return _refuse("explain", error)
    except BaseException as error:  # the function may raise, and end, as it likes
        name, _, _ = options.call.partition("(")
        said = describe_raised(name.strip(), error, is_user_s=":" in name)
        return _refuse("explain", said)
    return 0


# -- simulate --------------------------------------------------------------------------------------


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the options of `partita simulate`."""
    parser.description = (
        "Show what a training step of a model would cost: time, bytes, memory. It is captured over "
        "tensors without memory and played as events; nothing is run."
    )
    add_model(parser)
    parser.add_argument("--mesh", required=True, help="the ranks of each axis: dp=64,tp=8")
    parser.add_argument("--zero", type=int, default=3, help="the stage of ZeRO over dp (3)")
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--remat", action=on_off, default=True, help="recompute blocks (yes)")
    parser.add_argument("--sequence", action=on_off, default=False, help="sequence parallel (no)")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank of dp, at once (1)")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step (1)")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline for ui.perfetto.dev")
    parser.add_argument("--report", metavar="FILE", help="write a page about it (needs plotly)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model and a machine."""
    parser.add_argument("--model", required=True, help=", ".join(MODELS))
    machines = ", ".join(shipped_machines())
    parser.add_argument("--machine", default="h100", help=f"{machines}, or a TOML file (h100)")
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="AXIS=LATENCY,BANDWIDTH",
        help="what an axis has in place of the machine's links: tp=2us,360GB/s (may be repeated)",
    )
    parser.add_argument("--context", type=int, help="tokens of a sequence (the model's)")
    parser.add_argument("--layers", type=int, help="blocks (the model's)")
    parser.add_argument("--precision", default="bfloat16", help="bfloat16 or float32 (bfloat16)")


def strategy_of(options: argparse.Namespace) -> Strategy:
    """The strategy that options say."""
    given = vars(options)
    return Strategy(**{f.name: given[f.name] for f in fields(Strategy) if f.name in given})


def machine_of(options: argparse.Namespace) -> Machine:
    """The machine that options say, with its links.

    Raises:
        MachineError: a machine that is not known, a wrong file or a wrong link.
    """
    found = load_machine(options.machine)
    given = dict(map(read_link, options.link))
    return with_links(found, given, ("dp", "tp")) if given else found


def run_simulate(options: argparse.Namespace) -> int:
    """Print the simulation; the exit code is 2 where there is none, 1 where it does not fit."""
    try:
        if options.report:
            check_plotly()
        # Before what may take a minute.
        check_outputs({"--trace": options.trace, "--report": options.report})
        mesh = dict(read_mesh(options.mesh))
        found = simulate(options.model, mesh, machine_of(options), strategy=strategy_of(options))
        print(found, flush=True)
        if options.trace:
            found.save_trace(options.trace)
        if options.report:
            found.report(options.report)
    except (ValueError, LayoutError, OSError) as error:
        return _refuse("simulate", error)
    return 0 if found.fits else 1


# -- plan ------------------------------------------------------------------------------------------


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
def _showing_progress() -> Iterator[Callable[[int, int, str], None]]:
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
        with _showing_progress() as watch:
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
        return _refuse("plan", error)
    print(found)
    return 0


# -- calibrate -------------------------------------------------------------------------------------


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the options of `partita calibrate`."""
    parser.description = (
        "Measure this machine, with so many ranks of one thread at work at once, and write a "
        "machine file for `partita simulate` and `partita plan`."
    )
    parser.add_argument("--ranks", type=int, default=2, help="that will run (2)")
    parser.add_argument("--out", type=Path, default=Path("machine.toml"), help="(machine.toml)")


def run_calibrate(options: argparse.Namespace) -> int:
    """Measure, write the file and print it; the exit code is 2 where that fails."""
    try:
        if options.ranks < 1:
            raise ValueError(f"--ranks {options.ranks}: at least 1")
        check_outputs({"--out": options.out})
        text = machine_toml(calibrate(options.ranks))
        options.out.write_text(text)
    except (ValueError, RuntimeError, OSError) as error:
        return _refuse("calibrate", error)
    print(text, end="")
    print(f"# written to {options.out}")
    return 0


def _refuse(command: str, reason: object) -> int:
    """Say why a command cannot be done; the exit code for that."""
    print(f"partita {command}: {reason}", file=sys.stderr)
    return 2
