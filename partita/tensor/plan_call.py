"""Planning a call: what happens the first time that a function is called with such operands.

    x + y                of x in 8@dp 4, and of y in 8 4
    sentence             "... + ... -> ..."           the rule's, bound to the shapes (8, 4), (8, 4)
    a row for each axis  dp: S(0), S(0) -> S(0)       the cheapest (`choose`)
    targets              y has to become 8@dp 4       each call moves y before it runs
    kernel               none: torch.add runs on the pieces

A rule may also answer with other ops to call in its place (`Decomposition`), or with a new tensor
in the operand's layout (`LikeRule`). Where it has no answer, operands are gathered (`dispatch`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire, user_line
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
    gives_view,
    may_be_denser_than_whole,
    reshape_copy,
    wrap_copying_as_on_one_device,
    write_through_copy,
)
from .arguments import (
    Path,
    all_tensors,
    bind_declared_arguments,
    find_numbers_of_other_meshes,
    find_view_copies,
    find_wire,
    find_written_operands,
    make_changed_layout_error,
    operands_of_call,
    read_numbers_of_other_meshes,
    replace_at_paths,
    rule_parameters,
    write_into_plain,
    writes_view_copy,
)
from .dtensor import DTensor
from .op_facts import Form, as_autocast_casts, facts_of_function, parameter_names
from .plan import CallPlan, Choice, Target, work_of_plan
from .random import with_generator_check
from .tensor_state import HERE, Args, Function, Kwargs, make_layout_error, spec_of
from .uneven_pieces import wrap_filling_padding, wrap_for_empty_pieces

_NUMBERS = (int, float, bool, complex)


@dataclass(frozen=True)
class _UnplannedCall:
    """A call that is planned.

    Attributes:
        form, func: the function, and the form of an op that it is.
        args, kwargs: the arguments, under the names of the rule's parameters.
        tensors: the tensors among them, with their paths.
        wire: of its DTensors.
    """

    form: Form
    func: Function
    args: Sequence[Any]
    kwargs: dict[str, Any]
    tensors: list[tuple[Path, Any]]
    wire: Wire

    @property
    def run(self) -> Function:
        """What runs on the rank if nothing else is planned."""
        return self.form.local or self.func

    @property
    def is_view(self) -> bool:
        """Is the result a view of the first operand on one device?"""
        return facts_of_function(self.form.name).is_view and gives_view(self.form, self.args)

    @property
    def keeps_layout(self) -> bool:
        """Must the first operand keep its layout? In place it must, unless its shape changes."""
        return self.form.inplace and not self.form.reshapes

    def let_torch_complain(self) -> None:
        """Run it on tensors without storage, so that a bad shape gets torch's own message.

        Not a user's operator, which need not say what it makes of such tensors.
        """
        if self.form.operator is not None and not self.form.operator.is_torchs:
            return
        new = {
            path: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta")
            for path, t in self.tensors
        }
        args, kwargs = replace_at_paths(self.args, self.kwargs, new)
        try:
            with Local():
                self.func(*args, **kwargs)
        except NotImplementedError:
            pass


def make_plan(form: Form, func: Function, args: Args, kwargs: Kwargs) -> CallPlan | None:
    """The plan of a call, or None if its operands have to be gathered.

    Raises:
        LayoutError: operands on two meshes, or an in-place op whose operand cannot keep its layout.
    """
    tensors = all_tensors(args, kwargs)
    if find_numbers_of_other_meshes(tensors):
        home = next(t._spec.wire for _, t in tensors if isinstance(t, DTensor))
        return CallPlan(form.name, home, rewrite=partial(_run_with_plain_numbers, func, form.name))
    wire = find_wire(form.name, [t for _, t in tensors])
    if form.inplace and not isinstance(args[0], DTensor):
        return CallPlan(form.name, wire, rewrite=partial(_write_plain_first, func, form.name))
    if writes_view_copy(form, args):
        way = reshape_copy if form.reshapes else write_through_copy
        return CallPlan(form.name, wire, rewrite=partial(way, func))
    call = _UnplannedCall(form, func, args, kwargs, tensors, wire)
    answer, operands = _ask_rule(call)
    if answer is None:
        return None
    if isinstance(answer, Decomposition):
        return _plan_rewrite(call, answer)
    if isinstance(answer, LikeRule):
        return _plan_like_call(call, answer)
    return _plan_sentence(call, answer, operands)


def _run_with_plain_numbers(func: Function, op: str, *args: Any, **kwargs: Any) -> Any:
    numbers = read_numbers_of_other_meshes(op, all_tensors(args, kwargs))
    given, named = replace_at_paths(args, kwargs, numbers)
    return func(*given, **named)


def _write_plain_first(func: Function, op: str, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(args[0], torch.Tensor):
        raise TypeError(f"{op} in place of {type(args[0]).__name__}, which is no tensor")
    return write_into_plain(func, op, [(0,)], args, kwargs)


def _ask_rule(
    call: _UnplannedCall,
) -> tuple[KernelRule | Decomposition | LikeRule | None, list[tuple[Path, Any]]]:
    """What the rule says of the call, and the operands in the order of the sentence's terms."""
    rule = call.form.rule
    assert rule is not None
    if rule.derive is None:
        return KernelRule(rule.text), operands_of_call(call.form, call.args, call.kwargs)
    positional, named, operands = bind_declared_arguments(call.form, call.args, call.kwargs)
    try:
        answer = rule.ask(
            *map(_convert_for_rule, positional),
            **{k: _convert_for_rule(v) for k, v in named.items()},
        )
    except (ValueError, IndexError, TypeError, ArithmeticError):
        call.let_torch_complain()
        raise
    return KernelRule(answer) if isinstance(answer, str) else answer, operands


