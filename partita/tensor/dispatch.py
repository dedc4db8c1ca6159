"""Dispatch: how a torch function runs on DTensors.

`handle` is `DTensor.__torch_function__`. It looks up the cached plan of the call, runs the local
kernel with torch-function disabled, and makes the result a DTensor of the planned layout. A call
without a plan goes to `_run_unplanned`, which makes a plan (`plan_call`) and stores it (`plan`).

    torch.add(x, y)  ->  handle  ->  Op of torch.add  ->  key (spec of x, spec of y)  ->  CallPlan

Frequent methods skip `handle`. `in_c` has both in C, and replaces them if it has been built.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._C import _is_torch_function_enabled, _len_torch_function_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from partita.comm import inspect_collectives, on_first_wire
from partita.layout import Fix, Layout, LayoutError
from partita.rules import NUMBER
from partita.rules.rule import ON_NEW_RULE

from .aliasing import refuse_partial_overlap, refuse_repeated_write, write_through_copy
from .arguments import (
    OpCall,
    collect_tensors,
    may_have_numbers,
    normalize_call,
    read_numbers,
    takes_numbers,
    write_into_plain,
)
from .dtensor import DTensor, as_dtensor, make_no_strides_error, move_local
from .dtensor_gradients import pending_gradients, reduce_pending_gradients
from .foreach import run_foreach, run_fused
from .op_facts import (
    FREQUENT_METHODS,
    METHOD_OF_OPERATOR,
    OVERRIDES,
    enter_function,
    facts_of_function,
    form_of,
    is_collective,
    needs_no_rule,
)
from .plan import (
    HASHABLE,
    IN_C,
    NUMBERS,
    OPS,
    CallPlan,
    Op,
    Run,
    Target,
    freeze_value,
    note_miss,
    operand_kind,
)
from .plan_call import check_call_fits_rule, make_plan
from .random import with_generator_check
from .tensor_state import (
    HERE,
    Args,
    Function,
    Kwargs,
    Spec,
    in_formula_of_backward,
    make_layout_error,
    spec_of,
)

_Tensor = torch.Tensor


def _choose_run(op: Op) -> Run | None:
    """Returns the function that runs calls of an op without plans; None for an op with a rule."""
    if op.func in OVERRIDES:
        run = _calling_instead(OVERRIDES[op.func])
        return _reading_numbers(run) if takes_numbers(op.func) else run
    if needs_no_rule(op.func):
        return _run_locally
    if is_collective(op.func):
        return _run_collective
    if op.form.name.startswith("_fused_"):
        return run_fused
    if op.form.operator is not None and op.form.operator.is_torchs:
        return _run_operator
    if op.form.rule is None:
        return _choose_run_without_rule(op.func)
    return run_foreach if op.form.foreach else None


def _calling_instead(function: Function) -> Run:
    """Returns a `run` function that calls `function` in place of the called function."""
    return lambda func, args, kwargs, op: function(*args, **kwargs)


def _reading_numbers(run: Run) -> Run:
    """Wraps `run`: numbers of the call that are passed as DTensors are read first."""

    def read_and_run(func: Function, args: Any, kwargs: Kwargs, op: Op) -> Any:
        if may_have_numbers(args, kwargs):
            args, kwargs = read_numbers(func, args, kwargs)
            if not _collect_dtensors((args, kwargs)):
                return func(*args, **kwargs)
        return run(func, args, kwargs, op)

    return read_and_run


def _run_locally(func: Any, args: Any, kwargs: Kwargs, op: Op) -> Any:
    with local_ops():
        return func(*args, **kwargs)


def _run_collective(func: Any, args: Any, kwargs: Kwargs, op: Op) -> Any:
    args, kwargs = _operands_of_collective(op.form.name, (args, kwargs))
    return _run_locally(func, args, kwargs, op)


def _choose_run_without_rule(func: Function) -> Run:
    body = enter_function(func)
    return _gather_and_run if body is None else _calling_instead(body)


@_reading_numbers
def _gather_and_run(func: Function, args: Any, kwargs: Kwargs, op: Op) -> Any:
    if kwargs.get("out") is not None:
        kwargs = dict(kwargs)
        return _run_into_out(op, kwargs.pop("out"), args, kwargs)
    call = OpCall(op.form, func, args, kwargs)
    if HERE.explainer is not None:
        return HERE.explainer.explain_call(call, has_rule=False)
    return run_gathered(call)


def _run_operator(func: Function, args: Any, kwargs: Kwargs, op: Op) -> Any:
    """Run one of torch's own operators.

    If torch's own backward calls it (through a TorchDispatchMode), it runs on local tensors.
    """
    if in_formula_of_backward():
        return _run_locally(func, args, kwargs, op)
    run = _gather_and_run if op.form.rule is None else _plan_and_run
    return run(func, args, kwargs, op)


def handle(
    cls: type,
    func: Function,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Runs `func(*args, **kwargs)` on DTensors: finds the cached plan of the call, and runs it.

    It is the body of `DTensor.__torch_function__`, with the parameters that torch prescribes. `cls`
    and `types` are not used.
    """
    op = OPS.get(func) or op_of(func)
    if op.run is not None:
        return op.run(func, args, kwargs or {}, op)
    try:
        plan = op.find(op.key(*args, **kwargs) if kwargs else op.key(*args))
    except TypeError:  # arguments that do not fit the rule, or have no hash
        plan = None
    if plan is None:
        return _run_unplanned(func, args, kwargs or {})
    plan.hits += 1
    if not plan.direct:
        return plan.run(func, args, kwargs or {})
    kernel = plan.kernel
    if kernel is None:
        kernel = op.base
        if plan.bare is not None and len(args) == plan.bare[1]:
            kernel, kwargs = plan.bare[0], None
    with local_ops():
        out = kernel(*args, **kwargs) if kwargs else kernel(*args)
    if type(out) is _Tensor and out.shape == plan.local_shape:
        out.__class__ = DTensor
        out._spec = plan.spec  # type: ignore[attr-defined]
        return out
    return plan.tag(out)


