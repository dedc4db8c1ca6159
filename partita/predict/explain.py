"""Explanations: `pt.explain`, which shows how each call is planned, and the other plans' costs.

A *row* of a rule is one way to place an op's operands and results on a mesh axis, such as
`S(1), S(0) -> P`. The function runs on tensors without memory (`rehearsal`). Dispatch plans each
call anew and passes the rows that it priced to an `Explainer`, which also gets each move (step of a
redistribution) from the dry wire. The result is an `Explanation`, which prints as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from partita.comm import DryWire, Wire, user_line
from partita.layout import Layout, LayoutError, Mesh
from partita.layout.text import (
    describe_value,
    escape_controls,
    format_count,
    format_seconds,
    format_table,
    human,
)
from partita.redistribute import Move, plan
from partita.redistribute.move import bytes_sent
from partita.tensor.arguments import OpCall, Path
from partita.tensor.dispatch import run_gathered
from partita.tensor.dtensor import DTensor, short_dtype
from partita.tensor.plan import CallPlan
from partita.tensor.plan_call import Considered, RowChooser, make_plan
from partita.tensor.tensor_state import HERE

from .rehearsal import make_refusal, run_on_fakes, runs_nothing

_IS_CAUSAL = 4  # among the operands of `rules.table.attention`
_NO_RULE = "(no rule: the operands are gathered, the result is whole)"
_AS_OPERAND = "(a tensor of its own, laid out as its operand)"
_REWRITTEN = "(written as the calls below)"


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Plans the call `fn(*args, **kwargs)` without running it: nothing is sent or computed.

        print(pt.explain(F.linear, x, weight))
        print(pt.explain(model, x))

    For each call on DTensors it shows the op's rule, and the rows of the rule with their prices. A
    row is a way to place the op on a mesh axis, such as `S(1), S(0) -> P`. It also shows the
    redistributions of the chosen row, and the extra cost of the next best row. For a function or a
    module it shows all calls in order, and totals. If `fn` runs backward, the redistributions of
    backward are included. A single rank can call this.

    Args:
        fn: a function of torch, a function of yours, or a module. Any mesh works, including a dry
            mesh (`pt.dry_mesh`).
        args: the positional arguments of `fn`. DTensors may be on the device "meta".
        kwargs: the keyword arguments of `fn`.

    Returns:
        An `Explanation`. Its `ops` have rows and prices, layouts, moves, bytes that a rank sends,
        and operations of matrix products on a rank. Prices are seconds by round figures (see
        `partita.redistribute.move`). With uneven shards, bytes and operations are counted for the
        first rank, which holds the largest pieces. It prints as a table; a single op prints in
        full.

    Raises:
        LayoutError: an error that the call itself would raise; or `fn` cannot be called, is a
            generator or a coroutine function, gets an iterator, reads the value of a tensor, or
            steps an optimizer.
    """
    _check_function(fn)
    _check_operands((args, kwargs))
    explainer = Explainer()
    with run_on_fakes(fn, args, kwargs, explainer.make_wire) as (run, state):
        explainer.name_modules(state.modules)
        with explainer.listening():
            run()
    meshes = dict.fromkeys(str(wire.mesh) for wire in explainer.wires)
    ops = tuple(explainer.calls[0].inner)
    return Explanation(_name_of_function(fn), ", ".join(meshes), ops, explainer.goes_backward)


def _check_function(fn: Any) -> None:
    """Raises LayoutError if `fn` cannot be called, or if calling it runs nothing."""
    if not callable(fn):
        fact = f"fn is {describe_value(fn)}, which cannot be called"
        raise make_refusal(fact, "pt.explain(F.linear, x, weight)", "pt.explain(model, x)")
    if runs_nothing(fn):
        raise make_refusal(
            f"fn is {_name_of_function(fn)}, a generator or a coroutine function",
            "a function that iterates over what it yields",
            reason="a call of it gives an object, and runs nothing",
        )


def _check_operands(given: Any) -> None:
    """Raises LayoutError if an argument is an iterator, which can be read only once."""
    for value in pytree.tree_leaves(given):
        if isinstance(value, Iterator):
            raise make_refusal(
                f"an argument is {describe_value(value)}, which can be iterated only once",
                ("list(...)", "of it"),
                reason="the tensors that it returns are not known in advance",
            )


