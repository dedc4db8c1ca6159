"""Facts of a captured step for a report: memory by class, bytes by line, what the passes did."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

from partita.comm.ledger import Record

from .memory.schedule import Buffer, Memory
from .pass_report import peaks_of_changes

__all__ = ["facts_of_graph", "facts_of_moves"]

_HELD = {
    "parameter": "weights",
    "buffer": "weights",
    "optimizer": "optimizer",
    "gradient": "gradients",
}
_HOLDERS = 12


def facts_of_graph(step: Any) -> dict[str, Any]:
    """What ran last of a compiled step, as `report.RunFacts` hears of it in the event "graph".

    Raises:
        ValueError: nothing was captured yet.
    """
    changes, peaks = peaks_of_changes(step.program.captured, step.without, step.passes)
    passes = [
        {
            "name": change.name,
            "promise": change.promise,
            "did": change.did,
            "collectives": change.collectives,
            "sent": change.sent,
            "peak": peak,
        }
        for change, peak in zip(changes, pairwise(peaks), strict=True)
    ]
    return {"memory": _memory_facts(step.memory), "passes": passes}


def _memory_facts(memory: Memory) -> dict[str, Any]:
    held: dict[str, int] = {}
    for one in memory.held:
        kind = _HELD.get(one.kind, "arguments")
        held[kind] = held.get(kind, 0) + one.nbytes
    kinds = dict.fromkeys(_class_of(buffer) for buffer in memory.buffers)
    live = {kind: memory.live_of(partial(_is_of, kind)) for kind in kinds}
    holders = [
        {"name": b.name, "kind": _class_of(b), "source": b.source, "nbytes": b.nbytes}
        for b in memory.at(memory.peak_place)[:_HOLDERS]
    ]
    return {"places": memory.places, "held": held, "live": live, "holders": holders}


def _is_of(kind: str, buffer: Buffer) -> bool:
    return _class_of(buffer) == kind


def _class_of(buffer: Buffer) -> str:
    """A class of memory: by the move that made it, and else by the phase."""
    if buffer.passing:
        return "workspace"
    if buffer.reason in ("gather", "regather"):
        return "gathered"
    if buffer.reason in ("gradient", "settle"):
        return "gradients"
    by_phase = {"forward": "activations", "backward": "backward"}
    return by_phase.get(buffer.phase, "workspace")


def facts_of_moves(moves: list[Record]) -> list[dict[str, Any]]:
    """What a ledger has noted on one rank, by line and kind: the event "moves"."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for move in moves:
        name = (move.source, move.kind, " ".join(move.axes), move.reason)
        row = found.setdefault(
            name,
            {
                "source": move.source,
                "kind": move.kind,
                "axes": " ".join(move.axes),
                "reason": move.reason,
                "nbytes": 0,
                "count": 0,
            },
        )
        row["nbytes"] += move.nbytes
        row["count"] += 1
    return [*found.values()]
