"""Cases of ops: one op on DTensors, compared with its result on one device.

A case is one op, one sample and one class of arguments: every tensor argument becomes a DTensor of
that class (see `op_layouts`). Results, gradients, and the operands after the call are compared with
a call of plain tensors, on every rank.

Elements may differ by 1e-4 of their size plus 1e-5 of the largest element. The size of the largest
counts as 1 to 1,000. A larger difference is right if the element is closer to the result in
double precision than the result on one device is. An op may instead raise a LayoutError that gives
a reason or a fix, the same on every rank. Any other exception is a crash.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

import partita as pt

from .op_layouts import distribute_argument
from .opinfo import Form, choose_samples, form_of, map_tensors

OUTCOMES = ("right", "raise", "wrong", "crash", "hang")
"""The possible outcomes of a case, from best to worst."""

RTOL, ATOL, LARGEST_SCALE = 1e-4, 1e-5, 1e3


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test case: one op with one sample and one class of layouts.

    Attributes:
        kind: one of OUTCOMES.
        detail: a line about the difference or the error.
    """

    kind: str
    detail: str = ""

    def worse(self, other: Outcome) -> Outcome:
        return other if OUTCOMES.index(other.kind) > OUTCOMES.index(self.kind) else self


def merge_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Returns the worst of the ranks' outcomes of one case.

    If the worst is an error, but only some ranks raise one, or different ones, it counts as a
    crash.
    """
    worst = outcomes[0]
    for o in outcomes[1:]:
        worst = worst.worse(o)
    if worst.kind == "raise":
        if any(o.kind != "raise" for o in outcomes):
            return Outcome("crash", f"raised on some ranks only: {worst.detail}")
        if len({o.detail for o in outcomes}) > 1:
            return Outcome("crash", f"ranks raise different errors: {worst.detail}")
    return worst


Convert = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass
class Reference:
    """One sample of an op, with its results on one device, which count as right.

    Attributes:
        call: `call(convert)` runs the op with `convert(i, t)` in place of its i-th tensor argument
            t. It returns the output and the converted tensors.
        outputs: the leaves of the result: tensors and other values.
        graded: for each output, True if it requires grad.
        operands: the value of each tensor argument after the call.
        gradients: the gradient of each tensor argument, or None.
        seeds: for each output, the gradient with which backward starts; None if it needs none.
        narrow: True if the op runs under autocast. Errors may then be as large as bfloat16's.
    """

    call: Callable[[Convert], tuple[Any, list[torch.Tensor]]]
    outputs: list[Any] = field(default_factory=list)
    graded: list[bool] = field(default_factory=list)
    operands: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    seeds: list[torch.Tensor | None] = field(default_factory=list)
    narrow: bool = False

    @cached_property
    def exact(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The outputs, operands and gradients on one device, computed in double precision."""
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        if self.narrow:  # which leaves float64 as it is
            wide[torch.bfloat16] = torch.float64

        def convert(i: int, t: torch.Tensor) -> torch.Tensor:
            return t.detach().to(wide.get(t.dtype, t.dtype), copy=True)

        out, leaves = self.call(convert)
        outputs = _flatten_outputs(out)
        seeds = [s if s is None else convert(0, s) for s in self.seeds]
        operands = [t.detach().clone() for t in leaves]
        return outputs, operands, _run_backward(outputs, seeds, leaves)


# -- one device ------------------------------------------------------------------------------------


def references(name: str, count: int) -> tuple[list[Reference], int]:
    """Returns up to `count` samples of the op `name`, with their results on one device.

    Also returns the number of samples that raise on one device. `opinfo.list_names` lists the
    names.
    """
    form = form_of(name)
    found, refused = [], 0
    for sample in choose_samples(form, count):
        try:
            found.append(reference_of(form, sample))
        except Exception:
            refused += 1  # torch itself refuses this sample
    return found, refused


def reference_of(form: Form, sample: Any) -> Reference:
    """Returns a sample of `form`, with its results on one device. Raises what the op raises."""
    reference = Reference(_make_call(form, sample), narrow=form.autocast)
    out, leaves = reference.call(lambda i, t: t.detach().clone())
    reference.outputs = _flatten_outputs(out)
    reference.operands = [t.detach().clone() for t in leaves]
    generator = torch.Generator().manual_seed(1)
    for t in reference.outputs:
        graded = isinstance(t, torch.Tensor) and t.requires_grad
        reference.graded.append(graded)
        reference.seeds.append(
            torch.randn(t.shape, generator=generator, dtype=t.dtype) if graded else None
        )
    reference.gradients = _run_backward(reference.outputs, reference.seeds, leaves)
    reference.outputs = [
        t.detach().clone() if isinstance(t, torch.Tensor) else t for t in reference.outputs
    ]
    return reference