def _name_of_function(fn: Any) -> str:
    if isinstance(fn, nn.Module):
        return type(fn).__name__
    # An op made by torch.library.custom_op has only the operator's name.
    name = getattr(fn, "__name__", None) or getattr(fn, "_name", None) or type(fn).__name__
    return str(name)


class _ExplainedWire(DryWire):
    """A dry wire that reports to an explainer what it would carry."""

    explainer: Explainer
    _on_the_way: tuple[torch.Tensor, bool] | None = None

    def carry(self, move: Move, x: torch.Tensor, *, op: str, reason: str) -> torch.Tensor:
        # The result of an earlier move of the same plan requires grad if its operand did.
        last = self._on_the_way
        graded = last[1] if last is not None and last[0] is x else x.requires_grad
        self.explainer.record_move(self.mesh, move, x, op, reason, graded)
        out = super().carry(move, x, op=op, reason=reason)
        self._on_the_way = (out, graded)
        return out

    def start(self, move: Move, x: torch.Tensor, out: torch.Tensor, *, op: str, reason: str) -> Any:
        self.explainer.record_move(self.mesh, move, x, op, reason, False)
        return super().start(move, x, out, op=op, reason=reason)


@dataclass
class _Call:
    """A call that is running, with what was recorded for it so far."""

    op: str
    graded: bool = field(default_factory=torch.is_grad_enabled)
    inner: list[ExplainedOp] = field(default_factory=list)
    moves: list[ExplainedMove] = field(default_factory=list)
    rows: tuple[ConsideredRow, ...] = ()
    rule: str = ""


class Explainer:
    """Records the plan and the redistributions of each call while `explain` runs a function."""

    def __init__(self) -> None:
        self.calls = [_Call("")]
        self.wires: list[Wire] = []
        self.goes_backward = False
        self._modules: list[str] = []
        self._names: dict[int, str] = {}

    def make_wire(self, wire: Wire) -> Wire:
        """Returns a wire for `wire`'s mesh that sends nothing and records redistributions here."""
        found = _ExplainedWire.from_wire(wire)
        found.explainer = self
        self.wires.append(found)
        return found

    def name_modules(self, modules: dict[str, nn.Module]) -> None:
        """Stores the names of `modules` and their submodules, to show calls with their modules."""
        for name, module in modules.items():
            for prefix, part in module.named_modules():
                self._names.setdefault(id(part), f"{name}.{prefix}" if prefix else name)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Records this thread's calls on DTensors inside the `with` block."""
        before, HERE.explainer = HERE.explainer, self
        entered = register_module_forward_pre_hook(self._enter_module)
        left = register_module_forward_hook(self._leave_module, always_call=True)
        try:
            with entered, left:
                yield
        finally:
            HERE.explainer = before

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if HERE.explainer is self and id(module) in self._names:
            self._modules.append(self._names[id(module)])

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        # A forward that fails may end before `_enter_module` of it was called.
        if HERE.explainer is self and self._modules[-1:] == [self._names.get(id(module))]:
            self._modules.pop()

    # -- called by dispatch ------------------------------------------------------------------------

    def explain_call(self, call: OpCall, has_rule: bool = True) -> Any:
        """Plans a call of an op, runs it on fake tensors, and records the plan and the layouts.

        Args:
            call: the call.
            has_rule: False for an op without a rule, whose operands are gathered.

        Returns:
            The result of the call.
        """
        name = call.form.name
        operands = _layouts_of((call.args, call.kwargs))
        noted = _Call(name)
        source = user_line()
        self.calls.append(noted)
        try:
            made = make_plan(call) if has_rule else None
            if made is None:
                out = run_gathered(call)
            else:
                out = made.run(call.func, call.args, call.kwargs)
        finally:
            self.calls.pop()
        work = None if made is None else made.work
        products = () if work is None else work.products
        where = (name, source, self._current_module(), noted.rule or _rule_of(made))
        op = ExplainedOp(
            *where,
            operands,
            _layouts_of(out),
            noted.rows,
            tuple(noted.moves),
            _share_that_is_done(name, call.args, out) * sum(n for n, _ in products),
            tuple(dict.fromkeys(a for _, axes in products for a in axes)),
            tuple(noted.inner),
            work is None or work.is_even,
        )
        self.calls[-1].inner.append(op)
        return out

    def _current_module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def record_rows(
        self, places: Sequence[tuple[Path, Sequence[str]]], chooser: RowChooser
    ) -> None:
        """Records the rows (placements) that dispatch has priced for the running call.

        Args:
            places: the position of each operand in the call, and the names of its parameters.
            chooser: the search that has priced them.
        """
        names = [_name_of(path, parameters) for path, parameters in places]
        rows = (_describe_row(names, chooser, one) for one in chooser.considered or ())
        self.calls[-1].rule = str(chooser.bound.sentence)
        self.calls[-1].rows = tuple(rows)

    def record_move(
        self, mesh: Mesh, move: Move, x: torch.Tensor, op: str, reason: str, graded: bool
    ) -> None:
        """Records a move of the running call, or one that the program has requested.

        Args:
            mesh, move: the mesh, and the move over its axes.
            x: the local tensor that is moved.
            op, reason: the op that needs the move, and why.
            graded: True if `x` has a gradient, so that backward has a move, too.
        """
        call = self.calls[-1]
        graded = call.graded and (graded or reason == "gather")
        explained = _explained_move(mesh, move, x, reason, graded)
        self.goes_backward |= reason == "gradient"
        if len(self.calls) > 1:
            call.moves.append(explained)
            return
        name = op if reason in ("explicit", "implicit") else f"{reason} {op}"
        rule = f"({move.kind} over {' '.join(move.axes)})"
        where = (name, user_line(), self._current_module(), rule)
        call.inner.append(
            ExplainedOp(*where, (explained.before,), (explained.after,), moves=(explained,))
        )


