"""Does an op on DTensors give what it gives on one device?

The samples are torch's own (OpInfo). A case is one op, one sample and one class of arguments: every
tensor argument becomes a DTensor of that class, value and gradients are computed on all ranks and
compared with plain tensors.

- replicated: whole on every rank.
- even: sharded along a dimension of even size (along any, where none is even).
- uneven: sharded along a dimension of odd size, so that pieces are unequal or empty.
- partial: pending sums of lopsided shares, 2x and -x (exact in binary); whole where not floating.

Tolerance: |a - b| <= 1e-4 |b| + 1e-5 max(1, max |b|), or the op's own OpInfo tolerance where wider.
"""

from __future__ import annotations

import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

import partita as pt

__all__ = ["CLASSES", "Outcome", "Reference", "names_of_ops", "references", "run_case", "why_not"]

CLASSES = ("replicated", "even", "uneven", "partial")
OUTCOMES = ("right", "raise", "wrong", "crash", "hang")
"""From good to bad."""

RTOL, ATOL = 1e-4, 1e-5

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

_MOST_SAMPLES = 200
"""Samples that are looked at, per op, to choose from."""


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        kind: one of OUTCOMES.
        detail: what was wrong or raised, in a line.
    """

    kind: str
    detail: str = ""

    def worse(self, other: Outcome) -> Outcome:
        return other if OUTCOMES.index(other.kind) > OUTCOMES.index(self.kind) else self


@dataclass
class Reference:
    """One sample of an op and what one device makes of it.

    Attributes:
        call: `call(convert)` runs the op with each tensor argument put through `convert` and
            returns the output and the converted tensors.
        outputs: each tensor of the result, and each other value in it.
        gradients: of each tensor argument; None for one without.
        seeds: for each output tensor its cotangent, or None.
    """

    call: Callable[[Callable[[int, torch.Tensor], torch.Tensor]], tuple[Any, list[torch.Tensor]]]
    outputs: list[Any] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    seeds: list[torch.Tensor | None] = field(default_factory=list)


# -- which ops, which samples ----------------------------------------------------------------------


@lru_cache(maxsize=1)
def _database() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    found: dict[str, Any] = {}
    for op in op_db:
        found[f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name] = op
    return found


def names_of_ops() -> list[str]:
    """The name of every OpInfo, in torch's order."""
    return list(_database())


def why_not(name: str) -> str:
    """Why an op is not in the sweep; "" if it is."""
    op = _database()[name]
    if torch.float32 not in op.supported_dtypes("cpu"):
        return "no float32 on the CPU"
    try:
        samples = list(itertools.islice(_samples(op), _MOST_SAMPLES))
    except Exception as error:
        return f"its samples raise {type(error).__name__}"
    if not samples:
        return "no float32 samples"
    if not any(_leaves((s.input, s.args, s.kwargs)) for s in samples):
        return "no tensor arguments"
    return ""


def _samples(op: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    return op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _leaves(v)]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _leaves(v)]
    return []