def _convert_for_rule(value: Any) -> Any:
    """What a rule sees of an argument."""
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


def _plan_rewrite(call: _UnplannedCall, answer: Decomposition) -> CallPlan:
    form = call.form
    rewrite = as_autocast_casts(answer.run, form.name, form.inplace)
    rewrite = _wrap_writing_into_first(rewrite, form) if form.inplace else rewrite
    copies = False
    if call.is_view:
        # What the ops inside do to make a view is not known: what is split is taken as copied.
        spec = call.args[0]._spec
        copies = spec.is_sharded or spec.is_copy
    return CallPlan(
        form.name,
        call.wire,
        rewrite=rewrite,
        result_is_view_copy=copies,
        view_copies=find_view_copies(call.tensors),
        names=rule_parameters(form),
    )


# -- a new tensor in the layout of another ---------------------------------------------------------


def _plan_like_call(call: _UnplannedCall, answer: LikeRule) -> CallPlan:
    """A tensor of its own in the operand's layout; whole if its shape is another."""
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
    return CallPlan(
        form.name, wire, direct=True, spec=out, local_shape=out.local_shape, kernel=kernel
    )


# -- a sentence ------------------------------------------------------------------------------------


def _plan_sentence(
    call: _UnplannedCall, answer: KernelRule, operands: Sequence[tuple[Path, Any]]
) -> CallPlan | None:
    form, wire = call.form, call.wire
    paths = [path for path, _ in operands]
    if any(path not in paths for path, _ in call.tensors):
        check_call_fits_rule(form, call.func, call.args, call.kwargs)
        return None  # a tensor where the rule declares none: nothing is known of it
    values = [value for _, value in operands]
    bound = _bind_sentence(call, answer.text, values)
    if bound is None:
        return None
    layouts = [_layout_of_value(v) for v in values]
    work = work_of(bound, answer.work)
    choice = _choose_rows(call, bound, operands, layouts, work, answer.keeps)
    if choice is None or (call.keeps_layout and choice.inputs[0] != layouts[0]):
        return None
    targets = _find_targets(call, operands, layouts, choice)
    if form.writes:
        written = find_written_operands(form, call.args, call.kwargs)
        if any(target.path in written for target in targets):
            return None  # what is written keeps its layout
    first: Any = call.args[0] if call.args else None
    copies = call.is_view and (
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
        view_copies=find_view_copies(call.tensors),
        names=rule_parameters(form),
    )
    plan.kernel = _make_kernel(call, answer, plan, paths)
    if facts_of_function(form.name).may_copy and isinstance(first, DTensor):
        plan.may_copy = copies or first._spec.is_copy
        if not plan.may_copy and may_be_denser_than_whole(first._spec):
            run = plan.kernel or call.run
            plan.kernel = wrap_copying_as_on_one_device(run, call.func, first._spec)
    plan.bare = _find_bare_call(call, paths) if plan.kernel is None else None
    if work:
        plan.work = work_of_plan(plan, work, call.run)
        wire.scope.add_listener(plan)
    return plan


