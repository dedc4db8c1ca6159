"""Rivals in benches (DDP, FSDP2, ...), run as their users run them, and a training step for all.

All have the same model, batch, dtype and optimizer. Compiled ones are `CompiledRival`s: a bench
fails unless Dynamo has made graphs of them. This module uses nothing of partita. The processes of
rivals have no mesh of partita, so that no code of partita runs in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

Step = Callable[..., Any]


def cross_entropy(logits_btv: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of all tokens, in float32.

    Args:
        logits_btv: the logits (batch, tokens, vocabulary).
        targets_bt: the index of the right token (batch, tokens).
    """
    return F.cross_entropy(logits_btv.flatten(0, 1).float(), targets_bt.flatten())


def training(
    model: nn.Module,
    *,
    loss: Step = cross_entropy,
    autocast: torch.dtype | None = None,
    fused: bool = False,
    capturable: bool = False,
) -> Step:
    """Returns a function that makes one training step with AdamW, and returns the loss.

    Args:
        model: the model. The returned function takes its inputs and the targets.
        loss: a function of the model's result and the targets.
        autocast: the dtype of autocast in forward and loss; None for no autocast.
        fused: True uses the fused kernels of the optimizer instead of `foreach`.
        capturable: True keeps the optimizer's step counts on the device of the parameters.
    """
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=capturable, **how)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        if autocast is None:
            found = loss(model(x), y)
        else:
            with torch.autocast(x.device.type, dtype=autocast):
                found = loss(model(x), y)
        found.backward()
        optimizer.step()
        return found

    return step


# -- what is compiled ------------------------------------------------------------------------------


class NotCompiledError(RuntimeError):
    """Raised if a rival that should be compiled ran eagerly, so that its time is wrong."""


class CompiledRival:
    """A rival's step that must run compiled: the bench fails if Dynamo made no graph of it.

    Attributes:
        graphs: the number of graphs that Dynamo made.
        breaks: the number of graph breaks, by reason.
    """

    def __init__(self, name: str, step: Step):
        self.name, self.step = name, step
        self.graphs = 0
        self.breaks: dict[str, int] = {}

    def __call__(self) -> Any:
        return self.step()

    def compile(self) -> None:
        """Calls the step once, so that Dynamo compiles it. Later calls of this method do nothing.

        Raises:
            NotCompiledError: Dynamo made no graph.
        """
        if self.graphs:
            return
        from torch._dynamo.utils import counters

        before, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
        self.step()
        self.graphs = counters["stats"]["unique_graphs"] - before
        self.breaks = {
            reason: many - breaks.get(reason, 0)
            for reason, many in counters["graph_break"].items()
            if many > breaks.get(reason, 0)
        }
        if not self.graphs:
            raise NotCompiledError(
                f"{self.name}: torch.compile made no Dynamo graph of it, so its time would be that "
                "of an eager run"
            )

    def __str__(self) -> str:
        said = f"{self.name}: {self.graphs} Dynamo graphs, {sum(self.breaks.values())} breaks"
        return "\n".join([said, *(f"  {reason.splitlines()[0]}" for reason in self.breaks)])


def compiled_loss() -> Step:
    """Returns `cross_entropy`, compiled by itself, as torchtitan compiles the loss."""
    found: Step = torch.compile(cross_entropy, fullgraph=True)
    return found


def compile_blocks(model: nn.Module) -> nn.Module:
    """Compiles each block by itself, as torchtitan does before sharding. Returns the model."""
    blocks: Any = model.blocks
    for name, block in list(blocks.named_children()):
        blocks.register_module(name, torch.compile(block, fullgraph=True))
    return model


# -- sharded ---------------------------------------------------------------------------------------


def shard_by_fsdp(model: nn.Module, mesh: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """Shards the model by FSDP2, block by block, with its defaults; returns the model.

    FSDP2 frees the gathered parameters of a block after its forward and prefetches the next block.

    Args:
        mesh: torch's own mesh.
        dtype: the dtype of computation; gradients are then reduced in float32. None computes in the
            parameters' dtype.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    whole: Any = model
    options: dict[str, Any] = {"mesh": mesh}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in whole.blocks:
        fully_shard(block, **options)
    fully_shard(whole, **options)
    return model


class _Gathered(nn.Module):
    """A parametrization that gathers a parameter; its backward reduce-scatters the gradient."""

    def forward(self, x: Any) -> torch.Tensor:
        from torch.distributed.tensor import Partial, Replicate

        whole = x.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial(reduce_op="avg")])


def shard_by_simple_fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    """Makes every parameter a `torch.distributed.tensor` DTensor that is gathered at each use.

    This follows the SimpleFSDP paper (arXiv 2411.00284): one parametrization, no hooks. `mesh` is
    torch's own mesh. Returns the model.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            shard = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
            setattr(module, name, shard)
            parametrize.register_parametrization(module, name, _Gathered(), unsafe=True)
    return model


SIMPLE_FSDP_OPTIONS: dict[str, Any] = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
}
"""Options of Inductor for SimpleFSDP: without buckets each parameter needs its own collective."""


def make_rival(
    name: str, model: nn.Module, batch: Sequence[torch.Tensor], mesh: Any
) -> Callable[[], Any]:
    """Returns a function that makes one training step with a rival of partita.

    Args:
        name: "alone", "DDP", "FSDP2" or "SimpleFSDP", each also followed by " compiled".
        model: the model on this rank. It is changed.
        batch: the samples of this rank.
        mesh: torch's own mesh.
    """
    from torch.nn.parallel import DistributedDataParallel

    kind, _, compiled = name.partition(" ")
    loss = compiled_loss() if compiled else cross_entropy
    if kind == "FSDP2":
        model = shard_by_fsdp(compile_blocks(model) if compiled else model, mesh)
    elif kind == "DDP":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif kind == "SimpleFSDP":
        model = shard_by_simple_fsdp(model, mesh)
    if compiled and kind != "FSDP2":
        options = SIMPLE_FSDP_OPTIONS if kind == "SimpleFSDP" else None
        model = torch.compile(model, options=options)  # type: ignore[assignment]
    step = training(model, loss=loss)
    return CompiledRival(name, lambda: step(*batch)) if compiled else lambda: step(*batch)
