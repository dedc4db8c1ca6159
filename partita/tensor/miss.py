"""What happens the first time: a call's operands are bound to its rule, and a plan is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire, user_line
from partita.layout import Fix, Layout, LayoutError
from partita.rules import (
    NUMBER,
    Arg,
    Bound,
    Call,
    Kernel,
    Like,
    Operand,
    Rewrite,
    Said,
    SentenceError,
    bind,
    parse,
)

from .agreement import no_strides
from .autograd import moved
from .buckets import pending_gradients, settle
from .choose import Choice, choose
from .dtensor import DTensor, tagged
from .names import Form, parameter_names
from .plan import CallPlan, Path, Target, at_path, replaced
from .spec import Spec, spec_of, two_meshes
from .view_writes import is_view_of, reshaped, written_through

__all__ = ["gathered", "in_order", "make_plan", "one_wire"]

_NUMBERS = (int, float, bool, complex)


# -- putting a call in order -----------------------------------------------------------------------


def in_order(
    form: Form, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any], torch.Tensor | None]:
    """The call under its rule's own names, and the tensor given as `out=`, taken off."""
    if not kwargs:
        return args, kwargs, None
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    names = _parameters(form)
    for numpy_name, name in (("axis", "dim"), ("keepdims", "keepdim")):
        if numpy_name in kwargs and numpy_name not in names and name in names:
            kwargs[name] = kwargs.pop(numpy_name)
    for first in ("input", "self", "x", "a", "x1"):
        if first in kwargs and not args and names and first not in names:
            args = (kwargs.pop(first),)
    if "x2" in kwargs and len(args) == 1:
        args = (*args, kwargs.pop("x2"))
    if "input" in names and "input" in kwargs and not args and names[0] == "input":
        args = (kwargs.pop("input"),)
    return args, kwargs, out


def _parameters(form: Form) -> tuple[str, ...]:
    rule = form.rule
    assert rule is not None
    if rule.derive is not None:
        return tuple(p.name for p in rule.params)
    return parameter_names(form.func, len(parse(rule.text).terms))


def _operands_of_call(
    form: Form, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[Path, Any]]:
    """The values in the places of a fixed sentence's terms."""
    found: list[tuple[Path, Any]] = []
    for i, name in enumerate(_parameters(form)):
        if i < len(args):
            found.append(((i,), args[i]))
        else:
            found.append(((name,), kwargs.get(name)))
    return found


def _declared(
    form: Form, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], list[tuple[Path, Any]]]:
    """A derived rule's arguments, and the tensors among them in order."""
    rule = form.rule
    assert rule is not None
    positional: list[Any] = []
    named: dict[str, Any] = {}
    tensors: list[tuple[Path, Any]] = []
    i = 0
    for p in rule.params:
        if p.kind is p.VAR_POSITIONAL:
            rest = args[i:]
            flat = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
            # Variadic sizes may come by name: x.reshape(shape=(2, 3)).
            if not rest and "shape" in kwargs:
                flat = kwargs["shape"]
            positional += list(flat)
            tensors += _tensors_at(tuple(range(i, len(args))), rest)
            i = len(args)
        elif p.kind is not p.KEYWORD_ONLY and i < len(args):
            positional.append(args[i])
            tensors += _tensors_at((i,), (args[i],))
            i += 1
        elif p.name in kwargs:
            named[p.name] = kwargs[p.name]
            tensors += _tensors_at((p.name,), (kwargs[p.name],))
    return positional, named, tensors


def _tensors_at(places: Sequence[Any], values: Sequence[Any]) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    for place, value in zip(places, values, strict=True):
        if isinstance(value, torch.Tensor):
            found.append(((place,), value))
        elif isinstance(value, (tuple, list)):
            found += [((place, j), v) for j, v in enumerate(value) if isinstance(v, torch.Tensor)]
    return found


def _all_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Path, Any]]:
    found = _tensors_at(tuple(range(len(args))), args)
    return found + _tensors_at(tuple(kwargs), tuple(kwargs.values()))


def one_wire(op: str, tensors: Sequence[Any]) -> Wire:
    """The wire of all DTensors among `tensors`. Raises LayoutError if they are on two meshes."""
    wire: Wire | None = None
    for t in tensors:
        if isinstance(t, DTensor):
            if wire is not None and t._spec.wire is not wire:
                raise two_meshes(op, wire, t._spec.wire)
            wire = t._spec.wire
    if wire is None:
        raise TypeError(f"{op}: no DTensor among the operands")
    return wire


# -- from a rule to a plan -------------------------------------------------------------------------


