"""Agreement of ranks: text that must be equal on all ranks of a mesh is compared, and where it is
not each rank raises one error that names two of them.

    agree("from_local", "f32[8, 16] Shard(0)", wire)

A digest of the text is exchanged first, and the text itself only where digests differ. What a
program passes is compared the first time that a line of it does so (`agree_first`), and each time
under `check_ranks()`: in the steady state nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.layout import Fix, LayoutError

from .messages import hash_text
from .source import call_site, user_line
from .trace import TraceWire
from .wire import Wire

__all__ = [
    "agree",
    "agree_first",
    "digest_of_text",
    "gather_texts",
    "is_agreed",
    "is_alone",
    "make_disagreement_error",
    "remember_agreed",
]


def agree(
    what: str,
    mine: str,
    wire: Wire,
    *,
    fact: str = "the ranks do not ask for the same",
    reason: str = "a global tensor is one thing, of which each rank has a part",
    fixes: Sequence[Fix] = (),
) -> None:
    """Return if `mine` is equal on all ranks of the mesh; raise on all of them if not.

    Args:
        what: names the operation, alike on all ranks: "from_local".
        mine: this rank's text, of any length.
        fact: what is wrong where the ranks differ.
        fixes: what helps then.

    Raises:
        LayoutError: with the texts of two ranks.
    """
    if is_alone(wire):
        return
    why = f"compares {what}"
    if len(set(wire.exchange(why, hash_text(mine)))) > 1:
        texts = [row.decode(errors="replace") for row in wire.exchange(why, mine.encode())]
        raise make_disagreement_error(what, texts, fact=fact, reason=reason, fixes=fixes)


def agree_first(
    what: str, mine: str, wire: Wire, *where: object, each: bool = True, **message: object
) -> None:
    """`agree`, the first time that this line of the program passes this, or under `check_ranks()`.

    Args:
        where: which argument it is, where a line has several.
        each: compare each new text of a line; False: only its first.
        message: `fact`, `reason` and `fixes`, as of `agree`.
    """
    key = (call_site(), what, *where, mine if each else None)
    if is_agreed(wire, key):
        return
    agree(what, mine, wire, **message)  # type: ignore[arg-type]
    remember_agreed(wire, key)


def is_alone(wire: Wire) -> bool:
    """Is there nobody to compare with? Captured steps compare their keys instead."""
    return wire.mesh.size() == 1 or not wire.has_peers or isinstance(wire, TraceWire)


def is_agreed(wire: Wire, key: object) -> bool:
    """Need this not be compared, since it was, or since there is nobody to compare with?"""
    return is_alone(wire) or (wire.scope.check is None and key in wire.agreed)


def remember_agreed(wire: Wire, key: object) -> None:
    """Have `is_agreed` return True for `key` from now on."""
    # A program has few lines, but a line may bring any number of shapes.
    if len(wire.agreed) >= _KEPT:
        wire.agreed.clear()  # on all ranks at once, since they have agreed on as many
    wire.agreed.add(key)


_KEPT = 1 << 16


def gather_texts(mine: str, wire: Wire) -> list[str]:
    """Every rank's text, of any length, in mesh order."""
    return [row.decode(errors="replace") for row in wire.exchange("compares texts", mine.encode())]


def make_disagreement_error(
    what: str,
    texts: Sequence[str],
    *,
    fact: str = "the ranks do not ask for the same",
    reason: str = "a global tensor is one thing, of which each rank has a part",
    fixes: Sequence[Fix] = (),
) -> LayoutError:
    """The error for the `texts` of all ranks, in mesh order, of which two differ."""
    rank = next(i for i, text in enumerate(texts) if text != texts[0])
    return LayoutError(
        f"{what}: {fact}",
        place=user_line(),
        operands=(f"rank 0  {texts[0]}", f"rank {rank}  {texts[rank]}"),
        reason=reason,
        fixes=tuple(fixes) or (Fix("pass the same on every rank"),),
    )


def digest_of_text(text: str) -> int:
    """63 bits that are the same in every process."""
    return int.from_bytes(hash_text(text)[:8], "big") >> 1
