"""How is a model trained on a mesh? By an ordinary loop, over tensors that have been spread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import partita as pt

from .data import Text, read
from .models import GPT

__all__ = ["Options", "sample", "train", "verify"]

Tell = Callable[..., None]
"""Called with the name of an event and its facts: `tell("step", step=3, loss=2.1, ...)`."""

TOLERANCE = 1e-5  # relative difference of losses that --verify accepts, fp32
WARM_UP = 20  # steps until the learning rate is reached
PROMPT = b"def "


@dataclass(frozen=True)
class Options:
    """What to train, on what, for how long.

    Attributes:
        mesh: axis names and sizes: any of "dp" (the batch is split) and "tp" (the weights are);
            () for one device without a mesh.
        data: a folder of text; Python's standard library where None.
        steps: optimizer steps.
        seed: of the weights, the batches and the sample.
        batch: sequences per step, over all ranks.
        context: bytes per sequence.
        layers, width, heads: the model, see `GPT`.
        lr: the highest learning rate, reached after 20 steps; a cosine then takes it to a tenth.
        sample: bytes of text to write at the end; 0 for none.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    data: Path | None = None
    steps: int = 600
    seed: int = 0
    batch: int = 16
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4
    lr: float = 2e-3
    sample: int = 200

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.mesh)

    def check(self) -> None:
        """Refuse what can be refused before any rank starts.

        Raises:
            ValueError: a width that fits no heads, or no such data.
        """
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width {self.width} does not divide into --heads {self.heads} of an even size; "
                f"--width {2 * self.heads * max(1, round(self.width / (2 * self.heads)))} does"
            )
        if self.data is not None and not self.data.exists():
            raise ValueError(f"--data: there is no {self.data}")


def train(options: Options, tell: Tell, text: Text | None = None) -> list[float]:
    """Train a fresh GPT and return the loss of each step (nats per byte, before its update).

    Every rank of `options.mesh` calls this with equal options. Tells of "ready" once, of "step"
    after each step and of "sample" at the end.

    Raises:
        ValueError: options that fit no model or no text.
    """
    if text is None:
        text = read(options.data, context=options.context)
    mesh = _mesh(options)
    torch.manual_seed(options.seed)
    model = GPT(
        layers=options.layers, width=options.width, heads=options.heads, context=options.context
    )
    parameters = sum(p.numel() for p in model.parameters())
    if mesh is not None:
        # A byte has 256 values: to split so few words would cost more than it saves.
        tp = pt.plans.gpt(split_words=False) if "tp" in mesh.mesh_dim_names else None
        pt.parallelize(model, mesh, tp)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    tell(
        "ready",
        parameters=parameters,
        bytes=len(text.bytes),
        files=text.files,
        source=text.source,
        threads=torch.get_num_threads(),
    )
    losses = []
    for step in range(options.steps):
        start = time.monotonic()
        with pt.ledger() as log:
            batch = text.batch(step, seed=options.seed, size=options.batch, context=options.context)
            inputs, targets = batch if mesh is None else pt.distribute_batch(batch, mesh)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = options.lr * _share_of_lr(step, options.steps)
            optimizer.step()
            losses.append(loss.item())
        tell(
            "step",
            step=step,
            loss=losses[-1],
            seconds=time.monotonic() - start,
            nbytes=log.bytes,
        )
    if options.sample:
        written = sample(model, PROMPT, options.sample, seed=options.seed)
        tell("sample", prompt=PROMPT.decode(), text=written.decode(errors="replace"))
    return losses


def verify(options: Options, tell: Tell, *, compare: bool) -> bool:
    """Train on the mesh, then the same without one, and compare the losses of each step.

    Every rank calls this; the rank with `compare` makes the second run, tells of "verify" and
    returns whether no relative difference is over 1e-5. The other ranks return True.
    """
    options = replace(options, sample=0)
    text = read(options.data, context=options.context)
    spread_out = train(options, tell, text)
    if not compare:
        return True

    def tell_nothing(event: str, **facts: Any) -> None:
        pass

    single = train(replace(options, mesh=()), tell_nothing, text)
    worst = max(abs(a - b) / abs(b) for a, b in zip(spread_out, single, strict=True))
    tell("verify", mesh=spread_out, one=single, difference=worst, tolerance=TOLERANCE)
    return worst <= TOLERANCE


@torch.no_grad()
def sample(model: GPT, prompt: bytes, count: int, *, seed: int) -> bytes:
    """`count` bytes that the model writes after `prompt`. Every rank calls this and gets the same.

    The window keeps one length, filled up at its end, where a causal model does not look: so each
    byte runs the plans of the first.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        recent = tokens[-model.context :]
        window = torch.zeros(1, model.context, dtype=torch.int64)
        window[0, : len(recent)] = torch.tensor(recent)
        logits = _whole(model(window))[0, len(recent) - 1]
        chances = F.softmax(logits / 0.7, dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(tokens[len(prompt) :])


def _share_of_lr(step: int, steps: int) -> float:
    falling = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARM_UP) * falling


def _mesh(options: Options) -> Any:
    if not options.mesh:
        return None
    names, sizes = zip(*options.mesh, strict=True)
    return pt.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, pt.DTensor) else x
