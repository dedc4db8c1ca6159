"""Does `partita bench compile moves` print nodes and ratios that say what it is asked for?"""

from __future__ import annotations

import pytest

from partita.bench import compile as bench_compile

pytestmark = pytest.mark.slow


def test_the_bench_of_moves_prints_each_move_and_the_ratio(capsys, tmp_path):
    told = tmp_path / "told.json"
    sizes = ["--mesh-sizes", "2", "16", "--layer-width", "0", "--times", "1"]
    assert bench_compile.main(["moves", *sizes, "--json", str(told)]) == 0
    said = capsys.readouterr().out
    assert "S(1) -> R, uneven" in said and "16 ranks over 2, at most: nodes 1.00" in said
    assert told.stat().st_size > 0
