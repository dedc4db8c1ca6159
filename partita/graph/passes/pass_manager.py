"""The pass manager: runs passes in order, checks what each may change, and records what it changed.

A pass is a function of a `Program` that changes its graph and returns a few words on what it did.
It gets a legal graph (`graph.verify`) and must leave a legal graph that computes the same
(`PassContract`). Both are checked after each user's pass, and after the last pass. With
`PARTITA_VERIFY=1` in the environment they are checked after every pass, so that an error names the
pass. `step.explain()` prints a `Change` for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partita.comm.ledger import human
from partita.redistribute.move import bytes_of, seconds_of

from ..graph_nodes import (
    NOTE,
    Note,
    drop_unused,
    is_collective,
    nbytes_of,
    note_of,
    written_inputs_of,
)
from ..graph_text import canonical_lines, digest_lines
from ..program import Pass, Program, StepOptions
from ..shared_memory import Pairs, keep_apart, overlapping_results
from ..verify import IllegalGraph, verifies_each_pass, verify
from .backend_ways import backend_ways
from .bucket import bucket
from .free_remat import free_remat
from .lifetime import lifetime
from .moves import cancel, cast, dedupe, merge_views
from .overlap import overlap
from .regather import regather
from .remat import remat
from .rewrite import fake_value_of

PASSES: dict[str, Pass] = {
    "dedupe": dedupe,
    "cancel": cancel,
    "cast": cast,
    "remat": remat,
    "free_remat": free_remat,
    "regather": regather,
    "bucket": bucket,
    "merge_views": merge_views,
    "lifetime": lifetime,
    "overlap": overlap,
    "backend_ways": backend_ways,
}
"""The passes in their order. `free_remat` reads what `remat` has left in memory for backward.
`regather` splits gathers that `dedupe` has merged, and `bucket` joins gathers of one block.
`merge_views` removes views that moves and buckets have added. `backend_ways` is last, because how a
sum is computed depends on where `overlap` has put the nodes that read it."""

# A step with blocks as calls has three kinds of graphs. One is of the step; the others are of block
# programs, which either compute (forward and backward) or update (they write parameters). All other
# passes run over all three. A block program that computes has no updates for `lifetime` to move.
OF_STEP = ("overlap", "backend_ways")
"""Passes that move nodes between blocks. If blocks are calls of sections, these passes run only
over the graph of the step."""

OF_STEP_AND_UPDATES = ("lifetime",)
"""Passes that move updates. They run over the graph of the step and the graphs of updates."""


def order_passes(options: StepOptions) -> dict[str, Pass]:
    """Returns the passes to run, partita's and the user's, in order and by name.

    Args:
        options: the options of the step: `passes` and `without`.

    Raises:
        ValueError: `without`, or a key of `passes`, names an unknown pass; or two passes have one
            name.
    """
    passes, first = options.passes, next(iter(PASSES))
    by_place = passes if isinstance(passes, Mapping) else {first: passes}
    unknown = set(by_place) - {*PASSES, "end"}
    if unknown:
        raise ValueError(f'passes: a place is {", ".join(PASSES)} or "end", not {unknown}')
    found: dict[str, Pass] = {}
    for place in (*PASSES, "end"):
        given: Any = by_place.get(place, ())
        for change in (given,) if callable(given) else given:
            name = getattr(change, "__name__", type(change).__name__)
            if name in PASSES or name in found or name == "end":
                raise ValueError(f"passes: there is a pass {name!r} already")
            found[name] = change
        if place in PASSES:
            found[place] = PASSES[place]
    left_out = set(options.without)
    if left_out - set(found):
        raise ValueError(f"without: the passes are {', '.join(found)}, not {left_out - set(found)}")
    return {name: change for name, change in found.items() if name not in left_out}


def run_passes(program: Program) -> None:
    """Runs all passes on a program: partita's and the user's, as the options say.

    Raises:
        ValueError: see `order_passes`.
        IllegalGraph: the changed graph breaks the grammar, or computes something else.
    """
    for _ in _run_one_by_one(program):
        pass


def record_changes(program: Program) -> Iterator[Change]:
    """Runs all passes on `program`, one after the other. Yields what each of them has changed."""
    before = GraphFigures(program)
    for name, change, did in _run_one_by_one(program):
        now = GraphFigures(program)
        promise = (change.__doc__ or name).strip().split("\n")[0]
        yield before.compare(now, name, promise, did)
        before = now


def _run_one_by_one(program: Program) -> Iterator[tuple[str, Pass, str]]:
    """Runs the passes. After each, yields its name, itself, and its report of what it did."""
    contract_of_graph = PassContract.of_program(program)
    each, last = verifies_each_pass(), ""
    for name, change in order_passes(program.options).items():
        did = _run_pass(program, name, change)
        keep_apart(program.graph.graph, contract_of_graph.overlapping)
        drop_unused(program.graph.graph)
        if name not in PASSES:
            _lint_graph(program, name)
            _recompute_metadata(program, name)
        if each or name not in PASSES:
            verify(program, name)
            contract_of_graph.check(program, name)
        else:
            last = name
        yield name, change, did
    if last:
        verify(program, f"the passes, the last of them {last}")
        contract_of_graph.check(program, "the passes")


def _run_pass(program: Program, name: str, change: Pass) -> str:
    try:
        did = change(program)
    except IllegalGraph as error:
        raise IllegalGraph(
            f"pass {name}: {error.fact}", place=error.place, operands=error.operands
        ) from error
    except Exception as error:
        if name in PASSES:
            raise
        raise IllegalGraph(f"pass {name} raised {type(error).__name__}: {error}") from error
    return did if isinstance(did, str) and did else "(it does not say what it did)"


def _lint_graph(program: Program, name: str) -> None:
    try:
        program.graph.graph.lint()
    except RuntimeError as error:
        raise IllegalGraph(f"after {name}: {str(error).splitlines()[0]}") from error


# -- invariants of a pass --------------------------------------------------------------------------

_PHASES = ("forward", "backward", "update")
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class PassContract:
    """The properties of a program that a pass must not change: inputs, outputs, and what it writes.

    Attributes:
        inputs, outputs: the descriptions (`program.Input`, `program.Output`), compared by identity.
        made: the shape, dtype and device of each output, as a text.
        written: the indices of the inputs that are written in place.
        overlapping: the pairs of outputs, or of an output and an input, that share memory.
    """

    inputs: tuple[int, ...]
    outputs: tuple[Any, ...]
    made: tuple[str, ...]
    written: tuple[int, ...]
    overlapping: Pairs

    @classmethod
    def of_program(cls, program: Program) -> PassContract:
        (end,) = program.graph.graph.find_nodes(op="output")
        return cls(
            tuple(id(given) for given in program.inputs),
            tuple((id(o), o.kind, o.spec, o.slot, o.index) for o in program.outputs),
            tuple(_describe_value(node) for node in end.args[0]),
            written_inputs_of(program.graph.graph),
            overlapping_results(program.graph.graph),
        )

    def check(self, program: Program, name: str) -> None:
        """Raises IllegalGraph if the pass `name` has changed what this contract keeps fixed."""
        now = PassContract.of_program(program)
        if now.inputs != self.inputs:
            raise IllegalGraph(f"after {name}: the program takes other inputs")
        if now.outputs != self.outputs or len(now.made) != len(self.made):
            raise IllegalGraph(
                f"after {name}: the program gives other outputs, or in other layouts"
            )
        for i, (was, made) in enumerate(zip(self.made, now.made, strict=True)):
            if was != made:
                raise IllegalGraph(
                    f"after {name}: output {i} ({program.outputs[i].kind}) is {made}, it was {was}",
                    reason="what a step returns and leaves behind has the shape and dtype of eager",
                )
        for pair in sorted(self.overlapping - now.overlapping, key=sorted):
            raise IllegalGraph(
                f"after {name}: output {max(pair)} no longer shares the memory of "
                + (f"output {at}" if (at := min(pair)) >= 0 else program.inputs[-1 - at].name),
                reason="a write to one of them after the step must change the other, as in eager",
            )
        for i in sorted(set(now.written) ^ set(self.written)):
            how = "written" if i in now.written else "not written any more"
            raise IllegalGraph(f"after {name}: {program.inputs[i].name} is {how}")


def _describe_value(node: Any) -> str:
    value = node.meta.get("val") if isinstance(node, fx.Node) else node
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device.type}"


def _recompute_metadata(program: Program, name: str) -> None:
    """Completes the metadata of nodes after a user's pass: fake values and notes.

    Args:
        name: the name of the pass that has run.

    Raises:
        IllegalGraph: a call fails with its operands.
    """
    for node in program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        if NOTE not in node.meta:
            node.meta[NOTE] = _make_note(program, node, name)
        if node.target is torch.ops.aten.copy_.default:
            continue  # its value is the input that it writes
        try:
            node.meta["val"] = fake_value_of(node)
        except Exception as error:
            raise IllegalGraph(
                f"after {name}: {node.name} cannot be computed: {str(error).splitlines()[0]}",
                place=note_of(node).source,
                operands=(node.format_node() or node.name,),
            ) from error


def _make_note(program: Program, node: fx.Node, name: str) -> Note:
    """Returns the note of a new node: the source and phase of its operands, and its cost."""
    read = [note_of(n) for n in node.all_input_nodes]
    phase = max((note.phase for note in read), key=_PHASES.index, default=_PHASES[0])
    source = next((note.source for note in reversed(read) if note.source), "")
    if not is_collective(node) or node.args[-1] not in program.groups:
        return Note(source, phase)
    wire, axes = program.groups[str(node.args[-1])]
    opname = str(getattr(node.target, "_opname", ""))
    kind = _KINDS.get(opname, opname)
    (x,) = (n.meta["val"] for n in node.all_input_nodes)
    nbytes = bytes_of(kind, wire.mesh_size(axes), x.numel() * x.element_size())
    return Note(source, phase, "", kind, axes, nbytes, name, "explicit")


# -- changes by a pass -----------------------------------------------------------------------------

_SHOWN = 6  # lines of a diff, in text


@dataclass(frozen=True)
class Change:
    """What one pass did to a graph.

    Attributes:
        name, promise: the name of the pass, and the first line of its docstring.
        did: what the pass did, in a few words.
        nodes, collectives: (before, after), the numbers of nodes and of collectives.
        sent: (before, after), bytes that a rank sends.
        saved: (before, after), bytes of gathered parameters that are kept from forward to backward.
        seconds: (before, after), the predicted seconds of all collectives, one after another
            (`redistribute.move`). They serve only to compare graphs.
        diff: the calls that were removed ("-") and added ("+"), with their counts.
        digest: a hash of the graph after the pass. If ranks differ, the pass depends on the rank.
        changed: True if the pass changed the graph.
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
        """Returns the change as text: figures, the lines `more`, and a part of the diff."""
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
    """Returns `value`, the field `what` of a `Change`, as text with its unit, such as "12 MiB"."""
    if what in ("sent", "saved"):
        return "nothing" if not value else human(int(value))
    return f"{value * 1e6:.4g} us" if what == "seconds" else str(value)