def _share_that_is_done(name: str, args: Sequence[Any], out: Any) -> float:
    """Returns the fraction of an op's operations that a kernel computes.

    It is 0.5 for causal attention, as in simulations, and 1 for other ops. If queries are sharded
    along the sequence, they have an explicit mask, so it is 1, too.
    """
    if name != "attention" or args[_IS_CAUSAL] is not True or not isinstance(out, DTensor):
        return 1.0
    return 1.0 if out.layout_over_mesh.shards[-2] else 0.5


def _rule_of(made: CallPlan | None) -> str:
    if made is None:
        return _NO_RULE
    return _REWRITTEN if made.rewrite is not None else _AS_OPERAND


def _explained_move(
    mesh: Mesh, move: Move, x: torch.Tensor, reason: str, graded: bool
) -> ExplainedMove:
    size, dtype = x.element_size(), short_dtype(x.dtype)
    kind, back = "", 0
    if graded and reason != "gradient" and move.op == "sum":
        transposed = move.transpose(mesh)
        kind, back = transposed.kind, bytes_sent(transposed, mesh, size)
    before, after = replace(move.before, dtype=dtype), replace(move.after, dtype=dtype)
    nbytes = bytes_sent(move, mesh, size)
    return ExplainedMove(move.kind, move.axes, before, after, reason, nbytes, kind, back)


def _layouts_of(values: Any) -> tuple[Layout, ...]:
    leaves = pytree.tree_leaves(values)
    return tuple(leaf.layout_over_mesh for leaf in leaves if isinstance(leaf, DTensor))


# -- operands and moves of a row -------------------------------------------------------------------


def _describe_row(names: Sequence[str], chooser: RowChooser, one: Considered) -> ConsideredRow:
    """Returns a row that was priced, and what it requires of the operands with these names."""
    moved = [*_find_moves(names, chooser, one)]
    needs = [text for text, _ in moved]
    held = [layout.placement(one.axis) for layout in chooser.layouts if layout is not None]
    # If the axis splits no operand, all its ranks do the same work with any choice.
    is_spread = chooser.mesh.size(one.axis) > 1 and any(p.is_shard() for p in held)
    if is_spread and any(one.row.split not in work.names for work in chooser.work):
        needs.append(f"work repeated along {one.axis}")
    sent = sum(nbytes for _, nbytes in moved)
    return ConsideredRow(one.axis, str(one.row), one.price, one.chosen, tuple(needs), sent)