def _bind_sentence(call: _UnplannedCall, text: str, values: Sequence[Any]) -> Bound | None:
    """The sentence bound to the operands' shapes; None if they do not fit it."""
    try:
        sentence = parse(text)
    except SentenceError as error:  # of sizes that torch would refuse, or the rule's own mistake
        call.let_torch_complain()
        raise _make_misfit_error(call, text, str(error)) from None
    try:
        return bind(sentence, tuple(_classify_operand(v) for v in values))
    except SentenceError as error:
        call.let_torch_complain()
        if call.form.rule is not None and call.form.rule.must_fit:
            raise _make_misfit_error(call, text, str(error)) from None
        return None


def check_call_fits_rule(form: Form, func: Function, args: Args, kwargs: Kwargs) -> None:
    """Raise LayoutError if a call that a user's rule must fit has a tensor that it does not
    declare, or lacks an argument that it does."""
    rule, tensors = form.rule, all_tensors(args, kwargs)
    if rule is None or not rule.must_fit:
        return
    call = _UnplannedCall(
        form, func, args, kwargs, tensors, find_wire(form.name, [t for _, t in tensors])
    )
    if rule.derive is None:
        operands = operands_of_call(form, args, kwargs)
    else:
        positional, named, operands = bind_declared_arguments(form, args, kwargs)
        try:
            rule.check_given(len(positional), named)
        except LayoutError as error:
            call.let_torch_complain()
            raise error.located(user_line()) from None
    declared = [path for path, _ in operands]
    undeclared = [at for (at, *more), _ in tensors if (at, *more) not in declared]
    if undeclared:
        call.let_torch_complain()
        name = _name_of_argument(call, undeclared[0])
        raise _make_misfit_error(call, rule.text, f"it says nothing of {name}, a tensor")


def _name_of_argument(call: _UnplannedCall, at: Any) -> str:
    return parameter_names(call.func, len(call.args))[at] if isinstance(at, int) else str(at)


def _make_misfit_error(call: _UnplannedCall, text: str, reason: str) -> LayoutError:
    """What to raise where a user's rule does not fit a call."""
    name = call.form.name
    shown = [f"rule  {text!r}"] if text else []
    for (at, *_), t in call.tensors:
        layout = t._spec.layout.brief() if isinstance(t, DTensor) else f"{tuple(t.shape)}, plain"
        shown.append(f"{_name_of_argument(call, at)}  {layout}")
    return make_layout_error(
        f"{name}: its rule does not fit this call",
        operands=tuple(shown),
        reason=reason,
        fixes=(
            Fix(f'pt.rule("...", {name})', "a sentence that fits: a term for each tensor"),
            Fix(f"@pt.rule({name})", "that returns None for such calls: they are gathered"),
        ),
    )


