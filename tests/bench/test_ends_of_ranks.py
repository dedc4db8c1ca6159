"""Do the ranks of a bench leave nothing behind that Python warns of?"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing as mp
from partita.bench.interleaved import on_ranks

def body(rank, ranks):
    body.lock = mp.RLock()  # as a progress bar in torch.compile makes one
    return rank

if __name__ == "__main__":
    print(on_ranks(body, 2))
"""


@pytest.mark.slow
def test_a_semaphore_of_a_rank_is_removed_when_it_ends(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=250)
    assert done.stdout == "[0, 1]\n", done.stderr
    assert "leaked" not in done.stderr
