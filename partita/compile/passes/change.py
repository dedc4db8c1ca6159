"""Changes that a pass made to a graph, in figures and as a diff of its lines.

`GraphFigures` counts a graph before and after a pass; their comparison is a `Change`, which
`step.explain()` prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from partita.comm.ledger import human
from partita.redistribute.cost import seconds_of

from ..graph import canonical
from ..graph_nodes import is_collective, nbytes_of, note_of
from ..key import digest_of
from ..program import Program

__all__ = ["Change", "GraphFigures", "Pass", "format_figure"]

Pass = Callable[[Program], Any]
"""Changes a program's graph, and returns in a few words what it did."""

_SHOWN = 6  # lines of a diff, in text


@dataclass(frozen=True)
class Change:
    """What one pass did to a graph.

    Attributes:
        name, promise: of the pass; its promise is the first line of its docstring.
        did: what it did, in a few words.
        nodes, collectives, sent, saved, seconds: (before, after): nodes; collectives among them;
            bytes that a rank sends; bytes of gathered parameters that live from forward to
            backward; the predicted time of the collectives one after another (`redistribute.cost`),
            to compare graphs by and no measurement.
        diff: the calls that were removed ("-") and added ("+"), with their counts.
        digest: of the graph after it; where ranks differ, the pass depends on the rank.
        changed: whether the graph differs.
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
        """The change as text: figures, the lines `more`, and the first lines of the diff."""
        said = [f"{self.name}: {self.promise}", f"  {self.did}"]
        for what, label in _LABELS.items():
            before, after = (format_figure(what, value) for value in getattr(self, what))
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


def format_figure(what: str, value: float) -> str:
    """The text of a figure of a `Change`, given the name of its field."""
    if what in ("sent", "saved"):
        return "nothing" if not value else human(int(value))
    return f"{value * 1e6:.4g} us" if what == "seconds" else str(value)


class GraphFigures:
    """The figures, lines and digest of a graph as it is when this is made."""

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

    def compare(self, now: GraphFigures, name: str, promise: str, did: str) -> Change:
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
    """Bytes that all-gathers of ZeRO in forward make and that backward reads."""
    total = 0
    for node in nodes:
        note = note_of(node)
        if is_collective(node) and note.reason == "gather" and note.phase == "forward":
            waiting, is_saved = [node], False
            for value in waiting:
                is_saved = is_saved or any(note_of(u).phase == "backward" for u in value.users)
                waiting += [u for u in value.users if note_of(u).move == note.move]
            total += nbytes_of(node) if is_saved else 0
    return total


def _diff_calls(before: list[str], after: list[str]) -> tuple[str, ...]:
    """The calls that there are more or fewer of, collectives first."""

    def count_calls(lines: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for line in lines:
            if line.startswith("output ["):  # it lists numbers only
                continue
            called, typed, value = line.rpartition(" :")
            # A call of a section has no one type, but says which section it is.
            name = (
                called.split("(", 1)[0] + typed + value if typed else line.split(", [", 1)[0] + ")"
            )
            found[name] = found.get(name, 0) + 1
        return found

    counts_before, counts_after = count_calls(before), count_calls(after)
    out = []
    for name in sorted(
        {**counts_before, **counts_after}, key=lambda name: "_c10d_functional" not in name
    ):
        change = counts_after.get(name, 0) - counts_before.get(name, 0)
        if change:
            out.append(f"{'+' if change > 0 else '-'} {abs(change)} x {name}")
    return tuple(out)
