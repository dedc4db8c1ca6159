"""Explanations: what `pt.explain` found, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.comm.ledger import human
from partita.layout import Layout

__all__ = [
    "ConsideredRow",
    "ExplainedMove",
    "ExplainedOp",
    "Explanation",
    "format_count",
    "format_seconds",
]


@dataclass(frozen=True)
class ExplainedMove:
    """One move of an operand, or of whatever the program redistributes itself.

    Attributes:
        kind, axes: the move, such as "all_gather", and the mesh axes that it runs over.
        before, after: the layouts.
        reason: as in the ledger: "explicit", "implicit", "gather" of a ZeRO block, "gradient", ...
        nbytes: bytes that a rank (the first) sends.
        backward: the kind of its transpose, which runs in a backward; "" where no gradient comes
            back.
        backward_nbytes: bytes that a rank sends in that.
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    reason: str
    nbytes: int
    backward: str = ""
    backward_nbytes: int = 0

    def __str__(self) -> str:
        """`all_gather over tp: 8@dp 16@tp -> 8@dp 16, 1.5 KiB; backward reduce_scatter 1.5 KiB`."""
        over = f"{self.kind} over {' '.join(self.axes)}"
        text = f"{over}: {self.before.brief()} -> {self.after.brief()}"
        text += f", {human(self.nbytes)}" if self.nbytes else ", nothing sent"
        if self.backward_nbytes:
            text += f"; backward {self.backward} {human(self.backward_nbytes)}"
        return text


@dataclass(frozen=True)
class ConsideredRow:
    """A legal way to run an op on one mesh axis, and what it would cost.

    Attributes:
        axis: the mesh axis.
        row: placements of operands and results, such as "S(0), R -> S(0)".
        seconds: its price, forward and backward together, by round figures for a node of GPUs (see
            `partita.redistribute.cost`): to rank rows, not to predict a time.
        chosen: is it the cheapest, which is taken?
        needs: what it asks for: the moves of operands ("x all_gather 1.5 KiB"), and work that the
            ranks of the axis would repeat.
        nbytes: bytes that a rank sends in those moves, forward.
    """

    axis: str
    row: str
    seconds: float
    chosen: bool
    needs: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True)
