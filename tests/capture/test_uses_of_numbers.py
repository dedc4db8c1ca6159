"""Is a number that a captured step has read itself, whatever Python makes of it?"""

from __future__ import annotations

import array
import bisect
import copy
import ctypes
import datetime
import decimal
import fractions
import hashlib
import io
import itertools
import json
import math
import numbers
import operator
import pickle
import statistics
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from tests.programs.refused import each_rank


def printed(n: Any) -> str:
    out = io.StringIO()
    print(n, file=out)
    return out.getvalue()


def matched(n: Any) -> int:
    match n:
        case 5:
            return 2
        case 7:
            return 3
        case int():
            return 4
    return 5


def in_order(n: Any) -> Any:
    items = [n, 6, 1]
    items.sort()
    return items[1]


USES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "text": {
        "f-string": lambda n: len(f"{n}"),
        "str": lambda n: len(str(n)),
        "repr": lambda n: len(repr(n + 1)),
        "format": lambda n: len(format(n, ">4")),
        "%d": lambda n: len("%d" % n),  # noqa: UP031
        "%r": lambda n: len("%r" % n),  # noqa: UP031
        ".format": lambda n: len("{} {n}".format(n, n=n)),  # noqa: UP032
        "join": lambda n: len(",".join(map(str, [n, n]))),
        "print": lambda n: len(printed(n)),
        "of a list": lambda n: len(str([n, {"a": n}, (n,)])),
        "of a truth value": lambda n: len(repr(n > 6)),
        "of a float": lambda n: float(f"{n / 3:.2f}"),
        "compared": lambda n: 2 if str(n) < "6" else 3,
        "a key": lambda n: {"5": 2, "7": 9}.get(str(n), 1),
        "read again": lambda n: int(str(n) + "0", 16),
        "a width": lambda n: len(f"{3:{n}d}") + len("a".ljust(n)),
        "hashed": lambda n: hashlib.md5(str(n).encode()).digest()[0],
    },
    "containers": {
        "hash": lambda n: hash(n) % 7,
        "a key": lambda n: {5: 2, 7: 3}.get(n, 1),
        "keys": lambda n: len({n: 1, 5: 2, 7: 3}) + len({n, 5}),
        "in": lambda n: (n in [5, 6]) + 2 * (n in {5, 15}) + 4 * (n in range(6)),
        "index": lambda n: [7, 5, 15].index(n) + [7, 5, 5].count(n),
        "sorted": lambda n: sorted([n, 6, 1])[1] + in_order(n),
        "min, max": lambda n: min(n, 6) + max([n, 6]),
        "range": lambda n: sum(range(n)) + len([*reversed(range(n))]),
        "slice": lambda n: sum([1, 2, 3, 4, 5, 6, 7, 8][:n]),
        "repeated": lambda n: len([1] * n) + len("a" * n),
        "itertools": lambda n: len([*itertools.islice(range(20), n)]),
        "bisect": lambda n: bisect.bisect([1, 4, 6, 8], n),
        "compared": lambda n: 2 * ((n, 1) == (5, 1)) + ((n, 1) < (6, 1)),
        "unpacked": lambda n: (lambda *a: len(a))(*range(n)),
    },
    "truth": {
        "a chain": lambda n: 2 if 4 < n < 6 else 3,
        "a product": lambda n: (n > 6) * 2 + 1,
        "a sum": lambda n: sum([n > 6, n > 4]),
        "is": lambda n: 2 if (n > 6) is True else 3,
        "not": lambda n: 2 if not n - 5 else 3,
        "match": matched,
        "type": lambda n: 2 if type(n) is int and isinstance(n, numbers.Integral) else 3,
    },
    "arithmetic": {
        "int(n / 2)": lambda n: int(n / 2),
        "round": lambda n: round(n) + round(n / 3, 1) + round(n / 2),
        "divmod": lambda n: sum(divmod(n, 3)),
        "pow": lambda n: pow(n, 2, 7) + pow(n, 2),
        "floor": lambda n: math.floor(n) + math.ceil(n / 2) + math.trunc(n / 4),
        "math": lambda n: math.sqrt(n) + math.sin(n) + math.log2(n) + math.fmod(n, 3),
        "parts": lambda n: math.modf(n / 4)[0] + math.frexp(n)[1],
        "whole": lambda n: math.gcd(n, 10) + math.isqrt(n) + math.comb(n, 2),
        "several": lambda n: math.prod([n, 2]) + math.fsum([n, 2]) + math.dist([n], [1]),
        "tests": lambda n: math.isclose(n, 5) + 2 * math.isnan(n) + math.copysign(1, n),
        "bits": lambda n: n.bit_length() + int(hex(n), 16) + len(bin(n)),
        "ratio": lambda n: n.as_integer_ratio()[0] + n.numerator + n.real + float(n).is_integer(),
        "index": lambda n: operator.index(n) + complex(n).real + ord(chr(n)),
        "statistics": lambda n: statistics.mean([n, 2]),
        "fractions": lambda n: float(fractions.Fraction(n)) + float(decimal.Decimal(n)),
    },
    "bytes and copies": {
        "bytes": lambda n: len(bytes(n)) + bytes([n])[0] + n.to_bytes(2, "big")[1],
        "struct": lambda n: struct.pack("<i", n)[0] + struct.pack("<d", n)[6],
        "array": lambda n: array.array("d", [n])[0] + ctypes.c_double(n).value,
        "json": lambda n: len(json.dumps({"a": n})),
        "pickle": lambda n: pickle.loads(pickle.dumps([n]))[0],
        "copy": lambda n: copy.copy(n) + copy.deepcopy([n])[0],
        "timedelta": lambda n: datetime.timedelta(seconds=n).total_seconds(),
        "numpy": lambda n: float(np.sqrt(n) + np.float64(2) * n + np.where(n > 6, 2, 3)),
        "numpy's arrays": lambda n: float(np.arange(n).sum() + np.array([n, 1]).sum()),
    },
}
PROGRAMS = {f"{kind}: {name}": use for kind, uses in USES.items() for name, use in uses.items()}
CALLS = (5, 7, 15, 5)
X = torch.arange(6, dtype=torch.float64).view(3, 2) + 1


