"""The command line of partita.

`partita train | explain | simulate | plan | calibrate | report | bench | cache | doctor`
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

from .app import (
    Mesh,
    Options,
    count_cores,
    flag,
    is_launched,
    is_rank,
    joined,
    launch,
    make_logs,
    make_progress,
    options_in,
    read_positive,
    shown_mesh,
    train,
    verify,
)
from .comm import dry_mesh, own_lines_shown
from .comm.device import DEVICES, HOST, Device, accelerator_names, choose_device, explain_no_gpu
from .graph.backend.store import Entry, Store, default_store
from .graph.memory import Memory
from .layout import Fix, LayoutError
from .layout.text import escape_controls, format_table, human
from .predict.autoplan import MOST, autoplan
from .predict.calibrate import calibrate, machine_toml
from .predict.calibrate_gpu import calibrate_gpu
from .predict.explain import explain
from .predict.machine import Machine, MachineError, load_machine, read_link, shipped_machines
from .predict.rehearsal import describe_raised, eager_memory, read_call, read_mesh
from .predict.simulate import simulate, with_links
from .predict.strategy import MODELS, ModelShape, Strategy, make_step
from .predict.strategy import __file__ as strategy_file
from .predict.transformers_model import TASKS, shape_of_config
from .report import check_outputs, check_plotly, read_logs, write_report
from .versions import __version__, describe_torch

BENCHES = {
    name: f"partita.bench.{name}:main"
    for name in (
        *("dispatch", "ops", "compile", "memory", "zero", "checkpoint"),
        *("faults", "simulate", "published", "plan", "steps", "kernels"),
    )
}
"""Maps each NAME of `partita bench NAME` to its function, as "module:function". The function is
called with the remaining arguments.
"""
HOST_BENCHES = {
    "kernels": "it lowers for a chip that is not there",
    "faults": "it kills ranks of the processor",
    "ops": "it compares ranks of the processor with it alone",
    "published": "it measures nothing",
    "simulate": "`partita calibrate` measures the processor",
}
"""The benches that compute only on the CPU, and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    `argv` has the arguments after the program's name. None: the arguments of this process.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv, argparse.Namespace(argv=argv))
    try:
        code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="partita", description="A distributed tensor for PyTorch: train, predict, measure."
    )
    version_shown = f"partita {__version__}"
    parser.add_argument(
        "--version", action="version", version=version_shown, help="print it and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, help: str, run: Callable[..., int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.set_defaults(run=run)
        return command

    _add_train(add("train", "train a byte-level GPT on a mesh of ranks", run_train))
    _add_explain(add("explain", "show how a call would run: what is sent, and why", run_explain))
    _add_simulate(add("simulate", "predict what a step costs on another machine", run_simulate))
    _add_plan(add("plan", "find the fastest way to train a model on some ranks", run_plan))
    _add_calibrate(
        add("calibrate", "measure this machine, and write a machine file", run_calibrate)
    )
    report = add("report", "write a page about runs, from their --log files", run_report)
    report.add_argument("logs", nargs="+", type=Path, help="files that `partita train --log` wrote")
    report.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the page (report.html)"
    )
    bench = add("bench", "measure speed and memory, and compare with torch", run_bench)
    bench.add_argument(
        "--device", default=HOST.type, help="the device of the ranks: cpu (default), cuda or auto"
    )
    bench.add_argument("name", choices=sorted(BENCHES))
    each = "options of the bench: partita bench NAME --help shows them"
    bench.add_argument("options", nargs=argparse.REMAINDER, help=each)
    kept = add("cache", "list, verify or delete stored compiled programs", run_cache)
    actions = "; ".join(f"{name}: {what}" for name, what in _ACTIONS.items())
    kept.add_argument("action", choices=_ACTIONS, help=actions)
    add("doctor", "show what this machine has, and what is missing", run_doctor)
    return parser


def _refuse(command: str, reason: object) -> int:
    """Prints why a command is impossible. Returns its exit code."""
    _print_error(f"partita {command}: {reason}")
    return 2


def _print_error(text: str) -> None:
    """Prints lines on standard error. Control characters, as in file names, are escaped."""
    print("\n".join(map(escape_controls, text.split("\n"))), file=sys.stderr)


