"""Planning: decides how a call runs on local tensors, at the first call with a new key.

    x + y                of x in 8@dp 4, and of y in 8 4
    sentence             "... + ... -> ..."           applied to the shapes (8, 4), (8, 4)
    a row for each axis  dp: S(0), S(0) -> S(0)       the cheapest (`RowChooser`)
    targets              y has to become 8@dp 4       redistributed before a call
    kernel               none: torch.add runs on the shards

A *row* is one legal combination of placements on a mesh axis (`rules.sentence`). A rule may also
return other ops to call instead (`Decomposition`), or a new tensor in the operand's layout
(`LikeRule`). If it returns None, operands are gathered (`dispatch`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm import user_line
from partita.layout import Fix, Layout, LayoutError, Mesh, Partial, Placement, Replicate
from partita.redistribute import estimate_price, seconds_of_work
from partita.redistribute.move import LATENCY, local_numel, seconds_both_ways
from partita.rules import (
    NUMBER,
    Arg,
    Bound,
    Decomposition,
    Kernel,
    KernelCall,
    KernelRule,
    LikeRule,
    Operand,
    Row,
    SentenceError,
    Work,
    bind,
    parse,
    work_of,
)
from partita.rules.sentence import Dim

from .aliasing import (
    has_short_pieces,
    may_be_denser_than_whole,
    reshape_copy,
    wrap_copying_as_on_one_device,
    write_through_copy,
)
from .arguments import OpCall, Path, write_into_plain
from .dtensor import DTensor
from .infinite_factors import wrap_for_infinite_factors
from .op_facts import Form, as_autocast_casts, facts_of_function, parameter_names
from .plan import CallPlan, Choice, Target, work_of_plan
from .random import with_generator_check
from .tensor_state import HERE, Function, make_layout_error, spec_of
from .uneven_pieces import wrap_filling_padding, wrap_for_empty_pieces, wrap_keeping_strides


def make_plan(call: OpCall) -> CallPlan | None:
    """Returns the plan of a call, or None if the op must run on gathered operands.

    Args:
        call: the first call with its key, with normalized arguments.

    Raises:
        LayoutError: operands on two meshes, or an in-place op whose operand cannot keep its layout.
    """
    form, func = call.form, call.func
    if call.numbers_of_other_meshes:
        home = next(t._spec.wire for t in call.tensors.values() if isinstance(t, DTensor))

        def run_with_plain_numbers(*args: Any, **kwargs: Any) -> Any:
            return OpCall(form, func, args, kwargs).read_numbers_of_other_meshes().run()

        return CallPlan(form.name, home, rewrite=run_with_plain_numbers)
    if form.inplace and not isinstance(call.args[0], DTensor):
        return CallPlan(form.name, call.wire, rewrite=partial(_write_plain_first, form, func))
    if call.writes_view_copy:
        way = reshape_copy if form.reshapes else write_through_copy
        return CallPlan(form.name, call.wire, rewrite=partial(way, func))
    answer = _apply_rule(call)
    if answer is None:
        return None
    if isinstance(answer, Decomposition):
        return _plan_rewrite(call, answer)
    if isinstance(answer, LikeRule):
        return _plan_like_call(call, answer)
    plan = _plan_sentence(call, answer)
    if plan is not None:
        plan.inplace = form.inplace
        spec = call.args[0]._spec if form.inplace else None
        plan.is_short = spec is not None and len(spec.shape) > 1 and has_short_pieces(spec)
    return plan


def _write_plain_first(form: Form, func: Function, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(args[0], torch.Tensor):
        kind = type(args[0]).__name__
        raise TypeError(f"{form.name} in place of {kind}, which is no tensor")
    return write_into_plain(OpCall(form, func, args, kwargs), [(0,)])


def _apply_rule(call: OpCall) -> KernelRule | Decomposition | LikeRule | None:
    """Returns what the op's rule returns for this call."""
    rule = call.form.rule
    assert rule is not None
    if rule.derive is None:
        return KernelRule(rule.text)
    positional, named, _ = call.declared
    try:
        answer = rule.evaluate(
            *map(_convert_for_rule, positional),
            **{k: _convert_for_rule(v) for k, v in named.items()},
        )
    except (ValueError, IndexError, TypeError, ArithmeticError):
        _raise_torch_error(call)
        raise
    return KernelRule(answer) if isinstance(answer, str) else answer


