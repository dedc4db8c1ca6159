"""Is each command that a page shows one that there is, with these options?

Of `partita train` the options are read and printed, `partita explain` runs; of what takes longer
the command line is read, and what it would run is noted.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from partita import cli
from partita.bench.place import DEVICE_VARIABLE

ROOT = Path(__file__).parents[2]
PAGES = [p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")) if p.stem != "CHANGELOG"]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:partita|make|python -m|torchrun) [^`\n…]+)`")


def read_commands(page: Path) -> list[list[str]]:
    """The words of each command of a page, without its comment."""
    text = page.read_text()
    blocks = "".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    lines = [*blocks, *INLINE.findall(text)]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS = {page.stem: found for page in PAGES if (found := read_commands(page))}


NEEDED = {
    "simulate": {"--model": "llama3-8b", "--mesh": "dp=8"},
    "plan": {"--model": "llama3-8b", "--ranks": "8"},
}
"""What these commands are not run without."""


@pytest.fixture
def noted(monkeypatch, tmp_path):
    """What commands would run that take long; none of it runs."""
    ran = []
    for name in ("run_simulate", "run_plan", "run_calibrate", "run_cache", "write_report"):
        monkeypatch.setattr(cli, name, lambda *args, name=name: ran.append(name) or 0)
    for name in ("check_outputs", "read_logs"):
        monkeypatch.setattr(cli, name, lambda *args: ())
    for name in cli.BENCHES:
        monkeypatch.setitem(cli.BENCHES, name, f"{__name__}:run_nothing")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")  # as it was, afterwards
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_module.py").write_text("def my_function(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    return ran


def run_nothing(arguments):
    return 0


@pytest.mark.parametrize("page", COMMANDS)
def test_each_command_of_a_page_is_one_that_there_is(page, noted, capsys):
    for words in COMMANDS[page]:
        check_command(words, capsys)


def check_command(words, capsys):
    match words:
        case ["partita", *given]:
            check_partita(given, capsys)
        case ["torchrun", *given]:
            scripts = [word for word in given if word.endswith(".py")]
            if scripts:
                assert "/" not in scripts[0] or (ROOT / scripts[0]).exists(), words
                return
            at = given.index("-m")
            assert given[at + 1] == "partita"
            check_partita(given[at + 2 :], capsys)
        case ["make", *given]:
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert not given or given[0].startswith("ARGS=") or given[0] in targets, words
        case ["python", "-m", "pip", "install", *_] | ["pip", "install", *_] | ["python", "-c", _]:
            pass
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module), words
        case [path]:
            assert (ROOT / path).exists(), words
        case _:
            raise AssertionError(f"what is {' '.join(words)!r}?")


def check_partita(given, capsys):
    """Run the command as far as it is quick."""
    given, kept = given.copy(), None
    if ">" in given:
        kept = Path(given[-1])
        given = given[: given.index(">")]
    if given[0] == "bench":
        given = [word.replace("NAME", "zero") for word in given]
    if given == ["explain"]:  # which is spoken of
        given.append("--help")
    if given[0] == "train" and "--print-config" not in given:
        given.append("--print-config")
    for option, value in NEEDED.get(given[0], {}).items():  # where a text names one option
        if option not in given:
            given += [option, value]
    try:
        code = cli.main(given)
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    assert code in (0, None), f"partita {' '.join(given)}: {said.err}"
    if kept is not None:
        kept.write_text(said.out)


def test_a_command_that_is_not_there_is_found(noted, capsys):
    for words in (
        "partita trian",
        "partita train --sharding 3",
        "partita simulate --model llama3-8b --cuda-graph",
        "partita bench speed",
        "torchrun --nproc-per-node=4 -m partita train --remt",
        "make tests",
        "python -m partita.testing.proof",
    ):
        with pytest.raises(AssertionError):
            check_command(words.split(), capsys)
    assert noted == []


def test_pages_show_commands():
    assert sum(map(len, COMMANDS.values())) > 60
