"""Gradients of DTensors: what `.grad`, `backward`, `torch.autograd.grad` and hooks mean.

Autograd computes on pieces. What goes in is made a piece, and what comes out is tagged as a
DTensor, whose layout is the dual of its value's: Partial for Replicate, Replicate for Partial, and
itself for Shard and Invariant.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunction as Unheard  # by modes, too
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, Layout, LayoutError

from .autograd import moved
from .composite import enter_function
from .dtensor import DTensor, tagged
from .grad_state import is_watched, lay_out_gradient, store_gradient, unmark_settled
from .mixed_operands import admit
from .origin import current
from .spec import Spec, spec_of
from .tensor_overrides import find_getter, implements
from .tensor_state import own_state, state_of

__all__ = ["BROKEN_OFF", "clear_gradients", "gradient_of", "type_hook"]

T: Any = torch.Tensor
_grad: Any = torch._C.TensorBase.grad


def _show_gradient(x: torch.Tensor) -> None:
    """Have ZeRO add what it keeps of x's gradient to it, before it is read or cleared."""
    rest = state_of(x).rest
    if rest is not None:
        rest.owner.show_gradient()


@implements(find_getter("grad"))
def gradient_of(x: DTensor) -> DTensor | None:
    """`x.grad` as a DTensor. It is tagged once: later reads give the same object."""
    _show_gradient(x)
    with Unheard():
        grad = _grad.__get__(x)
        if grad is None:
            return None
        if isinstance(grad, DTensor):
            state = own_state(grad)
            state.gradient_of = state.gradient_of or weakref.ref(x)
            return grad
        spec = x._spec.gradient
        if grad.layout is not torch.strided:  # sparse, as gather(sparse_grad=True) makes it
            grad = grad.to_dense()
        typed = tagged(grad.detach(), spec)
        if grad.requires_grad:
            # A gradient with a history (create_graph) keeps it.
            return tagged(grad.view_as(grad), spec)
        own_state(typed).gradient_of = weakref.ref(x)
        _grad.__set__(x, typed)
        return typed


@implements(T.grad.__set__)
def _set_grad(x: torch.Tensor, grad: torch.Tensor | None) -> None:
    _show_gradient(x)
    if grad is None:
        unmark_settled(x)  # type: ignore[arg-type]
        fits = True
    else:
        if not isinstance(x, DTensor):
            raise LayoutError(
                "a plain tensor cannot have a DTensor as its gradient",
                place=user_line(),
                fixes=(Fix("t.grad = g.full_tensor()"),),
            )
        if not isinstance(grad, DTensor):
            raise LayoutError(
                "the gradient of a DTensor is a DTensor",
                place=user_line(),
                operands=(f"x  {x._spec.layout.brief()}", f"gradient  plain {tuple(grad.shape)}"),
                fixes=(Fix("x.grad = pt.distribute_tensor(g, mesh, placements)"),),
            )
        grad = lay_out_gradient(x, grad)
        with Unheard():
            fits = grad.shape == x.shape
    with Unheard():
        if fits:
            _grad.__set__(x, grad)
    if not fits:  # ZeRO leaves each rank a shard of it
        store_gradient(x, grad)  # type: ignore[arg-type]


def clear_gradients(tensors: Iterable[torch.Tensor]) -> None:
    """`x.grad = None` for each, quickly where there is none."""
    shown = None
    with Unheard():
        for x in tensors:
            rest = state_of(x).rest
            if rest is not None and rest.owner is not shown:
                shown = rest.owner
                shown.show_gradient()
            if _grad.__get__(x) is not None or is_watched(x):
                x.grad = None


@implements(T.grad.__delete__)
def _del_grad(x: DTensor) -> None:
    _show_gradient(x)
    unmark_settled(x)
    with Unheard():
        _grad.__delete__(x)