def _raise_torch_error(call: OpCall) -> None:
    """Run the call on tensors without storage, so that a bad shape raises torch's own error.

    A user's operator is not run, because it need not support such tensors.
    """
    if call.form.operator is not None and not call.form.operator.is_torchs:
        return
    new: dict[Path, Any] = {
        path: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta")
        for path, t in call.tensors.items()
    }
    with suppress(NotImplementedError), local_ops():
        call.with_values(new).run()


def _convert_for_rule(value: Any) -> Any:
    """Returns an argument in the form in which rule functions get it: tensors as `Arg`."""
    if isinstance(value, DTensor):
        spec = value._spec
        mesh = spec.wire.mesh
        split = tuple(math.prod([mesh.size(a) for a in axes]) for axes in spec.layout.shards)
        return Arg(spec.layout.shape, split, spec.is_pending)
    if isinstance(value, torch.Tensor):
        return Arg(tuple(value.shape), (1,) * value.dim())
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return [_convert_for_rule(v) for v in value]
    return value


# -- an op that is written as others ---------------------------------------------------------------


def _plan_rewrite(call: OpCall, answer: Decomposition) -> CallPlan:
    form = call.form
    rewrite = as_autocast_casts(answer.run, form.name, form.inplace)
    rewrite = _wrap_writing_into_first(rewrite, form) if form.inplace else rewrite
    copies = False
    if call.gives_view:
        # It is not known how the ops inside make the view. A view of a split tensor is assumed to
        # be a copy; a selection by index tensors is one.
        spec = call.args[0]._spec
        copies = spec.is_sharded or spec.is_copy or form.name == "getitem"
    return CallPlan(
        form.name,
        call.wire,
        rewrite=rewrite,
        result_is_view_copy=copies,
        view_copies=call.view_copies,
        names=form.parameters,
    )


# -- a new tensor in the layout of another ---------------------------------------------------------


def _plan_like_call(call: OpCall, answer: LikeRule) -> CallPlan:
    """Returns the plan of a call that makes a new tensor in the layout of its operand.

    If the rule gives another shape, the result is whole on every rank.
    """
    form, wire, spec = call.form, call.wire, call.args[0]._spec
    if answer.shape == spec.layout.shape:
        layout = spec.layout if answer.pending else spec.reduced.layout
    else:
        layout = Layout(answer.shape)
    out = spec_of(layout, wire)
    kernel = None
    if answer.local is not None:
        names = Arg(answer.shape).names
        split = [
            d for d, axes in enumerate(layout.shards) if any(wire.mesh.size(a) > 1 for a in axes)
        ]
        pieces = {names[d]: (*out.region[d], answer.shape[d]) for d in split}
        kernel = answer.local(
            KernelCall(call.func, (spec.layout.shape,), (tuple(out.local_shape),), pieces)
        )
    if facts_of_function(form.name).draws:
        kernel = with_generator_check(kernel or call.func, form, wire) or kernel
    plan = CallPlan(form.name, wire, direct=True, spec=out, kernel=kernel)
    plan.local_shape, plan.outputs = out.local_shape, ((out, out.local_shape),)
    return plan


# -- a sentence ------------------------------------------------------------------------------------


