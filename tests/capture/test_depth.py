"""What a first step costs by the depth of its model, as `partita bench compile depth` has it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_bench_of_depth_measures_each_depth(tmp_path):
    told = subprocess.run(
        [sys.executable, "-m", "partita.bench.compile", "depth"]
        + ["--blocks", "1", "2", "--width", "8", "--model", "llama"]
        + ["--json", str(tmp_path / "found.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    shallow, deep = json.loads((tmp_path / "found.json").read_text())["depth"].values()
    assert 0 < shallow["nodes"] < deep["nodes"]
    assert all(deep[part] > 0 for part in ("capture", "passes", "call"))
    assert "2 over 1 blocks: nodes" in told
