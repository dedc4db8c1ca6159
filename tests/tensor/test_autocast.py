"""Do ops have, under bf16 autocast, the dtypes and values that one device has, in every layout?"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import partita as pt
from partita import Partial, Replicate, Shard
from partita.tensor.op_facts import Cast, cast_of
from partita.testing.op_case import merge_outcomes, references, run_case
from partita.testing.op_layouts import CLASSES, distribute_argument
from partita.testing.opinfo import form_of, list_names

PLACES = [Replicate(), Shard(0), Shard(1), Partial()]
CASTS = {Cast.FLOAT32, Cast.FLOAT32_UNLESS_GIVEN, Cast.LOWER, Cast.WIDEST}


def listed() -> list[str]:
    """Each op of torch's own list with samples that autocast lists, on CPUs or GPUs."""
    found = []
    for name in list_names(autocast=True):
        op = form_of(name).info.aten_name or ""
        if {cast_of(op, "cpu"), cast_of(op, "cuda")} & CASTS:
            found.append(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
def test_each_op_on_autocasts_lists_is_as_on_one_device_in_every_class_of_layouts(turn):
    asked = listed()[turn::4]
    assert len(asked) > 30

    def run(mesh: Any, name: str, refs: Any) -> Any:
        cases = itertools.product(enumerate(refs), CLASSES)
        return [run_case(mesh, name, i, ref, klass) for (i, ref), klass in cases]

    bad, ran = {}, 0
    with pt.ranks(dp=2) as world:
        for name in asked:
            refs, _ = references(name, 3)
            outcomes = [merge_outcomes(o) for o in zip(*world.run(run, name, refs), strict=True)]
            ran += bool(refs)
            bad |= {f"{name} {i}": str(o) for i, o in enumerate(outcomes) if o.kind != "right"}
    assert not bad
    assert ran > 0.9 * len(asked)


def cases_of_torch() -> list[Any]:
    """The ops and arguments by which torch tests its lists, CPUs' and GPUs', with bf16 for fp16."""
    from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

    torch.manual_seed(0)
    found = []
    for lists in (AutocastCPUTestLists("cpu"), AutocastTestLists("cpu")):
        for kind, entries in vars(lists).items():
            for op, args, *more in entries if kind != "banned" else ():
                named = next((m for m in more if isinstance(m, dict)), {})
                for home in (torch, torch._C._nn, torch.Tensor):
                    if hasattr(home, op):
                        found.append((f"{kind} {op}", getattr(home, op), args, named))
    return found


def mapped(value: Any, convert: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return convert(value.bfloat16() if value.dtype is torch.float16 else value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, convert) for v in value)
    return value


def under_autocast(op: Any, args: Any, named: Any, convert: Any) -> Any:
    args = mapped(args, convert)
    with torch.autocast("cpu", torch.bfloat16):
        return op(*args, **named)


def whole(value: Any) -> Any:
    if isinstance(value, pt.DTensor):
        return value.full_tensor()
    return [whole(v) for v in value] if isinstance(value, (list, tuple)) else value


def check_close(mine: Any, right: Any, what: str) -> None:
    if isinstance(right, (list, tuple)):
        for m, r in zip(mine, right, strict=True):
            check_close(m, r, what)
    elif isinstance(right, torch.Tensor):
        assert mine.dtype == right.dtype, f"{what}: {mine.dtype}, not {right.dtype}"
        if right.is_floating_point():
            step = torch.finfo(right.dtype).eps
            largest = float(right.abs().nan_to_num(0, 0, 0).max())
            rtol, atol = max(4 * step, 1e-4), max(8 * step, 1e-5) * max(largest, 1.0)
            torch.testing.assert_close(
                mine,
                right,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda said: f"{what}: {said}",
            )
    else:
        assert mine == right, what


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("place", [*CLASSES, "S0", "S1"])
def test_torchs_own_cases_of_its_lists_are_as_on_one_device(place):
    def convert(mesh: Any, t: torch.Tensor) -> torch.Tensor:
        if place in CLASSES:
            return distribute_argument(t, mesh, place, turn=0)
        dim = int(place[1])
        placement = Shard(dim) if t.dim() > dim else Replicate()
        return pt.distribute_tensor(t, mesh, [placement])

    def body(mesh: Any, op: Any, args: Any, named: Any) -> Any:
        with torch.no_grad():
            return whole(under_autocast(op, args, named, partial(convert, mesh)))

    ran = 0
    with pt.ranks(dp=2) as world:
        for what, op, args, named in cases_of_torch():
            try:
                right = under_autocast(op, args, named, lambda t: t.clone())
            except (RuntimeError, TypeError, NotImplementedError):
                continue  # a kernel of GPUs alone
            ran += 1
            for mine in world.run(body, op, args, named):
                check_close(mine, right, f"{what} {place}")
    assert ran > 120


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.1}, {"weight": 1}], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_cross_entropy_of_bf16_logits_is_float32_whatever_is_split(place, more, reduction):
    logits = torch.randn(6, 4).bfloat16().requires_grad_()
    target = torch.tensor([0, 1, 3, -100, 2, 1])
    weight = torch.rand(4) if "weight" in more else None
    more = {**more, "reduction": reduction}

    def loss(x: Any, t: Any, w: Any) -> Any:
        given = more if w is None else {**more, "weight": w}
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(x, t, **given)

    right = loss(logits, target, weight)
    right.sum().backward()

    def body(mesh: Any) -> Any:
        x = distribute_argument(logits, mesh, "partial", 0) if place == Partial() else None
        if x is None:
            x = pt.distribute_tensor(logits.detach(), mesh, [place])
        x.requires_grad_()
        rows = [Shard(0)] if place == Shard(0) else [Replicate()]
        t = pt.distribute_tensor(target, mesh, rows)
        w = None if weight is None else pt.distribute_tensor(weight, mesh, [Replicate()])
        out = loss(x, t, w)
        out.sum().backward()
        return out.full_tensor(), x.grad.full_tensor()

    assert right.dtype is torch.float32
    with pt.ranks(dp=2) as world:
        for out, grad in world.run(body):
            assert out.dtype is torch.float32 and grad.dtype is torch.bfloat16
            torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grad, logits.grad, rtol=2**-6, atol=2**-7)


def test_a_decomposition_that_autocast_does_not_list_keeps_its_dtype():
    x = torch.randn(4, 6).bfloat16()

    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(x, mesh, [Shard(1)])
        with torch.autocast("cpu", torch.bfloat16):
            return d.var(1).full_tensor(), F.softmax(d, 1).full_tensor(), d.amax(1).full_tensor()

    with pt.ranks(tp=2) as world:
        for mine in world.run(body):
            right = (x.var(1), F.softmax(x, 1), x.amax(1))
            torch.testing.assert_close(mine, right, rtol=2**-7, atol=2**-8)


def test_autocast_is_on_again_after_a_decomposition_that_raises():
    x, target = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)

    def body(mesh: Any) -> Any:
        d = pt.distribute_tensor(x, mesh, [Shard(0)])
        with torch.autocast("cpu", torch.bfloat16):
            t = pt.distribute_tensor(target, mesh, [Shard(0)])
            with pytest.raises(pt.LayoutError, match="strict"), pt.strict():
                F.nll_loss(d, t)
            return F.linear(d, pt.distribute_tensor(x, mesh, [Replicate()])).dtype

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [torch.bfloat16] * 2
