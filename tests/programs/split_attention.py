"""Attention of sequences that the ranks share, and the operations that it takes."""

from __future__ import annotations

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pt
from partita import Shard
from tests.programs.steps import squares


class Operations(TorchDispatchMode):
    """Counts the multiplications of matrix products and attention that run on this rank."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with local_ops():
            self.count += self._of(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _of(name, args):
        if any(isinstance(a, torch.Tensor) and a.device.type == "meta" for a in args):
            return 0
        if name in ("mm", "bmm", "baddbmm", "addmm"):
            a, b = args[-2:]
            return a.numel() * b.shape[-1]
        if "attention" not in name:
            return 0
        back = "backward" in name
        q, k, v = args[back : back + 3]
        return q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1]) * (1 + back)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 6, 4).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def losses(mesh, way="eager"):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), Layer()).double()
    x = double(4, 8, 8)
    if mesh is not None:
        model = pt.zero(model, mesh, axis="dp", stage=3)
        x = pt.distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    step = squares(model, optimizer)
    ways = {"graph": {}, "blocks": {"blocks": True}}
    run = step if way == "eager" else pt.compile(step, backend="graph", **ways[way])
    with pt.ledger() as log:
        found = [run(x).item() for _ in range(3)]
    gathers = [m for m in log.moves if m.kind == "all_gather" and "cp" in m.axes]
    return found, len(gathers), run
