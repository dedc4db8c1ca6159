"""Custom autograd functions: an `autograd.Function` of the user's, called with DTensors.

Its forward sees DTensors, as any Python does. Its backward must too, but autograd gives it the
local pieces of gradients, and of outputs that were saved. So it runs as a subclass of itself, which
tags what comes in by duality, and redistributes what goes back to the layouts of the inputs'
gradients. A function that is meant for the pieces themselves (a kernel of one's own) is called by
`local_map`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._C import _is_torch_function_enabled as _global_view
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, _is_setup_context_defined

from partita.comm import user_line
from partita.layout import Fix, Layout, LayoutError

from .autograd import moved
from .dtensor import DTensor, tagged
from .mixed_operands import admit
from .spec import Spec, spec_of
from .watch import HERE

__all__ = ["make_typed_function"]

_bound_apply = vars(Function)["apply"].__get__  # of Python, or from torch 2.14 on of C
_saved = BackwardCFunction.saved_tensors.__get__  # type: ignore[attr-defined]


def _apply_watched(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if HERE.block is not None:
        HERE.block.refuse(f"it applies the autograd.Function {cls.__name__}")
    watcher = HERE.watcher
    if watcher is None:
        return _apply_to_dtensors(cls, *args, **kwargs)
    return watcher.run_function(cls, args, kwargs, lambda: _apply_to_dtensors(cls, *args, **kwargs))


def _apply_to_dtensors(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if _global_view():
        for a in (*args, *kwargs.values()):
            if isinstance(a, DTensor):
                return _bound_apply(None, make_typed_function(cls))(*args, **kwargs)
    return _bound_apply(None, cls)(*args, **kwargs)


@cache
def make_typed_function(cls: type[Function]) -> type[Function]:
    """`cls` with a backward that sees DTensors where its forward did."""
    body: dict[str, Any] = {}
    if _is_setup_context_defined(cls.setup_context):

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            cls.setup_context(ctx, inputs, output)
            _remember_specs(ctx, inputs, output)

        body["setup_context"] = staticmethod(setup_context)
    else:

        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            out = cls.forward(ctx, *args, **kwargs)
            _remember_specs(ctx, args, out)
            return out

        body["forward"] = staticmethod(forward)
    # A Function has its backward under one of two names.
    name = "backward" if cls.vjp is Function.vjp else "vjp"
    user_backward: Callable[..., Any] = getattr(cls, name)

    def backward(ctx: Any, *grads: Any) -> Any:
        out = user_backward(ctx, *map(_type_gradient, grads, ctx._output_specs))
        outs = out if isinstance(out, (tuple, list)) else (out,)
        # A backward may return fewer gradients than there were arguments, or None more.
        specs = (*ctx._input_specs, *[None] * len(outs))
        return tuple(
            _lay_out_gradient(g, spec, cls.__name__) for g, spec in zip(outs, specs, strict=False)
        )

    body[name] = staticmethod(backward)
    typed = type(cls.__name__, (cls,), body)
    typed._backward_cls.saved_tensors = property(_get_saved_tensors)  # type: ignore[attr-defined]
    return typed


def _remember_specs(ctx: Any, inputs: Any, output: Any) -> None:
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    ctx._input_specs, ctx._output_specs = _specs_of_values(inputs), _specs_of_values(outputs)
    ctx._saved_specs = _specs_of_values(ctx.to_save or ())


def _specs_of_values(values: Any) -> tuple[Spec | None, ...]:
    return tuple(v._spec if isinstance(v, DTensor) else None for v in values)


def _type_gradient(grad: torch.Tensor | None, spec: Spec | None) -> torch.Tensor | None:
    if grad is None or spec is None:
        return grad
    return tagged(grad.view_as(grad), spec.gradient)


def _get_saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """`ctx.saved_tensors` with DTensors: autograd gives a saved input back as it was, and a saved
    output as a plain piece."""
    return tuple(
        t if t is None or spec is None or isinstance(t, DTensor) else tagged(t.view_as(t), spec)
        for t, spec in zip(_saved(ctx), ctx._saved_specs, strict=True)
    )


def _lay_out_gradient(grad: Any, spec: Spec | None, name: str) -> Any:
    """The local gradient of an input of `spec`, of the gradient that the user's backward
    returned."""
    if not isinstance(grad, torch.Tensor):
        return grad
    if spec is None:
        if isinstance(grad, DTensor):
            raise LayoutError(
                f"{name}.backward returned a DTensor as the gradient of a plain tensor",
                operands=(f"gradient  {grad._spec.layout.brief()}",),
                fixes=(Fix("return g.full_tensor()"),),
            )
        return grad
    if isinstance(grad, DTensor):
        before = grad._spec
    else:
        if grad.shape != spec.shape:
            raise LayoutError(
                f"{name}.backward returned a plain tensor as the gradient of a DTensor",
                place=user_line(),
                operands=(
                    f"gradient  plain {tuple(grad.shape)}",
                    f"input     {spec.layout.brief()} on {spec.wire.mesh}",
                ),
                reason="a plain tensor is taken as one whole value, and this is not its shape",
                fixes=(
                    Fix("pt.DTensor.from_local(g, mesh, placements)", "if it is a piece"),
                    Fix(f"pt.local_map({name}.apply, ...)", "to work on pieces altogether"),
                ),
            )
        admit(grad.detach(), spec.wire, f"{name}.backward")
        before = spec_of(Layout(tuple(grad.shape)), spec.wire)
    grad = moved(grad, before, spec.gradient, name, "gradient")
    return spec.wire.fill_padding(grad, spec.gradient.layout, 0)


# A Function is applied by a class method of its base; torch asks no override about it. Dynamo knows
# it by its name, and enters none of it.
_apply_watched.__name__ = "apply"
Function.apply = classmethod(_apply_watched)  # type: ignore[assignment]
