"""Programs whose Python state changes between two calls of a step: one entry for each kind.

An entry is made of: what the step is, what changes between its second and its third call and,
where the step itself changes state, what is looked at after each call. It is built anew for each
run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Change:
    """One program.

    Attributes:
        step: what is compiled.
        change: what happens between two calls.
        seen: what a user can look at afterwards.
        arguments: of each of the four calls, beside x.
    """

    step: Callable[..., Any]
    change: Callable[[], Any]
    seen: Callable[[], Any] = lambda: None
    arguments: Callable[[int], tuple[Any, ...]] = lambda i: ()


CHANGES: dict[str, Callable[[], Change]] = {}
REFUSED: set[str] = set()
HOOKS: list[Any] = []  # of all modules: taken away after each run


def change(build: Callable[[], Change]) -> Callable[[], Change]:
    CHANGES[build.__name__] = build
    return build


def refused(build: Callable[[], Change]) -> Callable[[], Change]:
    """What no guard can hold, or no graph can write: an error, not a number."""
    REFUSED.add(build.__name__)
    return change(build)


def item(name: str, make: Callable[[], Any], read: Callable[..., Any], write: Callable[[Any], Any]):
    """A value that is read from something that the step's closure holds."""

    def build() -> Change:
        held = make()
        return Change(lambda x: x * read(held), lambda: write(held))

    CHANGES[name] = build


def setting(key: Any, value: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(key, value)


def having(key: str, value: Any) -> Callable[[Any], None]:
    return lambda held: setattr(held, key, value)
