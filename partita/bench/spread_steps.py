"""Training steps of the examples' models, with any width, distributed over a mesh in many ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt
from partita.app.models import GPT, Llama

from .place import bench_device


@dataclass(frozen=True, eq=False)
class SpreadStep:
    """A model of the examples, and how its training step is distributed over a mesh.

    Attributes:
        model: "gpt" or "llama", with two blocks, or "cnn".
        mesh: the number of ranks of each axis, "dp" and "tp".
        zero: the ZeRO stage over "dp".
        remat: True recomputes blocks in backward.
        width: the width of a block, or the channels of the first convolution.
        context: tokens per sequence.
        samples: the number of samples in the batch of all ranks.
    """

    model: str = "gpt"
    mesh: Mapping[str, int] = field(default_factory=lambda: {"dp": 2})
    zero: int = 0
    remat: bool = False
    width: int = 128
    context: int = 64
    samples: int = 16

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        count = 1
        for size in self.mesh.values():
            count *= size
        return count

    def __str__(self) -> str:
        axes = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        said = [self.model, axes, f"ZeRO-{self.zero}" if "dp" in self.mesh else "", str(self.width)]
        said += ["" if self.model == "cnn" else f"x {self.context}", "remat" if self.remat else ""]
        return " ".join(filter(None, said))

    def make(self) -> tuple[Any, tuple[Tensor, ...], Any]:
        """Makes the mesh and the training step. Must be called on all ranks.

        Returns:
            The compiled step, its arguments and the mesh.
        """
        names, sizes = tuple(self.mesh), tuple(self.mesh.values())
        mesh = pt.init_device_mesh(bench_device().type, sizes, mesh_dim_names=names)
        step, args, _ = self.make_on(mesh)
        return pt.compile(step, backend="graph"), args, mesh

    def make_on(self, mesh: Any) -> tuple[Any, tuple[Tensor, ...], torch.optim.Optimizer]:
        """Makes the training step on an existing mesh. Must be called on all ranks.

        Returns:
            The step, its arguments and the optimizer.
        """
        torch.manual_seed(0)
        model, plan, batch = _MODELS[self.model](self)
        bench_device().place(model)
        pt.parallelize(model, mesh, plan if "tp" in self.mesh else None)
        if "dp" in self.mesh:
            pt.zero(model, mesh, "dp", stage=self.zero)
        if self.remat:
            pt.remat(model, blocks=list(model.blocks))  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        placements = [pt.Shard(0) if name == "dp" else pt.Replicate() for name in self.mesh]
        rows = map(bench_device().place, batch)
        spread = tuple(pt.distribute_tensor(one, mesh, placements) for one in rows)

        def step(x: Tensor, target: Tensor) -> Tensor:
            optimizer.zero_grad()
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
            loss.backward()
            optimizer.step()
            return loss

        return step, spread, optimizer


def make_cnn(channels: int) -> nn.Module:
    """Returns the convolutional network of the example that classifies digits.

    Its first convolution has `channels` channels, the second one twice as many.
    """
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 10),
    )


_Made = tuple[nn.Module, Any, tuple[Tensor, Tensor]]


def _make_gpt(way: SpreadStep) -> _Made:
    model = GPT(layers=2, width=way.width, heads=4, context=way.context)
    return model, pt.plans.gpt(), _draw_text(way)


def _make_llama(way: SpreadStep) -> _Made:
    model = Llama(layers=2, width=way.width, heads=8, groups=4, context=way.context)
    return model, pt.plans.llama(), _draw_text(way)


def _make_digits(way: SpreadStep) -> _Made:
    images = torch.rand(way.samples, 1, 8, 8)
    return make_cnn(way.width), None, (images, torch.randint(0, 10, (way.samples,)))


def _draw_text(way: SpreadStep) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 256, (way.samples, way.context))
    return text, text


_MODELS: dict[str, Callable[[SpreadStep], _Made]] = {
    "gpt": _make_gpt,
    "llama": _make_llama,
    "cnn": _make_digits,
}


# -- a mixture of experts --------------------------------------------------------------------------

_EXPERTS, _CHOICES = 8, 2


class ExpertModel(nn.Module):
    """A mixture of experts that predicts the next byte: an RNN, and 2 of 8 MLPs for each byte.

    Args:
        width: the width between the layers.
        context: bytes per sequence. An expert takes at most twice the bytes of an even division.
    """

    def __init__(self, width: int, context: int):
        super().__init__()
        self.capacity = 2 * _CHOICES * context // _EXPERTS
        self.embed = nn.Embedding(256, width)
        self.past = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, _EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(_EXPERTS, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(_EXPERTS, 2 * width, width) / (2 * width) ** 0.5)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Returns logits (b, t, 256) for `tokens_bt`, bytes (b, t) as int64."""
        x_btw, _ = self.past(self.embed(tokens_bt))
        return self.head(x_btw + self._ask_experts(self.norm(x_btw)))  # type: ignore[no-any-return]

    def _ask_experts(self, x_btw: Tensor) -> Tensor:
        share_bte = self.router(x_btw).softmax(dim=-1)
        best_btk = share_bte.topk(_CHOICES, dim=-1).indices
        chosen_bte = F.one_hot(best_btk, _EXPERTS).sum(dim=2).to(x_btw.dtype)
        place_bte = (chosen_bte.cumsum(dim=1) - 1).long()
        taken_bte = chosen_bte * (place_bte < self.capacity)
        places = F.one_hot(place_bte.clamp(0, self.capacity - 1), self.capacity)
        sent_btec = taken_bte[..., None] * places.to(x_btw.dtype)
        x_becw = torch.einsum("btec,btw->becw", sent_btec, x_btw)
        h_bech = F.gelu(torch.einsum("becw,ewh->bech", x_becw, self.up))
        y_becw = torch.einsum("bech,ehw->becw", h_bech, self.down)
        return torch.einsum("btec,becw->btw", sent_btec * share_bte[..., None], y_becw)


def plan_experts(sequence: bool = False) -> dict[str, dict[str, pt.Shard]]:
    """Returns a plan for `pt.parallelize` that shards the experts over the axis "tp".

    A `ModelShape` calls it with `sequence`, which has no effect.
    """
    return {"up": {"tp": pt.Shard(0)}, "down": {"tp": pt.Shard(0)}}