def _plan_sentence(call: OpCall, answer: KernelRule) -> CallPlan | None:
    form, wire = call.form, call.wire
    paths = [path for path, _ in call.operands]
    if any(path not in paths for path in call.tensors):
        check_call_fits_rule(call)
        return None  # a tensor in a place where the rule declares none
    bound = _bind_sentence(call, answer.text)
    if bound is None:
        return None
    choice = _choose_rows(call, bound, answer)
    if choice is None:
        return None
    targets = _find_targets(call, choice)
    if form.writes and any(target.path in call.written for target in targets):
        return None  # a written operand must keep its layout
    first: Any = call.args[0] if call.args else None
    copies = call.gives_view and (
        bool(targets) or first._spec.is_copy or choice.partial[0] != first._spec.layout.partial
    )
    plan = CallPlan(
        form.name,
        wire,
        targets=targets,
        bound=bound,
        choice=choice,
        retags_operand=form.reshapes,
        result_is_view_copy=copies,
        view_copies=call.view_copies,
        names=form.parameters,
    )
    run = form.local or call.func
    plan.kernel = _make_kernel(call, answer, plan)
    if facts_of_function(form.name).may_copy and isinstance(first, DTensor):
        plan.may_copy = copies or first._spec.is_copy
        if not plan.may_copy and may_be_denser_than_whole(first._spec):
            plan.kernel = wrap_copying_as_on_one_device(plan.kernel or run, call.func, first._spec)
    elif not (call.gives_view or form.inplace) and any(
        x is not None and len(x.shape) > 1 and may_be_denser_than_whole(spec_of(x, wire))
        for x in choice.inputs
    ):
        plan.kernel = wrap_keeping_strides(plan.kernel, call, plan)
    plan.bare = _find_bare_call(call) if plan.kernel is None else None
    work = work_of(bound, answer.work)
    if work:
        plan.work = work_of_plan(plan, work, run)
        wire.scope.add_listener(plan)
    return plan


def _bind_sentence(call: OpCall, text: str) -> Bound | None:
    """Returns the sentence bound to the operands' shapes; None if they do not fit it."""
    rule, must_fit = call.form.rule, True
    try:
        sentence = parse(text)  # an error: torch would refuse these sizes, or the sentence is wrong
        must_fit = rule is not None and rule.must_fit
        return bind(sentence, tuple(_classify_operand(v) for _, v in call.operands))
    except SentenceError as error:
        _raise_torch_error(call)
        if must_fit:
            raise _make_misfit_error(call, text, str(error)) from None
        return None


def check_call_fits_rule(call: OpCall) -> None:
    """Raise LayoutError if a call does not fit a user's rule.

    This is so if it has a tensor that the rule does not declare, or lacks one that it declares.
    """
    rule = call.form.rule
    if rule is None or not rule.must_fit:
        return
    if rule.derive is not None:
        positional, named, _ = call.declared
        try:
            rule.check_given(len(positional), named)
        except LayoutError as error:
            _raise_torch_error(call)
            raise error.with_place(user_line()) from None
    declared = [path for path, _ in call.operands]
    undeclared = [path for path in call.tensors if path not in declared]
    if undeclared:
        _raise_torch_error(call)
        name = _name_of_argument(call, undeclared[0])
        raise _make_misfit_error(call, rule.text, f"it has no term for {name}, a tensor")


def _name_of_argument(call: OpCall, path: Path) -> str:
    at = path[0]
    return parameter_names(call.func, len(call.args))[at] if isinstance(at, int) else at


def _make_misfit_error(call: OpCall, text: str, reason: str) -> LayoutError:
    """Returns the error for a call that a user's rule does not fit."""
    name = call.form.name
    shown = [f"rule  {text!r}"] if text else []
    for path, t in call.tensors.items():
        layout = t._spec.layout.brief() if isinstance(t, DTensor) else f"{tuple(t.shape)}, plain"
        shown.append(f"{_name_of_argument(call, path)}  {layout}")
    return make_layout_error(
        f"{name}: its rule does not fit this call",
        Fix(f'pt.rule("...", {name})', "a sentence that fits: a term for each tensor"),
        Fix(f"@pt.rule({name})", "that returns None for such calls: they are gathered"),
        operands=tuple(shown),
        reason=reason,
    )


def _choose_rows(call: OpCall, bound: Bound, answer: KernelRule) -> Choice | None:
    """Returns the cheapest rows for a call; None if a written operand would change its layout.

    The explainer, if there is one, gets all rows and their prices.
    """
    form, values = call.form, [value for _, value in call.operands]
    chooser = RowChooser(
        bound,
        layouts=[_layout_of_value(v) for v in values],
        plain=[isinstance(v, torch.Tensor) and not isinstance(v, DTensor) for v in values],
        itemsizes=[v.dtype.itemsize if isinstance(v, torch.Tensor) else 0 for v in values],
        mesh=call.wire.mesh,
        # In place it must keep its layout, unless its shape changes.
        inplace=form.inplace and not form.reshapes,
        keeps=answer.keeps,
        work=work_of(bound, answer.work),
        considered=None if HERE.explainer is None else [],
    )
    choice = chooser.choose()
    if HERE.explainer is not None:
        HERE.explainer.record_rows([(path, form.parameters) for path, _ in call.operands], chooser)
    if choice is not None and chooser.inplace and choice.inputs[0] != chooser.layouts[0]:
        return None
    return choice


def _find_targets(call: OpCall, choice: Choice) -> tuple[Target, ...]:
    """Returns the operands that have to be moved, and those that are plain tensors."""
    targets = []
    for (path, value), after in zip(call.operands, choice.inputs, strict=True):
        before = _layout_of_value(value)
        if before is None or after is None:
            continue
        if not isinstance(value, DTensor):
            targets.append(Target(path, spec_of(after, call.wire), spec_of(before, call.wire)))
        elif before != after:
            if call.form.reshapes and path == (0,):
                raise call.make_changed_layout_error(value)
            targets.append(Target(path, spec_of(after, call.wire)))
    return tuple(targets)


def _make_kernel(call: OpCall, answer: KernelRule, plan: CallPlan) -> Function | None:
    """Returns the kernel that runs on the rank; None if the function itself runs."""
    form, wire, run = call.form, call.wire, call.form.local or call.func
    assert plan.choice is not None
    kernel = form.local if form.operator is not None else None
    if answer.local is not None:
        kernel = answer.local(_make_kernel_call(run, plan, answer.beyond))
        # A kernel is chosen with the tensors' own shapes; it runs with torch-function disabled.
        if kernel is not None:
            if not call.gives_view:
                kernel = as_autocast_casts(kernel, form.name, form.inplace)
            if form.inplace:
                kernel = _wrap_writing_into_first(kernel, form)
    if any(x is not None and x.partial for x in plan.choice.inputs):
        kernel = wrap_for_infinite_factors(kernel, call, plan)
    if wire.padded:
        kernel = wrap_filling_padding(kernel, call, plan)
    elif any(x.is_empty_at(wire.mesh, wire.at) for x in plan.choice.inputs if x is not None):
        kernel = wrap_for_empty_pieces(kernel, call, plan)
    if facts_of_function(form.name).draws:
        kernel = with_generator_check(kernel or run, form, wire) or kernel
    return kernel


def _find_bare_call(call: OpCall) -> tuple[Function, int] | None:
    """Returns `CallPlan.bare`: a faster function, and the number of operands; None if unusable.

    It is usable if all other arguments are None, False or floats, which have an effect only with a
    flag. A flag is in the plan's key.
    """
    form, count = call.form, len(call.operands)
    if form.bare is None or [path for path, _ in call.operands] != [(i,) for i in range(count)]:
        return None
    others = [*call.args[count:], *call.kwargs.values()]
    asks_nothing = all(v is None or v is False or isinstance(v, float) for v in others)
    return (form.bare, count) if asks_nothing else None


def _wrap_writing_into_first(run: Function, form: Form) -> Function:
    """Wraps `run` so that it writes its result into its first argument."""

    def write_into_first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = run(x, *args, **kwargs)
        if out is x:
            return x
        if form.reshapes:  # a view of the same memory
            return x.as_strided_(out.size(), out.stride(), out.storage_offset())
        return x.copy_(out)

    return write_into_first


def _classify_operand(value: Any) -> Operand:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return NUMBER if isinstance(value, (int, float, bool, complex)) else None


