"""Casting: for which devices autocast is on, and to which dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

__all__ = ["Casting", "cast_as", "casting_now", "dtypes_cast_to"]

Casting = tuple[tuple[str, bool, torch.dtype], ...]
"""For each kind of device: is autocast on, and to which dtype would it cast?"""


@cache
def _devices_that_cast() -> tuple[str, ...]:
    """The kinds of devices that a tensor may lie on here. A step for "cuda" is captured where there
    is none, too."""
    found = torch.accelerator.current_accelerator()
    kinds = ("cpu", "cuda") if found is None else ("cpu", "cuda", found.type)
    return tuple(k for k in dict.fromkeys(kinds) if torch.amp.is_autocast_available(k))


def casting_now() -> Casting:
    """How autocast is set in this thread."""
    return tuple(
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _devices_that_cast()
    )


def dtypes_cast_to(casting: Casting) -> tuple[torch.dtype, ...]:
    """The dtypes of those devices for which it is on."""
    return tuple(dtype for _, enabled, dtype in casting if enabled)


@contextmanager
def cast_as(casting: Casting) -> Iterator[None]:
    """Within, autocast is set so; afterwards as it was."""
    with ExitStack() as stack:
        for kind, enabled, dtype in casting:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield
