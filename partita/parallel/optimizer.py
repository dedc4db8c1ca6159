"""Optimizer steps on DTensors: gradients are reduced once, and updates run on plain local tensors.

The gradient of a Replicate parameter is Partial. Accumulating micro-batches adds Partial gradients
and sends nothing. The first use of the whole gradient (a clip, a step, a printed norm) reduces it
once. Then parameter, gradient and state have the same layout, and an element-wise optimizer can run
on local tensors.

To do so, a pre-step hook runs the step itself, on the local tensors; torch then steps an optimizer
without parameters. All other optimizers run through dispatch, op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._C import DisableTorchFunction  # also disables modes
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd.graph import increment_version
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from partita.comm import RepeatedCall, check_equal_on_ranks, is_alone
from partita.layout import Fix
from partita.tensor.construct import is_whole_state, lay_out_state
from partita.tensor.dtensor import TYPED, DTensor, as_dtensor, move_local
from partita.tensor.dtensor_gradients import (
    prepare_gradient,
    reduce_pending_gradients,
    reduced_gradient_spec,
    update_spec,
)
from partita.tensor.foreach import norms
from partita.tensor.tensor_state import (
    HERE,
    count_writes,
    in_backward,
    make_argument_error,
    state_of,
)
from partita.tensor.torch_patches import only_entered

from .gathered_parameters import InstalledParameter
from .parameters import refuse_replaced_parameters


@only_entered
def reduce_gradients(params: Iterable[torch.Tensor]) -> None:
    """Reduces the Partial gradients of `params` to the layouts of their parameters.

    Gradients with the same mesh axes and dtype are reduced together, in buckets. Other gradients do
    not change, so a second call does nothing. Gradients that backward adds later are summed
    correctly. The ledger records the reason "settle".
    """
    listed = _list_parameters(params, "reduce_gradients")
    reduce_pending_gradients(p for p in listed if isinstance(p, DTensor))


def _list_parameters(given: Any, by: str) -> list[Any]:
    """Returns the tensors `given`.

    Raises:
        TypeError: a model, an optimizer, names with parameters, or something that is not a tensor.
    """
    fix = f"{by}(model.parameters(){', max_norm' if 'clip' in by else ''})"
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, torch.nn.Module) or not isinstance(given, Iterable):
        raise make_argument_error(by, "parameters", given, fix)
    listed = list(given)
    for p in listed:
        if not isinstance(p, torch.Tensor):
            raise make_argument_error(by, "parameters", p, fix)
    return listed


@only_entered
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clips the norm of gradients of DTensors and plain tensors, as in torch.nn.utils.

    Partial gradients are reduced first. The norm costs one small all-reduce for each mesh over
    which gradients are sharded.

    Args:
        parameters: one parameter or several, whose gradients are clipped in place.
        max_norm: the largest norm of all gradients together.
        norm_type: the order of the norm, such as 2.0 or infinity.
        foreach: accepted as in torch, without effect.

    Returns:
        The norm of all gradients together before the clip: a plain scalar, equal on every rank.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    params = _list_parameters(parameters, "clip_grad_norm_")
    reduce_gradients(params)
    grads: list[Any] = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norm_type = float(norm_type)
    with local_ops(), torch.no_grad():
        each = norms(grads, norm_type)
        # In the widest dtype of all norms.
        dtype = torch.float64 if any(n.dtype == torch.float64 for n in each) else torch.float32
        first = each[0].device
        norm = torch.linalg.vector_norm(torch.stack([n.to(first, dtype) for n in each]), norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped."
            )
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for dtype in dict.fromkeys(g.dtype for g in grads):
            alike = [g for g in grads if g.dtype == dtype]
            torch._foreach_mul_(alike, scale.to(alike[0].device, dtype))
    return norm


# -- the step --------------------------------------------------------------------------------------

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)
"""Optimizers whose update of an element reads nothing but that element's own history. Subclasses
may do more and are not in it."""


_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_StepCall = tuple[_Args, _Kwargs]
"""The arguments of a step; of an unbound method, so that the optimizer is the first."""

_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]


@only_entered
def _before_step(optimizer: Optimizer, args: _Args, kwargs: _Kwargs) -> _StepCall | None:
    if torch.compiler.is_dynamo_compiling():  # Dynamo never compiles a step of DTensors
        return None
    _restore_own_hooks(optimizer)  # after a step that failed
    _writes_before.pop(optimizer, None)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    HERE.trace.run_without_profiling(refuse_replaced_parameters, params)
    spread = [p for p in params if isinstance(p, DTensor)]
    # A closure computes new gradients inside the step, after this hook.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    plain = type(optimizer) in _ELEMENTWISE and closure is None and not _has_later_hooks()
    if spread:
        _agree_settings(optimizer, spread)
        _suspend_gathered(optimizer, spread)
    owners = HERE.trace.run_without_profiling(_find_reducers, spread)
    if in_backward():  # in a hook: gradients that are complete belong to the step
        for p in spread:
            prepare_gradient(p)
    taken: _StepCall | None = None
    if plain and (owners or not spread):
        taken = HERE.trace.take_step(lambda: _step_in_graph(optimizer, spread, args, kwargs))
    if taken is not None or not spread:
        return taken
    alike = not owners and HERE.trace.run_without_profiling(_have_equal_layouts, optimizer, spread)
    if not alike:
        HERE.trace.run_without_profiling(reduce_gradients, spread)
    if not plain:
        HERE.trace.run_without_profiling(_lay_out_states, optimizer, spread)
        if not type(optimizer).__module__.startswith("torch.optim."):
            _writes_before[optimizer] = [(p, count_writes(p)) for p in spread]
        # Some optimizers take another argument in this place, such as the loss.
        return _reduce_after_closure(closure, spread, args, kwargs) if callable(closure) else None
    if not alike and not HERE.trace.run_without_profiling(_have_equal_layouts, optimizer, spread):
        HERE.trace.run_without_profiling(_lay_out_states, optimizer, spread)
        if not HERE.trace.run_without_profiling(_have_equal_layouts, optimizer, spread):
            return None
    args, kwargs = _run_own_hooks(optimizer, args, kwargs)
    with _narrow_to_updated([p for p in spread if update_spec(p) is not p._spec]):
        _step_as_plain(optimizer, spread, args, kwargs)
    for owner in owners:
        owner.gather_updated(spread)
    return _make_idle_step_args(optimizer, args, kwargs)


def _reduce_after_closure(
    closure: Callable[[], Any], params: list[DTensor], args: _Args, kwargs: _Kwargs
) -> _StepCall:
    """Returns the arguments of a step whose closure also reduces the gradients that it computes.

    The step reads gradients after the closure, and makes its state like them.
    """

    def compute_and_reduce() -> Any:
        loss = closure()
        with torch.no_grad():
            HERE.trace.run_without_profiling(reduce_gradients, params)
        return loss

    rest = {k: v for k, v in kwargs.items() if k != "closure"}
    return (args[0], compute_and_reduce, *args[2:]), rest


_COMPARED_TYPES = (int, float, str, tuple)
_steps_of: WeakKeyDictionary[Optimizer, RepeatedCall] = WeakKeyDictionary()


def _agree_settings(optimizer: Optimizer, params: list[DTensor]) -> None:
    """Raise on all ranks unless they use equal learning rates and other settings.

    They compare the number of the step, too, because one rank may have called `step` alone.
    `RepeatedCall.add` decides when they compare. Under `check_ranks()` they compare in each step.
    """
    wire = next((p._spec.wire for p in params if not is_alone(p._spec.wire)), None)
    if wire is None:  # in a capture, too, which reads no settings here
        return
    steps = _steps_of.get(optimizer)
    if steps is None:
        steps = _steps_of[optimizer] = RepeatedCall()
    settings = tuple(
        tuple([v for v in group.values() if isinstance(v, _COMPARED_TYPES)])
        for group in optimizer.param_groups
    )
    if not steps.add(settings) and wire.scope.check is None:
        return
    wires = [w for w in dict.fromkeys(p._spec.wire for p in params) if not is_alone(w)]
    groups = []
    for group in optimizer.param_groups:
        said = [f"{len(group['params'])} parameters"]
        for k, v in group.items():
            if isinstance(v, torch.Tensor) and v.numel() == 1 and not isinstance(v, DTensor):
                v = v.item()
            if isinstance(v, _COMPARED_TYPES):
                said.append(f"{k}={v}")
        groups.append(" ".join(said))
    for wire in wires:
        check_equal_on_ranks(
            f"{type(optimizer).__name__}.step",
            f"{'; '.join(groups)}; {steps}",
            wire,
            fact="the ranks' optimizers have other settings",
            reason="each rank updates its part of one value, or its copy of it",
            fixes=(
                Fix("the same lr, betas, weight_decay, ...", "on every rank, in each step"),
                Fix("optimizer.step()", "on every rank, equally often"),
            ),
        )


def _find_reducers(params: list[DTensor]) -> list[Any]:
    """Returns the objects that reduce the gradients of `params` early, each once."""
    all_layouts = (state_of(p).zero_layouts for p in params)
    return [*dict.fromkeys(layouts.owner for layouts in all_layouts if layouts is not None)]


def _lay_out_states(optimizer: Optimizer, params: list[DTensor]) -> None:
    for p in params:
        if p in optimizer.state:
            lay_out_state(p, optimizer.state[p])


def _has_later_hooks() -> bool:
    """True if hooks of the user for all optimizers run after partita's hook.

    The step must not be over when they run. Private torch: `_global_optimizer_pre_hooks` has the
    order of the hooks.
    """
    ids = [*_global_optimizer_pre_hooks]
    later = ids[ids.index(_hook.id) + 1 :]
    modules = (getattr(_global_optimizer_pre_hooks[i], "__module__", None) for i in later)
    return any(not str(module).startswith("partita.") for module in modules)


def _run_own_hooks(optimizer: Optimizer, args: _Args, kwargs: _Kwargs) -> _StepCall:
    """Run the user's pre-step hooks of this optimizer.

    Torch would run them after partita's own hook, which makes the step.

    Private torch: `_optimizer_step_pre_hooks`, which is emptied until the step has ended.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    if not hooks:
        return args, kwargs
    for hook in list(hooks.values()):
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    _done[optimizer] = dict(hooks)
    hooks.clear()
    return args, kwargs


_done: WeakKeyDictionary[Optimizer, dict[int, Any]] = WeakKeyDictionary()


def _restore_own_hooks(optimizer: Optimizer) -> None:
    own = _done.pop(optimizer, None)
    if own:
        optimizer._optimizer_step_pre_hooks.update(own)


_suspended: WeakKeyDictionary[Optimizer, list[InstalledParameter]] = WeakKeyDictionary()
"""The gathered parameters of the optimizers whose step runs now."""

_writes_before: WeakKeyDictionary[Optimizer, list[tuple[DTensor, int]]] = WeakKeyDictionary()
"""What a step that runs may write by address, with the number of writes that torch had counted."""


def _suspend_gathered(optimizer: Optimizer, params: list[DTensor]) -> None:
    """Suspend parameters that ZeRO-3 has gathered, in a step within a forward of their block."""
    copied = [state_of(p).copied_view for p in params if p._spec.is_copy]
    installed = [one for one in copied if isinstance(one, InstalledParameter)]
    _suspended.pop(optimizer, None)  # of a step that failed
    if installed:
        _suspended[optimizer] = installed
    for one in installed:
        one.release_for_step()


def _after_step(optimizer: Optimizer, args: _Args, kwargs: _Kwargs) -> None:
    _restore_own_hooks(optimizer)
    for p, count in _writes_before.pop(optimizer, ()):
        # Kernels of other libraries write parameters by their addresses, which torch does not
        # count. It is a write through `.data`: what autograd has saved of `p` stays valid.
        if count_writes(p) == count and not p.is_inference():
            increment_version(p.data)
    for one in _suspended.pop(optimizer, ()):
        one.connect_again()


def _make_idle_step_args(optimizer: Optimizer, args: _Args, kwargs: _Kwargs) -> _StepCall:
    """Returns arguments that make torch's own step do nothing: an optimizer without parameters."""
    idle = object.__new__(type(optimizer))  # `copy.copy` would walk the state of all parameters
    idle.__dict__.update(optimizer.__dict__)
    idle.param_groups = []
    return (idle, *args[1:]), kwargs


def _step_as_plain(
    optimizer: Optimizer,
    params: list[DTensor],
    args: _Args,
    kwargs: _Kwargs,
    originals: Mapping[Any, Any] | None = None,
) -> None:
    """Run the step while parameters, gradients and state have the class of plain tensors.

    torch's kernels take lists of plain tensors a good deal faster than lists of a subclass.

    Args:
        originals: maps each tensor that the optimizer updates to the parameter that holds it.
    """
    state = optimizer.state
    tensors = HERE.trace.run_without_profiling(_list_tensors, optimizer, params)
    typed = type(params[0])  # during a capture this is not DTensor but another class
    plain = next(cls for cls, kind in TYPED.items() if kind is typed)
    try:
        for t in tensors:
            t.__class__ = plain
        shapes = {p: p.shape for p in params}
        _run_step(optimizer, originals or {}, args, kwargs)
    finally:
        # Fused kernels do not count versions, by which results made from parameters are kept. What
        # has no gradient is not written: a backward pass that is under way may have saved it.
        if any(group.get("fused") for group in optimizer.param_groups):
            increment_version([p for p in params if _grad(p) is not None])
        for t in tensors:
            t.__class__ = typed
    for p in params:
        for name, value in (state.get(p) or {}).items():
            # State that is not per element (the count of steps, ASGD's eta) stays plain.
            if type(value) is not plain or name == "step":
                continue
            if value.shape == shapes[p]:  # type: ignore[attr-defined]
                as_dtensor(value, update_spec(p))  # type: ignore[arg-type]


def _list_tensors(optimizer: Optimizer, params: list[DTensor]) -> list[Any]:
    """Returns the DTensors among gradients, parameters and the optimizer's state."""
    state = optimizer.state
    with DisableTorchFunction():
        tensors: list[Any] = [g for p in params if (g := _grad(p)) is not None]
    tensors += params
    for p in params:
        tensors += [
            v for v in (state.get(p) or {}).values() if type(v) is DTensor or isinstance(v, DTensor)
        ]
    return tensors