def _mapped(value: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, dict):
        return {k: _mapped(v, convert) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        new = [_mapped(v, convert) for v in value]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return value


def _chosen(op: Any, count: int) -> list[Any]:
    """`count` samples: small ones that can be sharded first, and each with other arguments."""

    def kind(sample: Any) -> Any:
        shape = [t.dim() for t in _leaves((sample.input, sample.args))]
        others = sorted(f"{k}={v}" for k, v in sample.kwargs.items() if not _leaves(v))
        return str((shape, others, [a for a in sample.args if not _leaves(a)]))

    def size(sample: Any) -> tuple[bool, int]:
        tensors = _leaves((sample.input, sample.args, sample.kwargs))
        dull = not any(t.dim() and t.numel() > 1 for t in tensors)
        return dull or any(t.numel() == 0 for t in tensors), sum(t.numel() for t in tensors)

    samples = [
        s
        for s in itertools.islice(_samples(op), _MOST_SAMPLES)
        if _leaves((s.input, s.args, s.kwargs))
    ]
    order = sorted(range(len(samples)), key=lambda i: (*size(samples[i]), i))
    first, again, seen = [], [], set()
    for i in order:
        (again if (k := kind(samples[i])) in seen else first).append(samples[i])
        seen.add(k)
    return (first + again)[:count]


# -- one device ------------------------------------------------------------------------------------


def references(name: str, count: int) -> list[Reference]:
    """Up to `count` samples of an op that run on one device, with their results."""
    op = _database()[name]
    found = []
    for sample in _chosen(op, count):
        reference = Reference(_caller(op, sample))
        try:
            out, leaves = reference.call(lambda i, t: t.detach().clone())
            reference.outputs = _flat(out)
            generator = torch.Generator().manual_seed(1)
            for t in reference.outputs:
                graded = isinstance(t, torch.Tensor) and t.requires_grad
                reference.seeds.append(
                    torch.randn(t.shape, generator=generator, dtype=t.dtype) if graded else None
                )
            reference.gradients = _backward(reference.outputs, reference.seeds, leaves)
        except Exception:
            continue  # what one device refuses is not for us to get right
        reference.outputs = [
            t.detach().clone() if isinstance(t, torch.Tensor) else t for t in reference.outputs
        ]
        found.append(reference)
    return found


def _caller(op: Any, sample: Any) -> Callable[..., tuple[Any, list[torch.Tensor]]]:
    def call(convert: Callable[[int, torch.Tensor], torch.Tensor]) -> Any:
        leaves: list[torch.Tensor] = []

        def one(t: torch.Tensor) -> torch.Tensor:
            new = convert(len(leaves), t)
            leaves.append(new.requires_grad_(t.requires_grad))
            return new

        input, args, kwargs = _mapped((sample.input, sample.args, sample.kwargs), one)
        if op.is_factory_function and "device" not in kwargs:
            kwargs["device"] = "cpu"
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # An op that writes its operand gets one that is no leaf.
            if op.name.endswith("_") and isinstance(input, torch.Tensor) and input.requires_grad:
                input = input.clone()
            out = sample.output_process_fn_grad(op.op(input, *args, **kwargs))
        return out, leaves

    return call


def _flat(out: Any) -> list[Any]:
    if isinstance(out, dict):
        out = list(out.values())
    if isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
        return [t for o in out for t in _flat(o)]
    return [out]


def _backward(
    outputs: list[Any], seeds: list[torch.Tensor | None], leaves: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    loss: Any = None
    for t, seed in zip(outputs, seeds, strict=True):
        if seed is None:
            continue
        part = (t * seed).sum()
        part = torch.real(part) if part.is_complex() else part
        loss = part if loss is None else loss + part
    if loss is not None and loss.requires_grad:
        loss.backward()
    return [t.grad if t.requires_grad else None for t in leaves]


# -- many ranks ------------------------------------------------------------------------------------


def run_case(mesh: Any, name: str, number: int, reference: Reference, klass: str) -> Outcome:
    """Run one case as one rank of `mesh` (one axis) and compare. Called on every rank alike."""

    def convert(i: int, t: torch.Tensor) -> torch.Tensor:
        return _distributed(t.detach(), mesh, klass, number + i)

    try:
        out, leaves = reference.call(convert)
        outputs = _flat(out)
        if len(outputs) != len(reference.outputs):
            want = f"{len(reference.outputs)} outputs"
            return Outcome("wrong", f"{len(outputs)} outputs instead of {want}")
        unspecified = name.split(".")[0] in UNSPECIFIED
        graded = [] if unspecified else _backward(outputs, reference.seeds, leaves)
        got = [_whole(t) for t in outputs]
        gradients = [_whole(g) for g in graded]
    except pt.LayoutError as error:
        text = _line(error)
        bad = "does not hold" in text or "where its rule speaks of" in text
        out_of_step = any(s in text for s in ("ranks ask for", "ranks wait", "which has ended"))
        return Outcome("hang" if out_of_step else "crash" if bad else "raise", text)
    except NotImplementedError as error:
        return Outcome("raise", _line(error))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("crash", f"{_line(error)} ({frame.filename.split('/')[-1]}:{frame.lineno})")
    tolerance = _tolerance(name)
    for i, (mine, right) in enumerate(zip(got, reference.outputs, strict=True)):
        if isinstance(right, torch.Tensor) and not isinstance(outputs[i], pt.DTensor):
            return Outcome("wrong", f"output {i} is a {type(outputs[i]).__name__}, not a DTensor")
        if fault := _difference(mine, right, *tolerance, unspecified):
            return Outcome("wrong", f"output {i}: {fault}")
    for i, mine in enumerate(gradients):
        right = reference.gradients[i]
        if mine is None and right is None:
            continue
        if mine is None or right is None:
            # A zero gradient and none say the same.
            there = mine if right is None else right
            if there.abs().max() == 0 if there.numel() else True:
                continue
            return Outcome("wrong", f"gradient {i}: {'missing' if mine is None else 'not wanted'}")
        if fault := _difference(mine, right, *tolerance, False):
            return Outcome("wrong", f"gradient {i}: {fault}")
    return Outcome("right")


def _distributed(t: torch.Tensor, mesh: Any, klass: str, turn: int) -> torch.Tensor:
    floating = t.is_floating_point() or t.is_complex()
    if klass == "partial" and floating:
        first = mesh.get_local_rank() == 0
        with torch.no_grad():
            exact = torch.isfinite(t) & (t.abs() < 1e30)
            share = torch.where(exact, 2 * t if first else -t, t if first else torch.zeros_like(t))
        return pt.DTensor.from_local(share, mesh, [pt.Partial("sum")], run_check=False)
    placement: Any = pt.Replicate()
    if t.dim() and klass in ("even", "uneven"):
        even = [d for d, n in enumerate(t.shape) if n and n % 2 == 0]
        odd = [d for d, n in enumerate(t.shape) if n % 2] or [
            d for d, n in enumerate(t.shape) if not n
        ]
        # An odd size above 1 shards unequally, a size of 1 leaves a rank with nothing.
        odd = [d for d in odd if t.shape[d] > 1] or odd if turn % 3 else odd
        dims = (even or odd) if klass == "even" else (odd or even)
        placement = pt.Shard(dims[turn % len(dims)])
    return pt.distribute_tensor(t, mesh, [placement], src_data_rank=None)


def _whole(value: Any) -> Any:
    if isinstance(value, pt.DTensor):
        with torch.no_grad():
            return value.full_tensor().detach()
    return value


def _tolerance(name: str) -> tuple[float, float]:
    """The widest that OpInfo gives the op for float32, at least ours."""
    rtol, atol = RTOL, ATOL
    for decorator in _database()[name].decorators:
        for kind, given in getattr(decorator, "overrides", {}).items():
            if kind == torch.float32:
                rtol, atol = max(rtol, given.rtol), max(atol, given.atol)
    return rtol, atol


def _difference(mine: Any, right: Any, rtol: float, atol: float, only_kind: bool) -> str:
    """What is different; "" if nothing is."""
    if not isinstance(right, torch.Tensor):
        if isinstance(right, float):
            same = abs(mine - right) <= atol + rtol * abs(right) or (mine != mine != right != right)
        else:
            same = type(mine) is type(right) and mine == right
        return "" if same else f"{mine!r:.60} instead of {right!r:.60}"
    with Local(), torch.no_grad():
        if tuple(mine.shape) != tuple(right.shape):
            return f"shape {tuple(mine.shape)} instead of {tuple(right.shape)}"
        if mine.dtype != right.dtype:
            return f"{mine.dtype} instead of {right.dtype}"
        if only_kind or right.numel() == 0:
            return ""
        mine, right = mine.to_dense(), right.to_dense()
        if not (right.is_floating_point() or right.is_complex()):
            return "" if torch.equal(mine, right) else "other values"
        finite = right[torch.isfinite(right)].abs()
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        if torch.allclose(mine, right, rtol, atol * scale, equal_nan=True):
            return ""
        return f"off by {float((mine - right).abs().max()):.3g} of {scale:.3g}"


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    if len(text) > 1 and isinstance(error, pt.LayoutError):
        text[0] += " | " + " ".join(text[1:])[:160]
    return f"{type(error).__name__}: {text[0][:240]}"
