"""The hot path of dispatch in C (`in_c/`), where it was built.

Key functions, `handle` and the methods that skip torch's parser have twins in C, which leave what
is unusual to those in Python. Both give the same keys, so that they share the plans. Without a C
compiler the package installs without them, and `PARTITA_HOT_PATH=python` leaves them aside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "DECLARED",
    "FLAG",
    "FORM",
    "IN_C",
    "KEYWORD",
    "OPERAND",
    "REST",
    "UNREAD",
    "load_extension",
    "make_key_in_c",
]

OPERAND, DECLARED, FLAG, UNREAD, REST = range(5)
"""What a parameter is to the key: an operand of a fixed sentence; read by the rule; read, and a
bool; not read; all arguments that are left."""

KEYWORD = 8
"""Added to a parameter that can be given by name only."""


FORM = 1
"""The version of the interface between this package and the C. A module that was built of sources
of another version is left aside."""


def load_extension() -> Any:
    """The extension module; None where it was not built, is of other sources or is not wanted."""
    if os.environ.get("PARTITA_HOT_PATH") == "python":
        return None
    try:
        from . import _hot_path  # type: ignore[attr-defined]
    except ImportError:
        return None
    return _hot_path if getattr(_hot_path, "FORM", None) == FORM else None


IN_C = load_extension()
"""The extension module, or None."""


def make_key_in_c(
    key: Callable[..., Any],
    params: Sequence[tuple[str, int, Any]],
    flagged: bool,
) -> Callable[..., Any]:
    """A key function in C that gives the same keys as `key`; `key` itself where there is no C.

    Args:
        key: a key function in Python, with its set of `harmless` names among its globals.
        params: of each parameter its name, what it is to the key, and its default.
        flagged: an argument `inplace=True` has no key.
    """
    if IN_C is None:
        return key
    names, kinds, defaults = zip(*params, strict=True)
    harmless = key.__globals__["harmless"]
    return IN_C.Key(key, names, bytes(kinds), defaults, harmless, flagged)  # type: ignore[no-any-return]
