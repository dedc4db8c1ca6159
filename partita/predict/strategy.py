"""Named models and strategies: a step over tensors without memory, to be captured and not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Integral
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

__all__ = [
    "MODELS",
    "ModelShape",
    "Strategy",
    "StrategyError",
    "check_counts",
    "make_step",
    "shape_of",
]


class StrategyError(ValueError):
    """A model that is not known, no count, or a mesh or a batch that does not divide."""


def check_counts(**counts: Any) -> None:
    """Raise StrategyError for what is no whole number of at least 1, by its name."""
    for name, count in counts.items():
        if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
            raise StrategyError(f"{name} is {count!r}: a whole number, at least 1")


def make_text(sequences: int, context: int) -> tuple[Tensor, Tensor]:
    """Tokens (sequences, context) to be read, and as many to be guessed."""
    tokens = torch.randint(0, 256, (sequences, context))
    return tokens, tokens.clone()


def loss_of_logits(result: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of logits (..., classes) in float32."""
    return F.cross_entropy(result.flatten(0, -2).float(), targets.flatten())


@dataclass(frozen=True)
class ModelShape:
    """A model that is simulated and planned: one by name, or one's own.

    Attributes:
        make: the module, of `layers` blocks, for sequences of `context` tokens at most.
        layers, width, heads, groups: of its blocks; `groups` heads of keys and values.
        context: tokens of a sequence, unless others are asked for.
        vocab: the number of tokens.
        plan: of tensor parallelism, with or without sequence parallelism.
        name: what to call it.
        make_batch: inputs and targets of so many sequences of so many tokens, with the samples in
            dimension 0.
        loss: of the module's result and the targets.
        has_blocks: its `blocks` may be recomputed in backward.
        has_sequence: sequences may be split over tp.
        sums: over tp of a block's results in forward, at least.
        code: the call of a class of `partita.app.models` that makes it, with "{layers}" and
            "{context}" in it; "" of one's own.
    """

    make: Callable[[int, int], nn.Module]
    layers: int
    width: int
    heads: int
    groups: int
    context: int
    vocab: int
    plan: Callable[..., dict[str, Any]]
    name: str = ""
    make_batch: Callable[[int, int], tuple[Tensor, Tensor]] = make_text
    loss: Callable[[Any, Tensor], Tensor] = loss_of_logits
    has_blocks: bool = True
    has_sequence: bool = True
    sums: int = 2
    code: str = ""


def _llama_shape(
    layers: int,
    width: int,
    heads: int,
    hidden: int,
    *,
    groups: int = 8,
    context: int = 8192,
    vocab: int = 128_256,
) -> ModelShape:
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

    code = f"Llama(layers={{layers}}, width={width}, heads={heads}, groups={groups}, "
    code += f"context={{context}}, vocab={vocab}, hidden={hidden})"
    shape = ModelShape(make, layers, width, heads, groups, context, vocab, plans.llama)
    return dataclasses.replace(shape, code=code)


def _gpt_shape(layers: int, width: int, heads: int, context: int, vocab: int = 256) -> ModelShape:
    def make(layers: int, context: int) -> nn.Module:
        from partita.app.models import GPT

        return GPT(layers=layers, width=width, heads=heads, context=context, vocab=vocab)

    code = f"GPT(layers={{layers}}, width={width}, heads={heads}, "
    code += f"context={{context}}, vocab={vocab})"
    shape = ModelShape(make, layers, width, heads, heads, context, vocab, plans.gpt)
    return dataclasses.replace(shape, code=code)


