"""The report of the passes: what each did to a program, and to its predicted peak of memory.

To describe changes takes longer than all passes together, and mostly nobody asks. So a program is
kept as captured (`AsCaptured`), and whoever asks has the passes run over it again.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from textwrap import indent
from typing import Any, Generic, TypeVar

from torch import fx

from partita.comm.ledger import human

from .block_sections import (
    RewrittenBlock,
    lower_and_record_blocks,
    lower_blocks,
    mark_results,
)
from .capture.block_nodes import calls_of_blocks
from .capture.block_programs import inline_block_programs
from .graph_nodes import lazy_graph_module
from .memory.storages import memory_of
from .passes import Change, Passes, record_each_change
from .passes.change import GraphFigures, format_figure
from .passes.recompute import count_made_again
from .program import Program
from .section import call_section, section_of

__all__ = ["AsCaptured", "StepForm", "changes_of", "explain_passes", "peaks_of_changes"]

P = TypeVar("P", bound=Program)


@dataclass(frozen=True)
class StepForm:
    """How a captured step is rewritten.

    Attributes:
        level: how much is made again for a budget: `Program.level`.
        in_blocks: blocks stay calls; else they are inlined.
    """

    level: int = 0
    in_blocks: bool = False


class AsCaptured(Generic[P]):
    """A copy of a program before the passes: a row for each node, made a program on request.

    Attributes:
        form: the one in which it was rewritten: with blocks as calls where it has any, unless a
            budget took another.
    """

    def __init__(self, program: P):
        blocks: Any = {n.args[0] for n in calls_of_blocks(program.graph.graph)}
        self.has_blocks = bool(blocks)
        self.form = StepForm(in_blocks=self.has_blocks)
        for block in blocks:
            mark_results(block)
        self._kind, self._root_module = type(program), program.graph
        self._rows = [
            (n, n.op, n.target, n.args, n.kwargs, n.name, dict(n.meta))
            for n in program.graph.graph.nodes
        ]
        self._parts = {f.name: getattr(program, f.name) for f in fields(program) if f.init}
        for name in ("inputs", "outputs"):
            self._parts[name] = list(self._parts[name])

    def program(self, form: StepForm | None = None) -> P:
        """A new program like it, which may be changed: one of `self.form` unless another is
        asked for."""
        form = form or self.form
        program = self._rebuild_program(form.level)
        if form.in_blocks:
            lower_blocks(program)
        else:
            inline_block_programs(program.graph.graph)
        return program

    def inlined(self) -> P:
        """As `program`, with its blocks inlined."""
        return self.program(replace(self.form, in_blocks=False))

    def program_and_blocks(self) -> tuple[P, list[RewrittenBlock]]:
        """As `program`, with what passes did in its blocks, if they stay calls."""
        if not self.form.in_blocks:
            return self.program(), []
        program = self._rebuild_program(self.form.level)
        return program, lower_and_record_blocks(program)

    def _rebuild_program(self, level: int) -> P:
        parts: dict[str, Any] = {
            **self._parts,
            "graph": lazy_graph_module(self._root_module, self._rebuild_graph()),
            "level": level,
            "metadata": dict(self._parts["metadata"]),
        }
        for name in ("inputs", "outputs"):
            parts[name] = list(parts[name])
        return self._kind(**parts)

    def _rebuild_graph(self) -> fx.Graph:
        graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
        for node, op, target, args, kwargs, name, meta in self._rows:
            given = fx.node.map_arg((args, kwargs), of.__getitem__)
            of[node] = new = graph.create_node(op, target, *given, name=name)
            new.meta = dict(meta)
        return graph


def explain_passes(captured: AsCaptured[Any], without: Iterable[str], passes: Passes) -> str:
    """What each pass changes and saves, with a short diff; then all of them together."""
    program, changes, peaks = _record_changes(captured, without, passes)
    texts = []
    for change, (before, after) in zip(changes, pairwise(peaks), strict=True):
        peak = [f"predicted peak: {human(before)} -> {human(after)}"] if before != after else []
        texts.append(change.text(*peak))
    if changes:
        texts.append(_summarize_changes(changes[0], changes[-1], peaks))
    if program.budget is not None:
        texts.insert(0, f"budget\n{indent(_describe_budget(program, peaks[-1]), '  ')}")
    if blocks := str(program.blocks):
        texts.insert(0, f"blocks\n{indent(blocks, '  ')}")
    return "\n".join(texts)


def _describe_budget(program: Program, peak: int) -> str:
    """What a program makes again for its budget, in each section and between them."""
    assert program.budget is not None
    graph = program.graph.graph
    lines = [f"{human(peak)} of {human(program.budget)}, at level {program.level} of recomputation"]
    calls = Counter(map(section_of, graph.find_nodes(op="call_function", target=call_section)))
    for section, count in calls.items():
        assert section is not None
        if again := count_made_again(section.graph.graph):
            lines.append(f"{section.name}: {again} calls made again, each of {count} times")
    if again := count_made_again(graph):
        where = " outside of sections" if calls else ""
        lines.append(f"{again} calls made again{where}")
    return "\n".join(lines)


def peaks_of_changes(
    captured: AsCaptured[Any] | None, without: Iterable[str], passes: Passes
) -> tuple[list[Change], list[int]]:
    """The change of each pass, and the predicted peak (bytes above the inputs) around each."""
    assert captured is not None
    _, changes, peaks = _record_changes(captured, without, passes)
    return changes, peaks


def changes_of(
    captured: AsCaptured[Any], without: Iterable[str], passes: Passes
) -> Iterator[Change]:
    """The change of each pass in a captured program, one after another.

    The first is that of all passes within blocks, where blocks stay calls.
    """
    return (change for _, change in _run_and_record(captured, without, passes))


def _record_changes(
    captured: AsCaptured[P], without: Iterable[str], passes: Passes
) -> tuple[P, list[Change], list[int]]:
    """The rewritten program, the change of each pass, and the predicted peaks around them."""
    before = program = captured.inlined()
    changes, peaks = list[Change](), [memory_of(before).peak]
    for program, change in _run_and_record(captured, without, passes):
        changes.append(change)
        peaks.append(peaks[-1] if not change.changed else memory_of(program).peak)
    return program, changes, peaks


def _run_and_record(
    captured: AsCaptured[P], without: Iterable[str], passes: Passes
) -> Iterator[tuple[P, Change]]:
    """Rewrite a captured program; after each pass the program, and what the pass did."""
    with _without_warnings():
        program, blocks = captured.program_and_blocks()
        flat = captured.inlined() if blocks else program
    if blocks:
        yield program, _change_in_blocks(GraphFigures(flat), GraphFigures(program), blocks)
    changes = record_each_change(program, without, passes)
    while True:
        with _without_warnings():
            change = next(changes, None)
        if change is None:
            return
        yield program, change


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Within, passes warn of nothing: they did at capture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _change_in_blocks(
    before: GraphFigures, after: GraphFigures, blocks: Iterable[RewrittenBlock]
) -> Change:
    """What passes did within blocks, each structure of which is rewritten and cut once."""
    lines = ["each structure is rewritten once, and its parts between collectives are sections:"]
    for block in blocks:
        lines.append(f"{block.name}, {block.calls} times")
        lines += [f"    {change.name}: {change.did}" for change in block.changes]
    promise = "Passes within blocks, which stay calls."
    return before.compare(after, "blocks", promise, "\n    ".join(lines))


def _summarize_changes(first: Change, last: Change, peaks: list[int]) -> str:
    sent = [format_figure("sent", n) for n in (first.sent[0], last.sent[1])]
    time = [format_figure("seconds", n) for n in (first.seconds[0], last.seconds[1])]
    said = [
        f"{first.collectives[0]} -> {last.collectives[1]} collectives",
        f"{' -> '.join(sent)} sent by a rank",
        f"{' -> '.join(time)} predicted for them",
        f"{human(peaks[0])} -> {human(peaks[-1])} predicted peak above the inputs",
    ]
    return "all together: " + ", ".join(said)
