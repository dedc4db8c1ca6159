"""Errors of calls that must fail, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def collect_errors(calls: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """The kind and text of what each call raises; calls that raise nothing are not in it."""
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def check_errors(found: Mapping[str, str], expected: Mapping[str, tuple[str, str]]) -> None:
    """Check that each call has raised an error of its kind with a part of its text."""
    assert found.keys() == expected.keys()
    for name, (kind, text) in expected.items():
        assert found[name].startswith(f"{kind}: "), (name, found[name])
        assert text in found[name], (name, found[name])
