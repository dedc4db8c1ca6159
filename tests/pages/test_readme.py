"""Does the code in the README and in the pages run?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs.scripts import run_script

IGNORED = [FutureWarning]  # of transformers, whose functions peft calls
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ONE_PROGRAM = {"errors", "from_scratch"}  # pages whose blocks go on from each other
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A block of text behind a block of code and the word "prints" is what the code prints. There a line
# of dots is any number of lines.
PRINTED = re.compile(r"\s*prints\s+```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


def join_blocks(text: str) -> str:
    """All blocks of a page as one program, each at the lines at which it stands in the page."""
    program = ""
    for block in BLOCK.finditer(text):
        before = text.count("\n", 0, block.start(1)) - program.count("\n")
        program += "\n" * before + block[1]
    return program


def find_programs(page: Path) -> list[tuple[str, str | None]]:
    """The programs of a page, each with what the page says that it prints."""
    text = page.read_text()
    if page.stem in ONE_PROGRAM:
        return [(join_blocks(text), None)]
    blocks = [(block[1], PRINTED.match(text, block.end())) for block in BLOCK.finditer(text)]
    return [(code, printed and printed[1]) for code, printed in blocks]


def match_printed(shown: str) -> re.Pattern[str]:
    lines = [
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line) + "\n"
        for line in shown.splitlines()
    ]
    return re.compile("".join(lines))


BLOCKS = [
    pytest.param(program, printed, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, (program, printed) in enumerate(find_programs(page))
]


def test_the_readme_shows_code_and_what_it_prints():
    assert any(block.values[1] for block in BLOCKS if block.id.startswith("README"))
    assert not match_printed("a\n...\nc\n").search("a\nb\n")


def test_a_page_that_is_one_program_does_without_partita():
    assert "import partita" not in join_blocks((ROOT / "docs/from_scratch.md").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("block, printed", BLOCKS)
def test_a_block_of_the_readme_or_of_a_page_runs_as_it_stands(
    block: str, printed: str | None, tmp_path: Path
):
    script = tmp_path / "block.py"  # a file, so that errors and ledgers can name its lines
    script.write_text(block)
    ran = run_script(script, cwd=tmp_path, ignored=IGNORED)
    assert ran.returncode == 0, ran.stderr
    if printed is not None:
        assert match_printed(printed).search(ran.stdout), ran.stdout