def _make_call(form: Form, sample: Any) -> Callable[[Convert], tuple[Any, list[torch.Tensor]]]:
    fills: Any = None
    if form.fills:  # what the op returns without `out=` has the shapes that `out` must have
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fills = form.call(sample.input, *sample.args, **sample.kwargs)

    def call(convert: Convert) -> Any:
        leaves: list[torch.Tensor] = []

        def one(t: torch.Tensor) -> torch.Tensor:
            new = convert(len(leaves), t)
            leaves.append(new.requires_grad_(t.requires_grad))
            return new

        input, args, kwargs = map_tensors((sample.input, sample.args, sample.kwargs), one)
        if form.fills:
            # Something else than the result, so that it must be written.
            kwargs["out"] = (
                tuple(map(one, map(torch.zeros_like, fills)))
                if isinstance(fills, (tuple, list))
                else one(torch.zeros_like(fills))
            )
        if form.info.is_factory_function and "device" not in kwargs:
            kwargs["device"] = "cpu"
        torch.default_generator.manual_seed(0)  # not those of GPUs, which takes a millisecond
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if form.writes and isinstance(input, torch.Tensor) and input.requires_grad:
                input = input.clone()
            out = sample.output_process_fn_grad(form.call(input, *args, **kwargs))
        return out, leaves

    return call


def _flatten_outputs(out: Any) -> list[Any]:
    if isinstance(out, dict):
        out = list(out.values())
    if isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
        return [t for o in out for t in _flatten_outputs(o)]
    return [out]