def run(name: str, mesh: Any = None) -> list[torch.Tensor]:
    step = pt.compile(lambda x, n: x * PROGRAMS[name](n.item()), backend="graph")
    found = []
    for value in CALLS:
        x, n = X, torch.tensor(value)
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
            n = pt.distribute_tensor(torch.stack([n, n]), mesh, [pt.Shard(0)])[1]
        out = step(x, n)
        found.append(out.full_tensor() if mesh is not None else out)
    return found


def check(name: str, found: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, [X * PROGRAMS[name](n) for n in CALLS], rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:print at")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_number_that_was_read_is_what_it_is_in_eager(name: str) -> None:
    check(name, run(name))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:print at")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_number_that_was_read_of_a_split_tensor_is_what_it_is_in_eager(name: str) -> None:
    for found in each_rank(lambda mesh: run(name, mesh), dp=2):
        check(name, found)


OF_FLOATS = {
    "text": lambda n: len(f"{n}"),
    "a key": lambda n: {5.5: 2}.get(n, 1),
    "json": lambda n: len(json.dumps(n)),
    "struct": lambda n: struct.pack("<d", n)[6],
    "Decimal": lambda n: float(decimal.Decimal(n)),
    "timedelta": lambda n: datetime.timedelta(seconds=n).total_seconds(),
    "math": lambda n: math.sin(n),
    "int": lambda n: int(n),
    "round": lambda n: round(n),
}


@pytest.mark.parametrize("name", OF_FLOATS)
def test_a_float_that_each_call_changes_is_refused_where_its_value_is_needed(name: str) -> None:
    step = pt.compile(lambda x, n: x * OF_FLOATS[name](n.item()), backend="graph")
    with pytest.raises(pt.CaptureError, match=rf"reads a value.*{__name__[-15:]}|step computes"):
        step(X, torch.tensor(5.5))


def test_a_half_is_guarded_by_its_bits() -> None:
    step = pt.compile(lambda x, n: x * round(n.sum().item() / 2, 3), backend="graph")
    for value in (3, 4, 3, -1, 0):
        n = torch.tensor([value, 0])
        torch.testing.assert_close(step(X, n), X * round(value / 2, 3), rtol=0, atol=0)
    assert len(step.reasons) == 4
    assert "gave 2.0 in place of" in step.reasons[1]
