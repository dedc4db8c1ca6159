"""Strategies: models by name, how to distribute one over ranks, and its training step.

A *way* is a mesh and a strategy. `make_step` makes its training step, over tensors without memory
(for a capture) or on a mesh. `write_code` and `train_command` write it as a program and a command.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.comm import dry_mesh
from partita.comm.device import HOST, Device
from partita.layout import Replicate, Shard
from partita.layout.text import describe_value
from partita.parallel import plans
from partita.parallel.parallelize import parallelize
from partita.parallel.zero import no_sync, zero
from partita.remat import remat
from partita.tensor import DTensor

from .machine import CHOICE, COUNT, COUNT_OR_NONE_AT_ALL, TEXT, Kind, Machine, check_fields


class StrategyError(ValueError):
    """Raised if a model, strategy, mesh or argument is invalid.

    For example, the model is unknown, an argument has no effect, or the mesh does not divide the
    model.
    """


def refuse_if(is_wrong: object, message: str) -> None:
    """Raises StrategyError with the text `message` if `is_wrong` is true."""
    if is_wrong:
        raise StrategyError(message)


def check_counts(**counts: Any) -> None:
    """Raises StrategyError for the first named argument that is not an integer of at least 1."""
    for name, count in counts.items():
        COUNT.check(name, count, StrategyError)


def check_argument(name: str, value: Any, is_right: bool, allowed: str) -> None:
    """Raises StrategyError unless `is_right`: "NAME is VALUE: ALLOWED"."""
    refuse_if(not is_right, f"{name} is {describe_value(value)}: {allowed}")


def _make_text(sequences: int, context: int) -> tuple[Tensor, Tensor]:
    """Returns random input tokens and targets, each of shape (sequences, context)."""
    tokens = torch.randint(0, 256, (sequences, context))
    return tokens, tokens.clone()


def _loss_of_logits(result: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy of logits (..., classes) in float32."""
    return F.cross_entropy(result.flatten(0, -2).float(), targets.flatten())


