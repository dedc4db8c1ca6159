"""Function transforms (`torch.func`) and control flow (`torch.cond`) on DTensors.

A transform such as `vmap` or `grad` passes wrapped tensors without a layout to its function. So it
runs on whole values: each DTensor among its arguments, or that its function reads, is gathered. All
ranks compute the same, and the results are Invariant DTensors. The ledger records these
redistributions as implicit. Programs without DTensors are unaffected.

`torch.cond`, `while_loop`, `scan` and `associative_scan` run as equivalent Python code, in which
each op has its own rule.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from typing import Any

import torch
import torch._higher_order_ops as control_flow
import torch.func
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from partita.comm import Wire
from partita.comm.agreement import is_alone
from partita.comm.device import default_generator
from partita.comm.ranks import RankWire
from partita.comm.torch_distributed import wrap_in_place
from partita.layout import Fix, Layout, LayoutError

from .arguments import check_plain_tensor, spec_of_plain
from .dtensor import DTensor, as_dtensor, move_local
from .op_facts import OVERRIDES
from .random import compare_draws
from .tensor_state import (
    HERE,
    Function,
    any_spec,
    count_writes,
    make_layout_error,
    make_two_meshes_error,
    next_node,
    spec_of,
)
from .torch_patches import holds_dtensor

# -- transforms ------------------------------------------------------------------------------------

_TRANSFORMS = (
    "functionalize grad grad_and_value hessian jacfwd jacrev jvp linearize vjp vmap"
).split()
"""The function transforms of torch.func."""
_FORWARD_MODE = ("hessian", "jacfwd", "jvp", "linearize")
"""The transforms that use forward-mode AD. Torch counts its levels for all threads together."""
_FORWARD_LOCK = threading.RLock()
_PATIENCE = 60.0  # seconds


def outside_transforms() -> Any:
    """Returns a context manager that suspends the active transforms of `torch.func`.

    Redistributions run inside it, because a transform such as `vmap` cannot handle collectives.
    """
    return temporarily_clear_interpreter_stack()


class _Active(threading.local):
    """The outermost transform that runs in this thread, if any."""

    wholes: WholeValues | None = None


_active = _Active()


class WholeValues(TorchFunctionMode):
    """A torch-function mode for transforms such as `vmap`, which replaces DTensors by gathered
    tensors.

    Plain tensors from outside the transform are compared across ranks, as in every op that also
    takes DTensors.

    Args:
        maker: if a transform such as `vjp` returned the function: the mode of that transform.
            Otherwise None.

    Attributes:
        name: the name of the transform.
        wire: the wire of the DTensors that were replaced; None before the first.
    """

    def __init__(self, name: str, maker: WholeValues | None):
        super().__init__()
        self.name = name
        self.wire: Wire | None = None if maker is None else maker.wire
        self._wholes: dict[Any, tuple[DTensor, torch.Tensor, int]] = {}
        self._entered: dict[int, torch.Tensor] = {}
        self._made: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._is_gathering = False
        self._holds_lock = False
        self._first_node = next_node()
        self._is_derived = maker is not None
        spec = any_spec()
        self._generator = default_generator(spec.wire.device) if spec is not None else None
        self._state = self._generator.get_state() if self._generator is not None else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_gathering:
            return func(*args, **(kwargs or {}))
        given = (args, kwargs or {})
        # A function that `vjp` returned reads tensors that `vjp` has made.
        for leaf in () if self._is_derived else tree_leaves(given):
            self._note_entered(leaf)
        args, kwargs = self.replace(given)
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if _is_plain(leaf):
                self._made[id(leaf)] = leaf
        return out

    def _note_entered(self, leaf: Any) -> None:
        """Note `leaf` if it is a plain tensor that the transform has not made."""
        if not _is_plain(leaf) or self._made.get(id(leaf)) is leaf:
            return
        # Modes do not intercept the functions that make results of an inner transform, whose nodes
        # are new.
        if leaf.grad_fn is None or leaf.grad_fn._sequence_nr() < self._first_node:
            self._entered[id(leaf)] = leaf

    def replace(self, value: Any) -> Any:
        """Returns a copy of `value` (maybe nested) with gathered plain tensors for DTensors."""
        return tree_map_only(DTensor, self._find_whole, value)

    def _find_whole(self, x: DTensor) -> torch.Tensor:
        # Without gradients, a gathered value has no grad_fn.
        key = id(x), count_writes(x), torch.is_grad_enabled()
        found = self._wholes.get(key)
        if found is None:
            whole = self._gather(x)
            self._made[id(whole)] = whole
            self._wholes[key] = found = x, whole, count_writes(whole)
        return found[1]

    def _gather(self, x: DTensor) -> torch.Tensor:
        wire = x._spec.wire
        if self.wire is not None and self.wire is not wire:
            raise make_two_meshes_error(self.name, self.wire, wire)
        if self._holds_lock and wire.mesh.size() > 1:
            raise _make_closure_error(self.name)
        self.wire, self._is_gathering = wire, True
        # `x.shape` would be that of the piece where DTensor's own methods read a tensor.
        whole = spec_of(Layout(x._spec.layout.shape, invariant=wire.mesh.names), wire)
        try:
            with outside_transforms():
                return move_local(x, x._spec, whole, self.name, "implicit")
        finally:
            self._is_gathering = False

    def call(self, name: str, function: Function, args: Any, kwargs: Any) -> Any:
        """Returns `function(*args, **kwargs)`, called inside the transform.

        Forward-mode autograd runs on one thread at a time.

        Args:
            name: the name of the transform, such as "jvp".
        """
        if name not in _FORWARD_MODE or any_spec(RankWire) is None:
            return function(*args, **kwargs)
        if not _FORWARD_LOCK.acquire(timeout=_PATIENCE):
            raise _make_closure_error(name)
        before, self._holds_lock = self._holds_lock, True
        try:
            return function(*args, **kwargs)
        finally:
            self._holds_lock = before
            _FORWARD_LOCK.release()

    def finish(self, given: Any) -> None:
        """Check gathered values, plain tensors and random states after the transform has run.

        Args:
            given: the arguments of the transformed function.

        Raises:
            LayoutError: a gathered value was written, or plain tensors or states of random
                generators differ between ranks.
        """
        wire = self.wire
        if wire is None:
            return
        for x, whole, count in self._wholes.values():
            if count_writes(whole) != count and not x._spec.is_whole:
                raise _make_write_error(self.name)
        for leaf in tree_leaves(given):
            self._note_entered(leaf)
        for n, plain in enumerate(self._entered.values()):
            check_plain_tensor(plain, wire, self.name, (n,), with_gradient=True)
        self._wholes.clear()
        self._entered.clear()
        if self._generator is not None and self._state is not None and not is_alone(wire):
            compare_draws(self.name, wire, self._generator, self._state)

    def type_result(self, leaf: Any) -> Any:
        """Returns the plain result `leaf` as an Invariant DTensor, if the transform got DTensors.

        Without DTensors among the inputs, or if `leaf` is no plain tensor, it returns `leaf`.
        """
        if self.wire is None or not _is_plain(leaf):
            return leaf
        with local_ops():  # an alias: other code may refer to the tensor itself
            return as_dtensor(leaf.view_as(leaf), spec_of_plain(leaf, self.wire))


def _is_plain(value: Any) -> bool:
    """True if `value` is a tensor that is neither a DTensor nor wrapped by a transform."""
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_tensor and not is_functorch_wrapped_tensor(value)


def _make_write_error(name: str) -> LayoutError:
    return make_layout_error(
        f"torch.func: {name} writes into a DTensor that is not whole on each rank",
        Fix("y = x.clone()", "and write into y, which the function returns"),
        reason="the function runs on whole values, which are gathered copies of it",
    )


def _make_closure_error(name: str) -> LayoutError:
    return make_layout_error(
        f"torch.func: {name} of a function that reads a DTensor, or that communicates, on ranks "
        "that are threads",
        Fix(f"{name}(f, ...)", "with the DTensor among the arguments of f"),
        Fix("torchrun --nproc-per-node N", "for ranks that are processes"),
        reason="torch counts the levels of forward mode for all threads together, so ranks "
        "take turns, and none can wait for another",
    )


def _run_on_wholes(name: str, function: Function, maker: WholeValues | None = None) -> Function:
    """Returns a function that runs `function` on whole values, and makes the results DTensors.

    Args:
        maker: the mode of the transform that returned `function`, as `vjp` returns one.
    """

    @functools.wraps(function)
    def run_on_wholes(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or any_spec() is None:
            return function(*args, **kwargs)
        outer = _active.wholes
        if outer is not None:
            args, kwargs = outer.replace((args, kwargs))
            return outer.call(name, function, args, kwargs)
        wholes = _active.wholes = WholeValues(name, maker)
        try:
            given = wholes.replace((args, kwargs))
            with wholes:
                out = wholes.call(name, function, *given)
        finally:
            _active.wholes = None
        wholes.finish(given)

        def finish_result(leaf: Any) -> Any:
            if isinstance(leaf, (types.FunctionType, functools.partial)):  # as `vjp` returns
                return _run_on_wholes(name, leaf, wholes if wholes.wire is not None else None)
            return wholes.type_result(leaf)

        return tree_map(finish_result, out)

    return run_on_wholes


def _with_whole_results(function: Function) -> Function:
    """Returns a function that calls `function` and replaces the DTensors in its result."""

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        out, wholes = function(*args, **kwargs), _active.wholes
        return out if wholes is None else wholes.replace(out)

    return call


def _make_transform(name: str, transform: Function) -> Function:
    run = _run_on_wholes(name, transform)

    def make_transform(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return transform(*args, **kwargs)
        if args:
            args = (_with_whole_results(args[0]), *args[1:])
        elif "func" in kwargs:
            kwargs = {**kwargs, "func": _with_whole_results(kwargs["func"])}
        made = run(*args, **kwargs)
        # A function made before the first DTensor may be called with DTensors later.
        if any_spec() is None and isinstance(made, types.FunctionType):
            return _run_on_wholes(name, made)
        return made

    return make_transform


for _name in _TRANSFORMS:
    wrap_in_place(getattr(torch.func, _name), functools.partial(_make_transform, _name))


# -- control flow ----------------------------------------------------------------------------------
# Torch compiles these functions even in eager, and Dynamo does not support our DTensors. So with
# DTensors, and while a step is captured, they run as the Python code that torch documents.


def _meets_dtensors(*values: Any) -> bool:
    """True if one of `values` is a DTensor, holds one, or is a function that refers to one."""
    for value in tree_leaves(values):
        while isinstance(value, functools.partial):
            if holds_dtensor((value.args, value.keywords)):
                return True
            value = value.func
        if isinstance(value, types.MethodType):
            value = value.__self__
        if isinstance(value, types.FunctionType):
            used = inspect.getclosurevars(value)
            held = [*used.nonlocals.values(), *used.globals.values()]
            value = [*held, *(value.__defaults__ or ())]
        if holds_dtensor(value):
            return True
    return False


def _run_in_python(meaning: Function, plain: Function) -> Function:
    """Returns a function that calls `meaning` if DTensors are involved, otherwise `plain`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return plain(*args, **kwargs)
        if _meets_dtensors(args, kwargs):
            return meaning(*args, **kwargs)
        return HERE.trace.choose_control_flow(plain, meaning)(*args, **kwargs)

    return run


