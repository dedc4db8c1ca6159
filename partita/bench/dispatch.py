"""A bench of dispatch: what does an op on a DTensor cost over the same op on a plain tensor?

One process, torch's fake process group, tiny tensors, so that only the dispatch is timed. Each op
is run plain, on partita's DTensor and on `torch.distributed.tensor`'s, interleaved in one run, and
the minimum over many rounds is taken. Overheads are in microseconds per call.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import tensor as theirs

import partita as ours

from .place import bench_device, make_dp_mesh

Call = Callable[[dict[str, Any]], Any]

OPS: dict[str, Call] = {
    "x + y": lambda t: t["x"] + t["y"],
    "x - y": lambda t: t["x"] - t["y"],
    "x * y": lambda t: t["x"] * t["y"],
    "x / y": lambda t: t["x"] / t["y"],
    "x + scalar": lambda t: t["x"] + 0.5,
    "x * scalar": lambda t: t["x"] * 0.5,
    "x ** 2": lambda t: t["x"] ** 2,
    "-x": lambda t: -t["x"],
    "x > y": lambda t: t["x"] > t["y"],
    "x += y": lambda t: t["i"].__iadd__(t["y"]),
    "x.mul_(scalar)": lambda t: t["i"].mul_(1.0),
    "torch.add": lambda t: torch.add(t["x"], t["y"]),
    "torch.where": lambda t: torch.where(t["mask"], t["x"], t["y"]),
    "torch.exp": lambda t: torch.exp(t["x"]),
    "x.exp()": lambda t: t["x"].exp(),
    "x.sigmoid()": lambda t: t["x"].sigmoid(),
    "F.relu": lambda t: F.relu(t["x"]),
    "F.gelu": lambda t: F.gelu(t["x"]),
    "F.silu": lambda t: F.silu(t["x"]),
    "x @ w": lambda t: t["x"] @ t["w"],
    "torch.matmul": lambda t: torch.matmul(t["x"], t["w"]),
    "torch.bmm": lambda t: torch.bmm(t["b3"], t["b3"]),
    "F.linear": lambda t: F.linear(t["x"], t["w"]),
    "F.linear + bias": lambda t: F.linear(t["x"], t["w"], t["bias"]),
    "F.layer_norm": lambda t: F.layer_norm(t["x"], (8,), t["bias"], t["bias"]),
    "F.rms_norm": lambda t: F.rms_norm(t["x"], (8,), t["bias"]),
    "x.softmax(-1)": lambda t: t["x"].softmax(-1),
    "x.view": lambda t: t["x"].view(-1, 2, 4),
    "x.reshape": lambda t: t["x"].reshape(-1, 2, 4),
    "x.transpose": lambda t: t["b3"].transpose(1, 2),
    "x.permute": lambda t: t["b3"].permute(0, 2, 1),
    "x.unsqueeze": lambda t: t["x"].unsqueeze(1),
    "x.sum(-1)": lambda t: t["x"].sum(-1),
    "x.mean(-1)": lambda t: t["x"].mean(-1),
    "x.sum()": lambda t: t["x"].sum(),
    "x[:, 0]": lambda t: t["x"][:, 0],
    "x.chunk(2, -1)": lambda t: t["x"].chunk(2, -1),
    "torch.cat": lambda t: torch.cat([t["x"], t["y"]], -1),
    "x.to(bf16)": lambda t: t["x"].to(torch.bfloat16),
    "x.clone()": lambda t: t["x"].clone(),
    "x.detach()": lambda t: t["x"].detach(),
    "torch.zeros_like": lambda t: torch.zeros_like(t["x"]),
    "F.embedding": lambda t: F.embedding(t["idx"], t["w"]),
}
"""About forty calls of training programs, half as operators and methods, half as functions."""


@dataclass(frozen=True)
class Cost:
    """One op: microseconds per call plain, and over plain for each DTensor; nan where it raised."""

    op: str
    plain: float
    partita: float
    torch: float


def _plain_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        "x": torch.randn(8, 8),
        "y": torch.randn(8, 8),
        "i": torch.zeros(8, 8),
        "w": torch.randn(8, 8),
        "bias": torch.randn(8),
        "b3": torch.randn(8, 4, 4),
        "mask": torch.rand(8, 8) > 0.5,
        "idx": torch.randint(8, (8,)),
    }
    return {name: bench_device().place(t) for name, t in tensors.items()}


def _spread(kind: Any, mesh: Any, ranks: int) -> dict[str, Any]:
    """The tensors of `_plain_tensors` as local shards, whole where they are weights."""
    out = {}
    for name, t in _plain_tensors().items():
        whole = name in ("w", "bias")
        place = [kind.Replicate()] if whole else [kind.Shard(0)]
        out[name] = kind.DTensor.from_local(t, mesh, place, run_check=False)
    return out


def _time(call: Call, tensors: dict[str, Any], n: int) -> float:
    start = time.perf_counter()
    for _ in range(n):
        call(tensors)
    seconds = time.perf_counter() - start  # until Python goes on, which is what a call costs it
    bench_device().finish()
    return seconds / n * 1e6


def measure(rounds: int, n: int) -> list[Cost]:
    """Time every op of `OPS`, the three kinds of tensor in turn, `rounds` rounds of `n` calls."""
    mesh = make_dp_mesh(2)
    kinds = {
        "plain": _plain_tensors(),
        "partita": _spread(ours, mesh, 2),
        "torch": _spread(theirs, mesh, 2),
    }
    costs = []
    for name, call in OPS.items():
        best = dict.fromkeys(kinds, math.inf)
        for kind, tensors in kinds.items():
            try:
                for _ in range(5):
                    call(tensors)
            except Exception:
                if kind != "torch":  # only the rival may have no way to do it
                    raise
                best[kind] = math.nan
        for _ in range(rounds):
            for kind, tensors in kinds.items():
                if not math.isnan(best[kind]):
                    best[kind] = min(best[kind], _time(call, tensors, n))
        plain = best["plain"]
        costs.append(Cost(name, plain, best["partita"] - plain, best["torch"] - plain))
    return costs


def geometric_mean(values: Sequence[float]) -> float:
    """Over the finite values; an overhead below 0.01 us counts as 0.01."""
    finite = [max(v, 0.01) for v in values if not math.isnan(v)]
    return math.exp(sum(map(math.log, finite)) / len(finite))


def _block(d: int) -> torch.nn.Module:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
            self.qkv = torch.nn.Linear(d, 3 * d)
            self.out = torch.nn.Linear(d, d)
            self.up, self.down = torch.nn.Linear(d, 4 * d), torch.nn.Linear(4 * d, d)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 2, d // 2).unbind(2)
            score = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * (d // 2) ** -0.5
            y = score.softmax(-1) @ v.transpose(1, 2)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    return Block()


def _step_times(rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of forward + backward, and of an AdamW foreach step, of four blocks of d=16."""
    mesh = make_dp_mesh(2)
    runs: dict[str, tuple[torch.nn.Module, Any, torch.optim.Optimizer]] = {}
    for kind in ("plain", "partita", "torch"):
        torch.manual_seed(0)
        model: torch.nn.Module = bench_device().place(
            torch.nn.Sequential(*(_block(16) for _ in range(4)))
        )
        x: Any = bench_device().place(torch.randn(4, 8, 16))
        if kind != "plain":
            module = ours if kind == "partita" else theirs
            for part in model.modules():
                for key, p in list(part.named_parameters(recurse=False)):
                    rep = module.DTensor.from_local(
                        p.detach(), mesh, [module.Replicate()], run_check=False
                    )
                    part.register_parameter(key, torch.nn.Parameter(rep))
            x = module.DTensor.from_local(x, mesh, [module.Shard(0)], run_check=False)
        runs[kind] = (model, x, torch.optim.AdamW(model.parameters(), foreach=True))
    best = {k: {"forward + backward": math.inf, "AdamW foreach": math.inf} for k in runs}
    for kind, (model, x, _) in runs.items():
        model(x).sum().backward()
        for p in model.parameters():
            # Gradients at rest where the parameters are, so that only the optimizer is timed.
            if kind != "plain":
                g: Any = p.grad
                p.grad = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    grads = {k: [p.grad for p in m.parameters()] for k, (m, _, _) in runs.items()}
    for _ in range(rounds):
        for kind, (model, x, optimizer) in runs.items():
            for p, g in zip(model.parameters(), grads[kind], strict=True):
                p.grad = g
            start = time.perf_counter()
            optimizer.step()
            took = time.perf_counter() - start
            best[kind]["AdamW foreach"] = min(best[kind]["AdamW foreach"], took * 1e3)
            for p in model.parameters():
                p.grad = None
            start = time.perf_counter()
            model(x).sum().backward()
            took = time.perf_counter() - start
            best[kind]["forward + backward"] = min(best[kind]["forward + backward"], took * 1e3)
    return best


def _miss_time(rounds: int) -> float:
    """Median microseconds of a call that has to be planned, over the ops, without its kernel."""
    mesh = make_dp_mesh(2)
    tensors = _spread(ours, mesh, 2)
    times = []
    for call in OPS.values():
        call(tensors)
        hit = min(_time(call, tensors, 10) for _ in range(3))
        best = math.inf
        for _ in range(rounds):
            ours.cache_clear()
            best = min(best, _time(call, tensors, 1))
        times.append(best - hit)
    return sorted(times)[len(times) // 2]


def main(argv: Sequence[str] | None = None) -> int:
    """`partita bench dispatch`."""
    parser = argparse.ArgumentParser(prog="partita bench dispatch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="rounds per op (minimum is taken)")
    parser.add_argument("--calls", type=int, default=200, help="calls per round")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--no-step", action="store_true", help="leave out the training step")
    options = parser.parse_args(argv)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        gc.disable()
        costs = measure(options.rounds, options.calls)
        both = [c for c in costs if not math.isnan(c.torch)]
        figures = {
            "overhead_us": geometric_mean([c.partita for c in costs]),
            "torch_overhead_us": geometric_mean([c.torch for c in both]),
            "ratio": geometric_mean([c.partita for c in both])
            / geometric_mean([c.torch for c in both]),
            "miss_us": _miss_time(5),
        }
        steps = {} if options.no_step else _step_times(options.rounds)
    finally:
        gc.enable()
        dist.destroy_process_group()
    if options.json:
        print(json.dumps({"ops": [asdict(c) for c in costs], **figures, "steps": steps}))
        return 0
    print(f"{'op':<18}{'plain us':>10}{'partita':>10}{'torch DTensor':>15}{'ratio':>8}")
    for c in costs:
        print(
            f"{c.op:<18}{c.plain:>10.2f}{c.partita:>+10.2f}{c.torch:>+15.2f}"
            f"{c.partita / c.torch:>8.2f}"
        )
    print(
        f"\ngeometric mean over {len(costs)} ops: partita +{figures['overhead_us']:.2f} us, "
        f"torch.distributed.tensor +{figures['torch_overhead_us']:.2f} us, "
        f"ratio {figures['ratio']:.2f}"
    )
    print(f"a cache miss (median over the ops): {figures['miss_us']:.0f} us")
    for what in ("forward + backward", "AdamW foreach") if steps else ():
        plain = steps["plain"][what]
        print(
            f"4 blocks, d=16, {what}: plain {plain:.2f} ms, "
            f"partita {steps['partita'][what] / plain:.2f}x, "
            f"torch.distributed.tensor {steps['torch'][what] / plain:.2f}x"
        )
    return 0