def _find_moves(
    names: Sequence[str], chooser: RowChooser, one: Considered
) -> Iterator[tuple[str, int]]:
    """Yields the moves of each operand to where a row needs it, and their bytes."""
    mesh, operands = chooser.mesh, zip(names, chooser.layouts, chooser.itemsizes, strict=True)
    for (name, layout, itemsize), wanted in zip(operands, one.row.inputs, strict=False):
        if layout is None or wanted is None or wanted == layout.placement(one.axis):
            continue
        try:
            path = plan(layout, layout.put(one.axis, wanted), mesh, itemsize)
        except LayoutError:
            continue
        sent = path.nbytes(mesh, itemsize)
        kinds = " then ".join(move.kind for move in path.moves)
        yield f"{name} {kinds}" + (f" {human(sent)}" if sent else ""), sent


def _name_of(path: Path, parameters: Sequence[str]) -> str:
    """Returns the name of the operand at `path`: "weight", or "tensors[1]" in a list."""
    head, inside = path[0], "".join(f"[{i}]" for i in path[1:])
    if isinstance(head, int):
        head = parameters[head] if head < len(parameters) else f"operand{head}"
    return f"{head}{inside}"


# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExplainedMove:
    """One step of a redistribution: of an operand, or one that the program requested.

    Attributes:
        kind, axes: the move, such as "all_gather", and the mesh axes that it runs over.
        before, after: the layouts.
        reason: the reason in the ledger: "explicit", "implicit", "gather" of a ZeRO block,
            "gradient", ...
        nbytes: bytes that the first rank sends.
        backward: the kind of the move of its gradient in backward; "" if there is no gradient.
        backward_nbytes: bytes that the first rank sends in that move.
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
        text = escape_controls(f"{over}: {self.before.brief()} -> {self.after.brief()}")
        text += f", {human(self.nbytes)}" if self.nbytes else ", nothing sent"
        if self.backward_nbytes:
            text += f"; backward {self.backward} {human(self.backward_nbytes)}"
        return text


@dataclass(frozen=True)
class ConsideredRow:
    """One legal way to place an op on a mesh axis (a row of its rule), and its cost.

    Attributes:
        axis: the mesh axis.
        row: placements of operands and results, such as "S(0), R -> S(0)".
        seconds: its price, forward and backward together. It uses round figures for a node of GPUs
            (see `partita.redistribute.move`), to compare rows, not to predict a time.
        chosen: True for the row that is used: the cheapest.
        needs: the moves of operands that it needs ("x all_gather 1.5 KiB"). Also the work that the
            ranks of the axis would repeat.
        nbytes: bytes that a rank sends in the moves of `needs`, in forward.
    """

    axis: str
    row: str
    seconds: float
    chosen: bool
    needs: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True)
class ExplainedOp:
    """One call of an op on DTensors, with its plan and cost.

    Attributes:
        op: the op's name.
        source: the user's "file:line".
        module: the module in whose forward it is called; "" outside of one.
        rule: the op's rule, such as "... i * o i -> ... o"; a remark in parentheses if there is
            none.
        operands, results: the layouts, with their dtypes.
        rows: the legal rows that were priced, axis by axis.
        moves: its moves, in order.
        work: multiplications and additions of its matrix products in forward, on the first rank,
            which has the largest pieces. Causal attention counts half, because masked parts are
            skipped.
        repeated: the axes along which all ranks compute the same products.
        inner: the calls that it makes, if it is decomposed into other ops.
        is_even: True if every rank computes equally much.
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
    is_even: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes that the first rank sends in its moves, including moves of inner calls."""
        return sum(move.nbytes for move in self.all_moves)

    @property
    def backward_nbytes(self) -> int:
        """Bytes that the first rank sends in backward, to redistribute this call's gradients."""
        return sum(move.backward_nbytes for move in self.all_moves)

    @property
    def all_moves(self) -> list[ExplainedMove]:
        """The moves of this call and of the calls inside it."""
        return [move for op, _ in _with_depth([self]) for move in op.moves]

    @property
    def all_work(self) -> float:
        """The `work` (multiplications and additions) of this call and of the calls inside it."""
        return sum(op.work for op, _ in _with_depth([self]))

    def chosen(self, axis: str) -> ConsideredRow | None:
        """Returns the row (placements) that the op uses on a mesh axis; None without a rule."""
        return next((row for row in self.rows if row.axis == axis and row.chosen), None)

    def runner_up(self, axis: str) -> ConsideredRow | None:
        """Returns the second-best row (placements) on the mesh axis; None if there is only one."""
        others = [row for row in self.rows if row.axis == axis and not row.chosen]
        return min(others, key=lambda row: row.seconds, default=None)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes for which rows (possible placements) were priced."""
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
        return "\n".join(map(escape_controls, lines))  # names of modules, axes and files

    def _format_place(self) -> str:
        return " ".join(filter(None, [self.source, self.module and f"in {self.module}"]))

    def _format_work(self) -> str:
        text = _say_work(self.work, self.is_even)
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
    """The result of `pt.explain`: the plan of each call that the function makes.

    Attributes:
        title: the name of what was explained.
        mesh: the meshes of its tensors, such as "dp=2 tp=4".
        ops: calls on DTensors and redistributions, in order.
        goes_backward: True if the function ran backward. If so, `ops` also contain the moves of
            gradients, with the reason "gradient".
    """

    title: str
    mesh: str
    ops: tuple[ExplainedOp, ...]
    goes_backward: bool = False

    @property
    def moves(self) -> tuple[ExplainedMove, ...]:
        """All moves, in order. The moves of backward are included only if the function runs it."""
        return tuple(move for op in self.ops for move in op.all_moves)

    @property
    def nbytes(self) -> int:
        """The bytes that the first rank sends in all moves, without a later backward."""
        return sum(op.nbytes for op in self.ops)

    @property
    def backward_nbytes(self) -> int:
        """Bytes that the first rank would send in a backward pass from the result.

        0 if the function ran backward itself.
        """
        return 0 if self.goes_backward else sum(op.backward_nbytes for op in self.ops)

    @property
    def work(self) -> float:
        """Multiplications and additions of matrix products in forward, on the first rank."""
        return sum(op.all_work for op in self.ops)

    def __str__(self) -> str:
        if not self.ops:
            title = escape_controls(self.title)
            return f"{title}: nothing is planned, since no call takes a DTensor"
        head = escape_controls(f"{self.title} on {self.mesh}")
        body = str(self.ops[0]) if len(self.ops) == 1 else self._format_ops()
        return f"{head}\n{body}\n{self._format_totals()}"

    def _format_ops(self) -> str:
        cells = (_format_cells(op, depth) for op, depth in _with_depth(self.ops))
        return format_table([_HEAD, *cells], _RIGHT)

    def _format_totals(self) -> str:
        sending = [move for move in self.moves if move.nbytes]
        moves = f"{len(sending)} collective{'s' * (len(sending) != 1)}"
        said = f"{moves}, {human(self.nbytes) if self.nbytes else 'nothing'} sent by a rank"
        said += ", backward too" * self.goes_backward
        if self.backward_nbytes:
            said += f"; {human(self.backward_nbytes)} more in a backward"
        if not self.work:
            return said
        is_even = all(op.is_even for op, _ in _with_depth(self.ops))
        return f"{said}; {_say_work(self.work, is_even)}"


def _say_work(operations: float, is_even: bool) -> str:
    where = "a rank" if is_even else "the first rank, which has the largest pieces"
    return f"{format_count(operations)} operations on {where}"


def _rows_of(axis: str, rows: Sequence[ConsideredRow]) -> list[str]:
    cells = []
    for row in sorted(rows, key=lambda row: (not row.chosen, row.seconds)):
        mark = "->" if row.chosen else "  "
        cells.append((f"    {mark} {row.row}", format_seconds(row.seconds), ", ".join(row.needs)))
    return [f"  axis {axis}", *format_table(cells, {1}).splitlines()]


_HEAD = ("op", "rows", "gives", "sent", "backward", "work", "where")
_RIGHT = (3, 4, 5)


def _with_depth(ops: Iterable[ExplainedOp], depth: int = 0) -> Iterable[tuple[ExplainedOp, int]]:
    for op in ops:
        yield op, depth
        yield from _with_depth(op.inner, depth + 1)


def _format_cells(op: ExplainedOp, depth: int) -> tuple[str, ...]:
    chosen = [(axis, op.chosen(axis)) for axis in op.axes]
    rows = "; ".join(f"{axis}: {row.row}" for axis, row in chosen if row is not None)
    sent, backward = (sum(getattr(m, n) for m in op.moves) for n in ("nbytes", "backward_nbytes"))
    work = format_count(op.work) if op.work else "-"
    what = ("  " * depth + op.op, rows or op.rule, _format_layouts(op.results))
    return (*what, human(sent), human(backward), work, op._format_place())


def _format_layouts(layouts: Sequence[Layout]) -> str:
    return ", ".join(map(str, layouts))
