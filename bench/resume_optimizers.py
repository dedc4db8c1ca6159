"""A test of resumed runs with every optimizer that is installed.

    pip install --no-deps --target site schedulefree pytorch_optimizer
    PYTHONPATH=site python bench/resume_optimizers.py [--stage 3] [--only NAME]

Each optimizer of torch.optim, schedulefree and pytorch_optimizer trains a small model in float64
for six steps on two ranks under ZeRO. The run is saved after the third step. It is resumed on two
ranks, on three, and in one process without partita. Then its losses are compared with those of the
uninterrupted run; they may differ in their last bits, because sums have another order. A line per
optimizer says whether they are equal. Some optimizers do not run here at all; their line says so.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

MODULES = "torch.optim", "schedulefree", "pytorch_optimizer"
_WAYS = "plain", "graph", "closure"
"""How a step is called: plainly, after `backward(create_graph=True)`, or with a closure."""


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


def make(kind: type, model: nn.Module) -> Any:
    """Returns an optimizer, made by the first of the usual signatures that its class accepts."""
    params = list(model.parameters())
    matrices, others = ([p for p in params if (p.ndim == 2) is is_so] for is_so in (True, False))
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]

    def base() -> Any:
        return torch.optim.AdamW(params, lr=1e-2)

    ways: list[Callable[[], Any]] = [
        *([lambda: kind(params, lr=1e-2, max_iter=2)] if kind.__name__ == "LBFGS" else ()),
        lambda: kind(params, lr=1e-2),
        lambda: kind(params),
        lambda: kind(matrices, lr=1e-2),
        lambda: kind(groups),
        lambda: kind(base()),
        lambda: kind(params, base_optimizer=torch.optim.AdamW, lr=1e-2),
        lambda: kind(model, lr=1e-2),
        lambda: kind(model),
        lambda: kind(params, num_iterations=100),
    ]
    for way in ways:
        try:
            return way()
        except Exception as error:
            last = error
    raise last


def compare(kind: type, stage: int) -> str:
    """Returns in words how a resumed run with this optimizer compares with an uninterrupted one."""
    way = [""]

    def start(mesh: Any, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
        if mesh is not None:
            model = pt.zero(model, mesh, stage=stage)
        optimizer = make(kind, model)
        return {"model": model, "optimizer": optimizer, "random": pt.RandomState()}

    def train(state: dict[str, Any], mesh: Any, steps: range) -> list[float]:
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

            def closure(x: Any = x, y: Any = y, of_step: list[float] = of_step) -> Any:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward(create_graph=way == ["graph"])
                of_step.append(loss.item())
                return loss

            if way == ["closure"]:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            losses.append(of_step[0])
        return losses

    def run(ranks: int, program: Callable[[Any], Any]) -> Any:
        torch.manual_seed(5)
        if ranks == 1:
            return program(None)
        with pt.ranks(dp=ranks) as world:
            return world.run(program)[0]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"

        def save(mesh: Any) -> None:
            state = start(mesh, 0)
            train(state, mesh, range(3))
            pt.save(state, path)

        def resume(mesh: Any) -> list[float]:
            state = start(mesh, 1)
            pt.load(state, path)
            return train(state, mesh, range(3, 6))

        for way[0] in _WAYS:
            try:
                want = run(2, lambda mesh: train(start(mesh, 0), mesh, range(6)))[3:]
                break
            except Exception as error:
                failed = error
        else:
            return f"does not run: {' '.join(str(failed).split())[:100]}"
        try:
            run(2, save)
        except ValueError as error:
            return f"is refused where it is saved: {' '.join(str(error).split())[:100]}"
        off = {}
        for ranks in (2, 3, 1):
            try:
                got = run(ranks, resume)
            except Exception as error:
                return f"is refused where it is loaded: {' '.join(str(error).split())[:100]}"
            off[ranks] = max(abs(a / b - 1) for a, b in zip(got, want, strict=True))
    if max(off.values()) < 1e-6:
        return "equal"
    if off[2] < 1e-6:
        return f"equal on as many ranks: elsewhere off by {max(off.values()):.0e}"
    return f"differs: by {off[2]:.0e}"


if __name__ == "__main__":
    main()
