"""Changes by a pass: what did a pass do to a graph, in figures and in lines?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from partita.comm.ledger import human
from partita.redistribute.cost import seconds_of

from ..graph import canonical, is_collective, nbytes_of
from ..key import digest_of
from ..node_metadata import note_of
from ..program import Program

__all__ = ["Change", "Pass", "Seen", "worth"]

Pass = Callable[[Program], Any]
"""Changes a program's graph, and says in a few words what it did."""

_SHOWN = 6  # lines of a diff, in text


@dataclass(frozen=True)
class Change:
    """What one pass did to a graph.

    Attributes:
        name, promise: the pass, and the first line of what it says of itself.
        did: what it did, in a few words.
        nodes, collectives, sent, saved, seconds: (before, after): nodes; collectives among them;
            bytes that a rank sends; bytes of gathered values that forward leaves for backward;
            the time of the collectives one after the other, by `redistribute.cost`, which ranks
            one way against another and is no measurement.
        diff: the lines that went ("-") and came ("+"), without their numbers.
        digest: of the graph after it: equal on all ranks, or the pass looked at the rank.
        changed: is the graph another one?
    """

    name: str
    promise: str
    did: str
    nodes: tuple[int, int]
    collectives: tuple[int, int]
    sent: tuple[int, int]
    saved: tuple[int, int]
    seconds: tuple[float, float]
    diff: tuple[str, ...]
    digest: int = 0
    changed: bool = True

    def __str__(self) -> str:
        return self.text()

    def text(self, *more: str) -> str:
        """All of it, but of the diff the first lines; `more` stands before that."""
        said = [f"{self.name}: {self.promise}", f"  {self.did}"]
        for what, label in _LABELS.items():
            before, after = (worth(what, value) for value in getattr(self, what))
            if before != after:
                said.append(f"  {label}: {before} -> {after}")
        said += [f"  {line}" for line in more]
        lines = [line for line in self.diff if "wait_tensor" not in line]
        said += [f"    {line}" for line in lines[:_SHOWN]]
        if len(lines) > _SHOWN:
            said.append(f"    and {len(lines) - _SHOWN} more kinds of lines")
        return "\n".join(said)


_LABELS = {
    "nodes": "nodes",
    "collectives": "collectives",
    "sent": "sent by a rank",
    "saved": "gathered and saved for backward",
    "seconds": "predicted time of collectives",
}


def worth(what: str, value: float) -> str:
    """A figure of a `Change`, by the name of its field, as a person reads it."""
    if what in ("sent", "saved"):
        return "nothing" if not value else human(int(value))
    return f"{value * 1e6:.4g} us" if what == "seconds" else str(value)


class Seen:
    """A graph as it was when this was made."""

    def __init__(self, program: Program):
        nodes = list(program.graph.graph.nodes)
        sends = [note_of(n).nbytes for n in nodes if is_collective(n)]
        lines = canonical(program)
        self.figures = {
            "nodes": len(nodes),
            "collectives": len(sends),
            "sent": sum(sends),
            "saved": _saved_bytes_of_gathers(nodes),
            "seconds": sum(map(seconds_of, sends)),
        }
        self.lines = [line.split(" = ", 1)[-1] for line in lines]
        self.digest = digest_of(lines)

    def changed_to(self, now: Seen, name: str, promise: str, did: str) -> Change:
        pairs: dict[str, Any] = {
            what: (self.figures[what], now.figures[what]) for what in self.figures
        }
        return Change(
            name,
            promise,
            did,
            **pairs,
            diff=_diff_calls(self.lines, now.lines),
            digest=now.digest,
            changed=now.digest != self.digest,
        )


def _saved_bytes_of_gathers(nodes: list[fx.Node]) -> int:
    """Bytes that all-gathers of forward make and that backward reads."""
    total = 0
    for node in nodes:
        note = note_of(node)
        if is_collective(node) and note.reason == "gather" and note.phase == "forward":
            waiting, late = [node], False
            for made in waiting:
                late = late or any(note_of(user).phase == "backward" for user in made.users)
                waiting += [u for u in made.users if note_of(u).move == note.move]
            total += nbytes_of(node) if late else 0
    return total


def _diff_calls(before: list[str], after: list[str]) -> tuple[str, ...]:
    """What is called more or less often, those that send first."""

    def called(lines: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for line in lines:
            if line.startswith("output ["):  # of numbers only
                continue
            name = line.split("(", 1)[0] + " :" + line.rsplit(" :", 1)[-1]
            found[name] = found.get(name, 0) + 1
        return found

    one, other = called(before), called(after)
    out = []
    for name in sorted({**one, **other}, key=lambda name: "_c10d_functional" not in name):
        change = other.get(name, 0) - one.get(name, 0)
        if change:
            out.append(f"{'+' if change > 0 else '-'} {abs(change)} x {name}")
    return tuple(out)
