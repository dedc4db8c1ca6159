"""Do other people's models train as the page says? Five of them; `make test-clients` has all."""

from __future__ import annotations

import pytest

from .models import CLIENTS, IN_EACH_RUN
from .modes import MODES, run_cell
from .sweep import read_page

SAID = {(cell.model, cell.mode): cell.verdict for cell in read_page()}
SLOW = {("T5", "pt.compile"), ("GPT-2", "pt.compile"), ("BERT", "pt.compile, ZeRO-3")}
"""Captures that are of one kind with those that run."""


def test_the_page_speaks_of_every_model_and_mode() -> None:
    assert SAID.keys() == {
        (name, mode)
        for name, client in CLIENTS.items()
        for mode, how in MODES.items()
        if how.serves(client)
    }


CELLS = [
    (name, mode)
    for (name, mode), verdict in SAID.items()
    if name in IN_EACH_RUN and verdict == "right" and "Inductor" not in mode
]


# The method has another name now; this one is what people's programs call.
@pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")
@pytest.mark.parametrize(("name", "mode"), [cell for cell in CELLS if cell not in SLOW])
def test_a_model_trains_as_on_one_process(name: str, mode: str) -> None:
    run_cell(name, mode)