def _choose_rows(
    call: _UnplannedCall,
    bound: Bound,
    operands: Sequence[tuple[Path, Any]],
    layouts: Sequence[Layout | None],
    work: Sequence[Work],
    keeps: str,
) -> Choice | None:
    """`choose` for the operands of a call; who explains calls is shown all rows and their
    prices."""
    values = [value for _, value in operands]
    plain = [isinstance(v, torch.Tensor) and not isinstance(v, DTensor) for v in values]
    sizes = [v.dtype.itemsize if isinstance(v, torch.Tensor) else 0 for v in values]
    considered: list[Considered] | None = None if HERE.explainer is None else []
    mesh = call.wire.mesh
    choice = choose(
        bound,
        layouts,
        plain,
        sizes,
        mesh,
        inplace=call.keeps_layout,
        keeps=keeps,
        work=work,
        considered=considered,
    )
    if considered is not None:
        described = [(path, rule_parameters(call.form)) for path, _ in operands]
        HERE.explainer.hear_rows(described, bound, layouts, sizes, work, considered, mesh)
    return choice


def _find_targets(
    call: _UnplannedCall,
    operands: Sequence[tuple[Path, Any]],
    layouts: Sequence[Layout | None],
    choice: Choice,
) -> tuple[Target, ...]:
    """The operands that have to be moved, and those that are plain tensors."""
    targets = []
    for (path, value), before, after in zip(operands, layouts, choice.inputs, strict=True):
        if before is None or after is None:
            continue
        if not isinstance(value, DTensor):
            targets.append(Target(path, spec_of(after, call.wire), spec_of(before, call.wire)))
        elif before != after:
            if call.form.reshapes and path == (0,):
                raise make_changed_layout_error(call.form.name, value)
            targets.append(Target(path, spec_of(after, call.wire)))
    return tuple(targets)


def _make_kernel(
    call: _UnplannedCall, answer: KernelRule, plan: CallPlan, paths: Sequence[Path]
) -> Function | None:
    """What runs on the rank in place of the function; None where the function itself does."""
    form, func, wire = call.form, call.func, call.wire
    assert plan.bound is not None and plan.choice is not None
    kernel = form.local if form.operator is not None else None
    if answer.local is not None:
        given = _make_kernel_call(call.run, plan.bound, plan.choice, wire, answer.beyond)
        kernel = answer.local(given)
        # A kernel is asked with the tensors' own shapes; it runs with torch-function disabled.
        if kernel is not None:
            if not call.is_view:
                kernel = as_autocast_casts(kernel, form.name, form.inplace)
            if form.inplace:
                kernel = _wrap_writing_into_first(kernel, form)
    if wire.padded:
        kernel = wrap_filling_padding(kernel, func, form, plan, paths)
    elif any(x.is_empty_at(wire.mesh, wire.at) for x in plan.choice.inputs if x is not None):
        kernel = wrap_for_empty_pieces(kernel, func, form, plan, paths)
    if facts_of_function(form.name).draws:
        kernel = with_generator_check(kernel or call.run, form, wire) or kernel
    return kernel


def _find_bare_call(call: _UnplannedCall, paths: Sequence[Path]) -> tuple[Function, int] | None:
    """`CallPlan.bare`. A flag is in the key, so that it is the same in all calls of a plan; a
    number may differ, and is one that counts only where a flag says so."""
    form, others = call.form, [*call.args[len(paths) :], *call.kwargs.values()]
    if form.bare is None or paths != [(i,) for i in range(len(paths))]:
        return None
    asks_nothing = all(v is None or v is False or isinstance(v, float) for v in others)
    return (form.bare, len(paths)) if asks_nothing else None


def _wrap_writing_into_first(run: Function, form: Form) -> Function:
    """`run`, which may be an op's form that is not in place, writing into its first argument."""

    def write_into_first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = run(x, *args, **kwargs)
        if out is x:
            return x
        if form.reshapes:  # the same memory, seen otherwise
            return x.as_strided_(out.size(), out.stride(), out.storage_offset())
        return x.copy_(out)

    return write_into_first


def _classify_operand(value: Any) -> Operand:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return NUMBER if isinstance(value, _NUMBERS) else None


