"""A bench of dispatch: the time that a DTensor adds to an op on a plain tensor.

It uses one process, torch's fake process group, and tiny tensors, so that only dispatch is timed.
First each op runs on plain tensors and on `torch.distributed.tensor`'s DTensors, in turn. Then a
mesh of partita is made, and each op runs on plain tensors and on partita's, in turn. The minimum
over many rounds counts. Overheads are in microseconds per call.
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

from .place import bench_device, make_dp_mesh, make_rival_mesh

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
    """The time per call of one op, in microseconds.

    Attributes:
        op: the name of the op, a key of `OPS`.
        plain: the time on plain tensors.
        partita, torch: the additional time on DTensors; nan if the call raised.
    """

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


def _spread(kind: Any, mesh: Any) -> dict[str, Any]:
    """Returns the tensors of `_plain_tensors` as DTensors: sharded, but weights replicated."""
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


@dataclass(frozen=True)
class KindTimes:
    """The measured times of one implementation of DTensors: partita's or torch's.

    Attributes:
        ops: for each op, the microseconds of a call on plain tensors and on DTensors; nan if it
            raised.
        steps: the time of each part of a step divided by the time on plain tensors.
        plain_steps: milliseconds of each part on plain tensors.
    """

    ops: list[tuple[float, float]]
    steps: dict[str, float]
    plain_steps: dict[str, float]


def measure(kind: Any, mesh: Any, rounds: int, n: int, with_steps: bool) -> KindTimes:
    """Returns the times of all `OPS` and of a step's parts, on plain tensors and on DTensors.

    Call it for torch first: the process must not have a mesh of partita by then. The time of an op
    that raises on torch's DTensors is nan. For partita, the error is raised.

    Args:
        kind: the module `partita` or `torch.distributed.tensor`.
        mesh: the mesh of the DTensors, from the same library.
        rounds: the number of rounds. In each, plain tensors and DTensors take turns.
        n: the number of calls per round.
        with_steps: True also times the parts of a training step.
    """
    ops = _time_beside_plain(_spread(kind, mesh), rounds, n, kind is theirs)
    steps = _step_times(kind, mesh, rounds) if with_steps else {}
    plain, spread = steps.get("plain", {}), steps.get("spread", {})
    return KindTimes(ops, {part: spread[part] / plain[part] for part in plain}, plain)


def _time_beside_plain(
    dtensors: dict[str, Any], rounds: int, n: int, may_raise: bool
) -> list[tuple[float, float]]:
    """Returns for each op the least microseconds, plain and on `dtensors`; nan if it raises."""
    plain = _plain_tensors()
    found = []
    for call in OPS.values():
        best = [math.inf, math.inf]
        try:
            for _ in range(5):
                call(dtensors)
        except Exception:
            if not may_raise:
                raise
            best[1] = math.nan
        for _ in range(5):
            call(plain)
        for _ in range(rounds):
            best[0] = min(best[0], _time(call, plain, n))
            if not math.isnan(best[1]):
                best[1] = min(best[1], _time(call, dtensors, n))
        found.append((best[0], best[1]))
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean of `values`, overheads in microseconds; nan is left out.

    Values below 0.01 count as 0.01.
    """
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


def _step_times(kind: Any, mesh: Any, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of forward and backward, and of AdamW, for four blocks of d=16."""
    runs: dict[str, tuple[torch.nn.Module, Any, torch.optim.Optimizer]] = {}
    for name in ("plain", "spread"):
        torch.manual_seed(0)
        model: torch.nn.Module = bench_device().place(
            torch.nn.Sequential(*(_block(16) for _ in range(4)))
        )
        x: Any = bench_device().place(torch.randn(4, 8, 16))
        if name == "spread":
            for part in model.modules():
                for key, p in list(part.named_parameters(recurse=False)):
                    rep = kind.DTensor.from_local(
                        p.detach(), mesh, [kind.Replicate()], run_check=False
                    )
                    part.register_parameter(key, torch.nn.Parameter(rep))
            x = kind.DTensor.from_local(x, mesh, [kind.Shard(0)], run_check=False)
        runs[name] = (model, x, torch.optim.AdamW(model.parameters(), foreach=True))
    best = {k: {"forward + backward": math.inf, "AdamW foreach": math.inf} for k in runs}
    for name, (model, x, _) in runs.items():
        model(x).sum().backward()
        for p in model.parameters():
            # Gradients at rest where the parameters are, so that only the optimizer is timed.
            if name == "spread":
                g: Any = p.grad
                p.grad = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    grads = {k: [p.grad for p in m.parameters()] for k, (m, _, _) in runs.items()}
    for _ in range(rounds):
        for name, (model, x, optimizer) in runs.items():
            for p, g in zip(model.parameters(), grads[name], strict=True):
                p.grad = g
            start = time.perf_counter()
            optimizer.step()
            took = time.perf_counter() - start
            best[name]["AdamW foreach"] = min(best[name]["AdamW foreach"], took * 1e3)
            for p in model.parameters():
                p.grad = None
            start = time.perf_counter()
            model(x).sum().backward()
            took = time.perf_counter() - start
            best[name]["forward + backward"] = min(best[name]["forward + backward"], took * 1e3)
    return best


def _miss_time(rounds: int) -> float:
    """Returns the median microseconds to plan a call, over all ops, without its kernel."""
    mesh = make_dp_mesh(2)
    tensors = _spread(ours, mesh)
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
    """Runs `partita bench dispatch`. Returns the exit code.

    Args:
        argv: the command line without the program's name; None for `sys.argv`.
    """
    parser = argparse.ArgumentParser(prog="partita bench dispatch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="rounds per op; the minimum counts")
    parser.add_argument("--calls", type=int, default=200, help="calls per round")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--no-step", action="store_true", help="leave out the training step")
    options = parser.parse_args(argv)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        gc.disable()
        how = (options.rounds, options.calls, not options.no_step)
        rival = measure(theirs, make_rival_mesh(2), *how)  # before there is a mesh of partita
        partita = measure(ours, make_dp_mesh(2), *how)
        costs = [
            Cost(name, plain, our - plain, their - same)
            for name, (plain, our), (same, their) in zip(OPS, partita.ops, rival.ops, strict=True)
        ]
        both = [c for c in costs if not math.isnan(c.torch)]
        figures = {
            "overhead_us": geometric_mean([c.partita for c in costs]),
            "torch_overhead_us": geometric_mean([c.torch for c in both]),
            "ratio": geometric_mean([c.partita for c in both])
            / geometric_mean([c.torch for c in both]),
            "miss_us": _miss_time(5),
        }
    finally:
        gc.enable()
        dist.destroy_process_group()
    if options.json:
        steps = {"partita": partita.steps, "torch": rival.steps}
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
    for part, plain in partita.plain_steps.items():
        print(
            f"4 blocks, d=16, {part}: plain {plain:.2f} ms, partita {partita.steps[part]:.2f}x, "
            f"torch.distributed.tensor {rival.steps[part]:.2f}x"
        )
    return 0
