"""Programs that are given another number than at capture: one entry for each kind of question."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .state import CHANGES, Change

__all__: list[str] = []


def number(name: str, read: Callable[[Any, Any], Any], *values: Any) -> None:
    """The first value in two calls, the second in two: as an argument, and as an attribute."""

    class Holder:
        a = values[0]

    def attribute() -> Change:
        held = Holder()
        held.a = values[0]
        return Change(lambda x: read(x, held.a), lambda: setattr(held, "a", values[1]))

    CHANGES[f"{name}_in_an_argument"] = lambda: Change(
        read, lambda: None, arguments=lambda i: (values[i // 2],)
    )
    CHANGES[f"{name}_in_an_attribute"] = attribute


def inverse(a: float) -> float:
    try:
        return 1 / a
    except ZeroDivisionError:
        return 7.0


def power(a: float, b: float) -> float:
    try:
        return a**b
    except ZeroDivisionError:
        return 7.0


def filled(a: float) -> torch.Tensor:
    return torch.full((2, 3), a)


for name, was, now in (("zero", 0.0, -0.0), ("one", 1.0, 0.0)):
    number(f"minus_{name}", lambda x, a: filled(-a) if a <= 0 else x, was, now)
    number(f"the_sign_of_minus_{name}", lambda x, a: x * math.copysign(3, -a), was, now)
    number(f"the_text_of_minus_{name}", lambda x, a: x * len(str(-a)), was, now)
    number(f"a_tensor_of_minus_{name}", lambda x, a: x / torch.tensor(-a), was, now)
number("a_product_that_is_minus_zero", lambda x, a: filled(a * -3) if a in (0, 1) else x, 0.0, 1.0)
number("a_number_that_equals_itself", lambda x, a: x * (2 if a == a else 5), 1.0, math.nan)
number("a_number_that_is_below", lambda x, a: x * (5 if not a < 3 else 2), 1.0, math.nan)
number("a_number_that_is_infinite", lambda x, a: x * (2 if a == math.inf else 5), 1.0, math.inf)
number("a_number_that_cannot_divide", lambda x, a: x * inverse(a), 1.0, 0.0)
number("a_float_for_an_int", lambda x, a: x * (2 if isinstance(a, int) else 9), 2, 2.0)
number("an_int_for_true", lambda x, a: x * (5 if a is True else 2), True, 1)
number("a_float_of_numpy", lambda x, a: x * (2 if type(a) is float else 5), 1.0, np.float64(1))
number("a_power_below_zero", lambda x, a: x * power(a, -1.0), 2.0, 0.0)
number("a_root_of_a_number", lambda x, a: x * abs(a**0.5), 2.0, -2.0)
number("an_exponent", lambda x, a: x * power(0.0, a), 2.0, -2.0)
number("a_product_with_zero", lambda x, a: filled(a * 0.0), 2.0, -2.0)
number("a_zero_times_a_zero", lambda x, a: filled(0.0 * a), 0.0, -0.0)
number("a_zero_that_is_divided", lambda x, a: filled(0.0 / a), 2.0, -2.0)
number("a_remainder", lambda x, a: x * (a % 1.5) + 7 // a, 2.0, 3.0)
number("a_number_cut_off", lambda x, a: x * int(a) + round(a, 1) + math.floor(a), 2.25, -3.75)
