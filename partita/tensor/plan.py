"""Call plans: the cached decision how to run a call, its lookup, and the cache.

    torch.sum(x, dim=0)    key (spec of x, 0, False, None)    ->    CallPlan

A plan contains the operands that are redistributed and their new layouts, the kernel that runs on
local tensors, and the specs of the results, which are known after the first call. From then on a
plan may be `direct`: dispatch runs the kernel and sets the result's spec without `CallPlan.run`.

The plans of one function are stored in its `Op`. Its key function is generated from the arguments
that the op's rule declares.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm import Wire, user_line
from partita.layout import Layout, LayoutError
from partita.redistribute.move import local_numel
from partita.rules import NUMBER, Bound, Work

from .aliasing import copy_as_on_one_device, mark_copies, refuse_partial_overlap
from .arguments import (
    Path,
    check_plain_tensor,
    collect_tensors,
    get_at_path,
    locate_in_call,
    replace_at_paths,
    spec_of_plain,
)
from .dtensor import PLAIN, DTensor, alias_without_base, as_dtensor, move_local
from .dtensor_gradients import pending_gradients, reduce_pending_gradients
from .op_facts import Form, facts_of_function, form_of
from .origins import NotingKernel, note_origins_of
from .tensor_state import (
    Args,
    Function,
    Kwargs,
    RetypedValue,
    Spec,
    current,
    make_layout_error,
    own_state,
    spec_of,
    state_of,
)


@dataclass(frozen=True)
class Choice:
    """The chosen way to run an op on local tensors: the layouts of its operands and results.

    Attributes:
        inputs: the layout that each operand must have; None if it is absent or a number.
        outputs, partial, invariant: for each output, `shards`, `partial` and `invariant` of its
            `Layout`.
        splits: for each dimension name of the rule's sentence, the axes that split it, outermost
            first.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[tuple[tuple[str, ...], ...], ...]
    partial: tuple[tuple[tuple[str, str], ...], ...]
    invariant: tuple[tuple[str, ...], ...]
    splits: dict[str, tuple[str, ...]]

    def layout_of_output(self, bound: Bound, i: int, local: tuple[int, ...]) -> Layout:
        """Returns the global layout of output `i`, whose local shape is `local`.

        Args:
            bound: the rule's sentence with the sizes of this call.
            local: the shape of the local tensor.
        """
        shape = bound.output_shape(i, local)
        return Layout(shape, self.outputs[i], self.partial[i], self.invariant[i])


@dataclass(frozen=True)
class Target:
    """An operand that a plan redistributes before the kernel runs.

    Attributes:
        path: the operand's position in the call.
        spec: the spec (layout and wire) that it must have.
        plain: for a plain tensor, the spec that it is assumed to have (whole on every rank); None
            for a DTensor.
    """

    path: Path
    spec: Spec
    plain: Spec | None = None


