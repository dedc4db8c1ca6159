"""Gradients of DTensors: `.grad`, `backward` and hooks, and when a gradient is reduced.

Autograd computes on local tensors. A gradient that autograd returns becomes a DTensor, and one that
is passed to autograd a local tensor. A gradient's layout is the dual of its value's: the gradient
of a Replicate value is Partial. It is *pending* until it is reduced, then *settled*:

    backward       x.grad  Partial      pending
    clip, step     x.grad  Replicate    settled, by one all-reduce (`reduce_pending_gradients`)
    backward       x.grad  Partial      a hook makes it Partial again (the first rank keeps the sum)
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DisableTorchFunction  # also disables modes
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._C import _is_torch_function_enabled as _global_view
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, _is_setup_context_defined
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_module
from torch.nn.modules._functions import BackwardHookFunction

from partita.comm import Wire, check_equal_on_ranks, is_agreed, remember_agreed
from partita.layout import Fix, Layout
from partita.redistribute import plan

from .aliasing import redistribute_view, renew_copy
from .arguments import check_plain_tensor
from .dtensor import DTensor, as_dtensor, carry_all, move_local
from .op_facts import enter_function, find_getter, implements
from .origins import ORIGIN, find_origin, note_gradient
from .tensor_state import (
    _STATE,
    HERE,
    Spec,
    current,
    in_backward,
    is_only_returned,
    keep_in_class,
    make_layout_error,
    make_two_meshes_error,
    own_state,
    spec_of,
    state_of,
)

T: Any = torch.Tensor
_base: Any = torch._C.TensorBase
_grad = _base.grad
_requires_grad = _base.requires_grad.__get__
# Private torch: the dictionaries of a tensor's hooks, which no public function returns.
hooks_of_backward = _base._backward_hooks.__get__
hooks_of_gradient = _base._post_accumulate_grad_hooks.__get__


def prepare_gradient(x: Any) -> Any:
    """Returns the tensor that has the gradient of `x`: the shard, if ZeRO-3 has gathered `x`.

    Called before `x.grad` is read or cleared. ZeRO adds gradients that it has kept to `.grad`.
    """
    state = state_of(x)
    if state.gathered_from is not None:
        x = state.gathered_from[0]
        state = state_of(x)
    if state.zero_layouts is not None:
        state.zero_layouts.owner.reduce_postponed(x)
    return x


def zero_owners_of(tensors: Iterable[Any]) -> list[Any]:
    """Returns the ZeRO states that shard the gradient or update of some of `tensors`, each once."""
    layouts = [state_of(x).zero_layouts for x in tensors if isinstance(x, DTensor)]
    return [*dict.fromkeys(one.owner for one in layouts if one is not None)]


def _alias_with_history(t: torch.Tensor) -> torch.Tensor:
    """Returns a differentiable alias of a plain tensor, also inside `no_grad`."""
    if not t.requires_grad or torch.is_grad_enabled():
        return t.view_as(t)
    with torch.enable_grad():
        return t.view_as(t)


def _match_strides(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns `grad` with the strides of `x`, if they differ only in dimensions of one element.

    Other ranks may have more elements there. The strides of the global tensor follow from these.
    """
    if grad.shape != x.shape:
        return grad
    strides = x.stride()
    pairs = zip(grad.shape, grad.stride(), strides, strict=True)
    return grad.as_strided(x.shape, strides) if all(n < 2 or a == b for n, a, b in pairs) else grad


@implements(find_getter("grad"))
def gradient_of(x: DTensor) -> DTensor | None:
    """Returns `x.grad` as a DTensor, or None. Repeated reads return the same object."""
    x = prepare_gradient(x)
    with DisableTorchFunction():
        grad = _grad.__get__(x)
        if grad is None:  # if a view copy is out of date, backward has read a newer one
            now = current(x) if x.retains_grad else x
            return None if now is x else gradient_of(now)
        if isinstance(grad, DTensor):
            state = grad.__dict__.get(_STATE)  # in each step of each parameter
            owners = () if state is None else state.gradient_of
            if (not owners or owners[0]() is not x) and not _requires_grad(grad):
                _note_owner(grad, x)
            if grad._spec.is_copy:
                renew_copy(grad)
            return grad
        spec = x._spec.gradient
        if grad.layout is not torch.strided:  # sparse, as of gather(sparse_grad=True)
            grad = grad.to_dense()
        if not grad.requires_grad:
            grad = grad.detach()
            if grad.stride() != x.stride():
                grad = _match_strides(grad, x)
        typed = as_dtensor(grad, spec)
        # With a history it stays Partial when a clip or a norm reads it: a reduced one would be
        # another object.
        if not typed.requires_grad:
            own_state(typed).gradient_of = (weakref.ref(x),)
        note_gradient(typed, x)
        _grad.__set__(x, typed)
        return typed


def _note_owner(grad: DTensor, x: DTensor) -> None:
    """Record that `grad` is the gradient of `x`. It may be the gradient of other tensors, too."""
    state = own_state(grad)
    if not state.gradient_of:
        state.gradient_of = (weakref.ref(x),)
    elif not any(known() is x for known in state.gradient_of):
        alive = [known for known in state.gradient_of if known() is not None]
        state.gradient_of = (*alive, weakref.ref(x))


@implements(T.grad.__set__)
def _set_grad(x: torch.Tensor, grad: torch.Tensor | None) -> None:
    x = prepare_gradient(x)
    if grad is None:
        _unmark_settled(x)  # type: ignore[arg-type]
    elif not isinstance(x, DTensor):
        raise make_layout_error(
            "a plain tensor cannot have a DTensor as its gradient", Fix("t.grad = g.full_tensor()")
        )
    elif not isinstance(grad, DTensor):
        raise make_layout_error(
            "the gradient of a DTensor is a DTensor",
            Fix("x.grad = pt.distribute_tensor(g, mesh, placements)"),
            operands=(f"x  {x._spec.layout.brief()}", f"gradient  plain {tuple(grad.shape)}"),
        )
    else:
        grad = _lay_out_gradient(x, grad)
        if find_origin(grad) is None:
            note_gradient(grad, x)
        with DisableTorchFunction():
            fits = grad.shape == x.shape
        if not fits:  # with ZeRO each rank has a shard of it
            store_gradient(x, grad)
            return
        _note_owner(grad, x)
    with DisableTorchFunction():
        _grad.__set__(x, grad)


