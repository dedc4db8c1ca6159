"""Agreement of ranks: what must be the same on all ranks of a mesh is compared, and where it is not
all of them raise one error that names two.

Digests travel first, and the texts where digests differ. What a program brings is compared the
first time that a place of it does so (`agree_first`), and each time under `check_ranks()`: so it
costs nothing in the steady state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from partita.layout import Fix, LayoutError

from .source import call_site, user_line
from .trace import TraceWire
from .wire import Wire

__all__ = [
    "agree",
    "agree_first",
    "differing",
    "digest_of_text",
    "gather_texts",
    "is_agreed",
    "is_alone",
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
    """Return if all ranks of the mesh say the same of `what`; raise on all of them if not.

    Args:
        what: names the operation, alike on all ranks: "from_local".
        mine: what this rank says; of any length.
        fact: what is wrong where the ranks differ.
        fixes: what helps then.

    Raises:
        LayoutError: with what two of the ranks say.
    """
    if is_alone(wire):
        return
    why = f"compares {what}"
    if len(set(wire.exchange(why, _hash_text(mine)))) > 1:
        texts = [row.decode(errors="replace") for row in wire.exchange(why, mine.encode())]
        raise differing(what, texts, fact=fact, reason=reason, fixes=fixes)


def agree_first(
    what: str, mine: str, wire: Wire, *where: object, each: bool = True, **said: object
) -> None:
    """`agree`, the first time that this place of the program says this, or under `check_ranks()`.

    Args:
        where: which argument it is, where a place has several.
        each: what the place says for the first time is compared, not only what it says at first.
        said: as of `agree`.
    """
    key = (call_site(), what, *where, mine if each else None)
    if is_agreed(wire, key):
        return
    agree(what, mine, wire, **said)  # type: ignore[arg-type]
    remember_agreed(wire, key)


def is_alone(wire: Wire) -> bool:
    """Is there nobody to compare with? While a step is captured, what it reads is compared."""
    return wire.mesh.size() == 1 or not wire.has_peers or isinstance(wire, TraceWire)


def is_agreed(wire: Wire, key: object) -> bool:
    """Need this not be compared, since it was, or since there is nobody to compare with?"""
    return is_alone(wire) or (wire.scope.check is None and key in wire.agreed)


def remember_agreed(wire: Wire, key: object) -> None:
    """`is_agreed` from now on; what a program says is bounded by its places, but for shapes."""
    if len(wire.agreed) >= _KEPT:
        wire.agreed.clear()  # on all ranks at once, since they have agreed on as many
    wire.agreed.add(key)


_KEPT = 1 << 16


def gather_texts(mine: str, wire: Wire) -> list[str]:
    """Every rank's text, of any length, in mesh order."""
    return [row.decode(errors="replace") for row in wire.exchange("compares texts", mine.encode())]


def differing(
    what: str,
    texts: Sequence[str],
    *,
    fact: str = "the ranks do not ask for the same",
    reason: str = "a global tensor is one thing, of which each rank has a part",
    fixes: Sequence[Fix] = (),
) -> LayoutError:
    """What to raise where ranks, in mesh order, say `texts`, of which two differ."""
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
    return int.from_bytes(_hash_text(text)[:8], "big") >> 1


def _hash_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