MODELS: dict[str, ModelShape] = {
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

    Raises:
        StrategyError: names what is no count.
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

    def __post_init__(self) -> None:
        check_counts(batch=self.batch, micro_batches=self.micro_batches)
        check_counts(remat_every=self.remat_every)
        for name, count in (("context", self.context), ("layers", self.layers)):
            if count is not None:
                check_counts(**{name: count})


def make_step(
    model: str | ModelShape, mesh: Mapping[str, int], strategy: Strategy, on: Any = None
) -> tuple[Callable[..., Tensor], tuple[Any, ...], int]:
    """A training step of a model: on a dry mesh over the meta device, or to be run.

    Args:
        mesh: sizes of "dp" and "tp".
        on: the mesh of these sizes on which it will run.

    Returns:
        The step, its arguments, and the tokens of a step on all ranks together.

    Raises:
        StrategyError: names what does not divide.
    """
    shape = shape_of(model)
    _check_strategy(shape, mesh, strategy)
    device = "meta" if on is None else on.device_type
    computes_on = HOST.type if on is None else device
    on = dry_mesh(**mesh) if on is None else on  # type: ignore[arg-type]
    context = strategy.context or shape.context
    dp = mesh.get("dp", 1)
    dtype = getattr(torch, strategy.precision)
    with torch.device(device):
        module = shape.make(strategy.layers or shape.layers, context)
        local = [shape.make_batch(strategy.batch, context) for _ in range(strategy.micro_batches)]
    parallelize(module, on, shape.plan(sequence=strategy.sequence) if "tp" in mesh else None)
    in_zero = "dp" in mesh and strategy.zero == 3
    holds_back = "dp" in mesh and strategy.zero < 2  # shards are sent as they come
    if "dp" in mesh:
        precision = dtype if in_zero and dtype is not torch.float32 else None
        zero(module, on, "dp", stage=strategy.zero, precision=precision)
    if strategy.remat and shape.has_blocks:
        remat(module, blocks=list(module.blocks)[:: strategy.remat_every])  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)
    placements = [Shard(0) if name == "dp" else Replicate() for name in mesh]

    def step(micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        optimizer.zero_grad()
        total: Any = 0.0
        for i, (inputs, targets) in enumerate(micro_batches, 1):
            last = i == len(micro_batches)
            with nullcontext() if last or not holds_back else no_sync(module):
                with _computed_in(computes_on, torch.float32 if in_zero else dtype):
                    result = module(inputs)
                loss = shape.loss(result, targets)
                loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    spread = {id(t): DTensor.from_local(t, on, placements) for pair in local for t in pair}
    micro_batches = [(spread[id(x)], spread[id(y)]) for x, y in local]
    return step, (micro_batches,), dp * strategy.batch * strategy.micro_batches * context


def _computed_in(device: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is torch.float32 else Device(device).autocast(dtype)


def shape_of(model: str | ModelShape) -> ModelShape:
    """The model of this name, or what is one already. Raises StrategyError for another name."""
    if isinstance(model, ModelShape):
        return model
    if model not in MODELS:
        raise StrategyError(f"no model {model!r}: {', '.join(MODELS)} are known by name")
    return dataclasses.replace(MODELS[model], name=model)


def _check_strategy(shape: ModelShape, mesh: Mapping[str, int], strategy: Strategy) -> None:
    for name, size in mesh.items():
        if name not in ("dp", "tp"):
            raise StrategyError(f"{name}={size} is no axis of a named model: dp=N, tp=N")
        if size < 1:
            raise StrategyError(f"{name}={size}: an axis has at least one rank")
    if not mesh:
        raise StrategyError("a mesh has at least one axis: dp=N, tp=N")
    tp = mesh.get("tp", 1)
    for what, size in (("heads", shape.heads), ("key and value heads", shape.groups)):
        if size % tp:
            raise StrategyError(f"tp={tp} does not divide the {size} {what} of {shape.name}")
    context = strategy.context or shape.context
    check_counts(layers=strategy.layers or shape.layers, context=context)  # of one's own model
    if strategy.sequence and context % tp:
        raise StrategyError(f"tp={tp} does not divide sequences of {context} tokens")
    if strategy.zero not in (0, 1, 2, 3):
        raise StrategyError(f"ZeRO has stages 0 to 3, not {strategy.zero}")
    if getattr(torch, strategy.precision, None) not in (torch.float32, torch.bfloat16):
        raise StrategyError(f"precision is {strategy.precision!r}: bfloat16 or float32")