@dataclass(slots=True, weakref_slot=True)
class CallPlan:
    """The cached decision how to run a call: redistributions, kernel, layouts of results.

    Calls with the same key share one plan.

    Attributes:
        op: the op's name.
        wire: the rank's wire, on the mesh of the operands.
        direct: True if a call needs only two steps: run the kernel (or the function), and make its
            result a DTensor of `spec`. Set when the plan is made, or by the first call.
        spec, local_shape: the spec and local shape of a result that is one tensor; set with
            `direct`.
        outputs: the spec and the local shape of each result; set by the first call.
        targets: the operands that are redistributed first, and those that are plain tensors.
        kernel: a function that runs on local tensors in place of the called function, or None.
        bare: a faster kernel for calls that pass all operands by position and nothing else, and the
            number of operands.
        rewrite: a function that is called with the DTensors in place of a kernel, or None. With it,
            the fields above are unused.
        bound, choice: the rule and its chosen rows (placements), for `explain` and for shapes that
            only the kernel knows.
        retags_operand: True if the op changes its operand's shape in place (as `squeeze_` does), so
            that the operand gets a new spec.
        result_is_view_copy: True if the result has its own memory, but is a view in plain PyTorch.
        may_copy: True if the strides of the global tensor decide whether plain PyTorch makes a copy
            or a view.
        view_copies: the operands that are view copies (see `aliasing`): they may be out of date.
        names: the names of the parameters that may be passed by position or by name, in order.
        work: the matrix products of a call, for ledgers.
        make_output_spec: a function that computes each result's spec (data-dependent shapes).
        inplace: True if the op writes its first operand.
        is_short: True if it does, and on some ranks only the piece has a single row, or none.
        hits: the number of calls that have used this plan.
    """

    op: str
    wire: Wire
    direct: bool = False
    spec: Spec | None = None
    local_shape: torch.Size | None = None
    outputs: tuple[tuple[Spec, torch.Size], ...] = ()
    targets: tuple[Target, ...] = ()
    kernel: Function | None = None
    bare: tuple[Function, int] | None = None
    rewrite: Function | None = None
    bound: Bound | None = None
    choice: Choice | None = None
    retags_operand: bool = False
    result_is_view_copy: bool = False
    may_copy: bool = False
    view_copies: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()
    work: PlanWork | None = None
    make_output_spec: Callable[[torch.Tensor], Spec] | None = None
    inplace: bool = False
    is_short: bool = False
    hits: int = field(default=0)

    def count_flops(self, on: bool) -> None:
        """Starts (`on`) or stops the counting of this plan's flops in the open ledgers.

        While a ledger is open, the kernel runs through a wrapper that counts. Otherwise this costs
        nothing.
        """
        assert self.work is not None
        self.kernel = self.work.run_noting_work if on else self.work.kernel

    def run(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Runs the call `func(*args, **kwargs)` as planned, and returns its result.

        It updates view copies, redistributes operands, runs the kernel, and sets the specs (layout
        and wire) of the results.
        """
        if not args and self.names and self.names[0] in kwargs:
            kwargs = dict(kwargs)
            args = (kwargs.pop(self.names[0]),)
        if self.inplace and (self.view_copies or self.targets or self.is_short):
            refuse_partial_overlap(self.op, args[0], (args[1:], kwargs))
        if self.view_copies:
            paths = [locate_in_call(path, self.names, args, kwargs) for path in self.view_copies]
            renewed = {path: current(get_at_path(args, kwargs, path)) for path in paths}
            args, kwargs = replace_at_paths(args, kwargs, renewed)
        if self.rewrite is not None:
            out = self.rewrite(*args, **kwargs)
            return mark_copies(out, func, args, kwargs) if self.result_is_view_copy else out
        given_args, given_kwargs = args, kwargs
        if self.targets:
            if self._reduce_gradients(args, kwargs):
                return func(*args, **kwargs)  # by another plan, for the layouts of now
            args, kwargs = self._move_operands(args, kwargs)
        with local_ops():
            out = (self.kernel or func)(*args, **kwargs)
        out = self.tag(out)
        if self.notes_origin and type(self.kernel) is not NotingKernel:  # in the first call
            keeps = self.keeps_origin
            note_origins_of(out, args, kwargs, keeps, sys._getframe(1))
            self.kernel = NotingKernel(self.kernel or func, keeps)
        copied = self.result_is_view_copy
        if self.may_copy:
            out, copied = copy_as_on_one_device(
                out, func, given_args, given_kwargs, copied or bool(self.view_copies)
            )
        return mark_copies(out, func, given_args, given_kwargs) if copied else out

    def _reduce_gradients(self, args: Args, kwargs: Kwargs) -> bool:
        """Reduces Partial gradients among the operands, if they must be redistributed.

        Each stays the same object, which other arguments of the call may be, too.

        Returns True if a layout has changed.
        """
        found = []
        for target in self.targets:
            if target.plain is None and not target.spec.is_pending:
                path = locate_in_call(target.path, self.names, args, kwargs)
                value = get_at_path(args, kwargs, path)
                if value._spec.is_pending:
                    found.append((value, value._spec))
        if found:
            reduce_pending_gradients(pending_gradients(value for value, _ in found))
        return any(value._spec is not spec for value, spec in found)

    def _move_operands(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        new = {}
        for target in self.targets:
            path = locate_in_call(target.path, self.names, args, kwargs)
            value = get_at_path(args, kwargs, path)
            if target.plain is None:
                new[path] = _move_operand(value, target.spec, self.op)
            else:
                check_plain_tensor(value, self.wire, self.op, path, with_gradient=True)
                if value.requires_grad and torch.is_grad_enabled():
                    # Its gradient must be whole, because plain autograd continues with it.
                    whole = spec_of_plain(value, self.wire)
                    value = move_local(value, whole, target.plain, self.op, "implicit")
                # At least an alias: an op may return its operand; the user's tensor is not
                # re-tagged.
                new[path] = move_local(value, target.plain, target.spec, self.op, "implicit")
        return replace_at_paths(args, kwargs, new)

    @property
    def notes_origin(self) -> bool:
        """True if the plan records which line of the program made the results (see `origins`)."""
        noted = bool(self.outputs) and self.outputs[0][0].has_noted_origin
        return noted and self.work is None

    @property
    def keeps_origin(self) -> bool:
        """True if the results get the origin of their operand (see `origins`).

        That is so if a result may be the operand itself or a view of it.
        """
        facts = facts_of_function(self.op)
        return facts.is_view or facts.may_copy

    def tag(self, out: Any) -> Any:
        """Turns `out`, the local results of a kernel, into DTensors with the planned specs.

        Returns `out`. At the first call it also stores the specs in the plan.

        Raises:
            LayoutError: the shapes or the number of results do not fit the rule.
        """
        if isinstance(out, DTensor):
            self.direct = self._is_direct()  # in place: nothing is new
            if self.retags_operand:
                if self.spec is None:
                    with local_ops():
                        self._learn_output_specs((out,))
                out._spec = self.spec  # type: ignore[assignment]
            return out
        news = (out,) if type(out) in PLAIN else _collect_plain_tensors(out)
        if self.make_output_spec is not None:
            for t in news:
                as_dtensor(t, self.make_output_spec(t))
            return out
        if news and not self.outputs:
            self._learn_output_specs(news)
        for t, (spec, shape) in zip(news, self.outputs if news else (), strict=True):
            if t.shape != shape:
                raise self._make_broken_plan_error(t, spec)
            as_dtensor(t, spec)
        return out

    def _learn_output_specs(self, outs: Sequence[torch.Tensor]) -> None:
        """Set the results' specs from the choice of rows.

        Sizes that the sentence does not determine are taken from this first result.
        """
        assert self.bound is not None and self.choice is not None
        if len(outs) != len(self.bound.outputs):
            raise make_layout_error(
                f"{self.op} returned {len(outs)} tensors but its rule has "
                f"{len(self.bound.outputs)}",
                reason=f'rule "{self.bound.sentence}"',
            )
        specs = []
        for i, out in enumerate(outs):
            local = tuple(out.shape)
            if len(local) != len(self.bound.outputs[i]):
                raise self._make_broken_plan_error(out, None)
            spec = spec_of(self.choice.layout_of_output(self.bound, i, local), self.wire)
            if spec.local_shape != out.shape:
                raise self._make_broken_plan_error(out, spec)
            specs.append((spec, spec.local_shape))
        self.outputs = tuple(specs)  # a tuple may have one item, as of x.chunk(1)
        if len(specs) == 1:
            self.spec, self.local_shape = specs[0]
        self.direct = self._is_direct()

    def _is_direct(self) -> bool:
        return not (
            self.targets
            or self.retags_operand
            or self.result_is_view_copy
            or self.may_copy
            or self.view_copies
            or self.rewrite
            or self.is_short
        )

    def _make_broken_plan_error(self, out: torch.Tensor, spec: Spec | None) -> LayoutError:
        promise = (
            "" if spec is None else f", not {tuple(spec.local_shape)} as {spec.layout.brief()}"
        )
        by_rule = "" if self.bound is None else f' by rule "{self.bound.sentence}"'
        return make_layout_error(
            f"the plan for {self.op} does not hold: it made {tuple(out.shape)}{promise}",
            reason=f"planned{by_rule}: the rule reads too little or says something wrong",
        )


def _collect_plain_tensors(out: Any) -> Sequence[torch.Tensor]:
    if type(out) is tuple or type(out) is list:
        found = [t for t in out if type(t) in PLAIN]
        if len(found) == len(out):  # the usual case
            return found
    return [t for t in collect_tensors(out) if type(t) in PLAIN]


def _move_operand(x: DTensor, after: Spec, op: str) -> torch.Tensor:
    """Returns the local tensor of `x`, redistributed to the spec `after`.

    If the layouts differ only in the gradient's placement (Invariant and Replicate), the result is
    an alias of `x`. Ops that need the same alias share it, so that their gradients are summed and
    then moved once. A result with its own memory is not shared, because torch does not count every
    write of `x` (`numpy`, `.data`, DLPack).
    """
    before = x._spec
    held, wanted = before.layout, after.layout
    with local_ops():
        is_recorded = x.requires_grad and torch.is_grad_enabled()
        if not is_recorded or held.shards != wanted.shards or held.partial != wanted.partial:
            return move_local(x, before, after, op, "implicit")
        kept = state_of(x).retyped
        if kept is not None and kept.is_of(x, after):
            return kept.value
        # A view would refer to `x`, which refers to it. Neither would ever be freed.
        value = move_local(x, before, after, op, "implicit")
        value = value if value._base is None else alias_without_base(value)
        own_state(x).retyped = RetypedValue(after, x._version, x.grad_fn, value)
    return value


# -- work ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanWork:
    """The flops of a plan's matrix products on the first rank, which has the largest shards.

    Attributes:
        op, wire: those of the plan.
        products: for each product its operations, and the axes along which all ranks repeat them.
        is_even: True if every rank computes the same number of flops.
        kernel: the plan's kernel while no ledger is open; None if the function itself runs.
        run: the function that runs: the kernel or the called function.
    """

    op: str
    wire: Wire
    products: tuple[tuple[float, tuple[str, ...]], ...]
    is_even: bool
    kernel: Function | None
    run: Function

    def run_noting_work(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel, and record its matrix products in the open ledgers."""
        scope = self.wire.scope
        if not scope.recomputing:
            place = user_line()
            for log in scope.work_ledgers:
                for operations, axes in self.products:
                    log.note_work(self.wire.rank, self.op, place, axes, operations)
        return self.run(*args, **kwargs)


def work_of_plan(plan: CallPlan, work: Sequence[Work], run: Function) -> PlanWork:
    """Returns the flops of a plan's matrix products, in the form that open ledgers record.

    They are counted on the first rank, which has the largest shards.

    Args:
        plan: the plan of a call, with its rule (`bound`) and chosen rows (`choice`).
        work: the matrix products of the op on the global tensors.
        run: the function that runs if the plan has no kernel.
    """
    assert plan.choice is not None and plan.bound is not None
    wire, splits, sizes = plan.wire, plan.choice.splits, plan.bound.sizes
    products, is_even = [], True
    for one in work:
        split = {name: splits[name] for name in one.names if name in splits}
        spread = {a for axes in split.values() for a in axes}
        repeated = [a for a in wire.mesh.names if a not in spread and wire.mesh.size(a) > 1]
        held = total = 1
        for name, axes in split.items():
            parts = wire.mesh_size(axes)
            # A size that only the kernel knows, or that is 0, is assumed to be equal on all ranks.
            size = sizes.get(name) or parts
            held *= local_numel((size,), (axes,), wire.mesh)
            total *= size
            is_even = is_even and size % parts == 0
        products.append((one.operations * held / total, tuple(repeated)))
    return PlanWork(plan.op, wire, tuple(products), is_even, plan.kernel, plan.kernel or run)


# -- a function and its plans ----------------------------------------------------------------------


class Op:
    """A torch function with the cache of plans for its calls.

    Attributes:
        func, form: the function, and its `Form` (the op to which it belongs).
        base: the function that runs on local tensors if a plan has no kernel of its own.
        key: a function that computes the key of a call from its arguments. It raises TypeError if
            the arguments do not fit the rule.
        plans: the plan for each key of a call; `find` returns it, or None.
        run: a function that handles every call without a plan. Set if the function is not an op, or
            has no rule.
    """

    __slots__ = ("base", "find", "form", "func", "key", "plans", "run")

    def __init__(self, func: Function):
        self.func = func
        self.plans = Plans(getattr(func, "__name__", "?"))
        self.find = self.plans.get
        self.learn(form_of(func))

    def learn(self, form: Form) -> None:
        """Sets `form` (op and rule) as the function's form, and drops the old plans."""
        self.form = form
        self.base = form.local or self.func
        self.plans.name = form.name
        self.plans.forget()
        self.run: Run | None = None
        self.key: KeyFunction = _no_key
        rule = form.rule
        if rule is not None and not form.foreach:
            flagged = "inplace" in getattr(getattr(self.func, "__code__", None), "co_varnames", ())
            if rule.derive is None:
                self.key = operand_key(form.parameters, flagged)
            else:
                self.key = declared_key(rule.params, flagged)


OPS: dict[Function, Op] = {}
"""The Op of each function that was called with a DTensor so far."""

Run = Callable[[Function, Any, dict[str, Any], Op], Any]
"""`run(func, args, kwargs, op)`."""


def _no_key(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("a function without a rule has no key")


# -- keys ------------------------------------------------------------------------------------------
# The key of a call contains exactly the arguments that the op's rule declares. The key function is
# generated from the rule's parameters, so Python's own binding of positional and keyword arguments
# normalises the call, and undeclared arguments cannot enter the key. A DTensor enters as its spec,
# a plain tensor as its shape, a float as its type alone, and a number in an operand's place not at
# all.

KeyFunction = Function

_PLAIN_VALUES = frozenset(
    (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
HASHABLE = _PLAIN_VALUES - {bool}
_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)  # numbers in a step that is captured
NUMBERS = frozenset((int, float, bool, complex))

_RENAMED = frozenset(("axis", "keepdims", "input", "self", "x", "a", "x1", "x2", "out"))
"""Other names that torch accepts for an argument, and `out`: such calls are rewritten first."""


_FACTORS = frozenset(("alpha", "beta", "value"))
"""Names of arguments by which `add`, `addmm`, `addcmul` and similar ops multiply a term."""


class Unkeyed(TypeError):
    """Raised if the arguments of a call cannot be turned into the key of a cached plan.

    The arguments must first be normalized (`normalize_call`), or no rule covers them.
    """


def operand_kind(value: Any) -> Any:
    """Returns the part of a plan's key for `value`, an operand that is not a DTensor."""
    if value is None:
        return None
    if type(value) in NUMBERS or issubclass(type(value), _SYMBOLIC):
        return NUMBER
    return freeze_value(value)


def freeze_value(value: Any) -> Any:
    """Returns a hashable form of the argument `value` for a plan's key.

    For a DTensor that is its spec, for a float or a complex number its type.
    """
    t = type(value)
    if t in HASHABLE or (t is tuple and HASHABLE.issuperset(map(type, value))):
        return value
    if t is bool:  # distinct from int: x[True] is not x[1], nor x.var(True) x.var(1)
        return (bool, value)
    if t is tuple or t is list:
        return (list, *[freeze_value(v) for v in value])
    if t is slice:
        return (slice, value.start, value.stop, value.step)
    if t is DTensor:
        return value._spec
    if isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)  # of a subclass
        return spec or ("plain", value.dtype is torch.bool, tuple(value.shape))
    if isinstance(value, tuple):
        return freeze_value(tuple(value))
    if t is dict:
        return (dict, *((k, freeze_value(v)) for k, v in value.items()))
    if t is float or t is complex:
        return t
    if issubclass(t, _SYMBOLIC):
        return float if issubclass(t, torch.SymFloat) else t
    if value is Ellipsis:
        return value
    index = getattr(value, "__index__", None)
    if index is not None:
        return index()
    return t


def check_rest(
    more: tuple[Any, ...], named: dict[str, Any], harmless: set[str], flagged: bool
) -> None:
    """Raises Unkeyed if an argument outside of a plan's key could change the result.

    Examples are another name of a parameter (`axis` for `dim`), a tensor, an infinite factor, and
    `inplace=True`. After Unkeyed, the caller normalizes the arguments and tries again.

    Args:
        more: the arguments by position that the key does not have.
        named: the arguments by name that the key does not have.
        harmless: names of arguments that were checked before. Names that pass are added.
        flagged: True if the function has an argument `inplace`.
    """
    for name, value in named.items():
        if type(value) is float and name in _FACTORS and not math.isfinite(value):
            raise Unkeyed(name)
        if name not in harmless:
            if name in _RENAMED:
                raise Unkeyed(name)
            if name != "inplace":
                harmless.add(name)
            elif value:
                raise Unkeyed(name)
        if type(value) not in NUMBERS and _has_tensor(value):
            raise Unkeyed(name)
    for value in more:
        if (type(value) not in NUMBERS and _has_tensor(value)) or (flagged and value is True):
            raise Unkeyed("an undeclared tensor or flag")


def _has_tensor(value: Any) -> bool:
    if type(value) is tuple or type(value) is list:
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


OPERAND, DECLARED, FLAG, UNREAD, REST = range(5)
"""The role of a parameter in the key: an operand of a fixed sentence; read by the rule; read, and a
bool; not read; all remaining arguments.
"""

KEYWORD = 8
"""A flag that is added to the role of a keyword-only parameter."""

KeyParameters = Sequence[tuple[str, int, Any]]
"""For each parameter its name, its role in the key, and its default."""


def operand_key(names: Sequence[str], flagged: bool = False) -> KeyFunction:
    """Makes the function that computes the key of a call from its arguments, if the rule is a
    sentence.

    The key has the operands' specs, or their kinds if they are not DTensors.

    Args:
        names: the names of the operands' parameters.
        flagged: True if the function has an argument `inplace`. For a call that sets it, the key
            function raises Unkeyed.
    """
    empty = inspect.Parameter.empty
    return _make_key([(n, OPERAND, None if i else empty) for i, n in enumerate(names)], flagged)


def declared_key(params: Sequence[inspect.Parameter], flagged: bool = False) -> KeyFunction:
    """Makes the function that computes the key of a call from its arguments, if the rule is a
    function.

    The key has the arguments that the rule function declares.

    Args:
        params: the parameters of the rule function.
        flagged: True if the function has an argument `inplace`. For a call that sets it, the key
            function raises Unkeyed.
    """
    return _make_key([(p.name, _classify_parameter(p), p.default) for p in params], flagged)


def _classify_parameter(p: inspect.Parameter) -> int:
    """Returns a code that says how a rule function's parameter becomes a part of the key."""
    if p.kind is inspect.Parameter.VAR_POSITIONAL:
        return REST
    by_name = KEYWORD if p.kind is inspect.Parameter.KEYWORD_ONLY else 0
    read = FLAG if type(p.default) is bool else DECLARED
    return by_name | (UNREAD if p.name.startswith("_") else read)


def _make_key(params: KeyParameters, flagged: bool) -> KeyFunction:
    """Returns the key function for these parameters, in C or else in Python, with equal keys."""
    names, kinds, defaults = zip(*params, strict=True)
    count = sum(kind < REST for kind in kinds)  # those that a call may give by position
    harmless: set[str] = set()

    def key(*args: Any, **named: Any) -> Any:
        more, unread, parts = args[count:], [], []
        for i, (name, kind, default) in enumerate(params):
            what = kind & ~KEYWORD
            if what == REST:
                parts.append(freeze_value(more))
                more = ()
                continue
            by_position = i < len(args) and kind < REST
            value = args[i] if by_position else named.pop(name, default)
            if value is inspect.Parameter.empty or (by_position and name in named):
                raise TypeError(f"{name} is missing, or is given twice")
            if what == UNREAD:
                unread.append(value)
            else:
                parts.append(_key_of_argument(what, value))
        if named or more:
            check_rest(more, named, harmless, flagged)
        if unread:
            check_rest(tuple(unread), {}, harmless, False)
        return parts[0] if len(parts) == 1 else tuple(parts)

    return key if IN_C is None else IN_C.Key(key, names, bytes(kinds), defaults, harmless, flagged)


def _key_of_argument(what: int, value: Any) -> Any:
    """Returns the part of a key for an argument.

    Args:
        what: the code of the parameter (`_classify_parameter`).
    """
    kind = type(value)
    if kind is DTensor:
        return value._spec
    if what == OPERAND:
        return operand_kind(value)
    # Where a bool is expected, an int means the same.
    return value if kind in (_PLAIN_VALUES if what == FLAG else HASHABLE) else freeze_value(value)


# -- the memory of plans ---------------------------------------------------------------------------
# Each op has its own dictionary of plans, which dispatch reads directly, and a second one of older
# plans. When the first dictionaries of all ops together reach half of the limit, they become the
# older ones, and the previous older ones are dropped. A plan that is found among the older ones
# moves back to the first. So this is an LRU cache that knows ages by generation, and a hit costs no
# bookkeeping.


class CacheInfo(NamedTuple):
    """Statistics of the plan cache.

    Attributes:
        hits, misses: the number of calls that found a plan, and that made one.
        size, maxsize: the number of plans, and the most that are kept.
        by_op: the number of plans of each op that has any.
    """

    hits: int
    misses: int
    size: int
    maxsize: int
    by_op: dict[str, int]


class Plans(dict[Any, Any]):
    """The cached plans of one op: a dictionary from the key of a call to its plan.

    It has two generations. This dictionary is the younger one, with plans that were used recently.
    The plans of the older one are dropped next.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.old: dict[Any, Any] = {}
        _CACHE.ops.append(self)

    def recall(self, key: Any) -> Any | None:
        """Returns a plan of the older generation, or None. Moves it to the younger one."""
        plan = self.old.pop(key, None)
        if plan is not None:
            self.remember(key, plan)
        return plan

    def forget(self) -> None:
        """Drop every cached plan of this op."""
        with _CACHE.lock:
            _CACHE.young -= len(self)
            _CACHE.forgotten_hits += sum(p.hits for p in (*self.values(), *self.old.values()))
            self.clear()
            self.old = {}

    def remember(self, key: Any, plan: Any) -> None:
        """Store `plan` under `key`. It must have an integer attribute `hits`."""
        with _CACHE.lock:
            if _CACHE.young >= max(_CACHE.limit // 2, 1):
                _CACHE.rotate_generations()
            if key not in self:
                _CACHE.young += 1
            self[key] = plan


class _Cache:
    def __init__(self) -> None:
        self.ops: list[Plans] = []
        self.limit = 8192
        self.young = 0
        self.misses = 0
        self.forgotten_hits = 0
        self.lock = threading.RLock()

    def rotate_generations(self) -> None:
        """Drops the plans that were not used recently: the older generation of every op.

        The younger generation becomes the older one.
        """
        for plans in self.ops:
            self.forgotten_hits += sum(p.hits for p in plans.old.values())
            plans.old = dict(plans)
            plans.clear()
        self.young = 0

    def size(self) -> int:
        return sum(len(p) + len(p.old) for p in self.ops)


_CACHE = _Cache()


def note_miss() -> None:
    """Count a miss of the plan cache: a call for which there was no plan."""
    _CACHE.misses += 1


def cache_info() -> CacheInfo:
    """Returns statistics of the plan cache: hits, misses, number and limit of plans."""
    with _CACHE.lock:
        live = [p for plans in _CACHE.ops for p in (*plans.values(), *plans.old.values())]
        by_op: dict[str, int] = {}
        for plans in _CACHE.ops:
            n = len(plans) + len(plans.old)
            if n:
                by_op[plans.name] = by_op.get(plans.name, 0) + n
        hits = _CACHE.forgotten_hits + sum(p.hits for p in live)
        return CacheInfo(hits, _CACHE.misses, len(live), _CACHE.limit, by_op)


def cache_clear() -> None:
    """Drop the cached plans of all calls, and set all counts to 0. Results do not change."""
    with _CACHE.lock:
        for plans in _CACHE.ops:
            plans.forget()
        _CACHE.young = _CACHE.misses = _CACHE.forgotten_hits = 0


def forget_plans_on(wires: Container[Wire]) -> None:
    """Drop the cached plans for meshes that are not used any more, given by their wires.

    Otherwise these plans, and tensors to which their kernels refer, would stay in memory.
    """

    def is_on_wires(key: Any) -> bool:
        if type(key) is tuple:
            return any(map(is_on_wires, key))
        return isinstance(key, Spec) and key.wire in wires

    with _CACHE.lock:
        for plans in _CACHE.ops:
            for generation in (plans, plans.old):
                for key in filter(is_on_wires, list(generation)):
                    _CACHE.forgotten_hits += generation.pop(key).hits
                    _CACHE.young -= generation is plans


def set_cache_limit(n: int) -> None:
    """Set the largest number of plans that the cache keeps, for all ops together.

    In `pt.ranks` the limit is for all ranks of the process together.

    Args:
        n: the number of plans, at least 2.

    Raises:
        ValueError: n is less than 2.
    """
    if n < 2:
        raise ValueError(f"the cache holds at least 2 plans, not {n}")
    with _CACHE.lock:
        _CACHE.limit = n
        while _CACHE.size() > n:
            _CACHE.rotate_generations()


# -- the part in C ---------------------------------------------------------------------------------
# Key functions, `handle` and the methods that skip torch's parser have twins in C (`in_c/`), which
# leave unusual calls to the Python functions. Both make equal keys, so they share the plans.
# Without a C compiler the package is installed without them; `PARTITA_HOT_PATH=python` disables
# them.

FORM = 1
"""The version of the interface between this package and its C module. A module that was built from
another version is not used."""


def load_extension() -> Any:
    """Returns the C extension of the hot path; None if it is not built, out of date or disabled."""
    if os.environ.get("PARTITA_HOT_PATH") == "python":
        return None
    try:
        from . import _hot_path  # type: ignore[attr-defined]
    except ImportError:
        return None
    return _hot_path if getattr(_hot_path, "FORM", None) == FORM else None


IN_C = load_extension()
"""The extension module, or None."""
