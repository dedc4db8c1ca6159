"""OpInfo: the ops of torch, their forms, and samples of their arguments.

Torch's own list (OpInfo) has, for each op, arguments that it must accept. Ops have the names of
that list. An op's other forms have the same samples. They are named `add:method`, `add:inplace`,
`add:out`, ..., and `add:autocast` under bf16 autocast.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

UNSPECIFIED = {
    "empty_like": "memory that nobody wrote",
    "empty_permuted": "memory that nobody wrote",
    "empty_strided": "memory that nobody wrote",
    "empty": "memory that nobody wrote",
    "new_empty": "memory that nobody wrote",
    "new_empty_strided": "memory that nobody wrote",
    "resize_": "memory that nobody wrote, where it grows",
    "resize_as_": "memory that nobody wrote, where it grows",
}
"""Ops whose values are not specified: only shape and dtype are compared."""

_DTYPES = (torch.float32, torch.int64, torch.complex64)
"""Dtypes of samples; an op runs in the first of these that it accepts."""

_MOST_SAMPLES = 200
"""The most samples of an op that are considered."""


class Form:
    """One form of an op, such as the method `Tensor.add` or the in-place `add_`.

    Attributes:
        name: `op` or `op:variant`.
        info: torch's OpInfo.
        call: the function that is called with a sample's arguments.
        dtype: the dtype of the samples.
        writes: True if it writes its first operand, which must not be a leaf of autograd.
        fills: True if it is called with `out=`, and without gradients.
        unspecified: True if its values are not specified (`UNSPECIFIED`).
        autocast: True if it runs under bf16 autocast. The floating-point arguments are then bf16 in
            one sample, float32 in the next, and of both dtypes in a third.
    """

    def __init__(self, name: str, info: Any, call: Callable[..., Any], dtype: torch.dtype):
        op, _, variant = name.partition(":")
        self.name, self.info, self.call, self.dtype = name, info, call, dtype
        # `__radd__` writes nothing; a clone does it no harm.
        self.writes = info.name.endswith("_") or variant in ("inplace", "inplace_operator")
        self.fills = variant == "out"
        self.unspecified = op.split(".")[0] in UNSPECIFIED
        self.autocast = variant == "autocast"

    def samples(self) -> Iterator[Any]:
        """Yields torch's samples (arguments) for this form, generated with a fixed seed."""
        torch.default_generator.manual_seed(0)
        random.seed(0)
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.seed(0)
        graded = self.info.supports_autograd and self.dtype != torch.int64 and not self.fills
        # `sample_inputs` itself inspects the stack for its test, which takes longer than an op.
        return iter(self.info.sample_inputs_func(self.info, "cpu", self.dtype, graded))


def _narrow_sample(sample: Any, turn: int) -> Any:
    """Returns a sample with its float32 tensors in bfloat16: all, none, or every other."""
    sample, places = copy.copy(sample), itertools.count(turn // 3)

    def narrow(t: torch.Tensor) -> torch.Tensor:
        stays = turn % 3 == 1 or (turn % 3 == 2 and next(places) % 2 == 0)
        if stays or t.dtype is not torch.float32:
            return t
        return t.detach().to(torch.bfloat16).requires_grad_(t.requires_grad)

    sample.input, sample.args, sample.kwargs = map_tensors(
        (sample.input, sample.args, sample.kwargs), narrow
    )
    return sample


def _under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args, **kwargs)

    return run


@lru_cache(maxsize=1)
def _load_database() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Not public, and nothing public has it: torch's own list of its ops with samples.
        from torch.testing._internal.common_methods_invocations import op_db
    found: dict[str, Any] = {}
    for op in op_db:
        found[f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name] = op
    return found


def _find_variants(info: Any) -> dict[str, Callable[..., Any]]:
    found = {
        "autocast": _under_autocast(info.op),
        "method": info.method_variant,
        "inplace": info.inplace_variant,
        "operator": info.operator_variant,
        "inplace_operator": info.inplace_operator_variant,
        "out": info.op if info.supports_out else None,
        "aten": getattr(torch.ops.aten, info.aten_name or "", None),
    }
    for alias in info.aliases:
        found[f"{alias.name}"] = alias.op
    return {k: f for k, f in found.items() if f is not None and (f is not info.op or k == "out")}


def list_names(variants: bool = False, autocast: bool = False) -> list[str]:
    """Returns the names of the ops in torch's list (OpInfo), in its order.

    Args:
        variants: True returns the names of other forms (methods, in-place, `out=`) instead.
        autocast: True returns the names of ops under autocast instead.
    """
    if autocast:
        return [f"{name}:autocast" for name in _load_database()]
    if not variants:
        return list(_load_database())
    forms = ((name, v) for name, info in _load_database().items() for v in _find_variants(info))
    return [f"{name}:{v}" for name, v in forms if v != "autocast"]


@lru_cache(maxsize=8)
def form_of(name: str) -> Form:
    """Returns the form with this name, such as "add:inplace"."""
    op, _, variant = name.partition(":")
    info = _load_database()[op]
    call = _find_variants(info)[variant] if variant else info.op
    dtype = next((d for d in _DTYPES if d in info.supported_dtypes("cpu")), torch.float32)
    return Form(name, info, call, dtype)


def reason_to_skip(name: str) -> str:
    """Returns the reason why the op `name` is not in the sweep; "" if it is."""
    form = form_of(name)
    try:
        samples = list(itertools.islice(form.samples(), _MOST_SAMPLES))
    except Exception as error:
        return f"its samples raise {type(error).__name__}"
    if not samples:
        return "no samples"
    if not any(collect_tensors((s.input, s.args, s.kwargs)) for s in samples):
        return "no tensor arguments"
    return ""


def collect_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in `value` (nested tuples, lists and dicts), in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in collect_tensors(v)]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in collect_tensors(v)]
    return []


def map_tensors(value: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a copy of `value` (maybe nested) in which each tensor t is `convert(t)`."""
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, convert) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        new = [map_tensors(v, convert) for v in value]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return value


def choose_samples(form: Form, count: int) -> list[Any]:
    """Returns at most `count` samples of a form: different kinds first, small and shardable.

    Under autocast it returns exactly `count`, so samples may repeat with other dtypes.
    """

    def kind(sample: Any) -> Any:
        shape = [t.dim() for t in collect_tensors((sample.input, sample.args))]
        others = sorted(f"{k}={v}" for k, v in sample.kwargs.items() if not collect_tensors(v))
        return str((shape, others, [a for a in sample.args if not collect_tensors(a)]))

    def size(sample: Any) -> tuple[bool, int]:
        tensors = collect_tensors((sample.input, sample.args, sample.kwargs))
        dull = not any(t.dim() and t.numel() > 1 for t in tensors)
        return dull or any(t.numel() == 0 for t in tensors), sum(t.numel() for t in tensors)

    samples = [
        s
        for s in itertools.islice(form.samples(), _MOST_SAMPLES)
        if collect_tensors((s.input, s.args, s.kwargs))
    ]
    order = sorted(range(len(samples)), key=lambda i: (*size(samples[i]), i))
    first: list[Any] = []
    again: list[Any] = []
    seen = set()
    for i in order:
        (again if (k := kind(samples[i])) in seen else first).append(samples[i])
        seen.add(k)
    found = (first + again)[:count]
    if form.autocast and found:
        return [_narrow_sample(found[i % len(found)], i) for i in range(count)]
    return found
