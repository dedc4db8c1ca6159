"""Ways to spread a model over ranks: all that there are, and the program of each.

The program is Python, or options of `partita train`, that step a model as the way does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from partita.parallel import plans

from .machine import Machine
from .strategy import ModelShape, Strategy

__all__ = ["Way", "train_options", "ways_of", "write_code"]


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        dp, tp: ranks of each axis.
        strategy: how the model is spread over them, and stepped.
    """

    dp: int
    tp: int
    strategy: Strategy

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes of more than one rank; dp=1 where there is one rank."""
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
    """All ways to step a model on so many ranks, `batch` sequences on all of them together.

    Tensor parallelism stays within a host, and divides the heads; micro-batches are powers of two.
    """
    context = base.context or shape.context
    for tp in range(1, min(ranks, machine.ranks_per_host) + 1):
        dp = ranks // tp
        if ranks % tp or shape.heads % tp or shape.groups % tp or batch % dp:
            continue
        mine = batch // dp
        counts = [m for m in (2**k for k in range(mine.bit_length())) if mine % m == 0]
        for sequence in (False, True)[: 1 + (shape.has_sequence and tp > 1 and context % tp == 0)]:
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                for remat in (False, True)[: 1 + shape.has_blocks]:
                    for count in counts:
                        strategy = dataclasses.replace(
                            base,
                            zero=zero,
                            remat=remat,
                            sequence=sequence,
                            batch=mine // count,
                            micro_batches=count,
                        )
                        yield Way(dp, tp, strategy)


# -- the program of a way --------------------------------------------------------------------------


_PLANS = {plans.gpt: "pt.plans.gpt", plans.llama: "pt.plans.llama"}
_BYTES = 256
"""Tokens of `partita train`, which knows a GPT over bytes."""


def write_code(shape: ModelShape, way: Way) -> str:
    """A program for all ranks that trains a model as `make_step` did to simulate the way.

    A model of one's own it takes from its shape, which it calls `shape`.
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


def train_options(shape: ModelShape, way: Way) -> str:
    """The command that trains the model so, where it is one of `partita train`'s; else ""."""
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
