"""Reports of a captured step: memory by class, bytes by line, and the effect of each pass.

Describing what passes changed takes longer than the passes, and is rarely needed. So passes do not
record it. A report runs them again over the captured program, and compares.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from textwrap import indent
from typing import Any

from partita.comm.ledger import Record
from partita.layout.text import human
from partita.tensor.dtensor import DTensor

from .graph_nodes import call_subgraph, subgraph_of, subgraphs_in
from .memory import Buffer, Memory, memory_of
from .passes import Change, record_changes
from .passes.pass_manager import GraphFigures, format_figure
from .passes.remat import count_recomputed
from .program import Program
from .step_forms import CapturedForms, RewrittenBlock

_HELD = {
    "parameter": "weights",
    "buffer": "weights",
    "optimizer": "optimizer",
    "gradient": "gradients",
}
_HOLDERS = 12
_SHOWN_OF_PASS = ("name", "promise", "did", "collectives", "sent")


def facts_of_graph(step: Any) -> dict[str, Any]:
    """Returns data about a step's last program for a report: `{"memory": ..., "passes": ...}`.

    The first is `facts_of_memory`, the second what each pass changed. `step` is a `CompiledStep`.

    Raises:
        ValueError: nothing was captured yet.
    """
    _, changes, peaks = _record_changes(step.program.captured)
    passes = [
        {name: getattr(change, name) for name in _SHOWN_OF_PASS} | {"peak": peak}
        for change, peak in zip(changes, pairwise(peaks), strict=True)
    ]
    return {"memory": facts_of_memory(step.memory), "passes": passes}


def facts_of_memory(
    memory: Memory, class_of: Callable[[Buffer], str] | None = None
) -> dict[str, Any]:
    """Returns data for a report: the bytes of each class of memory over the course of a step.

    Args:
        class_of: a function from a buffer to its class ("activations"); `_class_of` if None.

    Returns:
        "places": the names of the points in time. "held": the bytes of inputs by class. "live": for
        each class, the bytes at each place. "holders": the largest buffers at the peak.
    """
    class_of = class_of or _class_of
    held = Counter[str]()
    for holding in memory.held:
        held[_HELD.get(holding.kind, "arguments")] += holding.nbytes
    classes = {id(buffer): class_of(buffer) for buffer in memory.buffers}
    live = {
        kind: memory.live_of(lambda buffer, kind=kind: classes[id(buffer)] == kind)  # type: ignore[misc]
        for kind in dict.fromkeys(classes.values())
    }
    holders = [
        {"name": b.name, "kind": classes[id(b)], "source": b.source, "nbytes": b.nbytes}
        for b in memory.at(memory.peak_place)[:_HOLDERS]
    ]
    return {"places": memory.places, "held": dict(held), "live": live, "holders": holders}


def _class_of(buffer: Buffer) -> str:
    """Returns the class of a buffer: by the redistribution that made it, otherwise by its phase."""
    if buffer.passing:
        return "workspace"
    if buffer.reason in ("gather", "regather"):
        return "gathered"
    if buffer.reason in ("gradient", "settle"):
        return "gradients"
    by_phase = {"forward": "activations", "backward": "backward"}
    return by_phase.get(buffer.phase, "workspace")


def facts_of_moves(moves: list[Record]) -> list[dict[str, Any]]:
    """Returns data for a report: one rank's moves, one entry for each line, kind, axes and reason.

    Each entry has these four, and the `nbytes` and `count` of its moves.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for move in moves:
        name = (move.source, move.kind, " ".join(move.axes), move.reason)
        what: dict[str, Any] = dict(zip(("source", "kind", "axes", "reason"), name, strict=True))
        row = found.setdefault(name, what | {"nbytes": 0, "count": 0})
        row["nbytes"] += move.nbytes
        row["count"] += 1
    return [*found.values()]


def facts_of_layouts(program: Program) -> list[list[Any]]:
    """Returns data for a report: `facts_of_parameter` for each DTensor parameter of `program`."""
    return [
        facts_of_parameter(given.name, given.tensor)
        for given in program.inputs
        if given.kind == "parameter" and isinstance(given.tensor, DTensor)
    ]


def facts_of_parameter(name: str, p: DTensor) -> list[Any]:
    """Returns `[name, layout, mesh, bytes on a rank]` of `p`; layout and mesh are text."""
    mesh = p._spec.wire.mesh
    axes = " ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.names)
    nbytes = math.prod(p._spec.local_shape) * p.element_size()
    return [name, str(p.layout_over_mesh), axes, nbytes]