def _run_cond(pred: Any, true_fn: Function, false_fn: Function, operands: Any = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _run_while_loop(cond_fn: Function, body_fn: Function, carried_inputs: Any) -> Any:
    while cond_fn(*carried_inputs):
        carried_inputs = body_fn(*carried_inputs)
    return tuple(carried_inputs)


def _run_map(f: Function, xs: Any, *args: Any) -> Any:
    return _stack_results([f(x, *args) for x in _slices(xs, 0)], 0)


def _run_scan(
    combine_fn: Function, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> Any:
    carry, found = init, []
    slices = _slices(xs, dim)
    if not slices:
        return init, []
    for x in reversed(slices) if reverse else slices:
        carry, y = combine_fn(carry, x)
        found.append(y)
    if reverse:
        found.reverse()
    return carry, _stack_results(found, dim)


def _slices(xs: Any, dim: int) -> list[Any]:
    leaves, structure = tree_flatten(xs)
    pieces = [x.unbind(dim) for x in leaves]
    return [tree_unflatten(some, structure) for some in zip(*pieces, strict=True)]


def _stack_results(found: list[Any], dim: int) -> Any:
    """Stack results of equal structure along `dim`, or along 0 where they have fewer dimensions."""

    def stack(*some: torch.Tensor) -> torch.Tensor:
        return torch.stack(some, dim if dim <= some[0].ndim else 0)

    return tree_map(stack, *found)


class _NotPointwiseError(Exception):
    """The function of a scan calls an op that is not pointwise."""


class _PointwiseOnly(TorchFunctionMode):
    """A mode that raises for every op that is not pointwise on tensors of one shape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)]
        packet = getattr(torch.ops.aten, func.__name__.strip("_"), None)
        is_pointwise = packet is not None and torch.Tag.pointwise in (
            getattr(packet, packet.overloads()[0]).tags
        )
        if not is_pointwise or len({t.shape for t in tensors if t.ndim}) != 1:
            raise _NotPointwiseError
        return func(*args, **(kwargs or {}))


def _run_associative_scan(
    combine_fn: Function,
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    """Scans by rules if the function is pointwise; otherwise by `vmap`, on whole values."""
    leaves, structure = tree_flatten(xs)

    def combine(*values: torch.Tensor) -> Any:
        halves = (values[: len(leaves)], values[len(leaves) :])
        with _PointwiseOnly():
            return combine_fn(*(tree_unflatten(half, structure) for half in halves))

    moved = [x.movedim(dim, 0) for x in leaves]
    try:
        found = generic_associative_scan(combine, [x.flip(0) for x in moved] if reverse else moved)
    except _NotPointwiseError:
        return _plain_associative_scan(combine_fn, xs, dim, reverse, "generic")
    if reverse:
        found = [x.flip(0) for x in found]
    return tree_unflatten([x.movedim(0, dim) for x in found], structure)


def _slice_by_rule(
    x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> torch.Tensor:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


OVERRIDES[torch.ops.aten.slice] = _slice_by_rule  # torch's scan calls it


_plain_associative_scan = wrap_in_place(
    control_flow.associative_scan, functools.partial(_run_in_python, _run_associative_scan)
)
for _function, _meaning in (
    (torch.cond, _run_cond),
    (control_flow.while_loop, _run_while_loop),
    (control_flow.map, _run_map),
    (control_flow.scan, _run_scan),
):
    wrap_in_place(_function, functools.partial(_run_in_python, _meaning))
