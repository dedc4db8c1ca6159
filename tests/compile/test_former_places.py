"""Public names that have moved to another room are found at their former places, too."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("former", "now", "names"),
    [
        ("partita.compile.passes", "partita.graph.passes", ["find", "put", "replace"]),
        ("partita.compile.verify", "partita.graph.verify", ["IllegalGraph"]),
    ],
)
def test_a_moved_name_is_found_at_its_former_place(former: str, now: str, names: list[str]) -> None:
    for name in names:
        found = [getattr(importlib.import_module(place), name) for place in (former, now)]
        assert found[0] is found[1]
