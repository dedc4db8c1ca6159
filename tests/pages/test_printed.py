"""Is what the front page and the first script are said to print what they print?"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BEFORE, AFTER = (EXAMPLES / "from_fsdp2" / f"{name}.py" for name in ("before", "after"))
README = (ROOT / "README.md").read_text()


def run_ranks(script: Path, *options: str, ranks: int = 2, cwd: Path) -> list[str]:
    """The lines that a script prints under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    ran = subprocess.run(
        [*command, script, *options], cwd=cwd, capture_output=True, text=True, timeout=250
    )
    # Torch's Gloo sometimes aborts a process that has ended its work, without partita as well.
    assert ran.returncode == 0 or "terminate called without an active" in ran.stderr, ran.stderr
    return ran.stdout.splitlines()


def assert_same_lines(printed: list[str], shown: list[str]) -> None:
    """Equal, but for the last digit of a loss, which depends on the processor."""
    losses = [[float(re.search(r"loss ([\d.]+)", line)[1]) for line in x] for x in (printed, shown)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert [re.sub(r"loss [\d.]+", "", line) for line in printed] == [
        re.sub(r"loss [\d.]+", "", line) for line in shown
    ]


def test_the_diff_of_the_front_page_is_that_of_the_two_scripts():
    shown = re.search(r"^```diff\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1].splitlines()
    codes = [path.read_text().split('"""\n', 1)[1].splitlines() for path in (BEFORE, AFTER)]
    _, _, *lines = difflib.unified_diff(*codes, n=0, lineterm="")
    changes = [line for line in lines if not line.startswith("@@")]
    assert [line for line in shown if line.startswith(("+", "-"))] == changes
    assert [sum(line[0] == sign for line in changes) for sign in "-+"] == [7, 3]
    assert {line[1:] for line in shown if line.startswith(" ")} <= set(codes[0]) & set(codes[1])


@pytest.mark.slow
def test_both_scripts_print_the_losses_of_the_front_page(tmp_path):
    before, after = (run_ranks(script, cwd=tmp_path) for script in (BEFORE, AFTER))
    assert before == after
    rows = re.findall(r"^(step .+)    (step .+)$", README, re.MULTILINE)
    assert len(rows) == 5
    for printed, shown in zip((before, after), zip(*rows, strict=True), strict=True):
        assert_same_lines(printed, list(shown))


@pytest.mark.slow
def test_the_first_script_prints_what_its_page_shows_and_resumes(tmp_path):
    page = (ROOT / "docs/start.md").read_text()
    shown = re.search(r"^```text\n(epoch .*?)^```", page, re.MULTILINE | re.DOTALL)[1].splitlines()
    script = EXAMPLES / "start.py"
    printed = run_ranks(script, "2", cwd=tmp_path) + run_ranks(script, "4", cwd=tmp_path)
    assert_same_lines(printed, shown)
    (tmp_path / "alone").mkdir()
    said, *alone = run_ranks(script, "4", ranks=1, cwd=tmp_path / "alone")
    assert said == "ZeRO has no effect on one rank"
    assert_same_lines(alone, shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["from_trainer", "from_accelerate"])
def test_a_trainer_prints_the_same_with_ddp_and_with_partita_and_resumes(name, tmp_path):
    page = (ROOT / "docs/trainers.md").read_text()
    shown = re.search(rf"<!-- {name} -->\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    before, after = (EXAMPLES / name / f"{which}.py" for which in ("before", "after"))

    def run(script, *options):
        lines = run_ranks(script, *options, cwd=tmp_path / script.stem)
        return [line for line in lines if re.match(r"(step|epoch) ", line)]

    for script in (before, after):
        (tmp_path / script.stem).mkdir()
        assert_same_lines(run(script), shown.splitlines())
    resumed = run(after, "resume")
    assert set(resumed) <= set(shown.splitlines()) and resumed


@pytest.mark.parametrize("name", ["from_trainer", "from_accelerate"])
def test_the_diff_of_a_trainer_is_that_of_its_two_scripts(name):
    page = (ROOT / "docs/trainers.md").read_text()
    scripts = (EXAMPLES / name / f"{which}.py" for which in ("before", "after"))
    before, after = (path.read_text().split('"""\n', 1)[1].splitlines() for path in scripts)
    changes = {line for line in difflib.ndiff(before, after) if line[:2] in ("- ", "+ ")}
    changes = {line[0] + line[2:] for line in changes if line[2:].strip()}
    shown = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [{*diff.splitlines()} for diff in shown]
    assert any(changes == diff for diff in lines), changes
    assert len([line for line in changes if line[0] == "-"]) <= 2