def _run_step(
    optimizer: Optimizer, originals: Mapping[Any, Any], args: _Args, kwargs: _Kwargs
) -> None:
    """Run the optimizer's own step without its hooks; in a captured step block by block."""
    step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    HERE.trace.step(optimizer, lambda: step(*args, **kwargs), originals)


def _step_in_graph(
    optimizer: Optimizer, params: list[DTensor], args: _Args, kwargs: _Kwargs
) -> _StepCall:
    """Run a captured step of ZeRO, or of plain tensors (without `params`), as a part of a graph."""
    args, kwargs = _run_own_hooks(optimizer, args, kwargs)
    if not params:
        _run_step(optimizer, {}, args, kwargs)
    else:
        with _step_on_parts(optimizer, params) as parts:
            _step_as_plain(optimizer, parts, args, kwargs, dict(zip(parts, params, strict=True)))
    return _make_idle_step_args(optimizer, args, kwargs)


def _have_equal_layouts(optimizer: Optimizer, params: list[DTensor]) -> bool:
    """True if each parameter's gradient and state have the parameter's layout."""
    if any(type(group.get("lr")) is DTensor for group in optimizer.param_groups):
        return False
    with DisableTorchFunction():
        grads = [_grad(p) for p in params]
    for p, grad in zip(params, grads, strict=True):
        if grad is None:
            continue
        is_dtensor = type(grad) is DTensor or isinstance(grad, DTensor)
        if not is_dtensor or grad._spec is not reduced_gradient_spec(p):
            return False
    states = optimizer.state
    for p in params:
        if p._spec.is_pending:
            return False
        update = update_spec(p)
        for value in (states.get(p) or {}).values():
            if type(value) is DTensor or isinstance(value, DTensor):
                if value._spec is not update:
                    return False
            elif (type(value) is not torch.Tensor or value.ndim) and is_whole_state(p, value):
                return False
    return True


# -- parts that a rank updates ---------------------------------------------------------------------


@contextmanager
def _step_on_parts(optimizer: Optimizer, params: list[DTensor]) -> Iterator[list[DTensor]]:
    """Give the optimizer the parts of `params` that this rank updates, in the `with` block.

    Afterwards the parts are gathered into the parameters.
    """
    cut = [p for p in params if update_spec(p) is not p._spec]
    parts: dict[DTensor, DTensor] = {p: p for p in params}
    with torch.no_grad():
        for p in cut:
            update, name = update_spec(p), _block_of(p)
            parts[p] = part = as_dtensor(move_local(p, p._spec, update, name, "update"), update)
            grad: Any = p.grad
            if grad is not None:  # Partial; whole, if a clip has reduced it; or a shard
                part.grad = as_dtensor(move_local(grad, grad._spec, update, name, "settle"), update)
    reduce_pending_gradients(p for p in params if parts[p] is p)
    groups = optimizer.param_groups
    _rekey_optimizer_state(optimizer, parts)
    optimizer.param_groups = [
        dict(group, params=[parts.get(p, p) for p in group["params"]]) for group in groups
    ]
    try:
        yield list(parts.values())
    finally:
        _rekey_optimizer_state(optimizer, {part: p for p, part in parts.items()})
        optimizer.param_groups = groups
    with torch.no_grad():
        for p in cut:
            now = move_local(parts[p], parts[p]._spec, p._spec, _block_of(p), "update")
            with local_ops():
                p.copy_(now)


def _block_of(p: DTensor) -> str:
    layouts = state_of(p).zero_layouts
    return "" if layouts is None else layouts.name


def _rekey_optimizer_state(optimizer: Optimizer, to: dict[Any, Any]) -> None:
    """Move each entry of the optimizer's state to another tensor, in the same order."""
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for p, state in entries:
        optimizer.state[to.get(p, p)] = state


@contextmanager
def _narrow_to_updated(params: list[DTensor]) -> Iterator[None]:
    """Narrow `params` and gradients to the parts that this rank updates, in the `with` block."""
    before = []
    with local_ops(), torch.no_grad():
        for p in params:
            whole, grad = p.data, _grad(p)
            mine, held = update_spec(p).region[0], p._spec.region[0]
            p.data = part = whole.narrow(0, mine[0] - held[0], mine[1])
            before.append((p, whole, grad))
            if grad is not None and grad.shape != part.shape:
                _set_grad(p, grad.detach().narrow(0, mine[0] - held[0], mine[1]))
    try:
        yield
    finally:
        with local_ops(), torch.no_grad():
            for p, whole, grad in before:
                if grad is not None and grad.shape != p.shape:
                    p.data = whole
                    _set_grad(p, grad)
                p.data = whole


_hook = register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