def make_plan(
    form: Form, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> CallPlan | None:
    """The plan of a call, or None if its operands have to be gathered.

    Raises:
        LayoutError: operands on two meshes, or an in-place op whose operand cannot keep its layout.
    """
    rule = form.rule
    assert rule is not None
    tensors = _all_tensors(args, kwargs)
    wire = one_wire(form.name, [t for _, t in tensors])
    if form.inplace and not isinstance(args[0], DTensor):
        raise _into_plain(form.name, args[0])
    if _writes_copy(form, args):
        way = reshaped if form.reshapes else written_through
        return CallPlan(form.name, wire, rewrite=partial(way, func))
    renews, names = _copies_among(tensors), _parameters(form)
    local = None
    if rule.derive is None:
        operands = _operands_of_call(form, args, kwargs)
        text = rule.text
    else:
        positional, named, operands = _declared(form, args, kwargs)
        try:
            said = rule.derive(*map(_seen, positional), **{k: _seen(v) for k, v in named.items()})
        except (ValueError, IndexError, TypeError, ArithmeticError):
            _let_torch_complain(func, args, kwargs)
            raise
        if said is None:
            return None
        if isinstance(said, Rewrite):
            rewrite = _into_first(said.run, form) if form.inplace else said.run
            # What the ops inside do to make a view is not known: what is split is taken as copied.
            copies = _is_view(form, args) and (args[0]._spec.is_sharded or args[0]._spec.is_copy)
            return CallPlan(
                form.name, wire, rewrite=rewrite, copies=copies, renews=renews, names=names
            )
        if isinstance(said, Like):
            return _like(form.name, func, wire, args[0]._spec, said)
        text, local = (said.text, said.local) if isinstance(said, Said) else (said, None)
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
        bound = bind(sentence, tuple(_operand(v) for v in values))
    except SentenceError:
        _let_torch_complain(func, args, kwargs)
        return None
    layouts = [_layout(v) for v in values]
    plain = [isinstance(v, torch.Tensor) and not isinstance(v, DTensor) for v in values]
    sizes = [v.element_size() if isinstance(v, torch.Tensor) else 0 for v in values]
    keeps = form.inplace and not form.reshapes
    choice = choose(bound, layouts, plain, sizes, wire.mesh, inplace=keeps)
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
                raise _changes_layout(form.name, value)
            targets.append(Target(path, spec_of(after, wire)))
    kernel = form.local if form.operator is not None else None
    if form.writes and {t.path for t in targets} & _written(form, args, kwargs):
        return None  # what is written keeps its layout
    if local is not None:
        kernel = local(_call(form.local or func, bound, choice, wire))
        # A kernel is asked with the tensors' own shapes; it runs with torch-function disabled.
        if kernel is not None and form.inplace:
            kernel = _into_first(kernel, form)
    copies = _is_view(form, args) and (
        bool(targets) or args[0]._spec.is_copy or choice.partial[0] != args[0]._spec.layout.partial
    )
    return CallPlan(
        form.name,
        wire,
        targets=tuple(targets),
        kernel=kernel,
        bound=bound,
        choice=choice,
        retags=form.reshapes,
        copies=copies,
        renews=renews,
        names=names,
    )


def _into_first(run: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """`run`, which may be an op's form that is not in place, writing into its first argument."""

    def written(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = run(x, *args, **kwargs)
        if out is x:
            return x
        if form.reshapes:  # the same memory, seen otherwise
            return x.as_strided_(out.size(), out.stride(), out.storage_offset())
        return x.copy_(out)

    return written


def _is_view(form: Form, args: Sequence[Any]) -> bool:
    """Would the result share its operand's memory on one device?"""
    if form.inplace or not args or not isinstance(args[0], DTensor):
        return False
    if form.func is torch.nn.functional.unfold:  # Tensor.unfold is a view, this one copies
        return False
    return is_view_of(form.name, args)


def _copies_among(tensors: Sequence[tuple[Path, Any]]) -> tuple[Path, ...]:
    """Where the operands stand that are copies of what would be views on one device."""
    return tuple(path for path, t in tensors if isinstance(t, DTensor) and t._spec.is_copy)


def _writes_copy(form: Form, args: Sequence[Any]) -> bool:
    """Is this an op in place on a copy of what would be a view on one device?"""
    first = args[0] if args else None
    return form.inplace and isinstance(first, DTensor) and first._spec.is_copy


def _seen(value: Any) -> Any:
    """What a rule sees of an argument."""
    if isinstance(value, DTensor):
        spec = value._spec
        mesh = spec.wire.mesh
        split = tuple(math.prod([mesh.size(a) for a in axes]) for axes in spec.layout.shards)
        return Arg(spec.layout.shape, split, spec.is_pending)
    if isinstance(value, torch.Tensor):
        return Arg(tuple(value.shape), (1,) * value.dim())
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return [_seen(v) for v in value]
    return value


def _operand(value: Any) -> Operand:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return NUMBER if isinstance(value, _NUMBERS) else None


def _layout(value: Any) -> Layout | None:
    if isinstance(value, DTensor):
        return value._spec.layout
    return Layout(tuple(value.shape)) if isinstance(value, torch.Tensor) else None


def _call(run: Kernel, bound: Bound, choice: Choice, wire: Wire) -> Call:
    pieces = {}
    for name, axes in choice.splits.items():
        if name in bound.sizes and any(wire.mesh.size(a) > 1 for a in axes):
            one = Layout((bound.sizes[name],), (axes,))
            ((offset, length),) = wire.region(one)
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
    return Call(run, shapes, tuple(outputs), pieces)


def _like(name: str, run: Kernel, wire: Wire, spec: Spec, said: Like) -> CallPlan:
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
        kernel = said.local(Call(run, (spec.layout.shape,), (tuple(out.local_shape),), pieces))
    return CallPlan(name, wire, direct=True, spec=out, local_shape=out.local_shape, kernel=kernel)


def _let_torch_complain(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Run the call on tensors without storage, so that a bad shape gets torch's own message."""
    new = {path: _meta(t) for path, t in _all_tensors(args, kwargs)}
    args, kwargs = replaced(args, kwargs, new)
    try:
        with Local():
            func(*args, **kwargs)
    except NotImplementedError:
        pass


def _meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(t.shape), dtype=t.dtype, device="meta", requires_grad=False)


# -- without a rule --------------------------------------------------------------------------------


def gathered(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], form: Form
) -> Any:
    """Run an op of which no rule speaks: operands whole, result whole.

    In place the result is moved back into the operand's layout, since others may hold it too: where
    that is pending, the first rank keeps the result and the others hold zeros; of a pending maximum
    or minimum each keeps it.

    Raises:
        LayoutError: in place, and the result has another shape.
    """
    tensors = _all_tensors(args, kwargs)
    waiting = pending_gradients(t for _, t in tensors)
    if waiting:  # who needs a gradient whole settles it for good
        settle(waiting)
        return func(*args, **kwargs)
    wire = one_wire(form.name, [t for _, t in tensors])
    layouts = [t._spec.layout for _, t in tensors if isinstance(t, DTensor)]
    invariant = tuple(
        a for a in wire.mesh.names if not all(x.placement(a).is_replicate() for x in layouts)
    )

    def whole(shape: Sequence[int]) -> Spec:
        return spec_of(Layout(tuple(shape), invariant=invariant), wire)

    def fresh(out: torch.Tensor) -> Spec:
        if out.layout is not torch.strided:
            raise no_strides(form.name, out)
        return whole(out.shape)

    written = _written(form, args, kwargs)
    if _writes_copy(form, args) and written == {(0,)}:
        return written_through(func, *args, **kwargs)
    copies = {}
    targets = []
    for path, t in tensors:
        after = whole(t.shape)
        if not isinstance(t, DTensor):
            if path in written:
                raise _into_plain(form.name, t)
            targets.append(Target(path, after, spec_of(Layout(tuple(t.shape)), wire)))
        elif t._spec is not after:
            if path not in written:
                targets.append(Target(path, after))
            else:
                with Local():
                    copies[path] = moved(t, t._spec, after, form.name, "implicit").clone()
    plan = CallPlan(
        form.name,
        wire,
        targets=tuple(targets),
        kernel=form.local,
        fresh=fresh,
        copies=bool(targets) and _is_view(form, args),
        renews=_copies_among(tensors),
    )
    if not copies:
        return plan.run(func, args, kwargs)
    out = plan.run(func, *replaced(args, kwargs, copies))
    for path, copy in copies.items():
        x = at_path(args, kwargs, path)
        if copy.shape != x.shape:
            raise _changes_layout(form.name, x)
        layout = x._spec.layout
        if all(op == "sum" for _, op in layout.partial):
            x.copy_(tagged(copy, whole(x.shape)))
            continue
        # A pending maximum of one value is that value: each rank keeps it whole.
        after = spec_of(Layout(layout.shape, layout.shards, (), layout.invariant), wire)
        with Local():
            x.copy_(moved(copy, whole(x.shape), after, form.name, "implicit"))
    return args[0] if form.inplace else out


def _written(form: Form, args: Sequence[Any], kwargs: dict[str, Any]) -> set[Path]:
    """Where the operands stand that the op writes."""
    places = {w.path(args, kwargs) for w in form.writes} | ({(0,)} if form.inplace else set())
    return {path for path, _ in _all_tensors(args, kwargs) if path[:1] in places}


def _into_plain(name: str, x: Any) -> LayoutError:
    return LayoutError(
        f"{name} in place: a DTensor cannot be written into a plain tensor",
        place=user_line(),
        operands=(f"x  plain {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"x  {x!r}",),
        reason="a plain tensor has no layout that says which part of the result it should hold",
        fixes=(
            Fix("x = pt.distribute_tensor(x, mesh, placements)", "before"),
            Fix(f"x.{name}_(y.full_tensor())"),
        ),
    )


def _changes_layout(name: str, x: DTensor) -> LayoutError:
    return LayoutError(
        f"{name} in place: its operand would have to change its layout",
        place=user_line(),
        operands=(f"x  {x._spec.layout.brief()} on {x._spec.wire.mesh}",),
        reason="a tensor that is written in place keeps its layout, since others may hold it too",
        fixes=(Fix(f"x = x.{name}(...)", "not in place"),),
    )
