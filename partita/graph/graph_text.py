"""Graphs as text: printed for people, and as lines that all ranks compare.

`Graph` prints a line for each node: name, call, shape and layout, bytes, the redistribution and its
reason, and the user's line. A part that repeats (`repeats_of`) is printed once.

`canonical_lines` returns lines that do not depend on the process that captured the program, so that
equal programs have equal lines on all ranks. `make_key` hashes these lines, with options and
versions. Ranks compare hashes before they compile. If hashes differ, bisection over the lines finds
the first difference."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from partita.comm import Wire, gather_texts, user_line
from partita.comm.device import HOST, view_bytes
from partita.layout import Fix, LayoutError
from partita.layout.text import format_table, human
from partita.tensor.dtensor import short_dtype
from partita.tensor.tensor_state import Spec
from partita.versions import __version__

from .graph_nodes import is_collective, nbytes_of, note_of, subgraph_of, subgraphs_in
from .program import Program


class Graph:
    """A captured graph for printing: `print` shows a line for each node."""

    def __init__(self, program: Program):
        self.program = program

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes, in the order in which they run."""
        return list(self.program.graph.graph.nodes)

    @property
    def moves(self) -> list[fx.Node]:
        """The nodes that communicate: calls of collectives."""
        return [n for n in self.nodes if is_collective(n)]

    def to_string(self, repeats: bool = True) -> str:
        """Returns the graph as text: a line for each node, those of sections last, and a total.

        Args:
            repeats: True to print each repeat of equal blocks; False to print one, with a count.
        """
        nodes = self.nodes
        roles = [f"{given.kind} {given.name}" for given in self.program.inputs]
        rows, lines = _write_rows(nodes, roles)
        if not repeats:
            numbers: dict[Any, int] = {}
            alike = [_signature_of_row(n, row) for n, row in zip(nodes, rows, strict=True)]
            lines = _fold_repeats(lines, [numbers.setdefault(a, len(numbers)) for a in alike])
        for section in subgraphs_in(self.program.graph.graph):
            lines += ["", f"{section.name}:", *_write_rows([*section.graph.graph.nodes])[1]]
        sent = sum(note_of(n).nbytes for n in self.moves)
        total = f"{len(rows)} nodes, {len(self.moves)} collectives, {human(sent)} sent"
        return "\n".join([*lines, total])

    def __str__(self) -> str:
        return self.to_string(repeats=False)

    __repr__ = __str__