class GraphFigures:
    """Figures of a graph, to compare before and after a pass.

    Attributes:
        figures: maps the fields of `Change` that are pairs ("nodes", "sent", ...) to their values.
        lines: the graph's canonical lines without numbers, to count equal calls.
        digest: a hash of the canonical lines.
    """

    def __init__(self, program: Program):
        nodes = list(program.graph.graph.nodes)
        sends = [note_of(n).nbytes for n in nodes if is_collective(n)]
        lines = canonical_lines(program)
        self.figures = {
            "nodes": len(nodes),
            "collectives": len(sends),
            "sent": sum(sends),
            "saved": _saved_bytes_of_gathers(nodes),
            "seconds": sum(map(seconds_of, sends)),
        }
        self.lines = [line.split(" = ", 1)[-1] for line in lines]
        self.digest = digest_lines(lines)

    def compare(self, now: GraphFigures, name: str, promise: str, did: str) -> Change:
        pairs: Any = {what: (value, now.figures[what]) for what, value in self.figures.items()}
        diff = _diff_calls(self.lines, now.lines)
        changed = now.digest != self.digest
        return Change(name, promise, did, **pairs, diff=diff, digest=now.digest, changed=changed)


def _saved_bytes_of_gathers(nodes: list[fx.Node]) -> int:
    """Returns bytes that all-gathers of ZeRO in forward make and that backward reads."""
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
    """Returns the calls whose number has changed, collectives first."""
    counts: Counter[str] = Counter()
    counts.subtract(map(_describe_call, before))
    counts.update(map(_describe_call, after))
    return tuple(
        f"{'+' if change > 0 else '-'} {abs(change)} x {call}"
        for call, change in sorted(counts.items(), key=lambda of: "_c10d_functional" not in of[0])
        if change and not call.startswith("output [")  # it lists numbers only
    )


def _describe_call(line: str) -> str:
    """Returns a line of a graph without its operands."""
    called, typed, value = line.rpartition(" :")
    if typed:
        return called.split("(", 1)[0] + typed + value
    # A call of a section has several results, so it shows its section and no type.
    return line.split(", [", 1)[0] + ")"
