"""A bench of depth: the cost of a first step by the number of a model's blocks.

It runs in its own process, on a fake process group that sends nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median

_COLUMNS = ("capture", "passes", "both", "first", "call")


def depth(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Prints and returns the seconds of each part of a first step for models of several depths.

    Returns:
        For each number of blocks, the medians by part: "capture", "passes", "both" (of these two),
        "first" (the whole first call) and "call" (a later one), in CPU seconds; and "nodes".

    Raises:
        subprocess.CalledProcessError: the process failed; its traceback is on stderr.
    """
    depths = options.blocks
    printed = subprocess.run(
        [sys.executable, "-m", "partita.bench.depth_worker", options.model, str(options.width)]
        + ["inductor" if options.cold else "graph", *map(str, depths * options.times)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    found: dict[int, list[dict[str, float]]] = {}
    for blocks, line in zip(depths * options.times, printed.splitlines(), strict=True):
        found.setdefault(blocks, []).append(json.loads(line))
    medians = {n: {k: median(one[k] for one in each) for k in each[0]} for n, each in found.items()}
    print(f"\n{options.model}, d={options.width}, ZeRO-3, AdamW, a fake group of 2; seconds of CPU")
    if options.cold:
        print("first: compiled by Inductor, one job at a time, with an empty store and no cache")
    print(f"{'blocks':>7}{'nodes':>8}" + "".join(f"{c:>10}" for c in _COLUMNS))
    for blocks, one in medians.items():
        print(f"{blocks:>7}{one['nodes']:>8.0f}" + "".join(f"{one[c]:>10.3f}" for c in _COLUMNS))
    first, last = min(depths), max(depths)
    if first != last:
        ratios = {c: medians[last][c] / medians[first][c] for c in ("nodes", *_COLUMNS)}
        said = ", ".join(f"{c} {ratio:.2f}" for c, ratio in ratios.items())
        print(f"{last} over {first} blocks: {said}", flush=True)
    return medians


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line options of the bench `depth` to a parser."""
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[4, 16, 48], help="`depth`: numbers of blocks"
    )
    parser.add_argument(
        "--model",
        choices=("gpt", "llama", "hf-llama", "hf-llama-cache", "hf-gemma3", "hf-swin"),
        default="gpt",
        help="`depth`: the models; hf needs transformers",
    )
    parser.add_argument("--width", type=int, default=32, help="`depth`: width of the model")
    parser.add_argument(
        "--cold", action="store_true", help="`depth`: also compile, with empty caches"
    )
    parser.add_argument("--times", type=int, default=1, help="how often each is measured")