def _write_rows(
    nodes: Sequence[fx.Node], roles: Iterable[str] = ()
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the cells of each node's line, and the lines; `roles` has a text for each input."""
    said = iter(roles)
    rows = [_row_of_node(n, next(said, "") if n.op == "placeholder" else "") for n in nodes]
    return rows, format_table(rows, widest=60).split("\n")


def _row_of_node(node: fx.Node, role: str) -> tuple[str, ...]:
    """Returns the cells of a line: name, call, value, bytes, reason or input's `role`, line."""
    note, value = note_of(node), node.meta.get("val")
    shape, size = "", ""
    if isinstance(value, torch.Tensor):
        shape = note.layout or f"{short_dtype(value.dtype)}{list(value.shape)}"
        size = human(nbytes_of(node))
    why = role
    if note.kind:
        why = f"{note.kind} over {' '.join(note.axes)}: {note.before} -> {note.after}"
        why += f", {note.reason}, for {note.op}"
    section = subgraph_of(node)
    name = _name(node.target) if section is None else section.name
    operands = ", ".join(a.name for a in node.all_input_nodes)
    called = node.op if node.op != "call_function" else f"{name}({operands})"
    where = f"{note.source} ({note.phase})" if note.source else ""
    return node.name, called, shape, size, why, where


_LEAST_LINES = 8
"""The lines of the shortest part that is printed once for all repeats."""


def _signature_of_row(node: fx.Node, row: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns a key of a printed line. It is equal for the same line of another repeat."""
    others = fx.node.map_arg((node.args, node.kwargs), lambda _: None)
    called = "" if node.op == "placeholder" else f"{node.target}{others}"
    return called, *row[2:4], re.sub(r"\d+", "", row[4]), row[5]


def _fold_repeats(lines: list[str], alike: list[int]) -> list[str]:
    """Returns lines of text in which repeated parts are printed once, with a count.

    Args:
        alike: a number for each line, equal for equal lines.
    """
    if len(lines) < 2 * _LEAST_LINES or (found := repeats_of(alike, _LEAST_LINES)) is None:
        return lines
    part, period = found
    begin, times = part.start, len(part) // period
    end, more = begin + times * period, (times - 1) * period
    if more < 2 * _LEAST_LINES:
        return lines
    said = f"... these {period} lines {times - 1} more time{'s' * (times > 2)} ({more} lines)"
    return [
        *_fold_repeats(lines[:begin], alike[:begin]),
        *lines[begin : begin + period],
        said,
        *_fold_repeats(lines[end:], alike[end:]),
    ]


# -- for comparison --------------------------------------------------------------------------------


def canonical_lines(program: Program) -> list[str]:
    """Returns a program as lines of text, which are equal on all ranks if their programs are equal.

    They contain no names, source lines, addresses, device indices or coordinates. There is a line
    for each node, then for each output, then for the step's result. The lines of each section
    follow once.
    """
    number: dict[fx.Node, str] = {}
    lines = []
    inputs = iter(program.inputs)
    layout_of = functools.cache(_format_layout)
    results: dict[int, str] = {}  # by id: the nodes of equal blocks have one value
    for i, node in enumerate(program.graph.graph.nodes):
        number[node] = f"%{i}"
        text = _format_node(node, number)
        if node.op == "placeholder":
            given = next(inputs)
            layout = "" if given.spec is None else f" {layout_of(given.spec)}"
            text = f"input {given.kind}{layout}"
        elif node.op == "get_attr":
            text = f"constant {_digest_constant(getattr(program.graph, str(node.target)))}"
        value = node.meta.get("val")
        if id(value) not in results:
            results[id(value)] = _format_result(value)
        lines.append(f"%{i} = {text}{results[id(value)]}")
    for output in program.outputs:
        layout = "plain" if output.spec is None else layout_of(output.spec)
        part = f" of part {output.part}" if output.part else ""
        lines.append(f"{output.kind}{part} {layout}")
    lines.append(f"returns {program.result} of {program.constants}")
    for section in subgraphs_in(program.graph.graph):
        lines += [f"{section}:", *lines_of(section.graph.graph)]
    return lines


def _format_layout(spec: Spec) -> str:
    return f"{spec.layout} on {spec.wire.mesh}"


def lines_of(graph: fx.Graph) -> Iterator[str]:
    """Yields a line of text for each node of `graph`.

    Graphs that compute the same values have equal lines.
    """
    number: dict[fx.Node, str] = {}
    for node in graph.nodes:
        number[node] = f"%{len(number)}"
        yield f"{number[node]} = {line_of(node, number)}"


def line_of(node: fx.Node, number: Mapping[fx.Node, str]) -> str:
    """Returns a line of text for a node. Nodes that compute the same have equal lines.

    Args:
        number: maps each operand to its name in the text, such as "%3".
    """
    return f"{_format_node(node, number)}{_format_result(node.meta.get('val'))}"


def _format_node(node: fx.Node, number: Mapping[fx.Node, str]) -> str:
    """Returns the text of a node's call, without that of its result."""
    if node.op == "output":
        return f"output {_format_value(node.args[0], number)}"
    if node.op != "call_function":
        return node.op
    args = [_format_value(a, number) for a in node.args]
    args += [f"{k}={_format_value(v, number)}" for k, v in sorted(node.kwargs.items())]
    return f"{_name(node.target)}({', '.join(args)})"


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def _format_value(value: Any, number: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return number[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_format_value(v, number) for v in value]) + "]"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, (float, complex)) and value != value:  # repr omits the sign of a NaN
        return f"{value!r} {struct.pack('dd', value.real, value.imag).hex()}"
    return repr(value)


def _format_result(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = "" if value.is_contiguous() else f" by {tuple(value.stride())}"
        return f" : {short_dtype(value.dtype)}{list(value.shape)}{strides} {value.device.type}"
    if isinstance(value, (list, tuple)):
        return "".join(_format_result(v) for v in value)
    return ""


def _digest_constant(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = view_bytes(value.detach().to(HOST).contiguous())
    return f"{hashlib.sha256(data).hexdigest()[:16]} {list(value.shape)} {value.dtype}"


# -- parts that repeat themselves ------------------------------------------------------------------

_PERIODS = 16
"""The number of frequent distances between equal calls that are tried as periods."""


def repeats_of(calls: Sequence[Hashable], least: int) -> tuple[range, int] | None:
    """Finds the longest part of a sequence in which a fixed period repeats, such as equal layers.

    The distances between equal calls suggest periods. For each frequent distance, this finds the
    longest range in which every call equals the call one period later.

    Args:
        calls: values that are equal for calls that do the same.
        least: the shortest period. A shorter one is multiplied until it is at least this long.

    Returns:
        The range of the part, at least two periods long, and the period; None if there is none.
    """
    before: dict[Hashable, int] = {}
    often: Counter[int] = Counter()
    seen: set[tuple[Hashable, int]] = set()
    for i, call in enumerate(calls):
        if call in before:
            often[i - before[call]] += 1
            seen.add((call, i - before[call]))
        before[call] = i
    of_many = Counter(distance for _, distance in seen)  # by how many different calls have it
    common = [d for count in (often, of_many) for d, _ in count.most_common(_PERIODS)]
    # A call that occurs several times in each repeat occurs again after a part of the period.
    periods = {d * -(-least // d) for d in common} | {
        a + b for a in common for b in common if a + b >= least
    }
    found: tuple[range, int] | None = None
    for period in sorted(periods):
        part = _find_longest_repeat(calls, period)
        if len(part) >= 2 * period and (found is None or len(part) > len(found[0])):
            found = part, period
    return found


def _find_longest_repeat(calls: Sequence[Hashable], period: int) -> range:
    """Returns the longest range in which each call equals the one a period later."""
    best, begin = range(0), 0
    for i in range(len(calls) - period + 1):
        if i == len(calls) - period or calls[i] != calls[i + period]:
            if i > begin and i + period - begin > len(best):
                best = range(begin, i + period)
            begin = i + 1
    return best


# -- keys of programs ------------------------------------------------------------------------------


def version_lines() -> list[str]:
    """Returns lines of text with the torch and partita versions and the processor's type.

    A program's key depends on them.
    """
    return [f"torch {torch.__version__}", f"partita {__version__}", platform.machine()]


def make_key(lines: Sequence[str]) -> str:
    """Returns the key of a program: a hash of its lines, as 64 hexadecimal digits."""
    return _hash_lines(lines).hex()


def digest_lines(lines: Sequence[str]) -> int:
    """Returns a 63-bit hash of lines of text, the same in every process."""
    return int.from_bytes(_hash_lines(lines)[:8], "big") >> 1


def agree_on_program(
    lines: Sequence[str],
    where: Sequence[str],
    wire: Wire,
    stages: Callable[[], Sequence[tuple[str, int]]] = tuple,
) -> None:
    """Checks that all ranks of `wire` have the same program. Otherwise raises an error on all.

    Args:
        lines: the program of this rank, as lines of text.
        where: for each line of the program's text, the user's line that it comes from.
        stages: a function that returns, for capture and each pass, its name and a digest of the
            program after it. It is called on all ranks if they differ, to find the first stage that
            differs.

    Raises:
        LayoutError: on all ranks, with the first line that differs between two of them.
    """
    if _are_equal(lines, wire):
        return
    shortest = min(n for (n,) in wire.gather_ints((len(lines),), "lengths of captured programs"))
    same, differ = 0, shortest + 1  # the first `same` lines are equal, the first `differ` are not
    while differ - same > 1:
        middle = (same + differ) // 2
        if middle <= shortest and _are_equal(lines[:middle], wire):
            same = middle
        else:
            differ = middle
    mine = lines[same] if same < len(lines) else "(it ends here)"
    place = where[same] if same < len(where) else ""
    texts = gather_texts(f"{mine}   {place}".rstrip(), wire)
    other = next((i for i, text in enumerate(texts) if text != texts[0]), 0)
    by = _find_diverging_pass(stages(), wire)
    raise LayoutError(
        f"compile: the pass {by} made different programs on different ranks"
        if by
        else "compile: the ranks have captured different programs",
        place=user_line(),
        operands=(f"rank 0  {texts[0]}", f"rank {other}  {texts[other]}"),
        reason=f"line {same + 1} of the graph is the first that differs; nothing was compiled",
        fixes=(
            Fix("the same constants, layouts and options on every rank"),
            Fix("pt.DTensor.from_local(t, mesh, placements)", "if ranks need different numbers"),
        ),
    )


def _find_diverging_pass(stages: Sequence[tuple[str, int]], wire: Wire) -> str:
    """Returns the first pass after which ranks differ; "" if they differed before all passes."""
    count = min(n for (n,) in wire.gather_ints((len(stages),), "passes"))
    digests = tuple(digest for _, digest in stages[:count])
    by_rank = wire.gather_ints(digests, "passes") if count else [()]
    for i in range(count):
        if len({digests[i] for digests in by_rank}) > 1:
            return stages[i][0] if i else ""
    return ""


def _are_equal(lines: Sequence[str], wire: Wire) -> bool:
    """True if all ranks have the same lines."""
    raw = _hash_lines(lines)
    numbers = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(0, 32, 4))
    return len(set(wire.gather_ints(numbers, "captured programs"))) <= 1


def _hash_lines(lines: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).digest()
