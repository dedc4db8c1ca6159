"""Does the code in the README and in the pages run?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Every warning is an error, but for what peft calls of transformers.
STRICT = ["-W", "error", "-W", "ignore::FutureWarning:transformers.modeling_utils"]
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    )
]


def test_the_readme_shows_code():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_readme_or_of_a_page_runs_as_it_stands(block: str, tmp_path: Path):
    script = tmp_path / "block.py"  # a file, so that errors and ledgers can name its lines
    script.write_text(block)
    ran = subprocess.run(
        [sys.executable, *STRICT, script], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
