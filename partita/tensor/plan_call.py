"""What happens the first time: a call's operands are bound to its rule, and a plan is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire
from partita.layout import Layout
from partita.rules import (
    NUMBER,
    Arg,
    Bound,
    Kernel,
    KernelCall,
    Like,
    Operand,
    Rewrite,
    Said,
    SentenceError,
    bind,
    parse,
    work_of,
)

from .arguments import (
    Path,
    all_tensors,
    changes_layout,
    copies_among,
    declared,
    numbers_elsewhere,
    one_wire,
    operands_of_call,
    parameters,
    replaced,
    writes_copy,
    written_places,
)
from .autocast import as_autocast_casts
from .choose import Choice, Considered, choose
from .draws import drawing
from .dtensor import DTensor
from .empty_pieces import as_with_elements
from .function_facts import facts_of_function
from .may_copy import copying_as_one_device, may_differ
from .names import Form
from .padding import without_padding
from .plain_writes import write_into_plain
from .plan import CallPlan, Target, work_of_plan
from .spec import Spec, spec_of
from .view_writes import gives_view, reshaped, written_through
from .watch import HERE

__all__ = ["make_plan"]

_NUMBERS = (int, float, bool, complex)


def make_plan(
    form: Form, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> CallPlan | None:
    """The plan of a call, or None if its operands have to be gathered.

    Raises:
        LayoutError: operands on two meshes, or an in-place op whose operand cannot keep its layout.
    """
    rule = form.rule
    assert rule is not None
    tensors = all_tensors(args, kwargs)
    if numbers_elsewhere(form.name, tensors):
        home = next(t._spec.wire for _, t in tensors if isinstance(t, DTensor))
        return CallPlan(form.name, home, rewrite=partial(_with_numbers, func, form.name))
    wire = one_wire(form.name, [t for _, t in tensors])
    if form.inplace and not isinstance(args[0], DTensor):
        return CallPlan(form.name, wire, rewrite=partial(_write_first, func, form.name))
    if writes_copy(form, args):
        way = reshaped if form.reshapes else written_through
        return CallPlan(form.name, wire, rewrite=partial(way, func))
    renews, names = copies_among(tensors), parameters(form)
    facts = facts_of_function(form.name)
    is_view = facts.is_view and gives_view(form, args)
    worked: tuple[str, ...] = ()
    local, kept, beyond = None, "", False
    if rule.derive is None:
        operands = operands_of_call(form, args, kwargs)
        text = rule.text
    else:
        positional, named, operands = declared(form, args, kwargs)
        try:
            said = rule.derive(
                *map(_convert_for_rule, positional),
                **{k: _convert_for_rule(v) for k, v in named.items()},
            )
        except (ValueError, IndexError, TypeError, ArithmeticError):
            _let_torch_complain(func, args, kwargs)
            raise
        if said is None:
            return None
        if isinstance(said, Rewrite):
            rewrite = as_autocast_casts(said.run, form.name, form.inplace)
            rewrite = _into_first(rewrite, form) if form.inplace else rewrite
            # What the ops inside do to make a view is not known: what is split is taken as copied.
            copies = is_view and (args[0]._spec.is_sharded or args[0]._spec.is_copy)
            return CallPlan(
                form.name, wire, rewrite=rewrite, copies=copies, renews=renews, names=names
            )
        if isinstance(said, Like):
            plan = _plan_like_call(form.name, func, wire, args[0]._spec, said)
            if facts.draws:
                plan.kernel = drawing(plan.kernel or func, form, wire) or plan.kernel
            return plan
        if isinstance(said, Said):
            text, local, kept, worked = said.text, said.local, said.keeps, said.work
            beyond = said.beyond
        else:
            text = said
    paths = {path for path, _ in operands}
    if any(path not in paths for path, _ in tensors):
        return None  # a tensor where the rule declares none: nothing is known of it
    try:
        sentence = parse(text)
    except SentenceError:  # made of sizes that torch would refuse, or the rule's own mistake
        _let_torch_complain(func, args, kwargs)
        raise
    values = [value for _, value in operands]
    try:
        bound = bind(sentence, tuple(_classify_operand(v) for v in values))
    except SentenceError:
        _let_torch_complain(func, args, kwargs)
        return None
    layouts = [_layout_of_value(v) for v in values]
    plain = [isinstance(v, torch.Tensor) and not isinstance(v, DTensor) for v in values]
    sizes = [v.dtype.itemsize if isinstance(v, torch.Tensor) else 0 for v in values]
    keeps = form.inplace and not form.reshapes
    work = work_of(bound, worked)
    considered: list[Considered] | None = None if HERE.explainer is None else []
    choice = choose(
        bound,
        layouts,
        plain,
        sizes,
        wire.mesh,
        inplace=keeps,
        keeps=kept,
        work=work,
        considered=considered,
    )
    if considered is not None:
        known = [(path, parameters(form)) for path, _ in operands]
        HERE.explainer.hear_rows(known, bound, layouts, sizes, work, considered, wire.mesh)
    if choice is None or (keeps and choice.inputs[0] != layouts[0]):
        return None
    targets = []
    for (path, value), before, after in zip(operands, layouts, choice.inputs, strict=True):
        if before is None or after is None:
            continue
        if not isinstance(value, DTensor):
            targets.append(Target(path, spec_of(after, wire), spec_of(before, wire)))
        elif before != after:
            if form.reshapes and path == (0,):
                raise changes_layout(form.name, value)
            targets.append(Target(path, spec_of(after, wire)))
    kernel = form.local if form.operator is not None else None
    if form.writes and {t.path for t in targets} & written_places(form, args, kwargs):
        return None  # what is written keeps its layout
    if local is not None:
        kernel = local(_make_kernel_call(form.local or func, bound, choice, wire, beyond))
        # A kernel is asked with the tensors' own shapes; it runs with torch-function disabled.
        if kernel is not None:
            if not is_view:
                kernel = as_autocast_casts(kernel, form.name, form.inplace)
            if form.inplace:
                kernel = _into_first(kernel, form)
    if wire.padded:
        kernel = without_padding(kernel, func, form, bound, choice, wire, operands, names)
    paths_of_terms = [path for path, _ in operands]
    pieces = [layout for layout in choice.inputs if layout is not None]
    if any(layout.is_empty_at(wire.mesh, wire.at) for layout in pieces):
        kernel = as_with_elements(kernel, func, form, bound, choice, wire, paths_of_terms, names)
    if facts.draws:
        kernel = drawing(kernel or form.local or func, form, wire) or kernel
    copies = is_view and (
        bool(targets) or args[0]._spec.is_copy or choice.partial[0] != args[0]._spec.layout.partial
    )
    may_copy = facts.may_copy and isinstance(args[0], DTensor)
    if may_copy and not (copies or args[0]._spec.is_copy):
        may_copy = False
        if may_differ(args[0]._spec):
            kernel = copying_as_one_device(kernel or form.local or func, func, args[0]._spec)
    plan = CallPlan(
        form.name,
        wire,
        targets=tuple(targets),
        kernel=kernel,
        bare=_find_bare_call(form, [path for path, _ in operands], args, kwargs)
        if kernel is None
        else None,
        bound=bound,
        choice=choice,
        retags=form.reshapes,
        copies=copies,
        may_copy=may_copy,
        renews=renews,
        names=names,
    )
    if work:
        plan.work = work_of_plan(form.name, wire, work, choice, kernel, form.local or func)
        wire.scope.add_listener(plan)
    return plan


def _find_bare_call(
    form: Form, paths: Sequence[Path], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], int] | None:
    """`CallPlan.bare`. A flag is in the key, so that it is the same in all calls of a plan; a
    number may differ, and is one that counts only where a flag says so."""
    given = [*args[len(paths) :], *kwargs.values()]
    if form.bare is None or paths != [(i,) for i in range(len(paths))]:
        return None
    nothing = all(v is None or v is False or isinstance(v, float) for v in given)
    return (form.bare, len(paths)) if nothing else None


def _with_numbers(func: Callable[..., Any], op: str, *args: Any, **kwargs: Any) -> Any:
    numbers = numbers_elsewhere(op, all_tensors(args, kwargs))
    given, named = replaced(args, kwargs, numbers)
    return func(*given, **named)


def _write_first(func: Callable[..., Any], op: str, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(args[0], torch.Tensor):
        raise TypeError(f"{op} in place of {type(args[0]).__name__}, which is no tensor")
    return write_into_plain(func, op, [(0,)], args, kwargs)


def _into_first(run: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """`run`, which may be an op's form that is not in place, writing into its first argument."""

    def write_into_first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = run(x, *args, **kwargs)
        if out is x:
            return x
        if form.reshapes:  # the same memory, seen otherwise
            return x.as_strided_(out.size(), out.stride(), out.storage_offset())
        return x.copy_(out)

    return write_into_first


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
            length = 1
            for n in dim.names:
                length *= pieces[n][1] if n in pieces else bound.sizes.get(n, -1)
            sizes.append(length if length >= 0 else -1)
        outputs.append(tuple(sizes))
    shapes = tuple(o if isinstance(o, tuple) else None for o in bound.operands)
    return KernelCall(run, shapes, tuple(outputs), pieces, wire.share)