# -- train ----------------------------------------------------------------------------------------


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a byte-level GPT on text of this machine: Python's standard library, or any folder. "
        "Starts its ranks itself. Under torchrun it is one of torchrun's ranks."
    )
    add = parser.add_argument
    add(
        "--ranks",
        type=_argument(read_positive),
        metavar="N",
        help="number of processes to start (as --mesh; or one for each GPU; or 4)",
    )
    add(
        "--tp",
        type=_argument(read_positive),
        metavar="N",
        help="number of ranks over which the weights are split",
    )
    add(
        "--verify", action="store_true", help="train 20 steps, and compare the losses with one rank"
    )
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="read options from a TOML file; flags override it",
    )
    add("--print-config", action="store_true", help="print the options as such a file and exit")
    for option in fields(Options):
        facts = option.metadata
        usual = option.default if facts["show"] is None else facts["show"](option.default)
        # Omitted options are suppressed, so that a config file can set them.
        given: dict[str, Any] = {"default": argparse.SUPPRESS, "help": facts["what"]}
        if isinstance(option.default, bool):
            given |= {"action": argparse.BooleanOptionalAction}
        else:
            given |= {"type": _argument(facts["read"])}
            name = "N" if isinstance(option.default, int) else option.name.upper()
            given |= {"metavar": facts["metavar"] or name}
            if option.default not in (None, ()):
                given["help"] += f" ({usual})"
        if facts["alone"] is not None:
            given |= {"nargs": "?", "const": facts["alone"]}
        add(f"--{flag(option.name)}", **given)


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wraps `read` for argparse: a ValueError becomes argparse's own error, which is shown."""

    def argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument


def run_train(arguments: argparse.Namespace) -> int:
    """Runs `partita train` with the parsed `arguments`, and returns its exit code.

    In a process that a launcher started, this trains as one rank. Otherwise it starts the ranks.
    Invalid options return 2. `--print-config` only prints the options.
    """
    try:
        options = _options(arguments)
        if arguments.print_config:
            print(options.to_toml(), end="")
            return 0
        options.check()
        least_seconds = _least_seconds_of_step(options)
        progress = make_progress(
            steps=options.steps,
            tokens=options.batch * options.context,
            mesh=shown_mesh(options.mesh) or "one rank",
            least_seconds=least_seconds,
        )
        logs = make_logs(options, progress.show, least_seconds)
    except (ValueError, OSError) as error:
        return _refuse("train", error)
    try:
        if not is_launched():  # the parent has printed these lines
            for line in options.leave_out_idle()[1]:
                progress.say(line)
        if not is_rank():
            progress.say(f"starting {options.ranks} rank{'s' * (options.ranks > 1)}")
            code = launch(arguments.argv, options.ranks, logs.show)
            logs.end()
            return code or (0 if logs.complete else 1)
        with joined(logs.show) as me:
            if not arguments.verify:
                train(options, me.emit)
                return 0
            return 0 if verify(options, me.emit, compare=me.rank == 0) else 1
    finally:
        progress.stop()
        logs.end()


def _least_seconds_of_step(options: Options) -> float | None:
    """Returns the seconds of a step at the peak of all ranks; None without a machine.

    Raises:
        MachineError: an unknown machine, or an invalid file.
    """
    if options.machine is None:
        return None
    dtype = "bfloat16" if options.dtype == "bf16" else "float32"
    return options.flops_of_step / (load_machine(options.machine).peak_flops(dtype) * options.ranks)


def _options(arguments: argparse.Namespace) -> Options:
    """Returns the options: those of the command line, then of the config file, then defaults.

    Raises:
        ValueError: an unknown option, or options that exclude each other.
        OSError: the config file cannot be read.
    """
    found: dict[str, Any] = {}
    if arguments.config is not None:
        found = options_in(arguments.config.read_text(), str(arguments.config))
    given = vars(arguments)
    found |= {o.name: given[o.name] for o in fields(Options) if o.name in given}
    ranks, mesh = arguments.ranks, found.get("mesh")
    if "mesh" not in given and (ranks, arguments.tp) != (None, None):
        # The options override the file's mesh. With --tp alone, its number of ranks stays.
        if ranks is None and mesh is not None:
            ranks = math.prod(size for _, size in mesh)
        mesh = None
    if is_rank():
        ranks = int(os.environ["WORLD_SIZE"])
    elif mesh is None and ranks is None:
        gpus = 0 if found.get("device") == HOST.type else len(accelerator_names())
        ranks = max(gpus or 4, arguments.tp or 1)
    found["mesh"] = _fit(mesh, ranks, arguments.tp)
    if arguments.verify:
        if found.get("dtype", "fp32") != "fp32" or found.get("save") is not None:
            raise ValueError("--verify compares losses in fp32, and saves nothing")
        found.setdefault("steps", 20)
    return Options(**found)


def _fit(mesh: Mesh | None, ranks: int | None, tp: int | None) -> Mesh:
    """Returns the mesh axes for `ranks` ranks, with `tp` ranks along axis "tp"; () for one rank."""
    if mesh is None:
        n = ranks or 1
        tp = tp or (2 if n % 2 == 0 and n > 2 else 1)
        if n % tp:
            raise ValueError(f"--tp {tp} does not divide {n} ranks")
        mesh = tuple((name, size) for name, size in (("dp", n // tp), ("tp", tp)) if size > 1)
    size = math.prod(n for _, n in mesh)
    if ranks is not None and size != ranks:
        raise ValueError(f"--mesh {shown_mesh(mesh)} has {size} ranks, but there are {ranks}")
    if tp is not None and dict(mesh).get("tp", 1) != tp:
        raise ValueError(f"--mesh {shown_mesh(mesh)} contradicts --tp {tp}")
    return mesh if size > 1 else ()


# -- report ---------------------------------------------------------------------------------------


def run_report(options: argparse.Namespace) -> int:
    """Runs `partita report` with the parsed `options`: writes the HTML page about training logs.

    Returns the exit code: 2 if this fails.
    """
    out, logs = options.out, options.logs
    try:
        check_plotly()
        check_outputs({"--out": out}, logs)
        runs = read_logs(logs)
        write_report(out, *runs)
    except (ValueError, OSError) as error:
        return _refuse("report", error)
    for note in (note for run in runs for note in run.notes):
        _print_error(f"partita report: {note}")
    print(out)
    return 0


# -- bench ----------------------------------------------------------------------------------------


def run_bench(options: argparse.Namespace) -> int:
    """Runs `partita bench NAME` with the parsed `options`: one benchmark on the requested device.

    Returns the benchmark's exit code; 2 if it cannot run on the device.
    """
    from partita.bench.place import DEVICE_VARIABLE

    name, device = options.name, options.device
    try:
        chosen = choose_device(device)
        if name in HOST_BENCHES and not chosen.is_host:
            if device == chosen.type:
                why = HOST_BENCHES[name]
                raise ValueError(f"--device {device}: {name} cannot run there, {why}")
            chosen = Device(HOST.type)
        os.environ[DEVICE_VARIABLE] = chosen.type
    except ValueError as error:
        return _refuse("bench", error)
    module, _, function = BENCHES[name].partition(":")
    return getattr(importlib.import_module(module), function)(options.options) or 0


# -- doctor ---------------------------------------------------------------------------------------

_USES = {
    "rich": "the progress bar of `partita train`",
    "safetensors": "weights in this format",
    "plotly": "reports",
}
"""Maps each optional package to its use."""


def _describe_package(name: str, use: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"none: for {use}: pip install {name}"


def run_doctor(options: argparse.Namespace) -> int:
    """Runs `partita doctor` with the parsed `options`: prints what this machine supports.

    Returns the exit code: 1 if torch has no Gloo.
    """
    from .comm.backends import can_compare, installed_backends
    from .tensor.plan import IN_C

    backends = installed_backends()
    compiler = os.environ.get("CXX", "g++")
    rows = {
        "partita": f"{__version__}, {Path(__file__).parent}",
        "python": platform.python_version(),
        "torch": describe_torch(),
        "system": platform.platform(terse=True),
        "cores": f"{count_cores()} usable of {os.cpu_count()}",
        "backends": ", ".join(backends) or "none: torch was built without torch.distributed",
        "gpus": ", ".join(accelerator_names()) or f"none: {explain_no_gpu()}",
        "dispatch": "in C" if IN_C else "in Python, which is slower: the part in C is not built",
        "compiler": shutil.which(compiler)
        or f"none: no {compiler}, with which pt.compile makes its kernels on CPUs",
        **{name: _describe_package(name, use) for name, use in _USES.items()},
        "world": (
            f"rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']}"
            if "WORLD_SIZE" in os.environ
            else "none: `partita train` starts its own ranks"
        ),
    }
    for name, value in rows.items():
        print(f"{name:<12}{value}")
    return 0 if can_compare() else 1


# -- explain ---------------------------------------------------------------------------------------


def _add_explain(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `partita explain`."""
    parser.description = (
        "Show how a call on DTensors would run: its rule, the moves of data, and the alternatives "
        "with their prices. Nothing is computed and nothing is sent."
    )
    parser.add_argument(
        "call", help='"F.linear(f32[8@dp, 16], f32[32@tp, 16])", "torch.sum", "my_module:function"'
    )
    parser.add_argument("--mesh", required=True, help="the ranks of each axis: dp=2,tp=4")
    parser.add_argument("--args", default="", help="the arguments, if CALL has none")
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        help="the rank that the function sees (0); figures are those of the first rank",
    )


_NO_AXES = {name for name, p in signature(dry_mesh).parameters.items() if p.kind != p.VAR_KEYWORD}


def run_explain(options: argparse.Namespace) -> int:
    """Runs `partita explain` with the parsed `options`: prints how one call of an op would run.

    Returns the exit code: 2 if it fails.
    """
    try:
        axes = read_mesh(options.mesh)
        if taken := _NO_AXES & axes.keys():
            raise LayoutError(
                f"no axis is called {min(taken)!r} here",
                reason=f"a dry mesh has options of these names: {', '.join(sorted(_NO_AXES))}",
                fixes=(Fix("--mesh dp=2,tp=4"),),
            )
        mesh = dry_mesh(options.rank, **axes)  # type: ignore[arg-type]
        fn, args, kwargs = read_call(options.call, options.args, mesh)
        print(explain(fn, *args, **kwargs))
    except KeyboardInterrupt:
        raise
    except LayoutError as error:  # all its lines count: place, reason and fixes
        return _refuse("explain", error)
    except BaseException as error:  # the user's function may raise anything, even SystemExit
        name, _, _ = options.call.partition("(")
        said = describe_raised(name.strip(), error, is_user_s=":" in name)
        return _refuse("explain", said)
    return 0


# -- simulate --------------------------------------------------------------------------------------


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `partita simulate`."""
    parser.description = (
        "Predict what a training step of a model would cost on a machine: time, bytes, memory. "
        "Nothing is trained. The exit code is 1 if the step does not fit in the memory."
    )
    _add_model(parser)
    parser.add_argument("--mesh", required=True, help="the ranks of each axis: dp=64,tp=8")
    # Omitted options keep the strategy's defaults, and passed ones without effect are reported.
    left_out: Any = argparse.SUPPRESS
    parser.add_argument("--zero", type=int, default=left_out, help="the stage of ZeRO over dp (3)")
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--remat", action=on_off, default=left_out, help="recompute blocks (yes)")
    parser.add_argument(
        "--sequence", action=on_off, default=left_out, help="sequence parallelism (no)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        help="sequences per step on all ranks (1 per micro-batch and rank of dp)",
    )
    parser.add_argument(
        "--micro-batches", type=int, default=left_out, help="micro-batches per step (1)"
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="also predict the memory of the eager step: 3 s per block",
    )
    parser.add_argument("--trace", metavar="FILE", help="write the timeline for ui.perfetto.dev")
    parser.add_argument("--report", metavar="FILE", help="write a page about it (needs plotly)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a model and a machine."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help=", ".join(MODELS))
    which.add_argument("--hf", metavar="PATH", help="config.json of a model of transformers")
    parser.add_argument("--task", choices=TASKS, help=f"of the model of --hf ({TASKS[0]})")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of --hf alone")
    machines = ", ".join(shipped_machines())
    parser.add_argument("--machine", default="h100", help=f"{machines}, or a TOML file (h100)")
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="AXIS=LATENCY,BANDWIDTH",
        help="links of one axis, instead of the machine's: tp=2us,360GB/s (may be repeated)",
    )
    parser.add_argument("--context", type=int, help="tokens per sequence (as in the model)")
    parser.add_argument("--layers", type=int, help="number of blocks (as in the model)")
    kinds = "dtype of computation: bfloat16 or float32 (bfloat16); weights keep the model's dtype"
    parser.add_argument("--precision", default=argparse.SUPPRESS, help=kinds)


def _model_of(options: argparse.Namespace) -> str | ModelShape:
    """Returns the name of the model in the options, or the shape of a transformers model.

    Raises:
        ValueError: there is no such configuration, or an option of --hf is given without it.
    """
    if options.hf is not None:
        return shape_of_config(options.hf, options.task or TASKS[0], lora=options.lora)
    for name in ("task", "lora"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} has no effect without --hf")
    return str(options.model)


def _strategy_of(options: argparse.Namespace) -> Strategy:
    """Returns the strategy that the options describe."""
    given = vars(options)
    known = [f.name for f in fields(Strategy) if f.name in given and f.name != "batch"]
    return Strategy(**{name: given[name] for name in known})


def _share_batch(strategy: Strategy, batch: int | None, mesh: dict[str, int]) -> Strategy:
    """Returns the strategy with a rank's share of `batch`, the global batch in sequences.

    Raises:
        ValueError: the batch does not divide into micro-batches on the ranks of "dp".
    """
    if batch is None:
        return strategy
    dp, micro_batches = mesh.get("dp", 1), max(1, strategy.micro_batches)
    each = dp * micro_batches
    if batch < 1 or batch % each:
        near = each * max(1, (batch + each // 2) // each)
        raise ValueError(
            f"--batch {batch} does not divide into {micro_batches} micro-batch"
            f"{'es' * (micro_batches > 1)} on each of {dp} ranks of dp; --batch {near} does"
        )
    return replace(strategy, batch=batch // each)


def _machine_of(options: argparse.Namespace, axes: Collection[str] = ("dp", "tp")) -> Machine:
    """Returns the machine in the options, with its links for these mesh axes.

    Raises:
        MachineError: an unknown machine, an invalid file or an invalid link.
    """
    found = load_machine(options.machine)
    given = dict(map(read_link, options.link))
    if len(given) < len(options.link):
        raise MachineError("--link: an axis has one link, and is given two")
    return with_links(found, given, axes) if given else found


def run_simulate(options: argparse.Namespace) -> int:
    """Runs `partita simulate` with the parsed `options`: prints a step's predicted time and memory.

    Returns the exit code: 2 if the step cannot be simulated, and 1 if the model does not fit into
    memory.
    """
    try:
        if options.report:
            check_plotly()
        # First, because the rest may take a minute.
        check_outputs({"--trace": options.trace, "--report": options.report})
        mesh = dict(read_mesh(options.mesh))
        if getattr(options, "zero", 0) and "dp" not in mesh:
            raise ValueError(f"--zero has no effect on {options.mesh}: ZeRO spreads over dp")
        strategy = _share_batch(_strategy_of(options), options.batch, mesh)
        model = _model_of(options)
        found = simulate(model, mesh, _machine_of(options, mesh), strategy=strategy)
        print(found, flush=True)
        if options.eager:
            print(f"  run eagerly: {_find_eager_memory(model, mesh, strategy)}")
        if options.trace:
            found.save_trace(options.trace)
        if options.report:
            found.report(options.report)
    except (ValueError, LayoutError, OSError) as error:
        return _refuse("simulate", error)
    return 0 if found.fits else 1


def _find_eager_memory(model: str | ModelShape, mesh: dict[str, int], strategy: Strategy) -> Memory:
    """Returns the memory of an eager training step of a named model."""
    with own_lines_shown(strategy_file):
        return eager_memory(lambda: make_step(model, mesh, strategy, dry_mesh(**mesh))[:2])  # type: ignore[arg-type]


# -- plan ------------------------------------------------------------------------------------------


def _add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `partita plan`."""
    parser.description = (
        "Find the fastest ways to train a model on a number of ranks, by simulation: meshes, ZeRO, "
        "tensor and sequence parallelism, remat, micro-batches. Shows the best five that fit."
    )
    _add_model(parser)
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks of the job")
    parser.add_argument("--memory", help="memory of a rank: 80GB, 64GiB (as in the machine file)")
    parser.add_argument("--batch", type=int, help="sequences per step on all ranks (1 per rank)")
    parser.add_argument(
        "--most",
        type=int,
        default=MOST,
        help=f"most ways to simulate: more may find a better one; seconds each ({MOST})",
    )


@contextmanager
def _showing_progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function that shows the next simulation on standard error.

    It shows a bar on a terminal with rich, otherwise a line for each simulation.
    """
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
    """Runs `partita plan` with the parsed `options`: prints the best parallelism for a machine.

    Returns the exit code: 2 if none fits, or an option is invalid.
    """
    try:
        if options.memory is not None and options.memory.strip().isdecimal():
            raise ValueError(
                f"--memory {options.memory} is without a unit: write {options.memory}GB or "
                f"{options.memory}GiB"
            )
        with _showing_progress() as watch:
            found = autoplan(
                _model_of(options),
                options.ranks,
                options.memory,
                _machine_of(options),
                batch=options.batch,
                strategy=_strategy_of(options),
                most=options.most,
                watch=watch,
            )
    except (ValueError, LayoutError, OSError) as error:
        return _refuse("plan", error)
    print(found)
    return 0


# -- calibrate -------------------------------------------------------------------------------------


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `partita calibrate`."""
    parser.description = (
        "Measure this machine, and write a machine file for `partita simulate` and `partita plan`. "
        "On CPUs several ranks of one thread work at once. With --device cuda one GPU is measured."
    )
    parser.add_argument(
        "--device", choices=DEVICES, default=HOST.type, help="what is measured (cpu)"
    )
    parser.add_argument(
        "--ranks", type=int, help="with --device cpu: number of ranks, as in later runs (2)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("machine.toml"), help="the machine file (machine.toml)"
    )


_RANKS_OF_A_CORE = 64
"""Processes that are started for each core, at most: of more nothing would be measured."""


def run_calibrate(options: argparse.Namespace) -> int:
    """Runs `partita calibrate` with the parsed `options`: measures this machine, writes a file.

    Returns the exit code: 2 on failure.
    """
    try:
        most, ranks = _RANKS_OF_A_CORE * count_cores(), options.ranks
        device = choose_device(options.device)
        if ranks is not None and not device.is_host:
            raise ValueError("--ranks has no effect on --device cuda: one GPU is measured")
        ranks = 2 if ranks is None else ranks
        if not 1 <= ranks <= most:
            raise ValueError(f"--ranks {ranks}: at least 1, at most {most} on this machine")
        check_outputs({"--out": options.out})
        is_gpu = not device.is_host
        machine = calibrate_gpu(device, accelerator_names()[0]) if is_gpu else calibrate(ranks)
        text = machine_toml(machine)
        options.out.write_text(text)
    except (ValueError, RuntimeError, OSError) as error:
        return _refuse("calibrate", error)
    print(text, end="")
    print(f"# written to {options.out}")
    return 0


# -- cache: compiled programs that are kept -------------------------------------------------------

_ACTIONS = {
    "list": "show all files",
    "clear": "delete all files",
    "verify": "read all files and name damaged ones; exit code 1 if there are any",
}


def run_cache(options: argparse.Namespace) -> int:
    """Runs `partita cache` with the parsed `options`: lists, checks or deletes stored programs.

    Returns the exit code: 2 if the store cannot be used, and 1 if a checked program is damaged.
    """
    action = options.action
    try:
        store = default_store()
        if action == "clear":
            count, nbytes = store.clear()
            print(f"removed {_format_count(count)}, {human(nbytes, '0 B')}, from {store.folder}")
            return 0
    except (ValueError, OSError) as error:
        return _refuse("cache", error)
    entries = store.entries(check=action == "verify")
    damaged = [e for e in entries if e.problem]
    print(_format_table(entries), end="")
    print(_format_total(entries, store))
    if action == "verify":
        for entry in damaged:
            print(f"{entry.path}: {entry.problem}", file=sys.stderr)
        print(f"{len(damaged)} damaged" if damaged else "all as they were written")
        return 1 if damaged else 0
    return 0


def _format_table(entries: list[Entry]) -> str:
    if not entries:
        return ""
    head = ("KEY", "SIZE", "USED", "WHAT", "MESH", "TORCH", "COMPILED IN")
    rows = [head, *(_format_row(entry) for entry in entries)]
    return format_table(rows, {1, 2}) + "\n"


def _format_row(entry: Entry) -> tuple[str, ...]:
    def said(name: str) -> str:
        return str(entry.metadata.get(name, "-"))

    seconds: Any = entry.metadata.get("seconds")
    return (
        entry.key[:12],
        human(entry.nbytes, "0 B"),
        _format_age(time.time() - entry.used),
        entry.problem or said("what").replace(".<locals>", ""),
        said("mesh"),
        said("torch"),
        f"{seconds:.1f} s" if isinstance(seconds, (int, float)) else "-",
    )


def _format_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


def _format_count(count: int) -> str:
    return f"{count} program{'s' * (count != 1)}"


def _format_total(entries: list[Entry], store: Store) -> str:
    total, limit = human(sum(e.nbytes for e in entries), "0 B"), human(store.limit, "0 B")
    return f"{_format_count(len(entries))}, {total} of {limit}, in {store.folder}"
