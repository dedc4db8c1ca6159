"""Does every rank raise one and the same error, that names a line and a way out?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import partita as pt

__all__ = ["each_rank", "refusal"]


def each_rank(fn: Callable[..., Any], **axes: int) -> list[Any]:
    """What `fn(mesh)` returns on each rank, or the exception that it raises there."""

    def body(mesh: Any) -> Any:
        try:
            return fn(mesh)
        except Exception as error:
            return error

    with pt.ranks(**axes) as world:
        return world.run(body)


def refusal(fn: Callable[..., Any], *, place: str, **axes: int) -> pt.LayoutError:
    """The LayoutError that `fn(mesh)` raises on every rank alike.

    Args:
        place: the file whose line the error must name.
    """
    errors = each_rank(fn, **(axes or {"dp": 2, "tp": 2}))
    for error in errors:
        if not isinstance(error, pt.LayoutError):
            raise AssertionError(f"not refused: {error!r}") from (
                error if isinstance(error, Exception) else None
            )
    texts = {str(error) for error in errors}
    assert len(texts) == 1, "the ranks say different things:\n" + "\n\n".join(texts)
    first = errors[0]
    assert place.rsplit("/", 1)[-1] in first.place, f"no line of the program: {first}"
    assert first.fixes, f"no way out: {first}"
    return first