def _layout_of_value(value: Any) -> Layout | None:
    if isinstance(value, DTensor):
        return value._spec.layout
    return Layout(tuple(value.shape)) if isinstance(value, torch.Tensor) else None


def _make_kernel_call(
    run: Kernel, bound: Bound, choice: Choice, wire: Wire, beyond: bool
) -> KernelCall:
    pieces = {}
    for name, axes in choice.splits.items():
        if name in bound.sizes and any(wire.mesh.size(a) > 1 for a in axes):
            one = Layout((bound.sizes[name],), (axes,))
            ((offset, length),) = wire.region(one, beyond=beyond)
            pieces[name] = (offset, length, bound.sizes[name])
    outputs = []
    for dims in bound.outputs:
        sizes = []
        for dim in dims:
            lengths = [pieces[n][1] if n in pieces else bound.sizes.get(n, -1) for n in dim.names]
            sizes.append(max(math.prod(lengths), -1))
        outputs.append(tuple(sizes))
    shapes = tuple(o if isinstance(o, tuple) else None for o in bound.operands)
    return KernelCall(run, shapes, tuple(outputs), pieces, wire.share)


# -- the cheapest row for each axis ----------------------------------------------------------------
# A pure function of layouts, which gives layouts; the plan cache stands around it.
#
# A row's price is in seconds: of its moves, forward and backward, and of the work that a rank then
# does. Work counts only where an operand is sharded, for then somebody wanted it spread: a row
# which gathers all and has each rank do everything loses against one which gathers less and has
# each rank do a part. What is whole on all ranks stays so.
#
#     x[8, 16@tp] @ w[16@tp, 4] on tp    S(1), S(0) -> P    moves nothing    is taken
#                                        R,    R    -> R    gathers both


@dataclass(frozen=True)
class Considered:
    """A row that was looked at for an axis, with its price in seconds, forward and backward
    together, and whether it was taken."""

    axis: str
    row: Row
    price: float
    taken: bool


def choose(
    bound: Bound,
    layouts: Sequence[Layout | None],
    plain: Sequence[bool],
    itemsizes: Sequence[int],
    mesh: Mesh,
    inplace: bool = False,
    keeps: str = "",
    work: Sequence[Work] = (),
    considered: list[Considered] | None = None,
) -> Choice | None:
    """The cheapest legal way to run an op on operands laid out like this.

    Args:
        layouts: the operands' layouts; None where one is absent or a number.
        plain: which operands are plain tensors: whole on every rank and without a gradient, so
            that each placement of them is free.
        itemsizes: bytes per element of each operand.
        inplace: operand 0 must keep its layout, and output 0 must have it too.
        keeps: a name that stays split by each axis that splits it in operand 0.
        work: the op's matrix products.
        considered: if given, every row looked at is appended.

    Returns:
        None if no legal row leaves operand 0 as `inplace` demands.
    """
    rows: list[Row] = []
    parts: dict[str, int] = {}
    for axis in mesh.names:
        n = mesh.size(axis)
        current = [None if x is None else x.placement(axis) for x in layouts]
        best, best_price = None, float("inf")
        seen: list[tuple[Row, float]] = []
        price = _RowPrice(axis, rows, bound, layouts, plain, itemsizes, mesh, work)
        for row in _find_rows_splitting(bound, layouts[0], keeps, axis) or bound.rows:
            if inplace and not (row.inputs[0] == current[0] == row.outputs[0]):
                continue
            if row.split and not bound.can_split(row.split, parts.get(row.split, 1) * n):
                continue
            cost = price(row)
            seen.append((row, cost))
            if cost < best_price:
                best, best_price = row, cost
                if cost == 0.0 and considered is None:
                    break
        if best is None:
            return None
        if considered is not None:
            considered += [Considered(axis, row, cost, row is best) for row, cost in seen]
        rows.append(best)
        if best.split:
            parts[best.split] = parts.get(best.split, 1) * n
    return _choose_layouts(bound, rows, layouts, mesh, inplace)


def _find_rows_splitting(bound: Bound, first: Layout | None, name: str, axis: str) -> list[Row]:
    """The rows that split `name`, if `axis` splits it in the first operand; else none."""
    dims = bound.inputs[0]
    if not name or first is None or dims is None:
        return []
    held = any(axis in axes and name in d.names for axes, d in zip(first.shards, dims, strict=True))
    return [row for row in bound.rows if held and row.split == name]


def _choose_layouts(
    bound: Bound, rows: Sequence[Row], layouts: Sequence[Layout | None], mesh: Mesh, inplace: bool
) -> Choice:
    splits: dict[str, tuple[str, ...]] = {}
    for axis, row in zip(mesh.names, rows, strict=True):
        if row.split:
            splits[row.split] = (*splits.get(row.split, ()), axis)
    for name, axes in splits.items():
        if len(axes) > 1:
            splits[name] = _choose_axis_order(
                name, axes, bound, layouts[:1] if inplace else layouts
            )
    by_axis = dict(zip(mesh.names, rows, strict=True))
    inputs: list[Layout | None] = []
    for i, layout in enumerate(layouts):
        dims = bound.inputs[i]
        if layout is None or dims is None:
            inputs.append(None)
            continue
        held = {a: by_axis[a].inputs[i] for a in mesh.names}
        stacks = _assign_axes_to_dims([d.names for d in dims], splits)
        inputs.append(
            Layout(layout.shape, stacks, _find_partial_axes(held), _find_invariant_axes(held))
        )
    outputs, partial, invariant = [], [], []
    for j, out in enumerate(bound.outputs):
        held = {a: by_axis[a].outputs[j] for a in mesh.names}
        outputs.append(_assign_axes_to_dims([d.names for d in out], splits))
        partial.append(_find_partial_axes(held))
        invariant.append(_find_invariant_axes(held))
    return Choice(tuple(inputs), tuple(outputs), tuple(partial), tuple(invariant), splits)


def _choose_axis_order(
    name: str, axes: tuple[str, ...], bound: Bound, layouts: Sequence[Layout | None]
) -> tuple[str, ...]:
    """The order in which several axes split one name: that of the largest operand split by them."""
    best: tuple[str, ...] = ()
    best_size = -1
    for layout, dims in zip(layouts, bound.inputs, strict=False):
        if layout is None or dims is None:
            continue
        for shards, dim in zip(layout.shards, dims, strict=True):
            if name in dim.names:
                kept = tuple(a for a in shards if a in axes)
                size = math.prod(layout.shape)
                if (len(kept), size) > (len(best), best_size):
                    best, best_size = kept, size
    return best + tuple(a for a in axes if a not in best)


