"""Casting: for which devices autocast is on, and to which dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from .device import kinds_that_cast

__all__ = ["Casting", "cast_as", "casting_now", "dtypes_cast_to"]

Casting = tuple[tuple[str, bool, torch.dtype], ...]
"""For each kind of device: is autocast on, and to which dtype would it cast?"""


def casting_now() -> Casting:
    """How autocast is set in this thread."""
    return tuple(
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds_that_cast()
    )


def dtypes_cast_to(casting: Casting) -> tuple[torch.dtype, ...]:
    """The dtypes of those devices for which it is on."""
    return tuple(dtype for _, enabled, dtype in casting if enabled)


@contextmanager
def cast_as(casting: Casting, *, cache: bool | None = None) -> Iterator[None]:
    """Within, autocast is set so; afterwards as it was.

    Args:
        cache: does it keep what it has cast? None: as outside.
    """
    kept = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, kept)
        torch.set_autocast_cache_enabled(kept if cache is None else cache)
        for kind, enabled, dtype in casting:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield
