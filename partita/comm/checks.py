"""Checks of moves: `strict()` refuses moves that nobody asked for, `check_ranks()` compares what
ranks are about to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from partita.layout import Fix, LayoutError

from .ledger import scope
from .source import user_line

if TYPE_CHECKING:
    from partita.redistribute import Move

__all__ = ["ON_CHECK", "Check", "check_ranks", "enter_check_hooks", "refuse_implicit", "strict"]


@contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Inside, an implicit move that sends bytes raises LayoutError instead of being carried.

    Slicing, masking and retyping send nothing and stay allowed. On an axis of one rank a move is
    refused like on many, so that a program that passes on one rank passes on all.

    Args:
        on: False allows implicit moves again, inside a strict region.
    """
    here = scope()
    before = here.strict
    here.set(strict=on)
    try:
        yield
    finally:
        here.set(strict=before)


def refuse_implicit(move: Move, op: str, nbytes: int) -> None:
    """Raise the error of an implicit move under `strict()`."""
    from .ledger import human  # the sentence needs it, and only here

    asked = ", ".join(f"{move.after.placement(a)} on {a}" for a in move.axes)
    cost = f"{move.kind} {human(nbytes)}"
    raise LayoutError(
        f"{op} needs an implicit {move.kind} over {' '.join(move.axes)}, and strict() forbids it",
        place=user_line(),
        operands=(f"{move.before.brief()}  would become  {move.after.brief()}",),
        reason="under strict() only what the program asks for is sent",
        fixes=(
            Fix(f"redistribute({asked}) before {op}", cost),
            Fix("leave strict() around this line", cost),
        ),
    )


# -- process groups ------------------------------------------------------------------------------


class Exchanging(Protocol):
    """A wire on which ranks compare."""

    def exchange(self, why: str, mine: bytes, deadline: float | None = None) -> list[bytes]:
        """What every rank brings; raises on all of them where they come for other reasons."""


class Check:
    """One `check_ranks()` region: what its ranks compare before each collective.

    All ranks of a mesh compare, not only the group of the collective: two ranks that disagree
    about the group itself would each wait in another one.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        # Wires that were used inside: leaving the region is compared on each.
        self.wires: dict[int, Exchanging] = {}
        self.broken = False  # a comparison has failed: to wait for another rank again would hang

    def compare(self, wire: Exchanging, text: str) -> None:
        """Raise on every rank of the mesh, naming two that differ, unless all say `text`."""
        self.wires[id(wire)] = wire
        try:
            wire.exchange(text, b"", self.timeout)
        except Exception:
            self.broken = True
            raise


ON_CHECK: list[Callable[[], AbstractContextManager[Any]]] = []
"""Context managers that `check_ranks()` enters too. `tensor/arguments` adds the comparison of
numbers that are given to ops."""


@contextmanager
def enter_check_hooks() -> Iterator[None]:
    """Within, all of `ON_CHECK` is entered, for this thread."""
    with ExitStack() as entered:
        for enter in ON_CHECK:
            entered.enter_context(enter())
        yield


@contextmanager
def check_ranks(timeout: float = 60.0) -> Iterator[None]:
    """Before each collective on process groups, compare what the ranks ask for.

    Ranks that differ in move, axes, shapes, dtype, op or source line all raise LayoutError naming
    both, where they would otherwise hang or mix up data. What is compared the first time at each
    place otherwise (pieces, batches, generators, an optimizer's settings, plain tensors) is
    compared each time, and so are the numbers that ops on DTensors take. So do ranks that go on
    while another leaves the region, in order or with an error. Costs one small collective per move
    and per op that takes numbers; moves of ranks of one process (`ranks`) are compared anyhow.

    Args:
        timeout: seconds to wait for the other ranks.
    """
    here = scope()
    before, check = here.check, Check(timeout)
    here.set(check=check)
    try:
        with enter_check_hooks():
            yield
    except BaseException as error:
        here.set(check=before)
        _announce_region_exit(
            check, f"left check_ranks() with {type(error).__name__}: {error}", quiet=True
        )
        raise
    here.set(check=before)
    _announce_region_exit(check, "left check_ranks() in order", quiet=False)


def _announce_region_exit(check: Check, text: str, quiet: bool) -> None:
    """Tell the ranks that may wait inside the region that this one has left it."""
    for wire in check.wires.values():
        if check.broken:
            return
        try:
            check.compare(wire, text)
        except Exception:
            if not quiet:
                raise
