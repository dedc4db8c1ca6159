"""Do other people's models train as the page says? Five of them; `make test-clients` has all."""

from __future__ import annotations

import pytest

from .models import CLIENTS, IN_EACH_RUN
from .modes import MODES, run_cell, serves
from .sweep import read_page

SAID = {(cell.model, cell.mode): cell.verdict for cell in read_page()}
CAPTURED = {
    ("Llama", "pt.compile, ZeRO-3"),
    ("BERT", "pt.compile"),
    ("T5", "pt.compile, ZeRO-3"),
    ("ViT", "pt.compile"),
}
"""A capture takes seconds: one of each model that differs."""


def test_the_page_speaks_of_every_model_and_mode() -> None:
    assert SAID.keys() == {(name, mode) for name in CLIENTS for mode in MODES if serves(name, mode)}


CELLS = [
    (name, mode)
    for (name, mode), verdict in SAID.items()
    if name in IN_EACH_RUN
    and verdict == "right"
    and (not MODES[mode].graph or (name, mode) in CAPTURED)
]


# The method has another name now; this one is what people's programs call.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")
@pytest.mark.parametrize(("name", "mode"), CELLS)
def test_a_model_trains_as_on_one_process(name: str, mode: str) -> None:
    run_cell(name, mode)