# -- reports of passes -----------------------------------------------------------------------------


def explain_passes(captured: CapturedForms) -> str:
    """Returns a text: what each pass changes in a captured program, and the bytes that it saves."""
    program, changes, peaks = _record_changes(captured)
    texts = []
    for change, (before, after) in zip(changes, pairwise(peaks), strict=True):
        peak = [f"predicted peak: {human(before)} -> {human(after)}"] if before != after else []
        texts.append(change.text(*peak))
    if changes:
        texts.append(_summarize_changes(changes[0], changes[-1], peaks))
    if (budget := program.options.budget) is not None:
        texts.insert(0, f"budget\n{indent(_describe_budget(program, peaks[-1], budget), '  ')}")
    blocks = program.blocks
    if not captured.form.in_blocks:
        blocks = blocks.left_flat("for the budget")
    elif not subgraphs_in(program.graph.graph):
        blocks = blocks.left_flat("a part of a block gives another part no tensor")
    if lines := str(blocks):
        texts.insert(0, f"blocks\n{indent(lines, '  ')}")
    return "\n".join(texts)


def _describe_budget(program: Program, peak: int, budget: int) -> str:
    """Returns what a program recomputes for its budget, in sections and outside, as text."""
    graph = program.graph.graph
    lines = [f"{human(peak)} of {human(budget)}, at level {program.level} of recomputation"]
    calls = Counter(map(subgraph_of, graph.find_nodes(op="call_function", target=call_subgraph)))
    for section, count in calls.items():
        assert section is not None
        if again := count_recomputed(section.graph.graph):
            lines.append(f"{section.name}: {again} calls made again, each of {count} times")
    if again := count_recomputed(graph):
        where = " outside of sections" if calls else ""
        lines.append(f"{again} calls made again{where}")
    return "\n".join(lines)


def changes_of(captured: CapturedForms) -> Iterator[Change]:
    """Runs the passes again on a captured program, and yields what each of them changed.

    If the step calls blocks, the first change has the changes of all passes within the blocks.
    """
    return (change for _, change in _run_and_record(captured))


def _record_changes(captured: CapturedForms) -> tuple[Any, list[Change], list[int]]:
    """Returns the rewritten program, the changes, and the predicted peaks around them in bytes."""
    program = captured.inlined()
    changes, peaks = list[Change](), [memory_of(program).peak]
    for program, change in _run_and_record(captured):
        changes.append(change)
        peaks.append(peaks[-1] if not change.changed else memory_of(program).peak)
    return program, changes, peaks


def _run_and_record(captured: CapturedForms) -> Iterator[tuple[Program, Change]]:
    """Runs the passes on a captured program; yields the program and the change after each pass."""
    blocks: list[RewrittenBlock] = []
    quiet = partial(warnings.catch_warnings, action="ignore")  # passes warned at capture
    with quiet():
        program = captured.program(recorded=blocks)
        inlined = captured.inlined() if blocks else program
    if blocks:
        yield program, _change_in_blocks(GraphFigures(inlined), GraphFigures(program), blocks)
    changes = record_changes(program)
    while True:
        with quiet():
            change = next(changes, None)
        if change is None:
            return
        yield program, change


def _change_in_blocks(
    before: GraphFigures, after: GraphFigures, blocks: Iterable[RewrittenBlock]
) -> Change:
    """Returns the change that all passes made inside blocks."""
    lines = ["each structure is rewritten once, and its parts between collectives are sections:"]
    for block in blocks:
        lines.append(f"{block.name}, {block.calls} times")
        lines += [f"    {change.name}: {change.did}" for change in block.changes]
    promise = "Passes within blocks, which stay calls."
    return before.compare(after, "blocks", promise, "\n    ".join(lines))


def _summarize_changes(first: Change, last: Change, peaks: list[int]) -> str:
    sent = [format_figure("sent", n) for n in (first.sent[0], last.sent[1])]
    time = [format_figure("seconds", n) for n in (first.seconds[0], last.seconds[1])]
    return (
        f"all together: {first.collectives[0]} -> {last.collectives[1]} collectives, "
        f"{' -> '.join(sent)} sent by a rank, {' -> '.join(time)} predicted for them, "
        f"{human(peaks[0])} -> {human(peaks[-1])} predicted peak above the inputs"
    )