def clear_gradients(tensors: Iterable[torch.Tensor]) -> None:
    """Sets `x.grad = None` for each `x` in `tensors`. Costs little if none has a gradient."""
    shown = None
    with DisableTorchFunction():
        for x in tensors:
            layouts = state_of(x).zero_layouts
            if layouts is not None and layouts.owner is not shown:
                shown = layouts.owner
                shown.reduce_postponed()
            if _grad.__get__(x) is not None or is_watched(x):
                x.grad = None


@implements(T.requires_grad_)
def _set_requires_grad(x: DTensor, requires_grad: bool = True) -> DTensor:
    """Run `x.requires_grad_()`. Raises if ZeRO-3 has already connected a parameter's gradient."""
    if _requires_grad(x) == requires_grad:
        return x
    state = state_of(x)
    phase = "" if state.zero_layouts is None else state.zero_layouts.owner.find_phase(x)
    is_gathered = state.gathered_from is not None
    if is_gathered or phase:
        phase = phase or "forward"
        raise make_layout_error(
            f"requires_grad = {requires_grad} for a parameter in the {phase} of its own block",
            Fix("p.requires_grad_(...)", f"before the block's {phase}, or after it"),
            Fix("pt.zero(model, mesh, stage=2)", "where parameters are not gathered"),
            reason="stage 3 of ZeRO has gathered it, and connected its gradient if it gets one",
        )
    with local_ops():
        return x.requires_grad_(requires_grad)


_shard_property: Any = DTensor.requires_grad
DTensor.requires_grad = _shard_property.setter(_set_requires_grad)


@implements(T.grad.__delete__)
def _del_grad(x: DTensor) -> None:
    x = prepare_gradient(x)
    _unmark_settled(x)
    with DisableTorchFunction():
        _grad.__delete__(x)


