"""Autocast state: for which devices autocast is on, and to which dtypes it casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from .device import kinds_that_cast

__all__ = [
    "AutocastState",
    "enabled_autocast_dtypes",
    "read_autocast_state",
    "switch_off",
    "use_autocast_state",
]

AutocastState = tuple[tuple[str, bool, torch.dtype], ...]
"""For each kind of device: (its type, is autocast on, the dtype that it casts to)."""


def read_autocast_state() -> AutocastState:
    """The state of autocast in this thread."""
    return tuple(
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds_that_cast()
    )


def enabled_autocast_dtypes(state: AutocastState) -> tuple[torch.dtype, ...]:
    """The dtypes of the devices for which autocast is on."""
    return tuple(dtype for _, enabled, dtype in state if enabled)


def switch_off(state: AutocastState) -> AutocastState:
    """The state in which autocast is on for no device."""
    return tuple((kind, False, dtype) for kind, _, dtype in state)


@contextmanager
def use_autocast_state(state: AutocastState, *, cache: bool | None = None) -> Iterator[None]:
    """Within, autocast is in `state`; afterwards as it was before.

    Args:
        cache: does autocast keep what it has cast? None: as outside.
    """
    cache_was_on = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, cache_was_on)
        torch.set_autocast_cache_enabled(cache_was_on if cache is None else cache)
        for kind, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield
