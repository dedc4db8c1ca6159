"""The command line: `partita train | explain | bench | cache | doctor`."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from partita.app import (
    Mesh,
    Options,
    count_cores,
    flag,
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
from partita.app.cache_table import ACTIONS, cache
from partita.comm.device import HOST, Device, accelerator_names, choose_device, explain_no_gpu
from partita.predict.commands import (
    add_calibrate,
    add_explain,
    add_plan,
    add_simulate,
    run_calibrate,
    run_explain,
    run_plan,
    run_simulate,
)
from partita.predict.machine import load_machine
from partita.report import check_outputs, check_plotly, read_logs, write_report
from partita.versions import __version__, describe_torch

__all__ = ["BENCHES", "main"]

BENCHES = {
    "dispatch": "partita.bench.dispatch:main",
    "ops": "partita.bench.ops:main",
    "compile": "partita.bench.compile:main",
    "memory": "partita.bench.memory:main",
    "zero": "partita.bench.zero:main",
    "checkpoint": "partita.bench.checkpoint:main",
    "faults": "partita.bench.faults:main",
    "simulate": "partita.bench.simulate:main",
    "published": "partita.bench.published:main",
    "plan": "partita.bench.plan:main",
}
"""What `partita bench NAME` runs: "module:function", called with the remaining arguments."""
HOST_BENCHES = {
    "faults": "it kills ranks of the processor",
    "ops": "it compares ranks of the processor with it alone",
    "published": "it measures nothing",
    "simulate": "`partita calibrate` measures the processor",
}
"""Those that compute on the processor alone, and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    try:
        if options.command == "train":
            return _train(options, argv)
        if options.command == "explain":
            return run_explain(options)
        if options.command == "simulate":
            return run_simulate(options)
        if options.command == "plan":
            return run_plan(options)
        if options.command == "calibrate":
            return run_calibrate(options)
        if options.command == "report":
            return _report(options.out, options.logs)
        if options.command == "bench":
            return _bench(options.name, options.device, options.options)
        if options.command == "cache":
            return cache(options.action)
        return _doctor()
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partita", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands.add_parser("train", help="train a byte-level GPT on a mesh of ranks"))
    add_explain(commands.add_parser("explain", help="how a call is run, without running it"))
    add_simulate(commands.add_parser("simulate", help="what a step costs on another machine"))
    add_plan(commands.add_parser("plan", help="the way to spread a model that fits best"))
    add_calibrate(commands.add_parser("calibrate", help="measure this machine, into a file"))
    report = commands.add_parser("report", help="a page about runs, from their --log files")
    report.add_argument("logs", nargs="+", type=Path, help="logs that `partita train --log` kept")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="(report.html)")
    bench = commands.add_parser("bench", help="measure, and compare with torch")
    bench.add_argument(
        "--device",
        default=HOST.type,
        help="what ranks compute on: cpu (default), cuda or auto",
    )
    bench.add_argument("name", choices=sorted(BENCHES))
    each = "of the bench: partita bench NAME --help"
    bench.add_argument("options", nargs=argparse.REMAINDER, help=each)
    kept = commands.add_parser("cache", help="compiled programs that are kept: what is there")
    actions = "; ".join(f"{name}: {what}" for name, what in ACTIONS.items())
    kept.add_argument("action", choices=ACTIONS, help=actions)
    commands.add_parser("doctor", help="show what this machine offers")
    return parser


# -- train ----------------------------------------------------------------------------------------


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a byte-level GPT on this machine's own text: Python's standard library, or any "
        "folder. Starts its ranks itself; under torchrun it joins the ranks that are there."
    )
    add = parser.add_argument
    add(
        "--ranks",
        type=_argument(read_positive),
        metavar="N",
        help="processes to start (4, or as --mesh)",
    )
    add(
        "--tp",
        type=_argument(read_positive),
        metavar="N",
        help="ranks among which the weights are split",
    )
    add("--verify", action="store_true", help="compare 20 steps' losses with those of one rank")
    add("--config", type=Path, metavar="FILE", help="options from a TOML file; flags come first")
    add("--print-config", action="store_true", help="print the options as such a file, and end")
    for option in fields(Options):
        facts = option.metadata
        usual = option.default if facts["show"] is None else facts["show"](option.default)
        # What is not given is left out, so that a config file can say it.
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
    """`read` for argparse, which shows the message of no error but its own."""

    def argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument


def _train(asked: argparse.Namespace, argv: list[str]) -> int:
    try:
        options = _options(asked)
        if asked.print_config:
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
        print(f"partita train: {error}", file=sys.stderr)
        return 2
    try:
        if not is_rank():
            progress.say(f"starting {options.ranks} rank{'s' * (options.ranks > 1)}")
            code = launch(argv, options.ranks, logs.show)
            logs.end()
            return code or (0 if logs.complete else 1)
        with joined(logs.show) as me:
            if not asked.verify:
                train(options, me.tell)
                return 0
            return 0 if verify(options, me.tell, compare=me.rank == 0) else 1
    finally:
        progress.stop()
        logs.end()


def _least_seconds_of_step(options: Options) -> float | None:
    """Of a step at the peak of all ranks; None where no machine says it.

    Raises:
        MachineError: a machine that is not known, or whose file is wrong.
    """
    if options.machine is None:
        return None
    dtype = "bfloat16" if options.dtype == "bf16" else "float32"
    return options.flops_of_step / (load_machine(options.machine).peak_flops(dtype) * options.ranks)


def _options(asked: argparse.Namespace) -> Options:
    """Defaults, over them the config file, and over that the command line.

    Raises:
        ValueError: options that are not, or do not go together.
        OSError: the config file cannot be read.
    """
    found: dict[str, Any] = {}
    if asked.config is not None:
        found = options_in(asked.config.read_text(), str(asked.config))
    given = vars(asked)
    found |= {o.name: given[o.name] for o in fields(Options) if o.name in given}
    ranks, mesh = asked.ranks, found.get("mesh")
    if "mesh" not in given and (ranks, asked.tp) != (None, None):
        # The file's mesh gives way, but for the number of ranks where only --tp is new.
        if ranks is None and mesh is not None:
            ranks = math.prod(size for _, size in mesh)
        mesh = None
    found["mesh"] = _fit(mesh, int(os.environ["WORLD_SIZE"]) if is_rank() else ranks, asked.tp)
    if asked.verify:
        if found.get("dtype", "fp32") != "fp32" or found.get("save") is not None:
            raise ValueError("--verify compares losses in fp32, and saves nothing")
        found.setdefault("steps", 20)
    return Options(**found)


def _fit(mesh: Mesh | None, ranks: int | None, tp: int | None) -> Mesh:
    """The mesh for so many ranks, of which `tp` split the weights; one rank needs none."""
    if mesh is None:
        n = ranks or max(4, tp or 1)
        tp = tp or (2 if n % 2 == 0 and n > 2 else 1)
        if n % tp:
            raise ValueError(f"--tp {tp} does not divide {n} ranks")
        mesh = tuple((name, size) for name, size in (("dp", n // tp), ("tp", tp)) if size > 1)
    size = math.prod(n for _, n in mesh)
    if ranks is not None and size != ranks:
        raise ValueError(f"--mesh {shown_mesh(mesh)} has {size} ranks, but there are {ranks}")
    if tp is not None and dict(mesh).get("tp", 1) != tp:
        raise ValueError(f"--mesh {shown_mesh(mesh)} is at odds with --tp {tp}")
    return mesh if size > 1 else ()


# -- report ---------------------------------------------------------------------------------------


def _report(out: Path, logs: list[Path]) -> int:
    try:
        check_plotly()
        check_outputs({"--out": out}, logs)
        runs = read_logs(logs)
        write_report(out, *runs)
    except (ValueError, OSError) as error:
        print(f"partita report: {error}", file=sys.stderr)
        return 2
    for note in (note for run in runs for note in run.notes):
        print(f"partita report: {note}", file=sys.stderr)
    print(out)
    return 0


# -- bench ----------------------------------------------------------------------------------------


def _bench(name: str, device: str, arguments: list[str]) -> int:
    from partita.bench.place import DEVICE_VARIABLE

    try:
        chosen = choose_device(device)
        if name in HOST_BENCHES and not chosen.is_host:
            if device == chosen.type:
                why = HOST_BENCHES[name]
                raise ValueError(f"--device {device}: {name} cannot run there, {why}")
            chosen = Device(HOST.type)
        os.environ[DEVICE_VARIABLE] = chosen.type
    except ValueError as error:
        print(f"partita bench: {error}", file=sys.stderr)
        return 2
    module, _, function = BENCHES[name].partition(":")
    return getattr(importlib.import_module(module), function)(arguments) or 0


# -- doctor ---------------------------------------------------------------------------------------

_USES = {
    "rich": "a bar of `partita train`: pip install partita[train]",
    "safetensors": "weights of that format: pip install partita[train]",
    "plotly": "reports as pages: pip install partita[report]",
}
"""By the packages that partita works without, what each is for."""


def _describe_package(name: str, use: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"none: for {use}"


def _doctor() -> int:
    from .comm.backends.choose import installed_backends
    from .comm.backends.control import can_compare
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
