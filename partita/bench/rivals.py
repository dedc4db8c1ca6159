"""The rivals of benches, as their users run them, and the loop that all train in.

Each has the model, the batch, the dtype and the optimizer of the others. Those that are compiled
are `CompiledRival`s: a bench fails unless Dynamo made graphs of them. Nothing of partita is used
here, and no process that runs rivals alone has a mesh of partita, so that nothing of it runs there.
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
    """The mean loss of all tokens, in float32."""
    return F.cross_entropy(logits_btv.flatten(0, 1).float(), targets_bt.flatten())


def training(
    model: nn.Module,
    *,
    loss: Step = cross_entropy,
    autocast: torch.dtype | None = None,
    fused: bool = False,
    capturable: bool = False,
) -> Step:
    """A step of AdamW as a plain loop has it.

    Args:
        autocast: of forward and loss.
        fused: the optimizer's kernels are fused; otherwise they are `foreach`.
        capturable: its counts of steps lie where the parameters do.
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
    """A rival that should be compiled is not: what would be timed is an eager run."""


class CompiledRival:
    """A step of which Dynamo must make graphs.

    Attributes:
        graphs: how many it made.
        breaks: how often it left a graph, by the reason.
    """

    def __init__(self, name: str, step: Step):
        self.name, self.step = name, step
        self.graphs = 0
        self.breaks: dict[str, int] = {}

    def __call__(self) -> Any:
        return self.step()

    def compile(self) -> None:
        """Call the step for the first time; do nothing if it was.

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
    """`cross_entropy`, compiled, as torchtitan compiles the loss beside the blocks."""
    found: Step = torch.compile(cross_entropy, fullgraph=True)
    return found


def compile_blocks(model: nn.Module) -> nn.Module:
    """The model with each block compiled by itself, as torchtitan does before it shards them."""
    blocks: Any = model.blocks
    for name, block in list(blocks.named_children()):
        blocks.register_module(name, torch.compile(block, fullgraph=True))
    return model


# -- sharded ---------------------------------------------------------------------------------------


def shard_by_fsdp(model: nn.Module, mesh: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """The model sharded by FSDP2, block by block, with its defaults: what is gathered of a block is
    freed behind its forward, and the next block's is prefetched.

    Args:
        dtype: of compute, if it is another than that of the parameters; gradients are reduced in
            float32.
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
    """A parameter is shown whole by a gather, whose transpose reduces its gradient."""

    def forward(self, x: Any) -> torch.Tensor:
        from torch.distributed.tensor import Partial, Replicate

        whole = x.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial(reduce_op="avg")])


def shard_by_simple_fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    """The model with every parameter a `torch.distributed.tensor` DTensor that is gathered at use.

    As the SimpleFSDP paper has it (arXiv 2411.00284): one parametrization, no hooks.
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
"""Of Inductor, for SimpleFSDP: without buckets each parameter is a collective of its own."""


def make_rival(
    name: str, model: nn.Module, batch: Sequence[torch.Tensor], mesh: Any
) -> Callable[[], Any]:
    """A rival's step, ready to be called.

    Args:
        name: "alone", "DDP", "FSDP2", "SimpleFSDP", each also with " compiled" behind it.
        batch: this rank's samples.
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