def _make_backward_seed(
    root: DTensor, gradient: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a plain alias of a root of backward, and the local gradient of the root.

    For a Replicate root this gradient is Partial: the first rank has it, the others zeros. For a
    Partial root it is Replicate. Neither needs communication.
    """
    root = current(root)
    spec = root._spec
    if any(op != "sum" for _, op in spec.layout.partial):
        after = spec.reduced
        root = as_dtensor(move_local(root, spec, after, "backward", "implicit"), after)
        spec = after
    with local_ops():
        plain = _alias_with_history(root)
    if gradient is None:
        if spec.shape.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        before = spec.whole
        with local_ops():
            seed = plain.new_ones(spec.shape)
    else:
        before, seed = _spec_of_gradient(gradient, spec, "backward"), gradient
    if before.shape != spec.shape:
        raise RuntimeError(
            f"Mismatch in shape: the gradient has a shape of {before.shape} and the output "
            f"has a shape of {spec.shape}."
        )
    seed = move_local(seed, before, spec.gradient, "backward", "implicit")
    return plain, spec.wire.fill_padding(seed, spec.gradient.layout, 0)


def _spec_of_gradient(gradient: torch.Tensor, spec: Spec, op: str) -> Spec:
    """Returns the spec of a gradient that a user passes for a value of `spec`.

    A plain gradient is a whole value, equal on every rank.
    """
    if isinstance(gradient, DTensor):
        return gradient._spec
    if not gradient.requires_grad:
        check_plain_tensor(gradient, spec.wire, op)
    return spec_of(Layout(tuple(gradient.shape)), spec.wire)


def _lay_out_as_dual(gradient: torch.Tensor, spec: Spec, op: str, giver: str = "") -> torch.Tensor:
    """Returns the local gradient of a value of `spec`, redistributed to the dual layout.

    Args:
        gradient: the gradient that a user's function has returned: a DTensor, or a whole value.
        op, giver: the op of the value, and that function (by default `op`), for errors.
    """
    before, wanted = _spec_of_gradient(gradient, spec, giver or op), spec.gradient
    local = move_local(gradient, before, wanted, op, "gradient")
    return spec.wire.fill_padding(local, wanted.layout, 0)


@implements(T.backward)
def _run_backward(
    x: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    _autograd_backward(x, gradient, retain_graph, create_graph, inputs=inputs)


class _BrokenOff(threading.local):
    def __init__(self) -> None:
        self.watchers: weakref.WeakSet[Any] = weakref.WeakSet()


BROKEN_OFF = _BrokenOff()
"""Holds the `watchers` whose `reset_after_abort()` is called when a backward pass of this thread
raises. Autograd has no hook for that."""

_plain_backward: Any = enter_function(torch.autograd.backward)
assert _plain_backward is not None


@implements(torch.autograd.backward)
def _autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """Run torch.autograd.backward with roots or inputs that are DTensors."""
    roots, seeds = _find_backward_seeds(tensors, grad_tensors)
    HERE.roots.append(roots)
    try:
        _plain_backward(roots, seeds, *args, **kwargs)
    except BaseException:
        if not in_backward():  # otherwise an enclosing pass continues
            for watcher in list(BROKEN_OFF.watchers):
                watcher.reset_after_abort()
        raise
    finally:
        HERE.roots.pop()


def _find_backward_seeds(outputs: Any, gradients: Any) -> tuple[list[Any], list[Any]]:
    """Returns the roots of a backward pass as plain tensors, and their local gradients."""
    roots = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    given = list(gradients) if isinstance(gradients, (tuple, list)) else [gradients]
    given += [None] * (len(roots) - len(given))
    for i, root in enumerate(roots):
        if isinstance(root, DTensor):
            roots[i], given[i] = _make_backward_seed(root, given[i])
        elif isinstance(given[i], DTensor):
            raise make_layout_error(
                "backward of a plain tensor with a DTensor as its gradient",
                Fix("loss.backward(gradient.full_tensor())"),
            )
    return roots, given


_plain_grad: Any = enter_function(torch.autograd.grad)
assert _plain_grad is not None


@implements(torch.autograd.grad)
def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """Run torch.autograd.grad. The gradients of DTensors are DTensors."""
    options: Any = (create_graph, only_inputs, allow_unused, False, materialize_grads)
    if is_grads_batched:
        return _grad_of_each(outputs, inputs, grad_outputs, retain_graph, *options)
    outs, given = _find_backward_seeds(outputs, grad_outputs)
    wanted = list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]
    wanted = [current(t) if isinstance(t, DTensor) else t for t in wanted]
    grads = _plain_grad(outs, wanted, given, retain_graph, *options)
    return tuple(map(type_gradient, grads, specs_of_values(wanted)))


def _grad_of_each(
    outputs: Any, inputs: Any, batches: Any, retain_graph: bool | None, *options: Any
) -> tuple[Any, ...]:
    """Returns the results of `torch.autograd.grad` for each gradient of a batch, stacked.

    It runs one backward pass for each. Torch would run one under vmap, but a collective has no
    batch.
    """
    given = list(batches) if isinstance(batches, (tuple, list)) else [batches]
    count = next(len(batch) for batch in given if batch is not None)
    keeps = options[0] if retain_graph is None else retain_graph
    found = [
        _autograd_grad(
            outputs,
            inputs,
            [None if batch is None else batch[i] for batch in given],
            keeps or i + 1 < count,
            *options,
        )
        for i in range(count)
    ]
    return tuple(
        None if grads[0] is None else torch.stack(grads) for grads in zip(*found, strict=True)
    )


def type_hook(x: torch.Tensor, hook: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    """Wraps a user's hook of the tensor `x`, so that it gets DTensors, not local gradients.

    If the hook returns a gradient, this is redistributed to the layout of the gradient of `x`.
    """
    # A parameter may get another layout later; the result of an op keeps its layout.
    known: list[Any] = [weakref.ref(x) if x.is_leaf else None]
    spec: Spec | None = getattr(x, "_spec", None)
    made = find_origin(x)

    def call_typed_hook(grad: torch.Tensor | None) -> Any:
        leaf = None if known[0] is None else known[0]()
        if grad is None:
            # Torch's hooks of several tensors count all calls.
            is_torchs = hook.__module__ == "torch.autograd.graph"
            return hook(None) if is_torchs or not _may_be_unused(leaf) else None
        now: Spec = spec if leaf is None else leaf._spec  # type: ignore[attr-defined, assignment]
        typed = as_dtensor(_alias_with_history(grad), now.gradient)
        if made is not None:
            typed.__dict__[ORIGIN] = made.gradient
        out = hook(typed)
        if not isinstance(out, torch.Tensor):
            return out
        if out.shape != now.shape:
            name = getattr(hook, "__name__", repr(hook))
            raise RuntimeError(
                f"hook '{name}' has changed the size of value: it returned "
                f"{tuple(out.shape)} for a gradient of {tuple(now.shape)}"
            )
        return _lay_out_as_dual(out, now, "hook")

    call_typed_hook.hook = hook  # type: ignore[attr-defined]  # capture hangs it on what stands for x
    call_typed_hook.known = known  # type: ignore[attr-defined]  # see `drop_references`
    return call_typed_hook


@implements(T.register_hook)
def _register_hook(x: DTensor, hook: Callable[..., Any]) -> Any:
    """Run `x.register_hook`, with a hook that gets DTensors."""
    x = prepare_gradient(x)  # the hook gets later gradients only
    typed = type_hook(x, hook)
    with local_ops():
        return x.register_hook(typed)


@implements(T.register_post_accumulate_grad_hook)
def _register_post_accumulate_grad_hook(x: DTensor, hook: Callable[..., Any]) -> Any:
    """Run `x.register_post_accumulate_grad_hook` for a DTensor."""
    x = prepare_gradient(x)
    typed = type_accumulate_hook(x, hook)
    with local_ops():
        handle = x.register_post_accumulate_grad_hook(typed)
        note = typed.note  # type: ignore[attr-defined]
        hooks = hooks_of_backward(x)
        hooks[handle.id] = hooks.pop(note.id)
    handle.extra_dict_ref += (note.hooks_dict_ref,)  # so that its `remove` removes both hooks
    return handle


def type_accumulate_hook(x: torch.Tensor, hook: Callable[..., Any]) -> Callable[[Any], Any]:
    """Wraps a user's post-accumulate-grad hook of the leaf `x`, to skip calls without a gradient.

    The autograd engine also calls these hooks if a node gave no gradient (see `_may_be_unused`).
    """
    came = [False]

    def note_gradient(grad: torch.Tensor | None) -> None:
        came[0] = grad is not None or not _may_be_unused(x)

    def call_accumulate_hook(x: Any) -> Any:
        return hook(x) if came[0] else None

    with local_ops(), requiring_grad(x):
        call_accumulate_hook.note = x.register_hook(note_gradient)  # type: ignore[attr-defined]
    call_accumulate_hook.hook = hook  # type: ignore[attr-defined]
    return call_accumulate_hook


def _may_be_unused(leaf: Any) -> bool:
    """True if the engine may call hooks of `leaf` with None because the program did not use it.

    Otherwise None means that a Function has returned None. Stage 3 of ZeRO has one autograd node
    for all leaves, used or not.
    """
    layouts = state_of(leaf).zero_layouts if leaf is not None else None
    return layouts is not None and layouts.update is leaf._spec.without_mark


@contextmanager
def requiring_grad(x: torch.Tensor) -> Iterator[None]:
    """Makes `x` require grad inside the `with` block, because hooks of tensors need it."""
    with local_ops():
        frozen = not _requires_grad(x)
        if frozen:
            x.requires_grad_(True)
        try:
            yield
        finally:
            if frozen:
                x.requires_grad_(False)


def user_hooks_of(t: torch.Tensor) -> tuple[Any, ...]:
    """Returns the backward hooks that a user has registered on the tensor `t`, of all kinds."""
    with local_ops():
        one, other = hooks_of_backward(t), hooks_of_gradient(t)
    if not one and not other:
        return ()
    return (*select_user_hooks(one), *select_user_hooks(other))


def select_user_hooks(hooks: Any) -> tuple[Any, ...]:
    """Returns the hooks in `hooks` that are not partita's.

    `hooks` is a tensor's dictionary of hooks, or None.
    """
    if not hooks:
        return ()
    found = [
        hook
        for typed in hooks.values()
        for hook in [getattr(typed, "hook", typed)]
        if not str(getattr(hook, "__module__", "")).startswith("partita.")
    ]
    return tuple(found)


DTensor.grad = property(gradient_of, _set_grad, _del_grad)  # type: ignore[assignment]

# -- nodes of autograd -----------------------------------------------------------------------------
# Hooks on an autograd node receive local tensors, and the node has no reference to their DTensors.
# So a user who reads `x.grad_fn` gets a `NodeOfPieces`. It accepts hooks only for leaves, because a
# leaf's node refers to its tensor. This package and torch read the node itself, because C++ needs
# it. Modules of torch get a `NodeOfPieces`, because they register hooks on it.


@Node.register
class NodeOfPieces:
    """The object that a user gets as the `grad_fn` of a DTensor. Its hooks get DTensors.

    Only the node of a leaf (AccumulateGrad) takes hooks. For other nodes they raise an error.

    Attributes:
        node: the autograd node, which computes on local tensors.
    """

    def __init__(self, node: Any):
        self.node = node

    @property
    def next_functions(self) -> tuple[tuple[NodeOfPieces | None, int], ...]:
        return tuple((n and NodeOfPieces(n), i) for n, i in self.node.next_functions)

    def register_hook(self, fn: Callable[..., Any]) -> Any:
        """Registers `fn`, which is called as `fn((), (gradient,))` after an AccumulateGrad node.

        Returns torch's handle, which removes the hook. The gradient is a DTensor.

        Raises:
            LayoutError: the node does not belong to a leaf.
        """
        leaf = self._hook_leaf()

        def call_typed_hook(_: Any, grads: tuple[Any, ...]) -> Any:
            if grads[0] is not None or not _may_be_unused(leaf):
                fn((), (type_gradient(grads[0], leaf._spec),))

        return self.node.register_hook(call_typed_hook)

    def register_prehook(self, fn: Callable[..., Any]) -> Any:
        """Registers `fn`, which is called as `fn((gradient,))` before an AccumulateGrad node.

        The gradient is a DTensor. `fn` may return a replacement, as a tuple with one DTensor.
        Returns torch's handle, which removes the hook.

        Raises:
            LayoutError: the node does not belong to a leaf.
        """
        leaf = self._hook_leaf()

        def call_typed_hook(grads: tuple[Any, ...]) -> Any:
            if grads[0] is None and _may_be_unused(leaf):
                return None
            out = fn((type_gradient(grads[0], leaf._spec),))
            return out and (_lay_out_as_dual(out[0], leaf._spec, "hook"),)

        return self.node.register_prehook(call_typed_hook)

    def _hook_leaf(self) -> DTensor:
        leaf = getattr(self.node, "variable", None)
        if not isinstance(leaf, DTensor):
            raise _make_node_error(self.node.name())
        prepare_gradient(leaf)  # the hook gets later gradients only
        own_state(leaf).has_node_hooks = True
        return leaf

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def __eq__(self, other: object) -> bool:
        return self.node is (other.node if isinstance(other, NodeOfPieces) else other)

    def __hash__(self) -> int:
        return hash(self.node)

    def __repr__(self) -> str:
        return repr(self.node)


def _make_node_error(name: str) -> Exception:
    return make_layout_error(
        f"a hook on {name}, a node of autograd behind a DTensor",
        Fix("x.register_hook(hook)", "on the tensor: its gradient is a DTensor"),
        Fix("module.register_full_backward_hook(hook)", "instead of register_backward_hook"),
        reason="autograd computes on pieces, and a node does not record their tensors",
    )


_node = _base.grad_fn.__get__


def _grad_fn_of(x: DTensor) -> Any:
    """Returns the autograd node that made this tensor, as in torch.

    User code gets a `NodeOfPieces`, whose hooks get DTensors; code of torch and partita gets the
    node itself, which computes on local tensors.
    """
    with local_ops():
        node = _node(x)
    if node is None:
        return None
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if caller.startswith(("torch.", "partita.")) and caller != torch_module.__name__:
        return node
    state = own_state(x)
    if state.node is None or state.node.node is not node:
        state.node = NodeOfPieces(node)
    return state.node


DTensor.grad_fn = property(_grad_fn_of)  # type: ignore[assignment]

# -- pending and settled gradients -----------------------------------------------------------------
# A gradient that an optimizer's step or a clip has reduced is whole (settled). Before another
# backward pass adds Partial gradients to it, it must become Partial again: the first rank keeps it,
# and the others get zeros. That is the move R -> P, which sends nothing. A hook does it
# (`mark_gradient_reduced`).


def reduced_gradient_spec(x: DTensor) -> Spec:
    """Returns the spec (layout) of x's gradient once it is reduced.

    That is the spec of x itself, or a sharded one if ZeRO shards x's gradients.
    """
    layouts = state_of(x).zero_layouts
    return x._spec if layouts is None else layouts.gradient


def update_spec(x: DTensor) -> Spec:
    """Returns the spec (layout) in which the optimizer updates x and keeps its state.

    That is the spec of x itself, or a sharded one if ZeRO shards the update.
    """
    layouts = state_of(x).zero_layouts
    return x._spec if layouts is None else layouts.update


def store_gradient(x: DTensor, grad: DTensor) -> None:
    """Set `x.grad = grad`, also if their local shapes differ, which torch would refuse."""
    # Also hidden from modes, because the program did not make this write.
    with torch._C.DisableTorchFunction(), torch.no_grad():
        whole = x.data
        if whole.shape != grad.shape:
            # torch checks the shape only when a gradient is set.
            x.data = whole.new_empty(grad.shape)
        _grad.__set__(x, grad)
        x.data = whole


def _lay_out_gradient(x: DTensor, grad: DTensor) -> DTensor:
    """Returns `grad` in a layout that `x.grad` may have: Partial as from autograd, or reduced.

    Raises:
        LayoutError: it has another shape or mesh than `x`.
    """
    spec = x._spec
    if grad._spec.wire is not spec.wire:
        raise make_two_meshes_error("x.grad = g", spec.wire, grad._spec.wire)
    if grad._spec.shape != spec.shape:
        raise make_layout_error(
            f"a gradient of shape {tuple(grad._spec.shape)} for a tensor of {tuple(spec.shape)}",
            Fix(f"g.reshape({tuple(spec.shape)})", "if it has as many elements"),
            operands=(f"x  {spec.layout.brief()}", f"gradient  {grad._spec.layout.brief()}"),
        )
    rests = reduced_gradient_spec(x)
    with local_ops():
        is_part = state_of(grad).copied_view is not None or _is_part_of_value(grad)
    if is_part and grad._spec.layout != rests.layout:
        grad = redistribute_view(grad, rests.layout)
    elif not is_part and grad._spec is spec.gradient:
        return grad
    elif not is_part and grad._spec is not rests:
        grad = as_dtensor(move_local(grad, grad._spec, rests, "grad", "explicit"), rests)
    mark_gradient_reduced(x, refuses=grad._spec.is_copy)
    return grad


def mark_gradient_reduced(x: DTensor, refuses: bool = False) -> None:
    """Records that x's gradient is reduced. A hook in the next backward undoes this.

    The hook makes the gradient Partial again, before backward adds to it. Other tensors with the
    same gradient object get the same record and hook.

    Args:
        refuses: True if the hook is to raise, because the gradient is a view copy.
    """
    with local_ops():  # otherwise each attribute would be read through dispatch
        grad = _grad.__get__(x)
        # Not by `state_of`: this runs for each parameter in each step.
        state = None if grad is None else grad.__dict__.get(_STATE)
        shared = state is not None and len(state.gradient_of) > 1
        for one in [x, *_find_owners(grad)] if shared else (x,):
            watch = state_of(one).restoring_hook
            if one._spec is one._spec.gradient and not refuses:
                continue
            if watch is None:
                if not (one.is_leaf and (one.is_floating_point() or one.is_complex())):
                    continue  # no backward pass adds to its gradient
                watch = own_state(one).restoring_hook = _register_restoring_hook(one)
            # Private torch: registering a hook costs 3 microseconds for each parameter and step; a
            # hook that is called without need would cost 6.
            number, hook = watch
            hooks_of_backward(one)[number] = hook


def _register_restoring_hook(x: DTensor) -> tuple[int, Any]:
    """Registers a hook of `x` that calls `restore_partial_gradient`; returns (id, hook)."""
    known = weakref.ref(x)

    def restore_before_adding(g: torch.Tensor | None) -> torch.Tensor | None:
        leaf = known()
        if g is None or leaf is None or is_only_returned(leaf):
            return None
        return restore_partial_gradient(leaf, g)

    with requiring_grad(x):  # it may be frozen only for a while
        handle = x.register_hook(restore_before_adding)
    return handle.id, hooks_of_backward(x)[handle.id]


def _unmark_settled(x: DTensor) -> None:
    """Remove the hook of `mark_gradient_reduced`: x has no reduced gradient any more."""
    watch = state_of(x).restoring_hook
    if watch is not None:
        number, _ = watch
        with local_ops():
            hooks_of_backward(x).pop(number, None)


def is_watched(x: torch.Tensor) -> bool:
    """True if a hook on `x` will handle its reduced gradient before the next backward pass.

    The hook makes the gradient Partial again. `mark_gradient_reduced` registers it.
    """
    watch = state_of(x).restoring_hook
    if watch is None:
        return False
    number, _ = watch
    with local_ops():
        return number in hooks_of_backward(x)


def drop_references(x: DTensor) -> Callable[[DTensor], None]:
    """Removes partita's weak references to `x`, because `torch.utils.swap_tensors` allows none.

    Returns:
        A function to call with the tensor after the swap. It restores the references.
    """
    is_settled = is_watched(x)
    _unmark_settled(x)
    own_state(x).restoring_hook = None
    with local_ops():
        # Torch warns if `.grad` of a non-leaf is read.
        grad = _grad.__get__(x) if x.is_leaf or x.retains_grad else None
        hooks = [h for h in (hooks_of_backward(x) or {}).values() if hasattr(h, "known")]
    if isinstance(grad, DTensor):
        others = tuple(known for known in state_of(grad).gradient_of if known() is not x)
        own_state(grad).gradient_of = others
    for hook in hooks:
        hook.known[0] = None

    def refer_to(new: DTensor) -> None:
        for hook in hooks:
            hook.known[0] = weakref.ref(new)
        if is_settled:
            mark_gradient_reduced(new)

    return refer_to


def restore_partial_gradient(x: DTensor, coming: torch.Tensor) -> torch.Tensor | None:
    """Makes the reduced `x.grad` Partial again, before backward adds a Partial gradient to it.

    The first rank keeps the sum, and the others get zeros. Without this, each rank would add its
    own part to the full sum, which would then be counted once per rank.

    A gradient that is a part of another tensor stays as it is, and `coming` is reduced instead.

    Args:
        coming: the local gradient that backward is about to add.

    Returns:
        The tensor to add in place of `coming`; None if `coming` is added.

    Raises:
        LayoutError: `.grad` is a part of another tensor, and is a copy or `x` has hooks.
    """
    with_graph = torch.is_grad_enabled()
    with local_ops(), torch.no_grad():
        grad_now = _grad.__get__(x)
        # As in autograd: add in place to an existing gradient, to which other code may refer.
        stays = not with_graph
        if isinstance(grad_now, DTensor) and grad_now._spec is not x._spec.gradient:
            wire, wanted = grad_now._spec.wire, x._spec.gradient
            refuse_copied_part(grad_now, wanted)
            if stays and _is_part_of_value(grad_now):
                if select_user_hooks(hooks_of_backward(x)):
                    raise make_layout_error(
                        "a hook on a tensor whose gradient is a part of another tensor",
                        Fix("x.grad = part.clone()", "a gradient with its own memory"),
                        Fix("x.register_post_accumulate_grad_hook(hook)", "which gets the sum"),
                        reason="such a gradient stays whole, and the hook would get the sum of all "
                        "ranks as one rank's share",
                    )
                return move_local(coming, wanted, grad_now._spec, "grad", "gradient")
            moves = plan(grad_now._spec.layout, wanted.layout, wire.mesh, grad_now.element_size())
            shares = carry_all(moves, grad_now, wire, "grad", "gradient")
            if stays:
                if shares.shape == grad_now.shape and shares.stride() != grad_now.stride():
                    shares = torch.empty_like(grad_now).copy_(shares)
                # New memory, as when it was reduced: a view that was taken since is whole.
                HERE.trace.replace_value(grad_now, shares)
                as_dtensor(grad_now, wanted)
            else:
                _grad.__set__(x, as_dtensor(shares.detach(), wanted))
    _unmark_settled(x)
    return None


def refuse_copied_part(grad: torch.Tensor | None, coming: Spec | None = None) -> None:
    """Raises an error if backward cannot add to a `.grad` that is a part of another tensor.

    In plain PyTorch the addition would change the other tensor, too. This is impossible if the part
    is a copy, or if the new gradient has another local shape on some rank. The other tensor may be
    alive on some ranks only. The error is raised on all ranks.

    Args:
        coming: the spec (layout and wire) of the gradient that backward adds. None: the spec of
            `grad`.
    """
    if grad is None:
        return
    refuses = state_of(grad).copied_view is not None
    if coming is not None and isinstance(grad, DTensor) and _is_part_of_value(grad):
        mesh = coming.wire.mesh
        last = tuple(n - 1 for n in mesh.sizes)  # the rank with the smallest pieces
        shapes = [spec.layout.local_shape(mesh, last) for spec in (grad._spec, coming)]
        refuses = refuses or shapes[0] != shapes[1]
    if refuses:
        raise make_layout_error(
            "backward adds to a gradient that was set to a part of another tensor",
            Fix("x.grad = part.clone()", "a gradient with its own memory"),
            reason="the part has another layout than the gradient that is added, which gets its "
            "own memory, and the other tensor would not change",
        )


def renew_gradient(held: Any, value: torch.Tensor) -> None:
    """Gives the gradient `held` the value that a captured step has computed.

    `held` stays the same object, as after an eager step.
    """
    if not isinstance(held, DTensor) or not isinstance(value, DTensor):
        held.data = value
    elif _is_part_of_value(held):
        with torch.no_grad():
            held.copy_(value)
    else:
        with local_ops(), torch.no_grad():
            _base.data.__set__(held, value.detach())
        held._spec = value._spec
        for owner in _find_owners(held):
            if held._spec is owner._spec.gradient:
                _unmark_settled(owner)
            else:
                mark_gradient_reduced(owner)


def _is_part_of_value(grad: DTensor) -> bool:
    """True if `grad` is a view of a DTensor that is not Partial, such as a buffer of gradients.

    Such a gradient is not made Partial again, because the other tensor would stay as it is.
    """
    base = grad._base
    return isinstance(base, DTensor) and not base._spec.is_pending


# -- pending gradients are reduced -----------------------------------------------------------------

BUCKET_BYTES = 64 << 20
"""The most bytes of gradients in one all-reduce; a larger gradient has its own."""


def _find_owner(grad: torch.Tensor) -> DTensor | None:
    """Returns the first tensor whose `.grad` this object is now, or None."""
    return next(_find_owners(grad), None)


def _find_owners(grad: torch.Tensor) -> Iterator[DTensor]:
    for known in state_of(grad).gradient_of:
        owner = known()
        if owner is not None and owner.grad is grad:
            yield owner


def pending_gradients(values: Iterable[Any]) -> list[DTensor]:
    """Returns the tensors whose gradient is among `values` and is Partial (not reduced yet).

    Each tensor is returned once, in order.
    """
    owners: dict[int, DTensor] = {}
    for value in values:
        if isinstance(value, DTensor) and value._spec.is_pending:
            owner = _find_owner(value)
            if owner is not None:
                owners[id(owner)] = owner
    return list(owners.values())


def reduce_pending_gradients(params: Iterable[DTensor]) -> None:
    """Reduce the Partial gradients of `params` to the layout of `reduced_gradient_spec`.

    A reduced gradient is the same object with new memory. A view that was taken before keeps the
    old memory, which is a correct Partial value. Writes through it do not reach the gradient.

    Gradients with equal axes and dtype are joined in all-reduces of at most `BUCKET_BYTES`. A
    gradient that ZeRO shards is reduce-scattered. The ledger records the reason "settle". Gradients
    that are not Partial do not change. This waits for reductions that ZeRO has already begun.
    """
    params = list({id(p): p for p in params}.values())
    all_layouts = [state_of(p).zero_layouts for p in params]
    for owner in dict.fromkeys(layouts.owner for layouts in all_layouts if layouts is not None):
        owner.finish()
    with local_ops():
        stored = [_grad.__get__(p) for p in params]
    pending: dict[DTensor, DTensor] = {}
    for p, g in zip(params, stored, strict=True):
        if g is None or (isinstance(g, DTensor) and not g._spec.is_pending):
            continue
        grad: Any = p.grad  # as a DTensor
        if grad._spec.is_pending:
            pending[p] = grad
    _agree_on_gradients(params, pending)
    groups: dict[Any, dict[int, DTensor]] = {}  # each gradient once, also if several have it
    for p, grad in pending.items():
        if grad.requires_grad:
            _reduce_with_history(p, grad)
            continue
        if reduced_gradient_spec(p) is not p._spec.without_mark:
            _reduce_scatter_gradient(p, grad)
            continue
        key = (grad._spec.wire, grad._spec.layout.partial, grad.dtype, grad.device)
        groups.setdefault(key, {})[id(grad)] = p
    for (wire, partial, _, _), group in groups.items():
        for bucket in _split_into_buckets([*group.values()]):
            _reduce_bucket(bucket, wire, partial)


def _agree_on_gradients(params: list[DTensor], pending: dict[DTensor, DTensor]) -> None:
    """Raise on all ranks unless all ranks have gradients of the same parameters.

    Ranks do not compare if earlier steps predict these parameters (`is_agreed`).
    """
    wires: dict[Wire, list[tuple[int, DTensor]]] = {}
    for i, p in enumerate(params):
        if p in pending:
            wires.setdefault(pending[p]._spec.wire, []).append((i, p))
    for wire, group in wires.items():
        # The key has positions, specs and origins, which are equal on all ranks; ids of objects are
        # not. Positions alone do not suffice: in a list of only the parameters that have gradients,
        # they belong to other parameters.
        made = [p.__dict__.get(ORIGIN) for _, p in group]
        key = (
            len(params),
            *[(i, p._spec, o and o.number) for (i, p), o in zip(group, made, strict=True)],
        )
        if is_agreed(wire, "gradients", key):
            continue
        descriptions = ", ".join(f"{i}: {list(p._spec.shape)}" for i, p in group)
        places = ", ".join(str(o) for o in made if o is not None)
        check_equal_on_ranks(
            "gradients",
            f"of {len(group)} of {len(params)} parameters: {descriptions}; {places}",
            wire,
            fact="the ranks have them for other parameters",
            reason="a parameter's gradient is a sum over ranks, each of which must have its share",
            fixes=(
                Fix("loss = loss + 0 * p.sum()", "on ranks that do not use the parameter p"),
                Fix("the same branch on every rank", "if a condition reads this rank's data"),
            ),
        )
        remember_agreed(wire, "gradients", key)


def _reduce_with_history(p: DTensor, grad: DTensor) -> None:
    """Reduce a gradient that is a part of the graph of `create_graph=True`, and stays one."""
    wanted = reduced_gradient_spec(p)
    with torch.enable_grad():
        settled = move_local(grad, grad._spec, wanted, "gradients", "settle")
    store_gradient(p, as_dtensor(settled, wanted))
    mark_gradient_reduced(p)


def _reduce_scatter_gradient(p: DTensor, grad: DTensor) -> None:
    """Reduce-scatter a gradient, so that each rank keeps the shard that ZeRO gives it."""
    wanted = reduced_gradient_spec(p)
    with torch.no_grad():
        layouts = state_of(p).zero_layouts
        name = (layouts and layouts.name) or "gradients"
        shard = move_local(grad, grad._spec, wanted, name, "settle")
    HERE.trace.replace_value(grad, shard)
    grad._spec = wanted
    mark_gradient_reduced(p)


def _split_into_buckets(params: list[DTensor]) -> Iterable[list[DTensor]]:
    most = HERE.trace.limit_bucket(BUCKET_BYTES)
    buckets: list[list[DTensor]] = []
    size = 0
    for p in params:
        # The largest piece, not this rank's: every rank cuts the same buckets.
        nbytes = p._spec.largest * p.element_size()
        if not buckets or size + nbytes > most:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += nbytes
    yield from buckets


def _reduce_bucket(params: list[DTensor], wire: Wire, partial: tuple[tuple[str, str], ...]) -> None:
    """Reduce a bucket by one all-reduce of a flat buffer, whose views the gradients become."""
    mesh = wire.mesh
    pending = {axis for axis, _ in partial}
    others = tuple(a for a in mesh.names if a not in pending)
    # With uneven shards, the sizes of the ranks' flat buffers differ. All are made as long as the
    # first rank's, which is the largest, so that all ranks make one move.
    longest = sum(p._spec.largest for p in params)
    copies = math.prod([mesh.size(a) for a in others])
    before = Layout((longest * copies,), (others,), partial)
    after = Layout((longest * copies,), (others,))
    grads: list[Any] = [p.grad for p in params]
    with local_ops(), torch.no_grad():
        rows = [g.reshape(-1) for g in grads]
        flat = rows[0] if len(rows) == 1 else torch.cat(rows)
        used = flat.numel()
        if used < longest:
            flat = torch.nn.functional.pad(flat, (0, longest - used))
        for move in plan(before, after, mesh, flat.element_size()).moves:
            flat = wire.carry(move, flat, op="gradients", reason="settle")
        pieces = flat[:used].split([g.numel() for g in grads])
        for g, piece in zip(grads, pieces, strict=True):
            whole = piece.view(g.shape)
            if not g.is_contiguous():  # it keeps the order in memory that autograd gave it
                whole = torch.empty_like(g).copy_(whole)
            HERE.trace.fill_value(g, whole)
    for p, g in zip(params, grads, strict=True):
        g._spec = p._spec
        mark_gradient_reduced(p)


# -- an autograd.Function of the user's ------------------------------------------------------------
# Its forward sees DTensors, as any Python does. Its backward must too, but autograd gives it the
# local pieces of gradients, and of outputs that were saved. So it runs as a subclass of itself,
# which tags what comes in by duality, and redistributes what goes back to the layouts of the
# inputs' gradients. One that is meant for the pieces themselves (a kernel of one's own) is called
# by `local_map`.

_bound_apply = vars(Function)["apply"].__get__  # of Python, or from torch 2.14 on of C
_saved = BackwardCFunction.saved_tensors.__get__  # type: ignore[attr-defined]


def _apply_watched(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if not (cls.__module__.startswith("partita.") or cls is BackwardHookFunction):
        HERE.rerunnable += 1  # torch's own, of full backward hooks, runs nothing again
    watcher = HERE.watcher
    if watcher is None:
        return _apply_to_dtensors(cls, *args, **kwargs)
    return watcher.run_function(cls, args, kwargs, lambda: _apply_to_dtensors(cls, *args, **kwargs))


def _apply_to_dtensors(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if _global_view():
        for a in (*args, *kwargs.values()):
            if isinstance(a, DTensor):
                return _bound_apply(None, _make_typed_function(cls))(*args, **kwargs)
    return _bound_apply(None, cls)(*args, **kwargs)


@keep_in_class
def _make_typed_function(cls: type[Function]) -> type[Function]:
    """Returns a subclass of `cls` whose backward gets DTensors if its forward did."""
    body: dict[str, Any] = {}

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        cls.setup_context(ctx, inputs, output)
        _remember_specs(ctx, inputs, output)

    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        out = cls.forward(ctx, *args, **kwargs)
        _remember_specs(ctx, args, out)
        return out

    has_setup = _is_setup_context_defined(cls.setup_context)
    first = setup_context if has_setup else forward
    body[first.__name__] = staticmethod(first)
    # A Function has its backward under one of two names.
    name = "backward" if cls.vjp is Function.vjp else "vjp"
    user_backward: Callable[..., Any] = getattr(cls, name)

    def backward(ctx: Any, *grads: Any) -> Any:
        out = user_backward(ctx, *map(type_gradient, grads, ctx._output_specs))
        outs = out if isinstance(out, (tuple, list)) else (out,)
        # A backward may return fewer gradients than there were arguments, or None more.
        specs = (*ctx._input_specs, *[None] * len(outs))
        return tuple(
            _lay_out_returned_gradient(g, spec, cls.__name__)
            for g, spec in zip(outs, specs, strict=False)
        )

    body[name] = staticmethod(backward)
    typed = type(cls.__name__, (cls,), body)
    typed._backward_cls.saved_tensors = property(  # type: ignore[attr-defined]
        lambda ctx: type_pieces(_saved(ctx), ctx._saved_specs)
    )
    return typed


def _remember_specs(ctx: Any, inputs: Any, output: Any) -> None:
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    ctx._input_specs, ctx._output_specs = specs_of_values(inputs), specs_of_values(outputs)
    ctx._saved_specs = specs_of_values(ctx.to_save or ())


def specs_of_values(values: Iterable[Any]) -> tuple[Spec | None, ...]:
    """Returns the spec (layout and wire) of each DTensor in `values`; None for other values."""
    return tuple(v._spec if isinstance(v, DTensor) else None for v in values)


def type_gradient(grad: torch.Tensor | None, spec: Spec | None) -> torch.Tensor | None:
    """Returns the local gradient `grad` as a DTensor, or `grad` itself if an argument is None.

    Args:
        spec: the spec (layout and wire) of the value. The gradient gets the dual spec.
    """
    if grad is None or spec is None:
        return grad
    return as_dtensor(_alias_with_history(grad), spec.gradient)


def type_pieces(values: Iterable[Any], specs: Iterable[Spec | None]) -> tuple[Any, ...]:
    """Turns the tensors `values`, which autograd had saved, into DTensors again.

    Autograd returns a saved input as a DTensor, but a saved output as a local tensor.

    Args:
        specs: the spec (layout and wire) of each tensor when it was saved; None for a plain tensor.
    """
    return tuple(
        t
        if t is None or spec is None or isinstance(t, DTensor)
        else as_dtensor(_alias_with_history(t), spec)
        for t, spec in zip(values, specs, strict=True)
    )


def _lay_out_returned_gradient(grad: Any, spec: Spec | None, name: str) -> Any:
    """Returns the local gradient of an input, from the gradient that a user's backward returned.

    Args:
        spec: the spec of the input; None for a plain tensor.
        name: the name of the `autograd.Function`.
    """
    if not isinstance(grad, torch.Tensor):
        return grad
    giver = f"{name}.backward"
    if spec is None:
        if isinstance(grad, DTensor):
            raise make_layout_error(
                f"{giver} returned a DTensor as the gradient of a plain tensor",
                Fix("return g.full_tensor()"),
                operands=(f"gradient  {grad._spec.layout.brief()}",),
            )
        return grad
    if not isinstance(grad, DTensor) and grad.shape != spec.shape:
        raise make_layout_error(
            f"{giver} returned a plain tensor as the gradient of a DTensor",
            Fix("pt.DTensor.from_local(g, mesh, placements)", "if it is a piece"),
            Fix(f"pt.local_map({name}.apply, ...)", "to work on pieces only"),
            operands=(
                f"gradient  plain {tuple(grad.shape)}",
                f"input     {spec.layout.brief()} on {spec.wire.mesh}",
            ),
            reason="a plain tensor counts as one whole value, and this is not its shape",
        )
    if not isinstance(grad, DTensor) and grad.requires_grad:
        check_plain_tensor(grad.detach(), spec.wire, giver)
    if grad.shape != spec.shape:  # summed as torch does where an input was broadcast
        grad = _sum_to_shape(grad, spec, giver)  # type: ignore[arg-type]
    return _lay_out_as_dual(grad, spec, name, giver)


def _sum_to_shape(grad: DTensor, spec: Spec, giver: str) -> torch.Tensor:
    shape = spec.shape
    extra = len(grad.shape) - len(shape)
    ends = grad.shape[max(extra, 0) :]
    if extra < 0 or any(n not in (1, m) for n, m in zip(shape, ends, strict=True)):
        raise RuntimeError(
            f"{giver} returned an invalid gradient: got {tuple(grad.shape)} but expected shape "
            f"compatible with {tuple(shape)}"
        )
    dims = [*range(extra), *(extra + i for i, n in enumerate(shape) if n == 1 != ends[i])]
    return torch.sum(grad, dims, keepdim=True).reshape(shape) if dims else grad


# A Function is applied by a class method of its base, without a torch-function hook. Dynamo
# recognizes the method by its name, and does not trace into it.
_apply_watched.__name__ = "apply"
Function.apply = classmethod(_apply_watched)  # type: ignore[assignment]