def _plan_like_call(name: str, run: Kernel, wire: Wire, spec: Spec, said: Like) -> CallPlan:
    """A tensor of its own in the operand's layout; whole if its shape is another."""
    if said.shape == spec.layout.shape:
        layout = spec.layout
        if not said.pending:
            layout = Layout(layout.shape, layout.shards, (), layout.invariant)
    else:
        layout = Layout(said.shape)
    out = spec_of(layout, wire)
    kernel = None
    if said.local is not None:
        names = Arg(said.shape).names
        split = [
            d for d, axes in enumerate(layout.shards) if any(wire.mesh.size(a) > 1 for a in axes)
        ]
        pieces = {names[d]: (*out.region[d], said.shape[d]) for d in split}
        kernel = said.local(
            KernelCall(run, (spec.layout.shape,), (tuple(out.local_shape),), pieces)
        )
    return CallPlan(name, wire, direct=True, spec=out, local_shape=out.local_shape, kernel=kernel)


def _let_torch_complain(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Run the call on tensors without storage, so that a bad shape gets torch's own message."""
    new = {path: _make_meta_tensor(t) for path, t in all_tensors(args, kwargs)}
    args, kwargs = replaced(args, kwargs, new)
    try:
        with Local():
            func(*args, **kwargs)
    except NotImplementedError:
        pass


def _make_meta_tensor(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(t.shape), dtype=t.dtype, device="meta", requires_grad=False)
