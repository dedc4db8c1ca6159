"""What rewrites a graph, in order; each pass in a file of its own, and each can be left out.

A pass is a function of a `Program` that changes its graph and returns what it did in a few words.
It may count on a legal graph and must leave one (`compile.verify`): `run_passes` checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from ..functional import drop_unused
from ..graph import canonical, is_collective, nbytes_of
from ..notes import note_of
from ..program import Program
from ..verify import verify
from .bucket import bucket
from .cancel import cancel
from .dedupe import dedupe
from .regather import regather

__all__ = ["PASSES", "Change", "Pass", "run_passes"]

Pass = Callable[[Program], str]

PASSES: dict[str, Pass] = {
    "dedupe": dedupe,
    "cancel": cancel,
    "regather": regather,
    "bucket": bucket,
}


@dataclass(frozen=True)
class Change:
    """What one pass did to a graph.

    Attributes:
        name, promise: the pass, and the first line of what it says of itself.
        did: what it did, in a few words.
        nodes, collectives, sent, saved: (before, after): nodes; collectives among them; bytes that
            a rank sends; bytes of gathered values that forward leaves for backward.
        diff: the lines that went ("-") and came ("+"), without their numbers.
    """

    name: str
    promise: str
    did: str
    nodes: tuple[int, int]
    collectives: tuple[int, int]
    sent: tuple[int, int]
    saved: tuple[int, int]
    diff: tuple[str, ...]

    def __str__(self) -> str:
        said = [f"{self.name}: {self.promise}", f"  {self.did}"]
        for what in ("nodes", "collectives", "sent", "saved"):
            before, after = getattr(self, what)
            if before != after:
                unit = " bytes" if what in ("sent", "saved") else ""
                said.append(f"  {what} {before} -> {after}{unit}")
        return "\n".join(said)


def run_passes(program: Program, without: Iterable[str] = ()) -> list[Change]:
    """Run the passes but those named in `without`; what each did.

    Raises:
        ValueError: `without` names a pass that there is not.
        IllegalGraph: a pass left a graph that breaks the grammar.
    """
    left_out = set(without)
    if left_out - set(PASSES):
        raise ValueError(f"without: the passes are {', '.join(PASSES)}, not {left_out}")
    changes = []
    for name, change in PASSES.items():
        if name in left_out:
            continue
        before, lines = _figures(program.graph.graph), _lines(program)
        did = change(program)
        drop_unused(program.graph.graph)
        program.graph.graph.lint()
        program.graph.recompile()
        verify(program, name)
        after, now = _figures(program.graph.graph), _lines(program)
        promise = (change.__doc__ or name).split("\n")[0]
        pairs = [(b, a) for b, a in zip(before, after, strict=True)]
        changes.append(Change(name, promise, did, *pairs, diff=_diff(lines, now)))
    return changes


def _figures(graph: fx.Graph) -> tuple[int, int, int, int]:
    nodes = list(graph.nodes)
    sends = [n for n in nodes if is_collective(n)]
    return len(nodes), len(sends), sum(note_of(n).nbytes for n in sends), _saved(nodes)


def _saved(nodes: list[fx.Node]) -> int:
    """Bytes that all-gathers of forward make and that backward reads."""
    total = 0
    for node in nodes:
        note = note_of(node)
        if is_collective(node) and note.reason == "gather" and note.phase == "forward":
            reach, late = {node}, False
            for other in nodes:
                if reach.intersection(other.all_input_nodes):
                    late = late or note_of(other).phase == "backward"
                    if note_of(other).move == note.move:
                        reach.add(other)
            total += nbytes_of(node) if late else 0
    return total


def _lines(program: Program) -> list[str]:
    return [line.split(" = ", 1)[-1] for line in canonical(program)]


def _diff(before: list[str], after: list[str]) -> tuple[str, ...]:
    def called(lines: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for line in lines:
            name = line.split("(", 1)[0] + " :" + line.rsplit(" :", 1)[-1]
            found[name] = found.get(name, 0) + 1
        return found

    one, other = called(before), called(after)
    out = []
    for name in dict.fromkeys([*one, *other]):
        change = other.get(name, 0) - one.get(name, 0)
        if change:
            out.append(f"{'+' if change > 0 else '-'} {abs(change)} x {name}")
    return tuple(out)
