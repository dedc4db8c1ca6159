"""Named models and strategies: a step over tensors without memory, to be captured and not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.comm import dry_mesh
from partita.comm.device import HOST, Device
from partita.layout import Replicate, Shard
from partita.parallel import plans
from partita.parallel.parallelize import parallelize
from partita.parallel.zero import no_sync, zero
from partita.remat import remat
from partita.tensor import DTensor

__all__ = ["MODELS", "Shape", "Strategy", "StrategyError", "make_step"]


class StrategyError(ValueError):
    """A model that is not known, or a mesh or a batch that does not divide."""


@dataclass(frozen=True)
class Shape:
    """A model by name.

    Attributes:
        make: the module, of `layers` blocks.
        layers, width, heads, groups: of its blocks; `groups` heads of keys and values.
        context: tokens of a sequence, unless others are asked for.
        vocab: the number of tokens.
        plan: of tensor parallelism, with or without sequence parallelism.
    """

    make: Callable[[int, int], nn.Module]
    layers: int
    width: int
    heads: int
    groups: int
    context: int
    vocab: int
    plan: Callable[..., dict[str, Any]]


def _llama_shape(
    layers: int,
    width: int,
    heads: int,
    hidden: int,
    *,
    groups: int = 8,
    context: int = 8192,
    vocab: int = 128_256,
) -> Shape:
    def make(layers: int, context: int) -> nn.Module:
        from partita.app.models import Llama  # the app is no part of `import partita`

        return Llama(
            layers=layers,
            width=width,
            heads=heads,
            groups=groups,
            context=context,
            vocab=vocab,
            hidden=hidden,
        )

    return Shape(make, layers, width, heads, groups, context, vocab, plans.llama)


def _gpt_shape(layers: int, width: int, heads: int, context: int, vocab: int = 256) -> Shape:
    def make(layers: int, context: int) -> nn.Module:
        from partita.app.models import GPT

        return GPT(layers=layers, width=width, heads=heads, context=context, vocab=vocab)

    return Shape(make, layers, width, heads, heads, context, vocab, plans.gpt)


MODELS: dict[str, Shape] = {
    "gpt": _gpt_shape(4, 256, 4, 256),
    "gpt2-xl": _gpt_shape(48, 1600, 25, 1024),
    "mpt-7b": _gpt_shape(32, 4096, 32, 2048, 50_368),
    "mpt-13b": _gpt_shape(40, 5120, 40, 2048, 50_368),
    "llama2-13b": _llama_shape(40, 5120, 40, 13_824, groups=40, context=4096, vocab=32_000),
    "llama2-70b": _llama_shape(80, 8192, 64, 28_672, context=4096, vocab=32_000),
    "llama3-8b": _llama_shape(32, 4096, 32, 14_336),
    "llama3-70b": _llama_shape(80, 8192, 64, 28_672),
}
"""By name: a byte-level GPT as small as `partita train`'s and one of GPT-2 XL's blocks; GPTs of the
shapes of MPT (github.com/mosaicml/llm-foundry, scripts/train/yamls); the shapes of Llama 2 (Touvron
et al., arXiv 2307.09288) and Llama 3 (Grattafiori et al., arXiv 2407.21783, table 3)."""


@dataclass(frozen=True)
class Strategy:
    """How a model is spread and stepped.

    Attributes:
        zero: the stage of ZeRO over "dp".
        remat: blocks are recomputed in backward.
        remat_every: of so many blocks one is, where `remat`.
        sequence: sequence parallelism beside tensor parallelism.
        batch: sequences of a micro-batch on each rank of "dp".
        micro_batches: of a step, one after the other.
        context: tokens of a sequence; the model's own where None.
        precision: the dtype to compute in; weights and optimizer are float32.
        layers: blocks; the model's own where None.
    """

    zero: int = 3
    remat: bool = True
    sequence: bool = False
    batch: int = 1
    micro_batches: int = 1
    context: int | None = None
    precision: str = "bfloat16"
    layers: int | None = None
    remat_every: int = 1


def make_step(
    model: str, mesh: Mapping[str, int], strategy: Strategy
) -> tuple[Callable[..., Tensor], tuple[Any, ...], int]:
    """A training step of a named model on a dry mesh, all on the meta device.

    Args:
        mesh: sizes of "dp" and "tp".

    Returns:
        The step, its arguments, and the tokens of a step on all ranks together.

    Raises:
        StrategyError: names what does not divide.
    """
    shape = _shape_of(model)
    _check_strategy(model, shape, mesh, strategy)
    dry = dry_mesh(**mesh)  # type: ignore[arg-type]
    context = strategy.context or shape.context
    dp = mesh.get("dp", 1)
    dtype = getattr(torch, strategy.precision)
    with torch.device("meta"):
        module = shape.make(strategy.layers or shape.layers, context)
        local = torch.zeros(strategy.batch, context, dtype=torch.long)
    parallelize(module, dry, shape.plan(sequence=strategy.sequence) if "tp" in mesh else None)
    in_zero = "dp" in mesh and strategy.zero == 3
    holds_back = "dp" in mesh and strategy.zero < 2  # shards are sent as they come
    if "dp" in mesh:
        precision = dtype if in_zero and dtype is not torch.float32 else None
        zero(module, dry, "dp", stage=strategy.zero, precision=precision)
    if strategy.remat:
        remat(module, blocks=list(module.blocks)[:: strategy.remat_every])  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)
    placements = [Shard(0) if name == "dp" else Replicate() for name in mesh]
    tokens = [DTensor.from_local(local, dry, placements) for _ in range(strategy.micro_batches)]

    def step(micro_batches: list[Tensor]) -> Tensor:
        optimizer.zero_grad()
        total: Any = 0.0
        for i, x in enumerate(micro_batches, 1):
            last = i == len(micro_batches)
            with nullcontext() if last or not holds_back else no_sync(module):
                with _computed_in(torch.float32 if in_zero else dtype):
                    logits = module(x)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), x.flatten())
                loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step, (tokens,), dp * strategy.batch * strategy.micro_batches * context


def _computed_in(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is torch.float32 else Device(HOST.type).autocast(dtype)


def _shape_of(model: str) -> Shape:
    if model not in MODELS:
        raise StrategyError(f"no model {model!r}: {', '.join(MODELS)} are known by name")
    return MODELS[model]


def _check_strategy(model: str, shape: Shape, mesh: Mapping[str, int], strategy: Strategy) -> None:
    for name, size in mesh.items():
        if name not in ("dp", "tp") or size < 1:
            raise StrategyError(f"{name}={size} is no axis of a named model: dp=N, tp=N")
    if not mesh:
        raise StrategyError("a mesh has at least one axis: dp=N, tp=N")
    tp = mesh.get("tp", 1)
    for what, size in (("heads", shape.heads), ("key and value heads", shape.groups)):
        if size % tp:
            raise StrategyError(f"tp={tp} does not divide the {size} {what} of {model}")
    context = strategy.context or shape.context
    if strategy.sequence and context % tp:
        raise StrategyError(f"tp={tp} does not divide sequences of {context} tokens")
    counts = {"batch": strategy.batch, "micro_batches": strategy.micro_batches, "context": context}
    counts["remat_every"] = strategy.remat_every
    for what, size in counts.items():
        if size < 1:
            raise StrategyError(f"{what} is {size}: at least 1")
    if strategy.zero not in (0, 1, 2, 3):
        raise StrategyError(f"ZeRO has stages 0 to 3, not {strategy.zero}")
    if getattr(torch, strategy.precision, None) not in (torch.float32, torch.bfloat16):
        raise StrategyError(f"precision is {strategy.precision!r}: bfloat16 or float32")