@dataclass(frozen=True)
class ModelShape:
    """A model for simulation and planning: how to make it, and its sizes.

    Attributes:
        make: a function `make(layers, context)` that returns the module, with `layers` blocks, for
            sequences of at most `context` tokens.
        layers, width, heads, groups: the number of blocks, the size of the residual stream, and the
            number of heads of queries, and of keys and values.
        context: tokens per sequence, unless the strategy has another number.
        vocab: the number of different tokens.
        plan: a function `plan(sequence=...)` that returns the plan of tensor parallelism.
        name: the name in reports.
        make_batch: a function `make_batch(sequences, tokens in each)` that returns inputs and
            targets. Their dimension 0 is the batch.
        loss: a function `loss(result, targets)` of the module's result that returns the loss.
        has_blocks: True if its `blocks` can be recomputed in backward.
        has_sequence: True if sequences can be split over tp.
        sums: the least number of reductions over tp that a block needs in forward.
        code: the constructor call of a class in `partita.app.models`, with "{layers}" and
            "{context}" in it; "" for your own model.

    Raises:
        StrategyError: a count is not valid, or a function cannot be called. The error names it.
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
    make_batch: Callable[[int, int], tuple[Tensor, Tensor]] = _make_text
    loss: Callable[[Any, Tensor], Tensor] = _loss_of_logits
    has_blocks: bool = True
    has_sequence: bool = True
    sums: int = 2
    code: str = ""

    def __post_init__(self) -> None:
        kinds = {
            "layers width heads groups context vocab": COUNT,
            "make": Kind("a function of layers and context", callable),
            "plan": Kind("a function that takes sequence=", callable),
            "make_batch": Kind("a function of sequences and context", callable),
            "loss": Kind("a function of the result and the targets", callable),
            "has_blocks has_sequence": CHOICE,
            "sums": COUNT_OR_NONE_AT_ALL,
            "name": TEXT,
        }
        check_fields(self, StrategyError, kinds)


def _shape_of_class(
    kind: str, layers: int, width: int, heads: int, context: int, vocab: int, **more: int
) -> ModelShape:
    """Returns the shape of a class of `partita.app.models`, which has `more` sizes."""
    sizes = {"width": width, "heads": heads, "vocab": vocab, **more}

    def make(layers: int, context: int) -> nn.Module:
        from partita.app import models  # not at the top: `import partita` must not load the app

        model: nn.Module = getattr(models, kind)(layers=layers, context=context, **sizes)
        return model

    code = f"{kind}(layers={{layers}}, width={width}, heads={heads}, context={{context}}, "
    code += ", ".join(f"{name}={size}" for name, size in {"vocab": vocab, **more}.items()) + ")"
    groups, plan = more.get("groups", heads), plans.gpt if kind == "GPT" else plans.llama
    return ModelShape(make, layers, width, heads, groups, context, vocab, plan, code=code)


MODELS: dict[str, ModelShape] = {
    "gpt": _shape_of_class("GPT", 4, 256, 4, 256, 256),
    "gpt2-xl": _shape_of_class("GPT", 48, 1600, 25, 1024, 256),
    "mpt-7b": _shape_of_class("GPT", 32, 4096, 32, 2048, 50_368),
    "mpt-13b": _shape_of_class("GPT", 40, 5120, 40, 2048, 50_368),
    "llama2-13b": _shape_of_class("Llama", 40, 5120, 40, 4096, 32_000, groups=40, hidden=13_824),
    "llama2-70b": _shape_of_class("Llama", 80, 8192, 64, 4096, 32_000, groups=8, hidden=28_672),
    "llama3-8b": _shape_of_class("Llama", 32, 4096, 32, 8192, 128_256, groups=8, hidden=14_336),
    "llama3-70b": _shape_of_class("Llama", 80, 8192, 64, 8192, 128_256, groups=8, hidden=28_672),
}
"""Models by name: a byte-level GPT as small as `partita train`'s and one of GPT-2 XL's blocks; GPTs
of the shapes of MPT (github.com/mosaicml/llm-foundry, scripts/train/yamls); the shapes of Llama 2
(Touvron et al., arXiv 2307.09288) and Llama 3 (Grattafiori et al., arXiv 2407.21783, table 3)."""


@dataclass(frozen=True)
class Strategy:
    """A way to distribute and train a model.

    Attributes:
        zero: the ZeRO stage over the axis "dp".
        remat: True recomputes blocks in backward.
        remat_every: with `remat`, recompute every n-th block; 1 recomputes all.
        sequence: True adds sequence parallelism to tensor parallelism.
        batch: sequences per micro-batch, on each rank of "dp".
        micro_batches: micro-batches per step, one after the other.
        context: tokens per sequence. None: the model's own.
        precision: the dtype of computation. Weights and optimizer state keep the dtype in which the
            model is created. That is float32, or the dtype in a configuration of transformers.
        layers: the number of blocks. None: the model's own.

    Raises:
        StrategyError: a field of a wrong type, or a number that is not a valid count.
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
        counts = {"remat_every": self.remat_every, "context": self.context, "layers": self.layers}
        check_counts(**{name: count for name, count in counts.items() if count is not None})
        is_stage = isinstance(self.zero, Integral) and not isinstance(self.zero, bool)
        check_argument("zero", self.zero, is_stage, "a stage, 0 to 3")
        check_fields(self, StrategyError, {"remat sequence": CHOICE})
        given = describe_value(self.precision)
        given = str(self.precision) if isinstance(self.precision, torch.dtype) else given
        is_text = isinstance(self.precision, str)
        refuse_if(not is_text, f"precision is {given}: {_PRECISIONS}, as text")


_MOST_ELEMENTS = 2**59
"""Elements of logits that a tensor can hold: torch counts its bytes in 64 bits with a sign."""
_PRECISIONS = "'bfloat16' or 'float32'"


