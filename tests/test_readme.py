"""Does the code in the README run?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_shows_code():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=lambda code: code.strip().partition("\n")[0][:40])
def test_a_block_of_the_readme_runs_as_it_stands(block: str, tmp_path: Path):
    script = tmp_path / "block.py"  # a file, so that errors and ledgers can name its lines
    script.write_text(block)
    ran = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
