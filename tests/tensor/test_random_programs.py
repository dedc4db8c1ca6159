"""Does any program that one device can run give the same values and gradients on many ranks?

Hypothesis draws the programs (`programs`), of 3 to 10 lines, on four meshes. The ground truth is
the same text run on plain tensors in float64.

A few hundred examples by default; the nightly run draws new ones every time:

    PARTITA_EXAMPLES=5000 python -m pytest tests/tensor/test_random_programs.py --timeout 0

The same programs are captured, too, as regions with up to three results.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import partita as pt
from partita.comm import wire_of
from partita.layout import Layout
from partita.tensor.dtensor import as_dtensor
from partita.tensor.tensor_state import spec_of
from tests.programs.random_programs import Program, execute, programs

EXAMPLES = int(os.environ.get("PARTITA_EXAMPLES", "0"))


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def loss_of(tensors: dict[str, Any]) -> Any:
    """A sum in which every element of every tensor has a weight of its own."""
    total = 0.0
    for name, t in tensors.items():
        weights = torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).reshape(t.shape)
        total = total + (t * (weights + len(name))).sum()
    return total


# -- running ---------------------------------------------------------------------------------------


def spread(mesh: Any, whole: torch.Tensor, layout: Layout) -> pt.DTensor:
    """A leaf in `layout`. Shares are uneven and of both signs; their sum is `whole`."""
    wire = wire_of(mesh)
    local = whole
    for axis, _ in layout.partial:
        n, i = wire.mesh.size(axis), wire.at[wire.mesh.index(axis)]
        local = local * (2.0 * n - 1 if i == 0 else -2.0)
    for d, (offset, length) in enumerate(layout.local_region(wire.mesh, wire.at)):
        local = local.narrow(d, offset, length)
    return as_dtensor(local.clone(), spec_of(layout, wire)).requires_grad_()


class Unsuited(Exception):
    """One device refuses the program, or torch does not say what it gives."""


class Unspecified(TorchFunctionMode):
    """Is something written after a reshape that had to copy, which torch leaves to the strides?

    A product of more than two dimensions reshapes its operands: if it need not copy, it saves them.
    """

    copied = written = False

    def __init__(self) -> None:
        super().__init__()
        self.folded: set[int] = set()

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        if name in ("reshape", "flatten", "contiguous"):
            self.copied |= out.data_ptr() != args[0].data_ptr()
        if name in ("matmul", "__matmul__", "linear", "einsum", "tensordot"):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            if any(t.dim() > 2 for t in tensors):
                self.folded |= {t.untyped_storage().data_ptr() for t in tensors}
        if name.startswith(("__i", "__set")) or name.removesuffix("__").endswith("_"):
            self.written |= self.copied
            self.written |= args[0].untyped_storage().data_ptr() in self.folded
        return out


class Nudged(TorchFunctionMode):
    """Changes each new result in its last bits: on ranks it may be a sum of shares.

    Products of the same numbers are equal on one device, whatever these are.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.numel():
            memory = out.untyped_storage().data_ptr()
            given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
            if all(memory != a.untyped_storage().data_ptr() for a in given):
                values = out.detach()
                is_exact = values * 8 == (values * 8).round()  # a grid that rounding made, or zeros
                values.data.copy_(torch.where(is_exact, values, nudged(values, self.seed)))
        return out


