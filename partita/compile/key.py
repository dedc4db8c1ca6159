"""Keys of programs: a hash that is equal for equal programs, and the check that all ranks agree.

The key hashes what the program is, never objects: the canonical text of its graph, the layouts of
its inputs, the options, and the versions of what compiles it. Ranks compare hashes with one small
collective before any of them compiles. Where they differ, bisection over the lines finds the first
that does, and all ranks raise the same error.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence

import torch

from partita.comm import Wire, gather_texts, user_line
from partita.layout import Fix, LayoutError
from partita.versions import __version__

__all__ = ["agree_on_program", "digest_of", "key_of", "versions"]


def versions() -> list[str]:
    """The versions and the kind of machine, which also decide what is compiled."""
    return [f"torch {torch.__version__}", f"partita {__version__}", platform.machine()]


def key_of(lines: Sequence[str]) -> str:
    """The hash of a program's lines: 64 hexadecimal digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_of(lines: Sequence[str]) -> int:
    """A 63-bit hash of lines, the same in every process."""
    raw = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(raw[:8], "big") >> 1


def agree_on_program(
    lines: Sequence[str],
    where: Sequence[str],
    wire: Wire,
    stages: Callable[[], Sequence[tuple[str, int]]] = tuple,
) -> None:
    """Return if all ranks of `wire` have the same lines; raise on all of them if not.

    Args:
        lines: the program of this rank.
        where: for each line the user's line that it comes from.
        stages: gives (name, digest of the program after it) for capture and each pass. Called
            only where ranks differ, and then on all of them.

    Raises:
        LayoutError: the first line in which two ranks differ, as both have it.
    """
    hashes = wire.gather_ints(_hash_lines(lines))
    if len(set(hashes)) <= 1:
        return
    shortest = min(n for (n,) in wire.gather_ints((len(lines),)))
    same, differ = 0, shortest + 1  # the first `same` lines are equal, the first `differ` are not
    while differ - same > 1:
        middle = (same + differ) // 2
        if middle <= shortest and len(set(wire.gather_ints(_hash_lines(lines[:middle])))) <= 1:
            same = middle
        else:
            differ = middle
    mine = lines[same] if same < len(lines) else "(it ends here)"
    place = where[same] if same < len(where) else ""
    texts = gather_texts(f"{mine}   {place}".rstrip(), wire)
    other = next((i for i, text in enumerate(texts) if text != texts[0]), 0)
    by = _find_diverging_pass(stages(), wire)
    raise LayoutError(
        f"compile: the pass {by} has made different programs on the ranks"
        if by
        else "compile: the ranks have captured different programs",
        place=user_line(),
        operands=(f"rank 0  {texts[0]}", f"rank {other}  {texts[other]}"),
        reason=f"line {same + 1} of the graph is the first that differs; nothing was compiled",
        fixes=(
            Fix("the same constants, layouts and options on every rank"),
            Fix("a tensor, where ranks are to have different numbers"),
        ),
    )


def _find_diverging_pass(stages: Sequence[tuple[str, int]], wire: Wire) -> str:
    """The first pass after which ranks differ; "" if capture or options do."""
    count = min(n for (n,) in wire.gather_ints((len(stages),)))
    by_rank = wire.gather_ints(tuple(digest for _, digest in stages[:count])) if count else [()]
    for i in range(count):
        if len({digests[i] for digests in by_rank}) > 1:
            return stages[i][0] if i else ""
    return ""


def _hash_lines(lines: Sequence[str]) -> tuple[int, ...]:
    raw = hashlib.sha256("\n".join(lines).encode()).digest()
    return tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(0, 32, 4))
