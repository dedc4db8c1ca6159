"""The zoo, model by model and mode by mode: what is right, what is refused, what is at fault.

    python -m tests.clients.sweep                        all of them
    python -m tests.clients.sweep --models BERT T5 --modes ZeRO-3

Each cell runs in a process of its own, so that one that dies or hangs is a cell of the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

__all__ = ["Cell", "main", "run_cells"]

LIMIT = 1800.0
"""Seconds that a cell may take, on a loaded machine too; one of Inductor's takes five times."""


@dataclass(frozen=True)
class Cell:
    """What became of one model in one mode.

    Attributes:
        verdict: "right"; "refused", by an error of partita's; "wrong", other numbers than one
            process; "fault", an error that is not partita's own; "crash"; "hang".
        reason: the error's text.
        seconds: of CPU; of a clock where it crashed or hung.
    """

    model: str
    mode: str
    verdict: str
    reason: str = ""
    seconds: float = 0.0


def judge(model: str, mode: str) -> Cell:
    """Run a cell here."""
    import partita as pt

    from .modes import run_cell

    begun = time.process_time()
    verdict, reason = "right", ""
    try:
        run_cell(model, mode)
    except (pt.LayoutError, pt.CaptureError, pt.RematError) as error:
        verdict, reason = "refused", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    except AssertionError as error:
        # torch and partita assert too: only the comparison's own says that numbers differ.
        own = "tests/clients/modes.py" in str(
            traceback.extract_tb(error.__traceback__)[-1].filename
        )
        own |= "testing/_comparison" in str(traceback.extract_tb(error.__traceback__)[-1].filename)
        verdict, reason = "wrong" if own else "fault", f"{error}"
        traceback.print_exc()
    except BaseException as error:
        verdict, reason = "fault", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return Cell(model, mode, verdict, reason, time.process_time() - begun)


def _in_child(end: Connection, model: str, mode: str, log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import faulthandler

    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_of(mode) - 5, exit=False)
    warnings.simplefilter("default")
    end.send(asdict(judge(model, mode)))
    end.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def limit_of(mode: str) -> float:
    return LIMIT * 5 if "Inductor" in mode else LIMIT


def run_cells(
    cells: list[tuple[str, str]], workers: int = 2, logs: str | None = None
) -> Iterator[Cell]:
    """Run cells, each in a fork of this process, some at a time; give them as they end."""
    context = mp.get_context("fork")
    waiting, running = list(cells), {}
    while waiting or running:
        while waiting and len(running) < workers:
            model, mode = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            log = (
                os.path.join(logs, f"{model}-{mode}.log".replace(" ", "_")) if logs else os.devnull
            )
            process = context.Process(target=_in_child, args=(theirs, model, mode, log))
            process.start()
            theirs.close()
            running[ours] = (process, model, mode, time.monotonic())
        for end in wait(list(running), timeout=1.0):
            process, model, mode, begun = running.pop(end)
            try:
                cell = Cell(**end.recv())
            except EOFError:
                process.join()
                how = signal.Signals(-process.exitcode).name if process.exitcode < 0 else "exit"
                cell = Cell(model, mode, "crash", how, time.monotonic() - begun)
            process.join()
            yield cell
        for end, (process, model, mode, begun) in list(running.items()):
            if time.monotonic() - begun > limit_of(mode):
                process.kill()
                process.join()
                del running[end]
                yield Cell(model, mode, "hang", "", time.monotonic() - begun)


# -- the table -------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "hugging_face.md"
BEGIN, END = "<!-- zoo -->\n", "<!-- /zoo -->\n"
SIGNS = {"right": "✓", "": "-"}


def format_table(cells: list[Cell], models: list[str], modes: list[str]) -> str:
    """A markdown table of models and modes; "-" where a mode does not serve a model."""
    found = {(c.model, c.mode): c.verdict for c in cells}
    rows = [["", *modes], ["---"] * (len(modes) + 1)]
    for model in models:
        verdicts = (found.get((model, mode), "") for mode in modes)
        rows.append([model, *(SIGNS.get(verdict, verdict) for verdict in verdicts)])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def format_sums(cells: list[Cell]) -> str:
    verdicts = dict.fromkeys(("right", "refused", "wrong", "fault", "crash", "hang"))
    verdicts |= dict.fromkeys(c.verdict for c in cells)
    count = {v: sum(c.verdict == v for c in cells) for v in verdicts}
    share = 100 * count.pop("right") / max(1, len(cells))
    return f"{len(cells)} cells: {share:.1f} % right; " + ", ".join(
        f"{n} {verdict}" for verdict, n in count.items()
    )


def read_page() -> list[Cell]:
    """What the page says of each cell."""
    text = PAGE.read_text()
    lines = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].splitlines()
    rows = [[word.strip() for word in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    (_, *modes), _, *models = rows
    names = {sign: verdict for verdict, sign in SIGNS.items()}
    return [
        Cell(model, mode, names.get(word, word))
        for model, *words in models
        for mode, word in zip(modes, words, strict=True)
        if word != SIGNS[""]
    ]


def write_page(table: str, sums: str) -> None:
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}{BEGIN}{table}\n{sums}.\n{after}")


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--modes", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--logs", help="a folder for what each cell prints")
    parser.add_argument("--json", help="a file for the cells")
    parser.add_argument("--page", action="store_true", help="write the table into docs")
    chosen = parser.parse_args(args)

    import torch
    import transformers

    from .models import CLIENTS
    from .modes import MODES, serves

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    models = chosen.models or list(CLIENTS)
    modes = chosen.modes or list(MODES)
    wanted = [(n, m) for n in models for m in modes if serves(n, m)]
    if chosen.logs:
        os.makedirs(chosen.logs, exist_ok=True)
    cells: list[Cell] = []
    for cell in run_cells(wanted, chosen.workers, chosen.logs):
        cells.append(cell)
        lines = cell.reason.strip().splitlines()[:2]
        print(
            f"[{len(cells)}/{len(wanted)}] {cell.model}, {cell.mode}: {cell.verdict}"
            f" ({cell.seconds:.0f} s) {' '.join(lines)[:200]}",
            flush=True,
        )
        if chosen.json:
            with open(chosen.json, "w") as file:
                json.dump([asdict(c) for c in cells], file, indent=1)
    table, sums = format_table(cells, models, modes), format_sums(cells)
    print(table + "\n" + sums)
    if chosen.page:
        write_page(table, sums)
    said = {(c.model, c.mode) for c in read_page() if c.verdict == "right"}
    broken = [c for c in cells if c.verdict != "right" and (c.model, c.mode) in said]
    broken += [c for c in cells if c.verdict not in ("right", "refused") and c not in broken]
    for cell in broken:
        print(f"{cell.model}, {cell.mode}: {cell.verdict}\n{cell.reason}", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