class ExplainedOp:
    """One call on DTensors.

    Attributes:
        op: the op's name.
        source: the user's "file:line".
        module: the module in whose forward it is called, "" outside of one.
        rule: the sentence by which it is planned; in parentheses what stands for one.
        operands, results: the layouts, with their dtypes.
        rows: the legal rows that were priced, of each axis in turn.
        moves: what is moved for it, in order.
        work: multiplications and additions of its matrix products on a rank, forward; half of the
            whole of causal attention, which leaves out what its mask hides.
        repeated: the axes along which every rank does the same of them.
        inner: the calls that it is written as, where it is.
    """

    op: str
    source: str = ""
    module: str = ""
    rule: str = ""
    operands: tuple[Layout, ...] = ()
    results: tuple[Layout, ...] = ()
    rows: tuple[ConsideredRow, ...] = ()
    moves: tuple[ExplainedMove, ...] = ()
    work: float = 0.0
    repeated: tuple[str, ...] = ()
    inner: tuple[ExplainedOp, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that a rank sends in its moves, with those of the calls inside."""
        return sum(m.nbytes for m in self.moves) + sum(one.nbytes for one in self.inner)

    @property
    def backward_nbytes(self) -> int:
        """Bytes that a rank sends in their transposes, where gradients come back."""
        return sum(m.backward_nbytes for m in self.moves) + sum(
            one.backward_nbytes for one in self.inner
        )

    @property
    def all_work(self) -> float:
        """`work`, with that of the calls inside."""
        return self.work + sum(one.all_work for one in self.inner)

    def chosen(self, axis: str) -> ConsideredRow | None:
        """The row that is taken on an axis; None where the op has no rule."""
        return next((row for row in self.rows if row.axis == axis and row.chosen), None)

    def runner_up(self, axis: str) -> ConsideredRow | None:
        """The cheapest row on an axis that is not taken; None where there is no other."""
        others = [row for row in self.rows if row.axis == axis and not row.chosen]
        return min(others, key=lambda row: row.seconds, default=None)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes on which rows were priced."""
        return tuple(dict.fromkeys(row.axis for row in self.rows))

    def __str__(self) -> str:
        lines = [self.op + (f"  {self._format_place()}" if self._format_place() else "")]
        lines += [f"  rule   {self.rule}"] if self.rule else []
        lines += [f"  takes  {_format_layouts(self.operands)}"] if self.operands else []
        lines += [f"  gives  {_format_layouts(self.results)}"] if self.results else []
        lines += [f"  moves  {move}" for move in self.moves] or ["  moves  nothing"]
        lines += [f"  work   {self._format_work()}"] if self.work else []
        for axis in self.axes:
            lines += _rows_of(axis, [row for row in self.rows if row.axis == axis])
            lines.append(f"    {self._explain_choice(axis)}")
        for one in self.inner:
            lines += [f"  {line}" for line in str(one).splitlines()]
        return "\n".join(lines)

    def _format_place(self) -> str:
        return " ".join(filter(None, [self.source, self.module and f"in {self.module}"]))

    def _format_work(self) -> str:
        text = f"{format_count(self.work)} operations on a rank"
        return text + f", repeated along {' '.join(self.repeated)}" * bool(self.repeated)

    def _explain_choice(self, axis: str) -> str:
        best, second = self.chosen(axis), self.runner_up(axis)
        if second is None or best is None:
            return "no other row is legal here"
        more = second.seconds - best.seconds
        needs = f": {', '.join(second.needs)}" if second.needs else ""
        if more <= 0:
            return f"the next best, {second.row}, costs the same: the first of the rule is taken"
        return f"the next best, {second.row}, costs {format_seconds(more)} more{needs}"


@dataclass(frozen=True)
class Explanation:
    """The plan of a call, or of each call of a function or a module.

    Attributes:
        title: what was explained.
        mesh: the meshes of its tensors, such as "dp=2 tp=4".
        ops: its calls on DTensors and its redistributions, in the order in which they are made.
        goes_backward: did it send gradients itself? Then these moves, of reason "gradient", are
            among the others.
    """

    title: str
    mesh: str
    ops: tuple[ExplainedOp, ...]
    goes_backward: bool = False

    @property
    def moves(self) -> tuple[ExplainedMove, ...]:
        """All moves, in order; their transposes are no moves of their own here."""
        return tuple(move for op in _flatten_ops(self.ops) for move in op.moves)

    @property
    def nbytes(self) -> int:
        """Bytes that a rank sends."""
        return sum(op.nbytes for op in self.ops)

    @property
    def backward_nbytes(self) -> int:
        """Bytes that a rank will send in the transposes, if it goes backward from the result; 0
        where the function has gone backward itself."""
        return 0 if self.goes_backward else sum(op.backward_nbytes for op in self.ops)

    @property
    def work(self) -> float:
        """Operations of matrix products on a rank, forward."""
        return sum(op.all_work for op in self.ops)

    def __str__(self) -> str:
        if not self.ops:
            return f"{self.title}: nothing is planned, since no call takes a DTensor"
        head = f"{self.title} on {self.mesh}"
        body = str(self.ops[0]) if len(self.ops) == 1 else _format_table(self.ops)
        return f"{head}\n{body}\n{self._format_totals()}"

    def _format_totals(self) -> str:
        sending = [move for move in self.moves if move.nbytes]
        moves = f"{len(sending)} collective{'s' * (len(sending) != 1)}"
        said = f"{moves}, {human(self.nbytes) if self.nbytes else 'nothing'} sent by a rank"
        said += ", backward too" * self.goes_backward
        if self.backward_nbytes:
            said += f"; {human(self.backward_nbytes)} more in a backward"
        if not self.work:
            return said
        return f"{said}; {format_count(self.work)} operations on a rank"


def _flatten_ops(ops: Iterable[ExplainedOp]) -> Iterable[ExplainedOp]:
    for op in ops:
        yield op
        yield from _flatten_ops(op.inner)


def _rows_of(axis: str, rows: Sequence[ConsideredRow]) -> list[str]:
    width = max(len(row.row) for row in rows)
    price = max(len(format_seconds(row.seconds)) for row in rows)
    lines = [f"  axis {axis}"]
    for row in sorted(rows, key=lambda row: (not row.chosen, row.seconds)):
        mark = "->" if row.chosen else "  "
        cells = f"    {mark} {row.row:<{width}}  {format_seconds(row.seconds):>{price}}"
        lines.append(f"{cells}  {', '.join(row.needs)}".rstrip())
    return lines


_HEAD = ("op", "rows", "gives", "sent", "backward", "work", "where")
_RIGHT = frozenset(("sent", "backward", "work"))


def _format_table(ops: Sequence[ExplainedOp]) -> str:
    rows = [_HEAD, *(_format_cells(op, depth) for op, depth in _with_depth(ops))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = zip(_HEAD, row, widths, strict=True)
        line = "  ".join(c.rjust(w) if name in _RIGHT else c.ljust(w) for name, c, w in cells)
        lines.append(line.rstrip())
    return "\n".join(lines)


def _with_depth(ops: Iterable[ExplainedOp], depth: int = 0) -> Iterable[tuple[ExplainedOp, int]]:
    for op in ops:
        yield op, depth
        yield from _with_depth(op.inner, depth + 1)


def _format_cells(op: ExplainedOp, depth: int) -> tuple[str, ...]:
    chosen = [(axis, op.chosen(axis)) for axis in op.axes]
    rows = "; ".join(f"{axis}: {row.row}" for axis, row in chosen if row is not None)
    sent, backward = (sum(getattr(m, n) for m in op.moves) for n in ("nbytes", "backward_nbytes"))
    return (
        "  " * depth + op.op,
        rows or op.rule,
        _format_layouts(op.results),
        human(sent),
        human(backward),
        format_count(op.work) if op.work else "-",
        op._format_place(),
    )


def _format_layouts(layouts: Sequence[Layout]) -> str:
    return ", ".join(map(str, layouts))


def format_seconds(time: float) -> str:
    """`4.1e-05` as "41 us"; less than a tenth of a microsecond as "0"."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if time >= unit:
            return f"{time / unit:.3g} {name}"
    return f"{time * 1e6:.1f} us" if time >= 1e-7 else "0"


def format_count(number: float) -> str:
    """`65536.0` as "65.5 k"."""
    for unit, name in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"
