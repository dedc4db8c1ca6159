"""A check of resumed runs, with every optimizer that is installed.

    pip install --no-deps --target site schedulefree pytorch_optimizer
    PYTHONPATH=site python bench/resume_optimizers.py [--stage 3] [--only NAME]

Each optimizer of torch.optim, schedulefree and pytorch_optimizer trains a small model in float64
for six steps on two ranks under ZeRO. The run is saved after three of them, and goes on from there
on two ranks, on three and without any. Its losses are those of the uninterrupted run, but for the
order of sums (1e-6), or a line says what they are. Some optimizers cannot run here at all.

Some optimizers compute in bfloat16, whatever the parameters are. There the order of sums, which
differs with the number of ranks, shows in the losses: also those of uninterrupted runs differ
between numbers of ranks. For these the three runs are repeated with float64 in place of bfloat16.
Nothing else is changed, and they are compared as all others are. The line gives both differences.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import partita as pt

MODULES = "torch.optim", "schedulefree", "pytorch_optimizer"
_WAYS = "plain", "graph", "closure"
"""The ways to call a step. SAM and similar optimizers need gradients before `step(closure)`.
Without them they use the gradients of the step before, which no checkpoint contains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO")
    parser.add_argument("--only", default="", help="part of an optimizer's name")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    count: Counter[str] = Counter()
    for name, kind in find_optimizers():
        if options.only.lower() in name.lower():
            outcome = compare(kind, options.stage)
            count[outcome.partition(":")[0]] += 1
            print(f"{name}: {outcome}", flush=True)
    print(dict(count))


def find_optimizers() -> Iterator[tuple[str, type]]:
    for home in MODULES:
        try:
            module = importlib.import_module(home)
        except ImportError:
            print(f"{home} is not installed")
            continue
        for name, kind in inspect.getmembers(module, inspect.isclass):
            base = torch.optim.Optimizer
            if issubclass(kind, base) and kind is not base and not name.startswith("_"):
                yield f"{home}.{name}", kind


