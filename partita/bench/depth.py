"""A bench of depth: what a first step costs by a model's blocks, and over an older checkout.

Each checkout has a process of its own, on a group that carries nothing; they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import partita

_COLUMNS = ("capture", "passes", "both", "first", "call")


def depth(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return, per depth and checkout, seconds of the parts of a first step, and nodes."""
    now = Path(partita.__file__).parents[1]
    checkouts = {"now": now}
    if options.before:
        checkouts["before"] = Path(options.before).resolve()
    depths = options.blocks
    found: dict[str, dict[int, list[dict[str, float]]]] = {}
    with _workers(checkouts, options.model, options.width, options.cold) as workers:
        for _ in range(options.times):
            for blocks in depths:
                for name, worker in workers.items():
                    found.setdefault(name, {}).setdefault(blocks, []).append(_ask(worker, blocks))
    medians = {
        name: {
            blocks: {k: median(one[k] for one in each) for k in each[0]}
            for blocks, each in by_depth.items()
        }
        for name, by_depth in found.items()
    }
    print(f"\n{options.model}, d={options.width}, ZeRO-3, AdamW, a fake group of 2; seconds of CPU")
    print("now: compile(step, blocks=True), each structure traced once")
    if options.cold:
        print("first: compiled by Inductor, one job at a time, with an empty store and no cache")
    print(f"{'':<8}{'blocks':>7}{'nodes':>8}" + "".join(f"{c:>10}" for c in _COLUMNS))
    for name, by_depth in medians.items():
        for blocks, one in by_depth.items():
            cells = "".join(f"{one[c]:>10.3f}" for c in _COLUMNS)
            print(f"{name:<8}{blocks:>7}{one['nodes']:>8.0f}{cells}")
        first, last = by_depth[min(depths)], by_depth[max(depths)]
        if first is not last:
            _print_ratios(f"{max(depths)} over {min(depths)} blocks, {name}", last, first)
    for blocks in depths if "before" in medians else ():
        _print_ratios(
            f"{blocks} blocks, now over before", medians["now"][blocks], medians["before"][blocks]
        )
    sys.stdout.flush()
    return medians


def _print_ratios(title: str, one: dict[str, float], other: dict[str, float]) -> None:
    said = ", ".join(f"{c} {one[c] / other[c]:.2f}" for c in ("nodes", *_COLUMNS))
    print(f"{title}: {said}")


@contextmanager
def _workers(
    checkouts: dict[str, Path], model: str, width: int, cold: bool
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each checkout, that answers `_ask`."""
    source = (Path(__file__).parent / "depth_worker.py").read_text()
    found: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, path in checkouts.items():
            found[name] = subprocess.Popen(
                [sys.executable, "-c", source, model, str(width), "inductor" if cold else "graph"],
                cwd=path,
                env={**os.environ, "PYTHONPATH": str(path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        yield found
    finally:
        for worker in found.values():
            worker.communicate()  # its input ends, and so does it


def _ask(worker: subprocess.Popen[str], blocks: int) -> dict[str, float]:
    """What a first step of so many blocks took.

    Raises:
        RuntimeError: the process died; its traceback is on stderr.
    """
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{blocks}\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError("a process that was to capture a step has died")
    answer: dict[str, float] = json.loads(line)
    return answer


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `depth`."""
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[4, 16, 48], help="the depths of `depth`"
    )
    parser.add_argument(
        "--model",
        choices=("gpt", "llama", "hf-llama", "hf-llama-cache", "hf-gemma3", "hf-swin"),
        default="gpt",
        help="of `depth`; hf: of transformers, where that is installed",
    )
    parser.add_argument("--width", type=int, default=32, help="of the model of `depth`")
    parser.add_argument(
        "--cold", action="store_true", help="compile what `depth` captures, with nothing in a cache"
    )
    parser.add_argument("--times", type=int, default=1, help="each is measured")
    parser.add_argument("--before", metavar="PATH", help="a checkout beside which `depth` measures")