def _run_unplanned(func: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run a call for which the hot path found no plan."""
    op = op_of(func)
    if op.run is not None:
        return op.run(func, args, kwargs, op)
    return _plan_and_run(func, args, kwargs, op)


@_reading_numbers
def _plan_and_run(func: Function, args: Any, kwargs: Kwargs, op: Op) -> Any:
    """Put the arguments in order, find or make the call's plan, and run it."""
    args, kwargs, out = normalize_call(op.form, args, kwargs)
    if out is not None:
        return _run_into_out(op, out, args, kwargs)
    call = OpCall(op.form, func, args, kwargs)
    if HERE.explainer is not None:
        return HERE.explainer.explain_call(call)
    try:
        key = op.key(*args, **kwargs)
    except TypeError:
        # The arguments do not fit the rule's parameters, so the call runs as if there were no rule.
        check_call_fits_rule(call)
        return _choose_run_without_rule(func)(func, args, kwargs, op)
    plan: CallPlan | None = op.plans.get(key) or op.plans.recall(key)
    if plan is not None:
        plan.hits += 1
        return plan.run(func, args, kwargs)
    note_miss()
    plan = make_plan(call)
    if plan is None:
        return run_gathered(call)
    result = plan.run(func, args, kwargs)
    op.plans.remember(key, plan)
    return result


def op_of(func: Function) -> Op:
    """Returns the `Op` of the torch function `func`: an object that stores plans of its calls.

    It is created at the first use of the function.
    """
    op = OPS.get(func)
    if op is None:
        op = Op(func)
        op.run = _choose_run(op)  # before another thread can find it
        OPS[func] = op
    return op


def _relearn_ops() -> None:
    """Updates the functions whose rule has changed: drops their plans and fast methods."""
    form_of.cache_clear()
    for func, op in OPS.items():
        form = form_of(func)
        if form.rule is not op.form.rule:
            op.learn(form)
            op.run = _choose_run(op)
    _install_fast_methods()


if IN_C is not None:
    IN_C.connect(
        DTensor=DTensor,
        Tensor=_Tensor,
        CallPlan=CallPlan,
        Op=Op,
        ops=OPS,
        op_of=op_of,
        call=_run_unplanned,
        number=NUMBER,
        hashable=HASHABLE,
        numbers=NUMBERS,
        kind=operand_kind,
        freeze=freeze_value,
        missing=inspect.Parameter.empty,
        run_locally=torch._C._disabled_torch_function_impl,
        is_enabled=_is_torch_function_enabled,
        count_modes=_len_torch_function_stack,
    )
# Bound once: torch reads it four times in a call, and would bind a class method each time.
DTensor.__torch_function__ = MethodType(handle, DTensor) if IN_C is None else IN_C.handle  # type: ignore[method-assign]


# -- methods that skip torch's argument parser -----------------------------------------------------
# `x + y` on a subclass goes through C++ that parses the arguments, builds tuples and calls
# `__torch_function__`, which costs more than the kernel. So `in_c` has methods of DTensor itself
# that do what `handle` does. With torch-function disabled, or under a TorchFunctionMode, they leave
# the call to torch.

_installed: dict[str, Any] = {}
"""The key function that each method was made with. A later rule replaces it."""


def _install_fast_methods() -> None:
    """Set fast methods of DTensor, in C, for ops whose key function has changed."""
    if IN_C is None:
        return
    for name in FREQUENT_METHODS:
        # Some operators of torch.Tensor are Python around a builtin method, which runs instead.
        base = getattr(torch.Tensor, METHOD_OF_OPERATOR.get(name, name))
        op = op_of(base)
        # An op without a rule, or a function written in Python, has no plan to be found.
        if op.run is None and _installed.get(name) is not op.key:
            method = IN_C.Method(op, base)
            method.__name__, method.__qualname__ = name, f"DTensor.{name}"
            method.__doc__ = f"As torch.Tensor.{name}."
            setattr(DTensor, name, method)
            _installed[name] = op.key


_install_fast_methods()
ON_NEW_RULE.append(_relearn_ops)


# -- collectives -----------------------------------------------------------------------------------


_MAY_HOLD_DTENSORS = (DTensor, list, tuple, dict)


def _operands_of_collective(name: str, given: tuple[Args, Kwargs]) -> Any:
    """Returns the arguments for a collective of torch.distributed.

    A DTensor that is whole on every rank becomes the plain tensor of the same memory.

    Args:
        given: the arguments by position and by name.

    Raises:
        LayoutError: a rank holds only a part of a DTensor, and the collective would take it for the
            whole value.
    """
    args, kwargs = given
    holders = any(isinstance(v, _MAY_HOLD_DTENSORS) for v in (*args, *kwargs.values()))
    if not holders and "object" not in name:  # plain arguments cost no more than this check
        return given
    dtensors = _collect_dtensors(given)
    if not dtensors:
        return given
    parted = [t for t in dtensors if t._spec.is_copy or not t._spec.is_whole]
    if not parted:
        return given if "object" in name else tree_map_only(DTensor, _alias_plainly, given)
    is_loss = "reduce" in name and all(t.ndim == 0 for t in parted)
    why = "and a division by the ranks: the value is that of the whole batch"
    raise make_layout_error(
        f"torch.distributed: {name} cannot take a DTensor that is not whole on each rank, or a "
        "view whose layout had to change",
        *([Fix("delete the line", why)] if is_loss else []),
        Fix("x.redistribute(placements=[...])", "reduces or gathers as the layouts say"),
        Fix("x.full_tensor()", "the whole value, on every rank"),
        Fix(f"{name}(x.to_local(), ...)", "if it is meant for the pieces"),
        operands=tuple(f"DTensor  {t._spec.layout.brief()}" for t in parted)[:2],
        reason="it would exchange the ranks' pieces as if each were the whole value",
    )


def _collect_dtensors(value: Any) -> list[DTensor]:
    return [t for t in tree_leaves(value) if isinstance(t, DTensor)]


def _alias_plainly(x: DTensor) -> torch.Tensor:
    with local_ops():
        return x.view_as(x)


on_first_wire(lambda: inspect_collectives(_operands_of_collective))

# -- functions without a rule ----------------------------------------------------------------------
# Their operands are gathered, so that each is whole on every rank, and so is the result. This is
# correct for any function, and the ledger shows what it costs.


def run_gathered(call: OpCall) -> Any:
    """Runs `call` on gathered operands, because no rule says how its op runs on shards.

    The result is whole on every rank. An operand that the op writes keeps its layout: the op writes
    a gathered copy, which is redistributed back. If the operand is a Partial sum, the first rank
    gets the result and the others get zeros. If it is a Partial max or min, all ranks get the
    result. If operands are unreduced gradients, they are reduced in place first.

    Raises:
        LayoutError: the written operand would get another shape.
    """
    form, func, tensors, written = call.form, call.func, call.tensors, call.written
    if call.numbers_of_other_meshes:
        return call.read_numbers_of_other_meshes().run()
    plain = [path for path in tensors if path in written and not isinstance(tensors[path], DTensor)]
    if plain:
        return write_into_plain(call, plain)
    waiting = pending_gradients(tensors.values())
    if waiting:  # a Partial gradient that is needed whole is reduced once, in place
        reduce_pending_gradients(waiting)
        return call.run()
    wire = call.wire
    layouts = [t._spec.layout for t in tensors.values() if isinstance(t, DTensor)]
    invariant = tuple(
        a for a in wire.mesh.names if not all(x.placement(a).is_replicate() for x in layouts)
    )

    make_replicated_spec = spec_of(Layout((), invariant=invariant), wire).invariant_of

    def make_output_spec(out: torch.Tensor) -> Spec:
        if out.layout is not torch.strided:
            raise make_no_strides_error(form.name, out)
        return make_replicated_spec(out.shape)

    if call.writes_view_copy and written == {(0,)}:
        return write_through_copy(func, *call.args, **call.kwargs)
    for path in written:
        refuse_partial_overlap(form.name, tensors[path], (call.args, call.kwargs))
    copies, targets = {}, []
    for path, t in tensors.items():
        after = make_replicated_spec(t.shape)
        if not isinstance(t, DTensor):
            targets.append(Target(path, after, spec_of(Layout(tuple(t.shape)), wire)))
        elif t._spec is not after and path not in written:
            targets.append(Target(path, after))
        elif t._spec is not after:
            refuse_repeated_write(form.name, t)
            with local_ops():
                copies[path] = move_local(t, t._spec, after, form.name, "implicit").clone()
    kernel = form.local
    if facts_of_function(form.name).draws:
        kernel = with_generator_check(kernel or func, form, wire) or kernel
    plan = CallPlan(
        form.name,
        wire,
        targets=tuple(targets),
        kernel=kernel,
        make_output_spec=make_output_spec,
        result_is_view_copy=bool(targets) and call.gives_view,
        view_copies=call.view_copies,
    )
    given = call.with_values(copies) if copies else call
    out = plan.run(func, given.args, given.kwargs)
    for path, copy in copies.items():
        x = tensors[path]
        if copy.shape != x.shape:
            raise call.make_changed_layout_error(x)
        x.copy_(as_dtensor(copy, make_replicated_spec(x.shape)))
    return call.args[0] if copies and form.inplace else out


# -- out= ------------------------------------------------------------------------------------------


def _run_into_out(op: Op, out: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs a call with `out=`, a tensor or a tuple of tensors, and returns `out`.

    The op runs without `out`. Its result is redistributed to the layout of `out` and copied.

    Raises:
        RuntimeError: as in torch: a tensor requires grad, or `out` cannot hold the result's dtype.
        LayoutError: `out` has another shape than the result, or elements that share memory.
    """
    func = op.func if op.form.operator is None else op.form.operator.packet
    held = collect_tensors(out)
    operands = collect_tensors((*args, *kwargs.values()))
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*held, *operands)):
        raise RuntimeError(
            f"{func.__name__}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )
    for into in held:
        if isinstance(into, DTensor):
            refuse_repeated_write(func.__name__, into)
            refuse_partial_overlap(op.form.name, into, operands)
    result = func(*args, **kwargs)
    for into, value in zip(held, collect_tensors(result), strict=True):
        if not torch.can_cast(value.dtype, into.dtype):
            raise RuntimeError(
                f"result type {value.dtype} can't be cast to the desired output type {into.dtype}"
            )
        if into.shape != value.shape and not isinstance(into, DTensor) and not into.numel():
            into.resize_(value.shape)  # as torch does for an empty `out`
        if into.shape != value.shape:
            raise _make_other_shape_error(func.__name__, into, value)
        into.copy_(value)
    return out if isinstance(result, torch.Tensor) else type(result)(held)


def _make_other_shape_error(name: str, into: torch.Tensor, value: torch.Tensor) -> LayoutError:
    def describe_operand(t: torch.Tensor) -> str:
        return t._spec.layout.brief() if isinstance(t, DTensor) else f"plain {tuple(t.shape)}"

    return make_layout_error(
        f"{name}: out= has another shape than the result",
        Fix(f"y = torch.{name}(...)", "without out="),
        operands=(f"out     {describe_operand(into)}", f"result  {describe_operand(value)}"),
        reason="a DTensor is not resized: its layout says which part each rank holds",
    )