def find_makers(kind: type) -> list[Callable[[nn.Module], Any]]:
    """Returns functions that make an optimizer of a model, one for each usual signature."""

    def base(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def matrices(model: nn.Module) -> list[Any]:
        return [p for p in model.parameters() if p.ndim == 2]

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        others = [p for p in model.parameters() if p.ndim != 2]
        return [
            {"params": matrices(model), "use_muon": True},
            {"params": others, "use_muon": False},
        ]

    adamw: Any = torch.optim.AdamW
    call: Any = kind
    return [
        *([lambda m: call(m.parameters(), max_iter=2)] if kind.__name__ == "LBFGS" else ()),
        lambda m: call(list(m.parameters()), lr=1e-2),
        lambda m: call(list(m.parameters())),
        lambda m: call(matrices(m), lr=1e-2),
        lambda m: call(groups(m)),
        lambda m: call(base(m)),
        lambda m: call(m.parameters(), base_optimizer=adamw, lr=1e-2),
        lambda m: call(m, lr=1e-2),
        lambda m: call(m),
        lambda m: call(m.parameters(), num_iterations=100),
        lambda m: call(m.parameters(), lr=1e-2, num_data=12),
        lambda m: call(m, m.parameters(), adamw, lr=1e-2),
    ]


class InFloat64(TorchFunctionMode):
    """Replaces bfloat16 by float64 in all calls of torch, and counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            self.count += 1
            return args[0].double()
        given = [*args, *(kwargs or {}).values()]
        if any(value is torch.bfloat16 for value in given):
            self.count += 1
            args = tuple(torch.float64 if a is torch.bfloat16 else a for a in args)
            named = (kwargs or {}).items()
            kwargs = {k: torch.float64 if v is torch.bfloat16 else v for k, v in named}
        return func(*args, **(kwargs or {}))


def compare(kind: type, stage: int) -> str:
    """Returns how an interrupted run with this optimizer compares with an uninterrupted one."""
    makers, failed = [], Exception()
    for make in find_makers(kind):
        try:
            make(nn.Sequential(nn.Linear(6, 9)).double())
            makers.append(make)
        except Exception as error:
            failed = failed if failed.args else error
    for make, way in product(makers, _WAYS):
        case = Case(make, way, stage)
        try:
            uninterrupted(2, case)
            break
        except Exception as error:
            failed = error
    else:
        return f"does not run: {' '.join(str(failed).split())[:100]}"
    try:
        off = differences(case)
    except Refused as error:
        return str(error)
    if max(off.values()) < _NEAR:
        return "equal"
    if off[2] >= _NEAR:
        return f"differs: by {off[2]:.0e}"
    want = uninterrupted(2, case)
    apart = max(off_by(uninterrupted(n, case), want) for n in (3, 1))
    found = f"in its own dtype off by {max(off.values()):.0e} on other ranks"
    found += f", uninterrupted runs by {apart:.0e}"
    mode = InFloat64()
    exact = differences(replace(case, mode=mode))
    if mode.count and max(exact.values()) < _NEAR:
        return f"equal in float64: it computes in bfloat16; {found}"
    return f"equal on as many ranks: {found}"


_NEAR = 1e-6


class Refused(Exception):
    """A save or a load that was refused, in words."""


def off_by(got: list[float], want: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(got, want, strict=True))


def run(ranks: int, program: Callable[[Any], Any]) -> Any:
    torch.manual_seed(5)
    if ranks == 1:
        return program(None)
    with pt.ranks(dp=ranks) as world:
        return world.run(program)[0]


@dataclass(frozen=True)
class Case:
    """A training run: its optimizer, how a step is called, the stage and the ranks."""

    make: Callable[[nn.Module], Any]
    way: str
    stage: int
    mode: AbstractContextManager[Any] = field(default_factory=nullcontext)


def start(mesh: Any, seed: int, case: Case) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    if mesh is not None:
        model = pt.zero(model, mesh, stage=case.stage)
    return {"model": model, "optimizer": case.make(model), "random": pt.RandomState()}


def train(state: dict[str, Any], mesh: Any, steps: range, case: Case) -> list[float]:
    model, optimizer = state["model"], state["optimizer"]
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    losses = []
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x, y = (torch.randn(12, n, generator=g, dtype=torch.float64) for n in (6, 4))
        if mesh is not None:
            x, y = (pt.distribute_tensor(t, mesh, [pt.Shard(0)]) for t in (x, y))
        of_step: list[float] = []

        @torch.enable_grad()
        def closure(x: Any = x, y: Any = y, of_step: list[float] = of_step) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward(create_graph=case.way == "graph")
            of_step.append(loss.item())
            return loss

        closure()
        with case.mode:
            optimizer.step(*([closure] if case.way == "closure" else []))
        losses.append(of_step[0])
    return losses


def uninterrupted(ranks: int, case: Case) -> list[float]:
    """The losses of the last three of six steps."""
    losses: list[float] = run(ranks, lambda mesh: train(start(mesh, 0, case), mesh, range(6), case))
    return losses[3:]


def differences(case: Case) -> dict[int, float]:
    """By the number of ranks on which the run goes on: by how much its losses are off."""
    want = uninterrupted(2, case)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"

        def save(mesh: Any) -> None:
            state = start(mesh, 0, case)
            train(state, mesh, range(3), case)
            pt.save(state, path)

        def resume(mesh: Any) -> list[float]:
            state = start(mesh, 1, case)
            pt.load(state, path)
            return train(state, mesh, range(3, 6), case)

        try:
            run(2, save)
        except ValueError as error:
            text = " ".join(str(error).split())[:100]
            raise Refused(f"is refused where it is saved: {text}") from None
        off = {}
        for ranks in (2, 3, 1):
            try:
                off[ranks] = off_by(run(ranks, resume), want)
            except Exception as error:
                text = " ".join(str(error).split())[:100]
                raise Refused(f"fails where it goes on: on {ranks} ranks: {text}") from None
    return off


if __name__ == "__main__":
    main()
