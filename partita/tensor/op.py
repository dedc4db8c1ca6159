"""What is known of one function: its op, its rule, its key, its plans?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partita.rules import parse

from .cache import Plans
from .keys import KeyFunction, declared_key, operand_key
from .names import Form, form_of, parameter_names

__all__ = ["Op", "Run"]


class Op:
    """One function and the plans of its calls.

    Attributes:
        func, form: the function, and what it is called and known as.
        base: what runs on the shard.
        key: from a call's arguments, the key of its plan.
        plans: the young generation of plans, by key; `find` gives one, or None.
        run: what to do instead of looking a plan up, for what is no op or has no rule.
    """

    __slots__ = ("base", "find", "form", "func", "key", "plans", "run")

    def __init__(self, func: Callable[..., Any]):
        self.func = func
        self.plans = Plans(getattr(func, "__name__", "?"))
        self.find = self.plans.get
        self.learn(form_of(func))

    def learn(self, form: Form) -> None:
        """Take the function for `form`, and forget the plans made when it was another."""
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
                names = parameter_names(self.func, len(parse(rule.text).terms))
                self.key = operand_key(names, flagged)
            else:
                self.key = declared_key(rule.params, flagged)


Run = Callable[[Callable[..., Any], Any, dict[str, Any], Op], Any]
"""`run(func, args, kwargs, op)`."""


def _no_key(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("a function without a rule has no key")
