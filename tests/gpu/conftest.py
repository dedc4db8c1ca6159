"""Where do the claims about devices run: on this machine's GPUs, or on its processor instead?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from partita.comm.device import HOST, Device

_WITHOUT_GPU = (
    "kernels and collectives of a GPU (CUDA, NCCL), and what waits in its streams",
    "copies to pinned memory that go on beside Python, when a checkpoint is staged",
    "the peak that its allocator counts, against the predicted one",
    "flash attention, bfloat16 and the time of a step as a GPU has them",
    "one key for ranks whose devices have other numbers",
    "steps in CUDA graphs, and what they take of the host",
    "the table of steps beside rivals: partita bench steps",
)
_WITH_ONE = ("more than one rank over NCCL: each group was of one",)


@dataclass(frozen=True)
class Place:
    """Where the ranks of a test compute.

    Attributes:
        device: "cuda" where there is a GPU, else "cpu".
        ranks: one for each GPU, at most two.
    """

    device: str
    ranks: int

    @property
    def is_host(self) -> bool:
        return Device(self.device).is_host


def _find_place() -> Place:
    gpus = torch.cuda.device_count()
    return Place("cuda", min(gpus, 2)) if gpus else Place(HOST.type, 2)


@pytest.fixture(scope="session")
def place() -> Place:
    return _find_place()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured, and what could not be tested here: no test is left out without a word."""
    place, tell = _find_place(), terminalreporter.write_line
    reports = [r for some in terminalreporter.stats.values() for r in some if hasattr(r, "when")]
    if not any("gpu" in r.nodeid for r in reports):
        return  # of other tests
    figures = [figure for r in reports if r.when == "call" for figure in r.user_properties]
    terminalreporter.section(f"on {place.ranks} ranks of {place.device}")
    for name, value in figures:
        tell(f"{name:<56}{value}")
    untested = _WITHOUT_GPU if place.is_host else _WITH_ONE if place.ranks == 1 else ()
    if untested:
        tell("Not tested, since this machine has no GPU:" if place.is_host else "Not tested:")
    for what in untested:
        tell(f"  {what}")
    for report in terminalreporter.stats.get("skipped", ()):
        *_, reason = report.longrepr
        tell(f"Not tested: {report.nodeid}: {reason.removeprefix('Skipped: ')}")