def _assign_axes_to_dims(
    dims: Sequence[tuple[str, ...]], splits: dict[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(a for n in names for a in splits.get(n, ())) for names in dims)


def _find_partial_axes(held: dict[str, Placement | None]) -> tuple[tuple[str, str], ...]:
    return tuple((a, p.reduce_op) for a, p in held.items() if isinstance(p, Partial))


def _find_invariant_axes(held: dict[str, Placement | None]) -> tuple[str, ...]:
    return tuple(a for a, p in held.items() if p is not None and p.is_invariant())


# -- the price of a row ----------------------------------------------------------------------------

_SECONDS_TO_CUT_PLAIN = 1e-8
"""Seconds for a plain tensor that is cut: of two rows that cost the same otherwise, the one that
leaves it whole is taken."""
_SECONDS_OF_REPEATED_WORK = 4 * LATENCY
"""Seconds for work that each rank repeats although a factor is sharded: what follows from its
result is repeated as well, which is not known here. As long as two collectives with their
transposes take to start, so that small products, whose work costs less than that, are spread
too."""


@dataclass(frozen=True)
class _RowPrice:
    """The price of rows on `axis`.

    Attributes:
        before: the rows that were taken for the axes before it.
        layouts, plain, itemsizes: of each operand, as for `choose`.
        work: the op's matrix products.
    """

    axis: str
    before: Sequence[Row]
    bound: Bound
    layouts: Sequence[Layout | None]
    plain: Sequence[bool]
    itemsizes: Sequence[int]
    mesh: Mesh
    work: Sequence[Work]

    def __call__(self, row: Row) -> float:
        """The price of a row in seconds, forward and backward."""
        moves = self._price_moves(row)
        if not self.work or not self._is_spread():
            return moves
        if self._has_exchanges(row) and not self._is_pending():
            moves += self._price_reductions(row)
        work = sum(self._operations_on_rank(work, row) for work in self.work)
        repeated = sum(work.operations for work in self.work if row.split not in work.names)
        whole = _SECONDS_OF_REPEATED_WORK * repeated / sum(work.operations for work in self.work)
        return moves + seconds_of_work(work) + whole

    # -- moves -------------------------------------------------------------------------------------

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
                # A piece among zeros is a share of what nobody had to reduce before: somebody has
                # to now, and sends twice what a gather of the pieces sends.
                whole = layout.put(self.axis, Replicate())
                total += estimate_price(moved, whole, self.mesh, self.itemsizes[i])
        return total

    def _has_exchanges(self, row: Row) -> bool:
        """Does the row move an operand from one sharded dimension to another (all-to-all)?"""
        held = [self._placement_of_layout(x) for x in self.layouts]
        return any(
            _is_split(before) and _is_split(after) and before != after
            for before, after in zip(held, row.inputs, strict=False)
        )

    def _price_reductions(self, row: Row) -> float:
        """Seconds to reduce the row's Partial results, at the least by a reduce-scatter: who takes
        them has to."""
        n, total = self.mesh.size(self.axis), 0.0
        for out, placed in zip(self.bound.outputs, row.outputs, strict=True):
            if isinstance(placed, Partial):
                size = max(self.itemsizes) * self._local_numel_of_dims(out) / n
                total += seconds_both_ways("PS", n, n * size, size, placed.reduce_op)
        return total

    def _local_numel_of_dims(self, dims: Sequence[Dim]) -> float:
        """Elements of a result on a rank; of the largest operand, if only the kernel tells a
        size."""
        names = {name for dim in dims for name in dim.names}
        if not names <= self.bound.sizes.keys():
            return max(local_numel(x.shape, x.shards, self.mesh) for x in self.layouts if x)
        return math.prod([self.bound.sizes[name] for name in names]) / self._count_parts(names)

    def _placement_of_layout(self, layout: Layout | None) -> Placement | None:
        return None if layout is None else layout.placement(self.axis)

    def _is_pending(self) -> bool:
        return any(isinstance(self._placement_of_layout(x), Partial) for x in self.layouts)

    def _is_spread(self) -> bool:
        """Does this axis shard a factor of a product that is a DTensor?"""
        factors = {i for work in self.work for i in work.factors if not self.plain[i]}
        return self.mesh.size(self.axis) > 1 and any(
            _is_split(self._placement_of_layout(self.layouts[i])) for i in factors
        )

    # -- work --------------------------------------------------------------------------------------

    def _operations_on_rank(self, work: Work, row: Row) -> float:
        """Operations on one rank."""
        n = self.mesh.size(self.axis) if row.split in work.names else 1
        return work.operations / (n * self._count_parts(work.names))

    def _count_parts(self, names: set[str] | frozenset[str]) -> int:
        """The number of parts into which other axes split these names: the axes before by their
        rows; of an axis behind, each that shards an operand is counted."""
        rows_by_axis = dict(zip(self.mesh.names, self.before, strict=False))
        parts = [self.mesh.size(a) for a, row in rows_by_axis.items() if row.split in names]
        ahead = {a for x in self.layouts if x is not None for axes in x.shards for a in axes}
        parts += [self.mesh.size(a) for a in ahead - {self.axis, *rows_by_axis}]
        return math.prod(parts)


def _is_split(placement: Placement | None) -> bool:
    return placement is not None and placement.is_shard()
