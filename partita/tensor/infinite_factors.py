"""Infinite factors: an op that multiplies a Partial sum by infinity must reduce the sum first.

    x = 1 = 3 - 2 on two ranks       x * inf = inf       3 * inf - 2 * inf = nan

Rules treat an op as linear in Partial values, which is right only for finite factors. So a factor
is checked if all ranks have the same value and reading it is cheap: numbers, and whole tensors in
host memory. If one is infinite (or a divisor zero), the Partial value is reduced first, and the
first rank keeps the result. A factor that is sharded or on an accelerator is not checked. The
result may then be nan although plain PyTorch returns infinity.
"""

from __future__ import annotations

from cmath import isfinite
from dataclasses import replace
from typing import Any

import torch

from partita.comm import Wire
from partita.comm.device import HOST
from partita.layout import Layout

from .arguments import OpCall, Path, collect_tensors, get_at_path, locate_in_call, replace_at_paths
from .dtensor import DTensor, move_local
from .op_facts import form_of
from .plan import CallPlan
from .tensor_state import Function, spec_of

_LOOKED_AT = (torch.Tensor, DTensor)
"""The classes of tensors that have values. Fake tensors of a capture have none."""
_FLOATS = frozenset((float, complex))


def wrap_for_infinite_factors(
    kernel: Function | None, call: OpCall, plan: CallPlan
) -> Function | None:
    """Wraps a kernel that multiplies a Partial sum by a factor, which may be infinite.

    In each call, the wrapper reads the factor. If it is infinite, the sum is reduced before the
    multiplication, because shares of both signs would otherwise give nan. Returns `kernel` itself
    if the call has no such factor.

    Args:
        kernel: the kernel that runs with finite factors; None means torch's function.
        call: the first call, for which the plan is made.
        plan: the plan of the call, whose kernel is not set yet.
    """
    bound, choice, wire, names, form = plan.bound, plan.choice, plan.wire, plan.names, call.form
    assert bound is not None and choice is not None
    shares = {
        path: spec_of(layout, wire)
        for (path, _), layout in zip(call.operands, choice.inputs, strict=True)
        if layout is not None and any(op == "sum" for _, op in layout.partial)
    }
    reduced = {axis for spec in shares.values() for axis, _ in spec.layout.partial}
    factors = [
        path
        for (path, value), layout in zip(call.operands, choice.inputs, strict=True)
        if path not in shares and _is_readable(value, layout, wire)
    ]
    divides = form.rule is form_of(torch.div).rule
    if not shares or not (factors or divides):
        return kernel
    divides = divides or form.rule is form_of(torch.addcdiv).rule
    tensors = [
        path
        for path in factors
        if isinstance(get_at_path(call.args, call.kwargs, path), torch.Tensor)
    ]
    run = kernel or form.local or call.func

    def run_on_shares(*args: Any, **kwargs: Any) -> Any:
        infinite = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) in _FLOATS:
                infinite = infinite or not isfinite(value) or (divides and _is_like_zero(value))
            elif divides and type(value) is int:
                infinite = infinite or value == 0
        for path in tensors:
            at = locate_in_call(path, names, args, kwargs)
            infinite = infinite or _is_infinite(get_at_path(args, kwargs, at), divides)
        return (run_reduced if infinite else run)(*args, **kwargs)

    def run_reduced(*args: Any, **kwargs: Any) -> Any:
        new: dict[Path, Any] = {}
        for path, spec in shares.items():
            at = locate_in_call(path, names, args, kwargs)
            x = get_at_path(args, kwargs, at)
            new[at] = move_local(x, spec, spec.reduced, plan.op, "implicit")
        written = args[0] if form.inplace else None
        args, kwargs = replace_at_paths(args, kwargs, new)  # type: ignore[assignment]
        outs = run(*args, **kwargs)
        kept = []
        for i, out in enumerate(collect_tensors(outs)):
            after = choice.layout_of_output(bound, i, tuple(out.shape))
            # Along other axes it may be shares because a dimension that they split was summed.
            rest = tuple(p for p in after.partial if p[0] not in reduced)
            before = spec_of(replace(after, partial=rest), wire)
            kept.append(move_local(out, before, spec_of(after, wire), plan.op, "implicit"))
        if written is not None:
            return written.copy_(kept[0])
        return kept[0] if isinstance(outs, torch.Tensor) else type(outs)(kept)

    return run_on_shares


def _is_readable(value: Any, layout: Layout | None, wire: Wire) -> bool:
    """True if a factor can be read on every rank with the same result: a number, or whole."""
    if not isinstance(value, torch.Tensor):
        return value is not None
    is_real = value.is_floating_point() or value.is_complex()
    return layout is not None and spec_of(layout, wire).is_whole and is_real


def _is_like_zero(number: complex) -> bool:
    return number == 0 or not isfinite(1 / number)


def _is_infinite(factor: Any, divides: bool) -> bool:
    """True if a factor (or if it divides: its inverse) may have an infinite element."""
    if type(factor) not in _LOOKED_AT or factor.device != HOST:
        return False
    with torch.no_grad():
        total = (factor.reciprocal() if divides else factor).sum()
        return not bool(torch.isfinite(total))