def on_one_device(
    program: Program, nudge: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All values, and the inputs' gradients.

    With `nudge`, inputs and results are changed in their last bits.
    """
    leaves = {n: nudged(v, nudge).requires_grad_() for n, v in program.values().items()}
    watch = Unspecified()
    try:
        with watch, Nudged(nudge) if nudge else nullcontext():
            tensors = execute(program.lines, leaves)
        loss_of(tensors).backward()
    except RuntimeError as error:
        raise Unsuited from error
    grads = {n: x.grad for n, x in leaves.items()}
    tame = all(g is not None and g.isfinite().all() and g.abs().max() < 1e8 for g in grads.values())
    if watch.written or not tame:
        raise Unsuited
    return {n: t.detach() for n, t in tensors.items()}, grads


def nudged(x: torch.Tensor, seed: int) -> torch.Tensor:
    """`x`, each element made a little larger or smaller: by up to 16 units in the last place."""
    if not seed:
        return x
    generator = torch.Generator().manual_seed(seed)
    return x * (1 + torch.randint(-16, 17, x.shape, generator=generator) * torch.finfo(x.dtype).eps)


def left_to_rounding(program: Program) -> set[str]:
    """What one device itself gives otherwise, beyond tolerance, if last bits differ.

    The order of equal cosines, the place of a value on the edge of a bin: there is no right answer
    to compare with. Gradients are named like `the gradient of x0`.
    """
    names: set[str] = set()
    values, grads = on_one_device(program)
    for seed in range(1, 9):
        others, other_grads = on_one_device(program, seed)
        for name, truth in values.items():
            names |= differs(name, others[name], truth)
        for name, truth in grads.items():
            names |= differs(f"the gradient of {name}", other_grads[name], truth)
    return names


def differs(what: str, ours: torch.Tensor, truth: torch.Tensor) -> set[str]:
    try:
        same(what, ours, truth)
    except AssertionError:
        return {what}
    return set()


def on_a_rank(mesh: Any, program: Program, values: dict[str, Any], grads: dict[str, Any]) -> None:
    """Compare what is in `values` and `grads`."""
    leaves = {
        n: spread(mesh, v, Layout.parse(text))
        for (n, v), text in zip(program.values().items(), program.inputs, strict=True)
    }
    tensors = execute(program.lines, leaves)
    for name, truth in values.items():
        same(name, tensors[name].detach(), truth)
    loss_of(tensors).backward()
    for name, truth in grads.items():
        same(f"the gradient of {name}", leaves[name].grad, truth)


def same(what: str, ours: Any, truth: torch.Tensor) -> None:
    scale = max(1.0, float(truth.double().abs().max())) if truth.numel() else 1.0
    placed = ours.placements if isinstance(ours, pt.DTensor) else "plain"
    whole = ours.full_tensor() if isinstance(ours, pt.DTensor) else ours
    torch.testing.assert_close(
        whole, truth, rtol=1e-9, atol=1e-10 * scale, msg=lambda m: f"{what}, {placed}: {m}"
    )


def check(program: Program) -> None:
    values, grads = on_one_device(program)
    try:
        with pt.ranks(**program.mesh) as world:
            world.run(on_a_rank, program, values, grads)
    except AssertionError:
        # Only now is it worth asking. What does not hang on rounding still has to agree.
        loose = left_to_rounding(program)
        if not loose:
            raise
        values = {n: v for n, v in values.items() if n not in loose}
        grads = {n: g for n, g in grads.items() if f"the gradient of {n}" not in loose}
        with pt.ranks(**program.mesh) as world:
            world.run(on_a_rank, program, values, grads)
        raise Unsuited from None
    except (RuntimeError, pt.LayoutError) as error:
        if not is_refused(error, program):
            raise
        raise Unsuited from error


def is_refused(error: Exception, program: Program) -> bool:
    """True for what the docs refuse: a split dimension of 1 that `squeeze_` would take away, and a
    write to logits of split classes, which backward of `cross_entropy` needs."""
    if isinstance(error, pt.LayoutError):
        return "its operand would need another layout" in error.fact
    has_logits = any("cross_entropy" in line for line in program.lines)
    return has_logits and "modified by an inplace operation" in str(error)


def shortest(program: Program) -> Program:
    """`program`, which fails, without the lines that it fails without."""
    for i in reversed(range(len(program.lines))):
        lines = program.lines[:i] + program.lines[i + 1 :]
        shorter = replace(program, lines=lines)
        try:
            on_one_device(shorter)
        except Exception:
            continue
        try:
            check(shorter)
        except Exception:
            program = shorter
    return program


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of broadcast targets and the like
@settings(
    max_examples=EXAMPLES or 300,
    derandomize=not EXAMPLES,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(programs())
def test_a_program_gives_what_one_device_gives(program: Program) -> None:
    try:
        check(program)
    except Unsuited:
        reject()
    except Exception as error:
        raise AssertionError(f"the shortest that fails: {shortest(program)!r}") from error


# -- regions ---------------------------------------------------------------------------------------


def region_of(program: Program) -> Any:
    """A function of the inputs that returns up to three values which the program makes."""
    made = [line.partition(" = ")[0] for line in program.lines]
    made = [name for name in dict.fromkeys(made) if name[0] == "t" and name.isalnum()]
    inputs = ", ".join(program.values())
    results = f"[t * 1 for t in ({', '.join(made[-3:])},) if t.is_floating_point()]"
    lines = [f"def region({inputs}):", *program.lines, f"return {results}"]
    code: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile("\n    ".join(lines), "<region>", "exec"), code)
    return code["region"]


def run_region(region: Any, leaves: list[Any]) -> list[Any]:
    """The results, behind a backward pass in which each counts otherwise."""
    torch.manual_seed(5)
    results = region(*leaves)
    loss = loss_of({"t" * (i + 1): t for i, t in enumerate(results)})
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
    return results


def check_region(program: Program) -> None:
    on_one_device(program)  # whether the program is suited
    region = region_of(program)
    inputs = [x.requires_grad_() for x in program.values().values()]
    values = [t.detach() for t in run_region(region, inputs)]

    def run_on_a_rank(mesh: Any) -> None:
        captured = pt.compile(region, backend="graph")
        for _ in range(2):
            leaves = [  # not `inputs`, which the program may have written
                spread(mesh, x, Layout.parse(text))
                for x, text in zip(program.values().values(), program.inputs, strict=True)
            ]
            results = run_region(captured, leaves)
        for i, (t, truth) in enumerate(zip(results, values, strict=True)):
            same(f"result {i}", t.detach(), truth)
        for i, (x, truth) in enumerate(zip(leaves, inputs, strict=True)):
            if truth.grad is None:
                assert x.grad is None or not x.grad.full_tensor().any(), f"gradient {i}"
            else:
                same(f"gradient {i}", x.grad, truth.grad)

    try:
        with pt.ranks(**program.mesh) as world:
            world.run(run_on_a_rank)
    except AssertionError:
        if not left_to_rounding(program):
            raise
        raise Unsuited from None
    except (RuntimeError, pt.LayoutError) as error:
        if not isinstance(error, pt.CaptureError) and not is_refused(error, program):
            raise
        raise Unsuited from error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(programs())
def test_a_captured_program_gives_the_results_and_gradients_of_one_device(program: Program) -> None:
    try:
        check_region(program)
    except Unsuited:
        reject()
    except Exception as error:
        raise AssertionError(f"as a region: {program!r}") from error


ONCE_WRONG = {
    "a result that one rank alone has as another object": (
        {"a": 3},
        ("[4@a]",),
        ("t0 = F.rms_norm(x0, x0.shape[-1:])",),
    ),
    "a copy on ranks with rows alone": (
        {"a": 2},
        ("[] {sum a}", "[3, 1, 1@a]"),
        ("t0 = x0 / (x1.abs() + 1)", "t1 = t0.permute(2, 1, 0).contiguous()"),
    ),
    "a deviation of 0": ({"a": 3}, ("[1@a, 6]",), ("t0 = x0.std(0, unbiased=False)",)),
    "one place of a split vector": ({"a": 2}, ("[5@a]",), ("t0 = x0[x0.argmax(0)]",)),
    "zeros like a scalar": ({"a": 2}, ("[] {sum a}",), ("t0 = x0.new_zeros(x0.shape) - x0",)),
    "unique": ({"a": 2}, ("[4@a, 2]",), ("t0 = torch.unique(x0 > 0)", "t1 = x0 * t0[0]")),
    "a part of an expanded copy is written": (
        {"a": 2, "b": 2},
        ("[4@(b a)]",),
        ("t0 = x0 + x0", "t1 = t0[0]", "t1.expand(2, *t1.shape)[0].mul_(3)", "t2 = t1 * t0"),
    ),
    "random numbers like shares of a transposed tensor": (
        {"a": 2, "b": 2},
        ("[3@a, 3] {sum b}",),
        ("t0 = -x0", "t0.t_()", "t1 = torch.randn_like(t0)"),
    ),
    "a pending maximum is written": (
        {"a": 2},
        ("[1, 4, 1@a]",),
        ("t0 = (x0 > 0.1).any()", "t0[t0 > 0] = 0.5", "t0.logical_not_()", "t1 = x0 * t0"),
    ),
    "a rank without channels": (
        {"a": 2, "b": 3},
        ("[4, 3@(a b)]",),
        ("t0 = F.group_norm(x0, x0.size(1))",),
    ),
    "F.unfold is no view": (
        {"a": 2, "b": 2},
        ("[4, 3, 3@b] {inv a}",),
        ("t0 = x0 * 3", "t1 = F.unfold(t0, 1)", "t0.clamp_(-1, 1)"),
    ),
    "a maximum that keeps its operand": (
        {"a": 2, "b": 3},
        ("[5@(a b)]",),
        ("t0 = x0 + x0", "t1 = t0.max(-1).values", "t0.mul_(3)"),
    ),
    "one element of what is expanded": (
        {"a": 2, "b": 2},
        ("[] {sum a, sum b}",),
        ("t0 = (x0 * 2).expand(3)", "t0[..., -1] = x0"),
    ),
    "a piece written where it stands": (
        {"a": 2, "b": 2},
        ("[5] {inv b}",),
        ("t0 = x0 * 1", "t0.unsqueeze_(0)", "t0[..., :2] *= 2"),
    ),
    "a part of shares that is written": (
        {"a": 2, "b": 2},
        ("[3@a] {sum b}", "[]"),
        ("t0 = x0 * x1", "t1 = t0.select(0, -1)", "t1.sub_(x1, alpha=2)"),
    ),
    "a difference of bools": ({"a": 3}, ("[5@a, 5]",), ("t0 = (x0 > 0.1).diff(dim=-2)",)),
    "a part of shares that is written, where a rank has nothing": (
        {"a": 2, "b": 3},
        ("[4, 3, 4@b] {sum a}",),
        ("t0 = torch.cat([x0, -x0], 1)", "t0[0].add_(1)"),
    ),
    "a copy that torch broadcasts": (
        {"a": 2, "b": 3},
        ("[]", "[3@b, 4] {sum a}"),
        ("t0 = x1.to(torch.complex128).real", "t0.unsqueeze_(0)", "t0.copy_(x0)"),
    ),
}


@pytest.mark.parametrize("case", ONCE_WRONG)
def test_a_program_that_was_wrong_once_stays_right(case: str) -> None:
    check(Program(*ONCE_WRONG[case]))


def test_the_order_of_equal_products_is_left_to_rounding_and_that_of_a_grid_is_not() -> None:
    ordered = "t1 = torch.searchsorted(t0.sort().values, t0) * 1.0"
    products = Program({"a": 2}, ("[3] {sum a}",), ("t0 = torch.kron(x0, x0)", ordered))
    assert "t1" in left_to_rounding(products)
    grid = Program({"a": 2}, ("[3] {sum a}",), ("t0 = (x0 * 3).round()", ordered))
    assert not left_to_rounding(grid)


def test_a_refusal_is_recognized() -> None:
    loss = "t1 = F.cross_entropy(t0, torch.arange(t0.size(0)) % t0.size(1))"
    lines = ("t0 = x0 * 2", loss, "t0.mul_(3)")
    check(Program({"a": 2}, ("[3@a, 3]",), lines))
    with pytest.raises(Unsuited):
        check(Program({"a": 2}, ("[3, 3@a]",), lines))