def _run_backward(
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
    """Returns the outcome of one case on this rank of `mesh`. Must be called on all ranks.

    Args:
        name: the name of the op, such as "add:inplace".
        number: a number that selects layouts of the class.
        reference: the sample, and its results on one device.
        klass: the class of layouts, one of `op_layouts.CLASSES`.
    """

    def convert(i: int, t: torch.Tensor) -> torch.Tensor:
        return distribute_argument(t, mesh, klass, number + i, first=i == 0)

    unspecified = form_of(name).unspecified
    try:
        out, leaves = reference.call(convert)
        outputs = _flatten_outputs(out)
        if len(outputs) != len(reference.outputs):
            want = f"{len(reference.outputs)} outputs"
            return Outcome("wrong", f"{len(outputs)} outputs instead of {want}")
        operands = [_full_value(t) for t in leaves]
        graded = [] if unspecified else _run_backward(outputs, reference.seeds, leaves)
        got = [_full_value(t) for t in outputs]
        gradients = [_full_value(g) for g in graded]
    except pt.LayoutError as error:
        return _outcome_of_error(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(
            "crash", f"{_format_error(error)} ({frame.filename.split('/')[-1]}:{frame.lineno})"
        )
    fault = (
        _find_output_fault(outputs, got, reference, unspecified)
        or _find_operand_fault(operands, reference, unspecified)
        or _find_gradient_fault(gradients, reference)
    )
    return Outcome("wrong", fault) if fault else Outcome("right")


def _find_output_fault(
    outputs: list[Any], got: list[Any], reference: Reference, unspecified: bool
) -> str:
    """Returns what is wrong with the results; "" if nothing is. `got` has their whole values."""
    for i, (mine, right) in enumerate(zip(got, reference.outputs, strict=True)):
        if isinstance(right, torch.Tensor):
            if not isinstance(outputs[i], pt.DTensor):
                return f"output {i} is a {type(outputs[i]).__name__}, not a DTensor"
            if outputs[i].requires_grad != reference.graded[i]:
                return f"output {i}: requires_grad is {not reference.graded[i]}"
        fault = _find_difference(mine, right, unspecified)
        if fault and not _is_nearer(mine, right, reference, 0, i):
            return f"output {i}: {fault}"
    return ""


def _find_operand_fault(operands: list[Any], reference: Reference, unspecified: bool) -> str:
    """Returns what is wrong with the arguments after the call."""
    for i, (mine, right) in enumerate(zip(operands, reference.operands, strict=True)):
        fault = _find_difference(mine, right, unspecified)
        if fault and not _is_nearer(mine, right, reference, 1, i):
            return f"argument {i} after the call: {fault}"
    return ""


def _find_gradient_fault(gradients: list[Any], reference: Reference) -> str:
    """Returns what is wrong with the gradients of the arguments. No gradient counts as zero."""
    for i, mine in enumerate(gradients):
        right = reference.gradients[i]
        if mine is None or right is None:
            there = mine if right is None else right
            if there is None or not there.numel() or there.abs().max() == 0:
                continue
            return f"gradient {i}: {'missing' if mine is None else 'not wanted'}"
        fault = _find_difference(mine, right, False)
        if fault and not _is_nearer(mine, right, reference, 2, i):
            return f"gradient {i}: {fault}"
    return ""


def _outcome_of_error(error: pt.LayoutError) -> Outcome:
    text = _format_error(error)
    if any(s in text for s in ("ranks ask for", "ranks wait", "which has ended")):
        return Outcome("hang", text)  # simulated ranks that diverge get an error; real ones wait
    broken = "does not hold" in text or "but its rule has" in text
    return Outcome("crash" if broken or not (error.reason or error.fixes) else "raise", text)


def _full_value(value: Any) -> Any:
    if isinstance(value, pt.DTensor):
        with torch.no_grad():
            return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _find_difference(mine: Any, right: Any, only_kind: bool) -> str:
    """Returns what is different; "" if nothing is."""
    if not isinstance(right, torch.Tensor):
        if isinstance(right, float):
            near = abs(mine - right) <= ATOL + RTOL * abs(right)
            same = type(mine) is float and (near or (mine != mine and right != right))
        else:
            same = type(mine) is type(right) and mine == right
        return "" if same else f"{mine!r:.60} instead of {right!r:.60}"
    with local_ops(), torch.no_grad():
        if tuple(mine.shape) != tuple(right.shape):
            return f"shape {tuple(mine.shape)} instead of {tuple(right.shape)}"
        if mine.dtype != right.dtype:
            return f"{mine.dtype} instead of {right.dtype}"
        if only_kind or right.numel() == 0:
            return ""
        mine, right = (_make_comparable(t.to_dense()) for t in (mine, right))
        if not (right.is_floating_point() or right.is_complex()):
            return "" if torch.equal(mine, right) else "other values"
        finite = right[torch.isfinite(right)].abs()
        scale = float(finite.max()) if finite.numel() else 1.0
        scale = min(max(1.0, scale), LARGEST_SCALE)
        if torch.allclose(mine, right, RTOL, ATOL * scale, equal_nan=True):
            return ""
        return f"off by {float((mine - right).abs().max()):.3g} of {scale:.3g}"


def _is_nearer(mine: Any, right: Any, reference: Reference, which: int, i: int) -> bool:
    """True if our value, where it differs, is nearer to the exact value than the one on one device.

    One device has its own rounding errors. If its value is within 100 times the tolerance of its
    result in double precision, ours need not have the same error.
    """
    if not (isinstance(right, torch.Tensor) and mine.shape == right.shape):
        return False
    if right.dtype not in (torch.float32, torch.complex64) and not reference.narrow:
        return False
    try:
        exact = reference.exact[which][i]
    except Exception:  # not an op for double precision
        return False
    if not isinstance(exact, torch.Tensor) or exact.shape != right.shape:
        return False
    with local_ops(), torch.no_grad():
        ours, theirs = (mine.to_dense() - exact).abs(), (right.to_dense() - exact).abs()
        scale = min(max(1.0, float(exact.abs().max())), LARGEST_SCALE)
        allowed = ATOL * scale + RTOL * exact.abs()
        if reference.narrow:
            # Elements that are inf or nan on one device are not compared: 0 * inf is possible.
            finite = torch.isfinite(right.to_dense())
            same = bool((~torch.isfinite(mine.to_dense()) | finite).all())
            return same and _as_near(ours[finite], theirs[finite], exact[finite], right.dtype)
        return bool(((ours <= allowed) | ((ours <= theirs) & (theirs <= 100 * allowed))).all())


def _as_near(
    ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> bool:
    """True if, under autocast, our value is as exact as the one on one device.

    It must be within eight times the rounding error on one device, because Partial shares are
    rounded one by one and are larger than their sum. Or it must be within two roundings of the
    result's dtype.
    """
    step = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    if not theirs.numel():
        return True
    whole, largest = float(theirs.max()), float(exact.abs().max())
    held = 2 * step * exact.abs() + step * min(largest, 1.0)
    return bool((ours <= torch.maximum(held, torch.full_like(held, 8 * whole))).all())


def _make_comparable(t: torch.Tensor) -> torch.Tensor:
    """Torch does not compare numbers of 8 bits."""
    return t.float() if t.is_floating_point() and t.element_size() == 1 else t


def _format_error(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    if len(text) > 1 and isinstance(error, pt.LayoutError):
        text[0] += " | " + " ".join(" ".join(text[1:]).split())[:160]
    return f"{type(error).__name__}: {text[0][:240]}"