def _layout_of_value(value: Any) -> Layout | None:
    if isinstance(value, DTensor):
        return value._spec.layout
    return Layout(tuple(value.shape)) if isinstance(value, torch.Tensor) else None


def _make_kernel_call(run: Kernel, plan: CallPlan, beyond: bool) -> KernelCall:
    bound, choice, wire = plan.bound, plan.choice, plan.wire
    assert bound is not None and choice is not None
    pieces = {}
    for name, axes in choice.splits.items():
        if name in bound.sizes and any(wire.mesh.size(a) > 1 for a in axes):
            one = Layout((bound.sizes[name],), (axes,))
            ((offset, length),) = wire.region(one, beyond=beyond)
            pieces[name] = (offset, length, bound.sizes[name])

    def length_of_dim(dim: Dim) -> int:
        lengths = [pieces[n][1] if n in pieces else bound.sizes.get(n, -1) for n in dim.names]
        return max(math.prod(lengths), -1)

    outputs = tuple(tuple(map(length_of_dim, dims)) for dims in bound.outputs)
    shapes = tuple(o if isinstance(o, tuple) else None for o in bound.operands)
    return KernelCall(run, shapes, outputs, pieces, wire.share)


# -- the cheapest row for each axis ----------------------------------------------------------------
# Layouts go in and layouts come out; the plan cache stands around it.
#
# A row's price is in seconds: of its moves, forward and backward, and of the work that a rank then
# does. Work counts only where an operand is sharded, which shows that the work should be divided. A
# row that gathers all, so that each rank does everything, loses against one that gathers less, so
# that each rank does a part. What is whole on all ranks stays so.
#
#     x[8, 16@tp] @ w[16@tp, 4] on tp    S(1), S(0) -> P    moves nothing    is taken
#                                        R,    R    -> R    gathers both


@dataclass(frozen=True)
class Considered:
    """A row of an op's rule that the search has priced for one mesh axis. `pt.explain` lists them.

    Attributes:
        axis: the mesh axis.
        row: the placements of operands and results on the axis.
        price: seconds, for forward and backward together.
        chosen: True for the cheapest row.
    """

    axis: str
    row: Row
    price: float
    chosen: bool


_SECONDS_TO_CUT_PLAIN = 1e-8
"""Seconds for a plain tensor that is cut: of two rows that cost the same otherwise, the one that
leaves it whole is taken."""
_SECONDS_OF_REPEATED_WORK = 4 * LATENCY
"""Seconds for work that each rank repeats although a factor is sharded: what follows from its
result is repeated as well, which is not known here. As long as two collectives with their
transposes take to start, so that small products, whose work costs less than that, are spread
too."""


