"""Python floats as inputs of a captured graph.

While a step is captured, a float that it reads (a learning rate, an argument) is a symbolic float:
what is computed from it becomes part of the graph, and what the step branches on (`weight_decay !=
0`) a condition, under which the program may be used for other values. Where only a number will do
(an `eps`), the condition is that it has the same value.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.utils._sympy.printers import PythonPrinter

from partita.comm import user_line

from ..conditions import Condition
from ..program import Input
from .optimizers import ParamGroup
from .symbolic import NumberEnv

__all__ = ["NUMBER", "CapturedNumbers", "PlainNumbers"]

NUMBER = torch.zeros((), dtype=torch.float64)
"""A tensor of the metadata that a number has in a graph."""


@dataclass
class PlainNumbers:
    """Which floats are not traced, so that the program is for their values alone.

    Attributes:
        why: the reason for which none is traced; "" where they are.
        zeros: names of zeros that the step compares with something.
    """

    why: str = ""
    zeros: set[str] = field(default_factory=set)


class CapturedNumbers:
    """The floats of one capture run.

    Args:
        env: of the fake tensors.
        plain: floats that are not traced.

    Attributes:
        made: the inputs of floats that are traced, in order.
    """

    def __init__(self, env: NumberEnv, plain: PlainNumbers):
        self.env, self.plain = env, plain
        self.made: list[Input] = []
        self._symbols: dict[str, Input] = {}
        self._values: list[tuple[Input, float]] = []

    @property
    def inputs_met(self) -> list[Input]:
        """The inputs of all floats that were met, also of those that are not traced."""
        return [given for given, _ in self._values]

    def stand_in(self, given: Input, value: float) -> Any:
        """The symbolic float, an input of the graph, that stands for `value`; or `value` itself.

        Args:
            given: the input that it becomes.
        """
        if self.plain.why or not _is_traceable(value, given, self.plain.zeros):
            self._values.append((given, value))
            return value
        mode = get_proxy_mode()
        assert mode is not None
        found = self.env.symbolic(f"{given.name} {len(self.made)}", float(value))
        found.kind = type(value)
        graph = mode.tracer.graph
        inputs = graph.find_nodes(op="placeholder")
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
            node = graph.placeholder(f"number_{len(self.made)}")
        track_tensor_tree(found, fx.Proxy(node, mode.tracer), constant=None, tracer=mode.tracer)
        node.meta["val"] = found
        self.made.append(given)
        self._symbols[str(found.node.expr)] = given
        self._values.append((given, value))
        return found

    def asked_zeros(self) -> bool:
        """Has the step read or compared a traced zero? It stays plain from the next run on."""
        asked = set(map(id, self._list_asked()))
        found = {given.name for given, value in self._values if value == 0 and id(given) in asked}
        self.plain.zeros |= found
        return bool(found)

    def _list_asked(self) -> list[Input]:
        """The inputs of floats that were compared or read."""
        read = [g.expr for g in self.env.guards if type(g.expr).__name__ == "Equality"]
        guarded = {str(s) for expr in read for s in expr.free_symbols}
        return [given for s, given in self._symbols.items() if s in self.env.asked | guarded]

    def conditions(self) -> list[Condition]:
        """What the step has asked of its floats, as conditions."""
        found = []
        values = {id(given): value for given, value in self._values}
        symbolic = {id(given) for given in self.made}
        for i, guard in enumerate(self.env.guards):
            names = sorted(map(str, guard.expr.free_symbols))
            if not names or any(name not in self._symbols for name in names):
                continue  # it is about `.item()` of a tensor, which torch decides by itself
            numbers = tuple(self._symbols[name] for name in names)
            code = None  # a value that is read includes the sign of a zero
            if not _is_value(guard.expr):
                code = compile(PythonPrinter().doprint(guard.expr), "<condition>", "eval")
            said = _describe_condition(guard.expr, {n: g.name for n, g in self._symbols.items()})
            found.append(
                Condition(
                    said,
                    self.env.lines.get(i, ""),
                    numbers,
                    tuple(values[id(g)] for g in numbers),
                    code,
                    tuple(names),
                )
            )
        asked = self._list_asked()
        if asked:
            found.append(_make_finite_condition(asked, [values[id(given)] for given in asked]))
        for given, value in self._values:
            if id(given) not in symbolic:
                text = f"a Python number is read ({self.plain.why or f'{value} cannot be traced'})"
                found.append(Condition(text, user_line(), (given,), (value,), None))
        return found


def _make_finite_condition(numbers: list[Input], values: list[float]) -> Condition:
    """The condition that traced floats are finite: tracing takes `x == x`, for one, as true."""
    symbols = tuple(f"n{i}" for i in range(len(numbers)))
    total = " + ".join(f"{symbol} * 0" for symbol in symbols)  # nan of what is not finite
    code = compile(f"{total} == 0", "<condition>", "eval")
    said = "the program is for finite numbers"
    return Condition(said, user_line(), tuple(numbers), tuple(values), code, symbols)


def _is_traceable(value: float, given: Input, zeros: set[str]) -> bool:
    """Can a float be traced? Not NaN, infinities and -0.0, which symbolic numbers do not know.

    Nor a zero among an optimizer's settings other than the learning rate: it branches on those.
    """
    if value != 0:
        return math.isfinite(value)
    asked = type(given.home) is ParamGroup and given.path[0] != "lr"
    return math.copysign(1, value) > 0 and not asked and given.name not in zeros


def _is_value(expr: Any) -> bool:
    """Is a condition that one number has one value?"""
    return bool(type(expr).__name__ == "Equality" and expr.rhs.is_number and expr.lhs.is_symbol)


def _describe_condition(expr: Any, names: dict[str, str]) -> str:
    """A condition in words."""
    kind = type(expr).__name__
    if _is_value(expr):
        return f"{_name_symbols(expr.lhs, names)} is read as a number"
    sign = {"Equality": "==", "Unequality": "!="}.get(kind, getattr(expr, "rel_op", ""))
    text = (
        f"{_name_symbols(expr.lhs, names)} {sign} {_name_symbols(expr.rhs, names)}"
        if sign
        else str(expr)
    )
    return f"the program asks whether {_name_symbols(text, names)}"


def _name_symbols(expr: Any, names: dict[str, str]) -> str:
    text = re.sub(r"\b\d+\.\d+(e[+-]?\d+)?", lambda found: repr(float(found[0])), str(expr))
    return re.sub(r"\bzf\d+\b", lambda found: names.get(found[0], found[0]), text)
