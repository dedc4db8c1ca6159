"""Facts of a captured step for a report: memory by class, bytes by line, what the passes did."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from partita.comm.ledger import Record
from partita.tensor.dtensor import DTensor

from .memory.schedule import Buffer, Memory
from .pass_report import peaks_of_changes
from .program import Program

__all__ = [
    "facts_of_graph",
    "facts_of_layouts",
    "facts_of_memory",
    "facts_of_moves",
    "facts_of_parameter",
]

_HELD = {
    "parameter": "weights",
    "buffer": "weights",
    "optimizer": "optimizer",
    "gradient": "gradients",
}
_HOLDERS = 12


def facts_of_graph(step: Any) -> dict[str, Any]:
    """The last program of a compiled step, as the event "graph" of `report.RunFacts`.

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
    return {"memory": facts_of_memory(step.memory), "passes": passes}


def facts_of_memory(
    memory: Memory, class_of: Callable[[Buffer], str] | None = None
) -> dict[str, Any]:
    """Bytes over a step by class, as `report.RunFacts.memory` has them.

    Args:
        class_of: gives the class of a buffer; None for `_class_of`.
    """
    class_of = class_of or _class_of
    held: dict[str, int] = {}
    for holding in memory.held:
        kind = _HELD.get(holding.kind, "arguments")
        held[kind] = held.get(kind, 0) + holding.nbytes
    classes = {id(buffer): class_of(buffer) for buffer in memory.buffers}
    live = {
        kind: memory.live_of(lambda buffer, kind=kind: classes[id(buffer)] == kind)  # type: ignore[misc]
        for kind in dict.fromkeys(classes.values())
    }
    holders = [
        {"name": b.name, "kind": classes[id(b)], "source": b.source, "nbytes": b.nbytes}
        for b in memory.at(memory.peak_place)[:_HOLDERS]
    ]
    return {"places": memory.places, "held": held, "live": live, "holders": holders}


def _class_of(buffer: Buffer) -> str:
    """The class of a buffer: by the move that made it, else by the phase."""
    if buffer.passing:
        return "workspace"
    if buffer.reason in ("gather", "regather"):
        return "gathered"
    if buffer.reason in ("gradient", "settle"):
        return "gradients"
    by_phase = {"forward": "activations", "backward": "backward"}
    return by_phase.get(buffer.phase, "workspace")


def facts_of_moves(moves: list[Record]) -> list[dict[str, Any]]:
    """The moves of one rank, summed by line, kind, axes and reason: the event "moves"."""
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


def facts_of_layouts(program: Program) -> list[list[Any]]:
    """`facts_of_parameter` of each DTensor parameter that a program reads: the event "layouts"."""
    return [
        facts_of_parameter(given.name, given.tensor)
        for given in program.inputs
        if given.kind == "parameter" and isinstance(given.tensor, DTensor)
    ]


def facts_of_parameter(name: str, p: DTensor) -> list[Any]:
    """[name, layout, mesh, bytes on a rank] of a parameter; layout and mesh as text."""
    mesh = p._spec.wire.mesh
    axes = " ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.names)
    nbytes = math.prod(p._spec.local_shape) * p.element_size()
    return [name, str(p.layout_over_mesh), axes, nbytes]