@dataclass
class RowChooser:
    """Searches for the cheapest row of a rule on each mesh axis, for operands with given layouts.

    A row gives the placements of operands and results on one axis.

    Attributes:
        bound: the rule's sentence with the sizes of this call.
        layouts: the operands' layouts; None if one is absent or a number.
        plain: for each operand, True if it is a plain tensor. It is whole on every rank and has no
            gradient, so every placement of it is free.
        itemsizes: bytes per element of each operand.
        work: the op's matrix products.
        inplace: True if operand 0 must keep its layout, and output 0 must have it, too.
        keeps: the name of a dimension. If an axis splits it in operand 0, the chosen row must split
            it, too.
        considered: a list to which every priced row is appended, or None.
        axis: the mesh axis for which a row is searched.
        rows: the rows that were chosen for the axes before `axis`.
    """

    bound: Bound
    layouts: Sequence[Layout | None]
    plain: Sequence[bool]
    itemsizes: Sequence[int]
    mesh: Mesh
    work: Sequence[Work]
    inplace: bool
    keeps: str
    considered: list[Considered] | None
    axis: str = ""
    rows: list[Row] = field(default_factory=list)

    def choose(self) -> Choice | None:
        """Returns the cheapest legal placements of operands and results on all mesh axes.

        Returns None if an in-place op would have to change the layout of the operand that it
        writes.
        """
        parts: dict[str, int] = {}
        for axis in self.mesh.names:
            self.axis, n = axis, self.mesh.size(axis)
            current = [self._placement_of_layout(x) for x in self.layouts]
            best, best_price = None, float("inf")
            seen: list[tuple[Row, float]] = []
            for row in self._find_rows_to_keep() or self.bound.rows:
                if self.inplace and not (row.inputs[0] == current[0] == row.outputs[0]):
                    continue
                if row.split and not self.bound.can_split(row.split, parts.get(row.split, 1) * n):
                    continue
                cost = self._price_row(row)
                seen.append((row, cost))
                if cost < best_price:
                    best, best_price = row, cost
                    if cost == 0.0 and self.considered is None:
                        break
            if best is None:
                return None
            if self.considered is not None:
                self.considered += [Considered(axis, row, c, row is best) for row, c in seen]
            self.rows.append(best)
            if best.split:
                parts[best.split] = parts.get(best.split, 1) * n
        return self._choose_layouts()

    def _find_rows_to_keep(self) -> list[Row]:
        """Returns the rows that split `keeps`, if the axis splits it in the first operand."""
        first, dims, name = self.layouts[0], self.bound.inputs[0], self.keeps
        if not name or first is None or dims is None:
            return []
        shards = zip(first.shards, dims, strict=True)
        held = any(self.axis in axes and name in d.names for axes, d in shards)
        return [row for row in self.bound.rows if held and row.split == name]

    # -- layouts -----------------------------------------------------------------------------------

    def _choose_layouts(self) -> Choice:
        bound = self.bound
        splits: dict[str, tuple[str, ...]] = {}
        for axis, row in zip(self.mesh.names, self.rows, strict=True):
            if row.split:
                splits[row.split] = (*splits.get(row.split, ()), axis)
        for name, axes in splits.items():
            splits[name] = self._order_axes(name, axes) if len(axes) > 1 else axes

        def lay_out(dims: Sequence[Dim], placements: Sequence[Placement | None]) -> tuple[Any, ...]:
            """Returns the layout of an operand or result, from its placements, as three tuples.

            They are the axes that split each dimension, the Partial axes with their reductions, and
            the Invariant axes.

            Args:
                dims: the dimensions in the rule's sentence.
                placements: the placement on each mesh axis.
            """
            held = list(zip(self.mesh.names, placements, strict=True))
            return (
                tuple(tuple(a for n in d.names for a in splits.get(n, ())) for d in dims),
                tuple((a, p.reduce_op) for a, p in held if isinstance(p, Partial)),
                tuple(a for a, p in held if p is not None and p.is_invariant()),
            )

        inputs: list[Layout | None] = []
        for i, (layout, dims) in enumerate(zip(self.layouts, bound.inputs, strict=True)):
            if layout is None or dims is None:
                inputs.append(None)
            else:
                placed = lay_out(dims, [row.inputs[i] for row in self.rows])
                inputs.append(Layout(layout.shape, *placed))
        outputs = [
            lay_out(dims, [row.outputs[j] for row in self.rows])
            for j, dims in enumerate(bound.outputs)
        ]
        shards, partial, invariant = zip(*outputs, strict=True) if outputs else ((), (), ())
        return Choice(tuple(inputs), shards, partial, invariant, splits)

    def _order_axes(self, name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the order in which axes split one name: as in the largest operand they split."""
        best: tuple[str, ...] = ()
        best_size = -1
        layouts = self.layouts[:1] if self.inplace else self.layouts
        for layout, dims in zip(layouts, self.bound.inputs, strict=False):
            if layout is None or dims is None:
                continue
            for shards, dim in zip(layout.shards, dims, strict=True):
                kept = tuple(a for a in shards if a in axes)
                size = math.prod(layout.shape)
                if name in dim.names and (len(kept), size) > (len(best), best_size):
                    best, best_size = kept, size
        return best + tuple(a for a in axes if a not in best)

    # -- prices ------------------------------------------------------------------------------------

    def _price_row(self, row: Row) -> float:
        """Returns the price of a row in seconds, forward and backward."""
        moves = self._price_moves(row)
        if not self.work or not self._is_spread():
            return moves
        if self._has_exchanges(row) and not self._is_pending():
            moves += self._price_reductions(row)
        n, total, on_rank, repeated = self.mesh.size(self.axis), 0.0, 0.0, 0.0
        for work in self.work:
            is_split = row.split in work.names
            total += work.operations
            on_rank += work.operations / ((n if is_split else 1) * self._count_parts(work.names))
            repeated += 0 if is_split else work.operations
        return moves + seconds_of_work(on_rank) + _SECONDS_OF_REPEATED_WORK * repeated / total

    def _price_moves(self, row: Row) -> float:
        total = 0.0
        for i, (layout, wanted) in enumerate(zip(self.layouts, row.inputs, strict=False)):
            held = self._placement_of_layout(layout)
            if layout is None or wanted is None or wanted == held:
                continue
            if self.plain[i]:
                total += _SECONDS_TO_CUT_PLAIN
                continue
            moved = layout.put(self.axis, wanted)
            total += estimate_price(layout, moved, self.mesh, self.itemsizes[i])
            if isinstance(wanted, Partial) and _is_split(held) and not self._is_pending():
                # A piece among zeros makes a Partial value, which must be reduced later. That
                # sends twice as much as a gather of the pieces.
                whole = layout.put(self.axis, Replicate())
                total += estimate_price(moved, whole, self.mesh, self.itemsizes[i])
        return total

    def _has_exchanges(self, row: Row) -> bool:
        """True if the row moves an operand from one sharded dimension to another (all-to-all)."""
        held = [self._placement_of_layout(x) for x in self.layouts]
        return any(
            _is_split(before) and _is_split(after) and before != after
            for before, after in zip(held, row.inputs, strict=False)
        )

    def _price_reductions(self, row: Row) -> float:
        """Returns the least seconds to reduce the row's Partial results, by reduce-scatter.

        Later readers of the results have to reduce them.
        """
        n, total = self.mesh.size(self.axis), 0.0
        for out, placed in zip(self.bound.outputs, row.outputs, strict=True):
            if isinstance(placed, Partial):
                size = max(self.itemsizes) * self._local_numel_of_dims(out) / n
                total += seconds_both_ways("PS", n, n * size, size, placed.reduce_op)
        return total

    def _local_numel_of_dims(self, dims: Sequence[Dim]) -> float:
        """Returns the elements of a result on a rank.

        If only the kernel knows a size: the elements of the largest operand.
        """
        names = {name for dim in dims for name in dim.names}
        if not names <= self.bound.sizes.keys():
            return max(local_numel(x.shape, x.shards, self.mesh) for x in self.layouts if x)
        return math.prod([self.bound.sizes[name] for name in names]) / self._count_parts(names)

    def _placement_of_layout(self, layout: Layout | None) -> Placement | None:
        return None if layout is None else layout.placement(self.axis)

    def _is_pending(self) -> bool:
        return any(isinstance(self._placement_of_layout(x), Partial) for x in self.layouts)

    def _is_spread(self) -> bool:
        """True if this axis shards a factor of a product that is a DTensor."""
        factors = {i for work in self.work for i in work.factors if not self.plain[i]}
        return self.mesh.size(self.axis) > 1 and any(
            _is_split(self._placement_of_layout(self.layouts[i])) for i in factors
        )

    def _count_parts(self, names: set[str] | frozenset[str]) -> int:
        """Returns the number of parts into which other axes split these names.

        Earlier axes count by their chosen rows, later axes if they shard an operand.
        """
        rows_by_axis = dict(zip(self.mesh.names, self.rows, strict=False))
        parts = [self.mesh.size(a) for a, row in rows_by_axis.items() if row.split in names]
        ahead = {a for x in self.layouts if x is not None for axes in x.shards for a in axes}
        parts += [self.mesh.size(a) for a in ahead - {self.axis, *rows_by_axis}]
        return math.prod(parts)


def _is_split(placement: Placement | None) -> bool:
    return placement is not None and placement.is_shard()
