"""How does a torch function run on DTensors?

`handle` is the hot path: look the plan up by the key that the op's rule declares, run the local
kernel with torch-function disabled, tag the result. Everything else happens once per key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.rules import parse

from . import cache
from .composite import entered
from .dtensor import DTensor
from .foreach import run_foreach, run_fused
from .keys import KeyFunction, declared_key, operand_key
from .miss import gathered, in_order, make_plan
from .names import form_of, parameter_names
from .plan import CallPlan
from .special import SPECIAL, passes

__all__ = ["OPS", "Op", "call", "handle", "op_of"]

_Tensor = torch.Tensor


class Op:
    """One function and the plans of its calls.

    Attributes:
        func, form: the function, and what it is called and known as.
        base: what runs on the shard.
        key: from a call's arguments, the key of its plan.
        plans: the young generation of plans, by key.
        run: what to do instead of looking a plan up, for what is no op or has no rule.
    """

    __slots__ = ("base", "form", "func", "key", "plans", "run")

    def __init__(self, func: Callable[..., Any]):
        self.func = func
        self.form = form_of(func)
        self.base = self.form.local or func
        self.plans = cache.Plans(self.form.name)
        self.key: KeyFunction = _no_key
        self.run: Run | None = None
        rule = self.form.rule
        if func in SPECIAL or passes(func):
            self.run = _meaning(SPECIAL.get(func))
        elif self.form.name.startswith("_fused_"):
            self.run = run_fused
        elif rule is None:
            self.run = _without_rule(func)
        elif self.form.foreach:
            self.run = run_foreach
        elif rule.derive is None:
            self.key = operand_key(parameter_names(func, len(parse(rule.text).terms)))
        else:
            self.key = declared_key(rule.params)


Run = Callable[[Callable[..., Any], Any, dict[str, Any], Op], Any]


def _no_key(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("a function without a rule has no key")


def _meaning(special: Callable[..., Any] | None) -> Run:
    if special is not None:
        return lambda func, args, kwargs, op: special(*args, **kwargs)

    def passed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], op: Op) -> Any:
        with Local():
            return func(*args, **kwargs)

    return passed


def _without_rule(func: Callable[..., Any]) -> Run:
    body = entered(func)
    if body is not None:
        return lambda func, args, kwargs, op: body(*args, **kwargs)
    return gathered


OPS: dict[Callable[..., Any], Op] = {}
"""Every function met so far."""


def handle(
    cls: type,
    func: Callable[..., Any],
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """`DTensor.__torch_function__`."""
    op = OPS.get(func) or op_of(func)
    if op.run is not None:
        return op.run(func, args, kwargs or {}, op)
    try:
        plan = op.plans.get(op.key(*args, **kwargs) if kwargs else op.key(*args))
    except TypeError:
        plan = None
    if plan is None:
        return call(func, args, kwargs or {})
    if not plan.direct:
        plan.hits += 1
        return plan.run(func, args, kwargs or {})
    plan.hits += 1
    with Local():
        out = (plan.kernel or op.base)(*args, **(kwargs or {}))
    if type(out) is _Tensor and out.shape == plan.local_shape:
        out.__class__ = DTensor
        out._spec = plan.spec
        return out
    return plan.tag(out)


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` where the hot path found no plan: the long way, which ends in a plan."""
    op = op_of(func)
    if op.run is not None:
        return op.run(func, args, kwargs, op)
    args, kwargs, out = in_order(op, args, kwargs)
    if out is not None:
        return SPECIAL[_Tensor.copy_](out, call(func, args, kwargs))
    try:
        key = op.key(*args, **kwargs)
    except TypeError:
        # The arguments do not fit the rule's parameters: nothing is known of such a call.
        return _without_rule(func)(func, args, kwargs, op)
    plan: CallPlan | None = op.plans.get(key) or op.plans.recall(key)
    if plan is not None:
        plan.hits += 1
        return plan.run(func, args, kwargs)
    cache.note_miss()
    plan = make_plan(op, func, args, kwargs)
    if plan is None:
        return gathered(func, args, kwargs, op)
    result = plan.run(func, args, kwargs)
    op.plans.remember(key, plan)
    return result


def op_of(func: Callable[..., Any]) -> Op:
    """The Op of a function, made at first sight."""
    op = OPS.get(func)
    if op is None:
        op = OPS[func] = Op(func)
    return op


DTensor.__torch_function__ = classmethod(handle)  # type: ignore[assignment]