def make_step(
    model: str | ModelShape, mesh: Mapping[str, int], strategy: Strategy, on: Any = None
) -> tuple[Callable[..., Tensor], tuple[Any, ...], int]:
    """Makes a training step of a model that is distributed by a strategy.

    Args:
        model: a name in `partita.predict.MODELS`, or a `ModelShape`.
        mesh: the sizes of "dp" and "tp".
        strategy: how the model is distributed and trained.
        on: the mesh of these sizes on which the step will run. None: a dry mesh, with meta tensors.

    Returns:
        The step, its arguments, and the tokens of a step on all ranks together.

    Raises:
        StrategyError: an unknown model, or a mesh or strategy that does not fit the model.
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
        check_argument("what make gives", module, isinstance(module, nn.Module), "a module")
        local = [shape.make_batch(strategy.batch, context) for _ in range(strategy.micro_batches)]
    parallelize(module, on, shape.plan(sequence=strategy.sequence) if "tp" in mesh else None)
    in_zero = "dp" in mesh and strategy.zero == 3
    casts = dtype is not torch.float32 and not in_zero
    holds_back = "dp" in mesh and strategy.zero < 2  # from stage 2 on, each backward reduces
    if "dp" in mesh:
        precision = dtype if in_zero and dtype is not torch.float32 else None
        zero(module, on, "dp", stage=strategy.zero, precision=precision)
    if strategy.remat and shape.has_blocks:
        said = f"{shape.name} has no `blocks` to be recomputed: its ModelShape says has_blocks=True"
        refuse_if(not hasattr(module, "blocks"), said)
        remat(module, blocks=list(module.blocks)[:: strategy.remat_every])  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)
    placements = [Shard(0) if name == "dp" else Replicate() for name in mesh]

    def step(micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        optimizer.zero_grad()
        total: Any = 0.0
        for i, (inputs, targets) in enumerate(micro_batches, 1):
            last = i == len(micro_batches)
            with nullcontext() if last or not holds_back else no_sync(module):
                with nullcontext() if not casts else Device(computes_on).autocast(dtype):
                    result = module(inputs)
                loss = shape.loss(result, targets)
                loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    step.__qualname__ = f"the step of {shape.name or 'the model'}"  # for progress and errors
    spread = {id(t): DTensor.from_local(t, on, placements) for pair in local for t in pair}
    micro_batches = [(spread[id(x)], spread[id(y)]) for x, y in local]
    return step, (micro_batches,), dp * strategy.batch * strategy.micro_batches * context


def shape_of(model: str | ModelShape) -> ModelShape:
    """Returns the `ModelShape` of a model that is known by name, or `model` itself.

    Raises:
        StrategyError: no model has this name.
    """
    if isinstance(model, ModelShape):
        return model
    allowed = "a name of partita.predict.MODELS, or a ModelShape of your own"
    check_argument("model", model, isinstance(model, str), allowed)
    known = ", ".join(MODELS)
    is_known = model in MODELS
    refuse_if(not is_known, f"no model {describe_value(model)}: {known} are known by name")
    return dataclasses.replace(MODELS[model], name=model)


def _check_strategy(shape: ModelShape, mesh: Mapping[str, int], of: Strategy) -> None:
    """Raises StrategyError for sizes that do not divide, and options without effect."""
    for name, size in mesh.items():
        is_known = name in ("dp", "tp")
        refuse_if(not is_known, f"{name}={size} is not an axis of a named model: dp=N, tp=N")
        refuse_if(size < 1, f"{name}={size}: an axis has at least one rank")
    refuse_if(not mesh, "a mesh has at least one axis: dp=N, tp=N")
    tp, context = mesh.get("tp", 1), of.context or shape.context
    for what, size in (("heads", shape.heads), ("key and value heads", shape.groups)):
        refuse_if(size % tp, f"tp={tp} does not divide the {size} {what} of {shape.name}")
    _check_effects(shape, mesh, of)
    elements = of.batch * context * max(shape.vocab, shape.width)
    said = f"batch={of.batch} sequences of context={context} tokens are more than a tensor can hold"
    refuse_if(elements > _MOST_ELEMENTS, said)
    is_cut = of.sequence and context % tp
    refuse_if(is_cut, f"tp={tp} does not divide sequences of {context} tokens")
    refuse_if(of.zero not in (0, 1, 2, 3), f"ZeRO has stages 0 to 3, not {of.zero}")
    is_known = of.precision in ("bfloat16", "float32")
    refuse_if(not is_known, f"precision is {describe_value(of.precision)}: {_PRECISIONS}")


def _check_effects(shape: ModelShape, mesh: Mapping[str, int], of: Strategy) -> None:
    """Raises StrategyError for options of a strategy that have no effect on this mesh."""
    axes = ",".join(f"{name}={size}" for name, size in mesh.items())
    said = f"zero={of.zero} has no effect: ZeRO spreads over dp, and the mesh is {axes}"
    refuse_if(of.zero in (1, 2) and "dp" not in mesh, said)
    said = f"sequence=True has no effect: sequences are split over tp, and the mesh is {axes}"
    refuse_if(of.sequence and mesh.get("tp", 1) == 1, said)
    said = f"sequence=True has no effect: {shape.name} says has_sequence=False"
    refuse_if(of.sequence and not shape.has_sequence, said)
    why = "remat is False" if shape.has_blocks else f"{shape.name} says has_blocks=False"
    is_all_kept = not (of.remat and shape.has_blocks)
    every = of.remat_every
    refuse_if(every > 1 and is_all_kept, f"remat_every={every} has no effect: {why}")


# -- ways to spread --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way to distribute and train a model: mesh sizes and a strategy.

    Attributes:
        dp, tp: the number of ranks of each axis.
        strategy: how the model is distributed and trained.
    """

    dp: int
    tp: int
    strategy: Strategy

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes with more than one rank; {"dp": 1} for a single rank."""
        sizes = {name: n for name, n in (("dp", self.dp), ("tp", self.tp)) if n > 1}
        return sizes or {"dp": 1}

    def __str__(self) -> str:
        of = self.strategy
        axes = ",".join(f"{name}={n}" for name, n in self.mesh.items())
        said = [axes, f"ZeRO-{of.zero}" if self.dp > 1 else "no ZeRO"]
        said += ["remat"] * of.remat + ["sequence parallel"] * of.sequence
        each = f"{of.batch} sequence{'s' * (of.batch != 1)} a rank"
        said.append(f"{of.micro_batches} x {each}" if of.micro_batches > 1 else each)
        return ", ".join(said)


def ways_of(
    shape: ModelShape, ranks: int, batch: int, machine: Machine, base: Strategy
) -> Iterator[Way]:
    """Yields all ways to train a model with `ranks` ranks and `batch` sequences per step in total.

    Ranks of tensor parallelism are on one host, and their number divides that of the heads. Numbers
    of micro-batches are powers of two.

    Args:
        machine: the hardware of a rank. It says how many ranks are on a host.
        base: a strategy with the fields that all ways have in common.
    """
    context = base.context or shape.context
    for tp in range(1, min(ranks, machine.ranks_per_host) + 1):
        dp = ranks // tp
        if ranks % tp or shape.heads % tp or shape.groups % tp or batch % dp:
            continue
        mine = batch // dp
        counts = [m for m in (2**k for k in range(mine.bit_length())) if mine % m == 0]
        sequences = (False, True)[: 1 + (shape.has_sequence and tp > 1 and context % tp == 0)]
        stages = (0, 1, 2, 3) if dp > 1 else (0,)
        remats = (False, True)[: 1 + shape.has_blocks]
        for sequence, stage, remats_blocks, count in product(sequences, stages, remats, counts):
            every = base.remat_every if remats_blocks else 1
            spread: dict[str, Any] = {"zero": stage, "sequence": sequence, "remat": remats_blocks}
            batches = {"remat_every": every, "batch": mine // count, "micro_batches": count}
            yield Way(dp, tp, dataclasses.replace(base, **spread, **batches))


# -- the program of a way --------------------------------------------------------------------------


_PLANS = {plans.gpt: "pt.plans.gpt", plans.llama: "pt.plans.llama"}
_BYTES = 256
"""Tokens of `partita train`, which knows a GPT over bytes."""


def write_code(shape: ModelShape, way: Way) -> str:
    """Returns a Python program that trains the model with a mesh and strategy on all ranks.

    Its step is the one that `make_step` makes. If the model is not one of partita's, the program
    uses a `ModelShape` named `shape`.
    """
    of = way.strategy
    own = not shape.code
    is_split = "tp" in way.mesh
    in_zero = "dp" in way.mesh and of.zero == 3
    casts = of.precision != "float32" and not in_zero
    holds_back = "dp" in way.mesh and of.zero < 2 and of.micro_batches > 1
    layers, context = of.layers or shape.layers, of.context or shape.context

    lines = ["from contextlib import nullcontext", ""] if holds_back else []
    lines += ["import torch"]
    lines += [] if own else ["import torch.nn.functional as F"]
    lines += ["", "import partita as pt"]
    if not own:
        lines += [f"from partita.app.models import {shape.code.partition('(')[0]}"]
    lines += ["", 'device = "cuda" if torch.cuda.is_available() else "cpu"']
    sizes, names = tuple(way.mesh.values()), tuple(way.mesh)
    axes = f"({', '.join(map(json.dumps, names))}{',' * (len(names) == 1)})"
    lines += [f"mesh = pt.init_device_mesh(device, {sizes}, mesh_dim_names={axes})"]
    lines += ["torch.manual_seed(0)  # the same weights and batches on all ranks"]
    lines += [f"with torch.device({'device' if own else json.dumps('meta')}):"]
    made = shape.code.format(layers=layers, context=context)
    lines += [f"    model = {made or f'shape.make({layers}, {context})'}"]
    plan = _PLANS.get(shape.plan, "shape.plan")
    plan = f"{plan}(sequence={of.sequence})" if is_split else "None"
    lines += [f"pt.parallelize(model, mesh, {plan})"]
    if "dp" in way.mesh:
        sent = in_zero and of.precision != "float32"
        precision = f", precision=torch.{of.precision}" if sent else ""
        lines += [f'pt.zero(model, mesh, "dp", stage={of.zero}{precision})']
    lines += [] if own else ["pt.materialize(model)  # no rank has had the whole model"]
    if of.remat and shape.has_blocks:
        each = f"[::{of.remat_every}]" if of.remat_every > 1 else ""
        lines += [f"pt.remat(model, blocks=list(model.blocks){each})"]
    lines += ["optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)"]

    lines += ["", "", "@pt.compile", "def step(micro_batches):", "    optimizer.zero_grad()"]
    lines += ["    total = 0.0", "    for i, (inputs, targets) in enumerate(micro_batches, 1):"]
    body = [f"with torch.autocast(device, torch.{of.precision}):"] if casts else []
    body += ["    " * casts + "result = model(inputs)"]
    loss = "shape.loss(result, targets)"
    loss = loss if own else "F.cross_entropy(result.flatten(0, -2).float(), targets.flatten())"
    body += [f"loss = {loss}", "loss.backward()"]
    if holds_back:
        sync = "with nullcontext() if i == len(micro_batches) else pt.no_sync(model):"
        body = [sync, *("    " + line for line in body)]
    lines += ["        " + line for line in [*body, "total = total + loss.detach()"]]
    lines += ["    optimizer.step()", "    return total", "", ""]
    if not holds_back:
        lines = [line.replace("i, (inputs, targets) in enumerate(micro_batches, 1)",
                              "inputs, targets in micro_batches") for line in lines]  # fmt: skip

    rows = of.batch * of.micro_batches * way.dp
    sequences = f"{rows} sequence{'s' * (rows != 1)}"
    lines += [f"# A step's batch, here drawn: {sequences} of all ranks together."]
    lines += ["with torch.device(device):"]
    n = of.micro_batches
    if own:
        lines += [f"    inputs, targets = shape.make_batch({rows}, {context})"]
    else:
        lines += [f"    inputs = torch.randint({shape.vocab}, ({rows}, {context}))"]
        lines += ["    targets = inputs.clone()"]
    lines += [f"pairs = zip(inputs.chunk({n}), targets.chunk({n}), strict=True)"]
    lines += ["loss = step([pt.distribute_batch(pair, mesh) for pair in pairs])"]
    return "\n".join(lines)


def train_command(shape: ModelShape, way: Way) -> str:
    """Returns the `partita train` command for the mesh and strategy of `way`; "" if there is none.

    There is one for a GPT whose tokens are bytes, if it recomputes all blocks or none.
    """
    of = way.strategy
    if not shape.code.startswith("GPT(") or shape.vocab != _BYTES or of.remat_every > 1:
        return ""
    mesh = ",".join(f"{name}={size}" for name, size in way.mesh.items())
    said = [f"--mesh {mesh}", "--compile", f"--zero {of.zero}"]
    said += ["--sp"] * of.sequence + ["--remat blocks"] * of.remat
    said += ["--dtype bf16"] * (of.precision == "bfloat16")
    said += [f"--batch {of.batch * of.micro_batches * way.dp}", f"--accumulate {of.micro_batches}"]
    said += [f"--layers {of.layers or shape.layers}", f"--width {shape.width}"]
    said += [f"--heads {shape.heads}", f"--context {of.context or shape.context}"]
    return "partita train " + " ".join(said)
