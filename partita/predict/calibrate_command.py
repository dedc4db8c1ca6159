"""`partita calibrate`: a machine file of this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from partita.report import check_outputs

from .calibrate import calibrate, machine_toml

__all__ = ["add_calibrate", "run_calibrate"]


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
        print(f"partita calibrate: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    print(f"# written to {options.out}")
    return 0