def make_backward_seed(
    root: DTensor, gradient: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A plain alias of a root of backward, and the local gradient that backward starts from.

    Of a Replicate root it is Partial: the first rank has the gradient, the others zeros. Of a
    Partial root it is Replicate. Neither needs communication.
    """
    root = current(root)
    spec = root._spec
    if any(op != "sum" for _, op in spec.layout.partial):
        after = spec.reduced
        root = tagged(moved(root, spec, after, "backward", "implicit"), after)
        spec = after
    with torch.enable_grad(), Local():
        plain = root.view_as(root)
    if gradient is None:
        if spec.shape.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        before = spec.whole
        with Local():
            seed = plain.new_ones(spec.shape)
    elif isinstance(gradient, DTensor):
        before, seed = gradient._spec, gradient
    else:
        before, seed = _spec_of_plain_gradient(gradient, spec, "backward"), gradient
    if before.shape != spec.shape:
        raise RuntimeError(
            f"Mismatch in shape: the gradient has a shape of {before.shape} and the output "
            f"has a shape of {spec.shape}."
        )
    seed = moved(seed, before, spec.gradient, "backward", "implicit")
    return plain, spec.wire.fill_padding(seed, spec.gradient.layout, 0)


def _spec_of_plain_gradient(gradient: torch.Tensor, spec: Spec, op: str) -> Spec:
    """The spec of a plain gradient that a user gives: a whole value, the same on every rank."""
    if not gradient.requires_grad:
        admit(gradient, spec.wire, op)
    return spec_of(Layout(tuple(gradient.shape)), spec.wire)


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
"""Its `watchers` have their `reset_after_abort()` called when a backward pass of this thread
raises: autograd has no hook for that."""

_plain_backward: Any = enter_function(torch.autograd.backward)
assert _plain_backward is not None


@implements(torch.autograd.backward)
def _autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """torch.autograd.backward, from DTensors or towards them."""
    roots, seeds = _find_backward_seeds(tensors, grad_tensors)
    try:
        _plain_backward(roots, seeds, *args, **kwargs)
    except BaseException:
        for watcher in list(BROKEN_OFF.watchers):
            watcher.reset_after_abort()
        raise


def _find_backward_seeds(outputs: Any, gradients: Any) -> tuple[list[Any], list[Any]]:
    """The roots of a backward pass as plain tensors, and the local gradient that each starts
    from."""
    roots = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    given = list(gradients) if isinstance(gradients, (tuple, list)) else [gradients]
    given += [None] * (len(roots) - len(given))
    for i, root in enumerate(roots):
        if isinstance(root, DTensor):
            roots[i], given[i] = make_backward_seed(root, given[i])
        elif isinstance(given[i], DTensor):
            raise LayoutError(
                "backward of a plain tensor with a DTensor as its gradient",
                place=user_line(),
                fixes=(Fix("loss.backward(gradient.full_tensor())"),),
            )
    return roots, given


_plain_grad: Any = enter_function(torch.autograd.grad)
assert _plain_grad is not None


@implements(torch.autograd.grad)
def _autograd_grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """torch.autograd.grad, whose results are DTensors for inputs that are."""
    outs, given = _find_backward_seeds(outputs, grad_outputs)
    wanted = list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]
    grads = _plain_grad(outs, wanted, given, *args, **kwargs)
    result = []
    for x, g in zip(wanted, grads, strict=True):
        if g is not None and isinstance(x, DTensor):
            g = tagged(g.view_as(g), x._spec.gradient)
        result.append(g)
    return tuple(result)


def type_hook(x: torch.Tensor, hook: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    """What is registered on `x` for the user's `hook`, which gets the gradient as a DTensor and may
    return one."""
    # A parameter may be laid out anew; what an op has made keeps the layout that it had here.
    known = weakref.ref(x) if x.is_leaf else None
    spec: Spec | None = getattr(x, "_spec", None)

    def call_typed_hook(grad: torch.Tensor) -> Any:
        leaf = None if known is None else known()
        now: Spec = spec if leaf is None else leaf._spec  # type: ignore[attr-defined, assignment]
        wanted = now.gradient
        out = hook(tagged(grad.view_as(grad), wanted))
        if isinstance(out, torch.Tensor):
            before = (
                out._spec
                if isinstance(out, DTensor)
                else _spec_of_plain_gradient(out, wanted, "hook")
            )
            grad = moved(out, before, wanted, "hook", "gradient")
            return now.wire.fill_padding(grad, wanted.layout, 0)
        return out

    call_typed_hook.hook = hook  # type: ignore[attr-defined]  # capture hangs it on what stands for x
    return call_typed_hook


@implements(T.register_hook)
def _register_hook(x: DTensor, hook: Callable[..., Any]) -> Any:
    """`x.register_hook`."""
    typed = type_hook(x, hook)
    with Local():
        return x.register_hook(typed)


DTensor.grad = property(gradient_of, _set_grad, _del_grad)  # type: ignore[assignment]
