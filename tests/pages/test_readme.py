"""Does the code in the README and in the pages run?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Every warning is an error, but for what peft calls of transformers.
STRICT = ["-W", "error", "-W", "ignore::FutureWarning:transformers.modeling_utils"]
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ONE_PROGRAM = {"errors", "from_scratch"}  # pages whose blocks go on from each other
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def join_blocks(text: str) -> str:
    """All blocks of a page as one program, each at the lines at which it stands in the page."""
    program = ""
    for block in BLOCK.finditer(text):
        before = text.count("\n", 0, block.start(1)) - program.count("\n")
        program += "\n" * before + block[1]
    return program


def find_programs(page: Path) -> list[str]:
    text = page.read_text()
    return [join_blocks(text)] if page.stem in ONE_PROGRAM else BLOCK.findall(text)


BLOCKS = [
    pytest.param(program, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, program in enumerate(find_programs(page))
]


def test_the_readme_shows_code():
    assert BLOCKS


def test_a_page_that_is_one_program_does_without_partita():
    assert "import partita" not in join_blocks((ROOT / "docs/from_scratch.md").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_readme_or_of_a_page_runs_as_it_stands(block: str, tmp_path: Path):
    script = tmp_path / "block.py"  # a file, so that errors and ledgers can name its lines
    script.write_text(block)
    ran = subprocess.run(
        [sys.executable, *STRICT, script], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
