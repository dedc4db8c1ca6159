"""Programs that are given other arguments than before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from .containers import Color, Frozen, Plain, Settings
from .state import CHANGES, Change, change, having, setting


def argued(name: str, *values: Any, read: Callable[[Any], Any] = lambda v: v) -> None:
    """An argument beside the tensor: the first in two calls, the second in two."""
    CHANGES[name] = lambda: Change(
        lambda x, v: x * read(v), lambda: None, arguments=lambda i: (values[i // 2],)
    )


argued("an_argument", 2, 5)
argued("a_float_argument", 2.0, 5.0)
argued("an_argument_that_becomes_true", 1, True, read=lambda v: 3 if v is True else 2)
argued("an_argument_that_becomes_minus_zero", 0.0, -0.0)
argued("an_argument_that_becomes_nan", 1.0, math.nan)
argued("an_argument_in_a_dict", {"k": 2}, {"k": 5}, read=lambda v: v["k"])
argued("an_argument_dict_with_another_key", {"k": 2}, {"j": 5}, read=lambda v: v.get("k", 3))
argued("an_argument_list_that_is_longer", [1, 2], [1, 2, 3], read=sum)
argued("an_argument_of_a_dataclass", Settings(2.0), Settings(5.0), read=lambda v: v.scale)
argued("an_argument_of_a_frozen_dataclass", Frozen(2), Frozen(5), read=lambda v: v.scale)
argued("an_argument_object", Plain(k=2), Plain(k=5), read=lambda v: v.k)
argued("an_array_as_an_argument", np.ones(3), np.full(3, 5.0), read=lambda v: float(v[0]))
argued(
    "a_long_array_as_an_argument",
    np.ones(5000),
    np.concatenate([np.ones(2500), np.full(2500, 3.0)]),
    read=lambda v: float(v.sum()),
)
argued("an_argument_function", torch.sin, torch.cos, read=lambda v: v(torch.ones(())))
argued("an_argument_string", "a", "abc", read=len)
argued("an_argument_slice", slice(0, 1), slice(0, 3), read=lambda v: sum([1, 2, 3][v]))
argued("an_argument_enum", Color.RED, Color.BLUE, read=lambda v: v.value)
argued("an_argument_set", {1}, {1, 2}, read=len)


@change
def an_argument_object_that_is_changed():
    held = Plain(k=2)
    return Change(lambda x, v: x * v.k, lambda: having("k", 5)(held), arguments=lambda i: (held,))


@change
def an_array_argument_that_is_written():
    held = np.ones(3)
    return Change(
        lambda x, v: x * float(v[1]), lambda: setting(1, 5)(held), arguments=lambda i: (held,)
    )


@change
def a_module_as_an_argument():
    held = nn.Dropout(0.0)
    return Change(lambda x, m: m(x), lambda: having("p", 1.0)(held), arguments=lambda i: (held,))


@change
def another_module_as_an_argument():
    both = [nn.Tanh(), nn.ReLU()]
    return Change(lambda x, m: m(x), lambda: None, arguments=lambda i: (both[i // 2],))
