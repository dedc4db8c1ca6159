"""`partita simulate`: what a named model's step costs on a machine that is not here."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from partita.layout import LayoutError
from partita.report import check_outputs, check_plotly

from .call_text import read_mesh
from .machine import Machine, load_machine, read_link, shipped_machines
from .simulate import simulate, with_links
from .strategy import MODELS, Strategy

__all__ = [
    "add_model",
    "add_simulate",
    "machine_of",
    "run_simulate",
    "strategy_of",
]


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
        print(f"partita simulate: {error}", file=sys.stderr)
        return 2
    return 0 if found.fits else 1
