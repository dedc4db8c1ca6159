"""Ready plans for `parallelize`: tensor and sequence parallelism of common models.

Each function returns a plan: an ordinary dict that you can print, change, and join with others
(`{**column("*.up"), **row("*.down")}`). Names are patterns: `blocks.*.attention` means that module
in every block.

| plan         | the weight is split by | it takes            | it returns                       |
|--------------|------------------------|---------------------|----------------------------------|
| `column`     | outputs                | all features        | its own features                 |
| `row`        | inputs                 | its own features    | partial sums of all features     |
| `vocabulary` | words                  | all tokens          | partial sums (embedding), or     |
|              |                        |                     | logits of its own words (head)   |
| `inner`      | -                      | whole sequences, or | the same                         |
|              |                        | pieces (sequence)   |                                  |
| `outer`      | -                      | pieces of sequences | the same                         |

(Column and row: Shoeybi et al., arXiv 1909.08053; sequences: Korthikanti et al., arXiv 2205.05198.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partita.layout import Replicate, Shard

from .parallelize import Inputs, Outputs

_SEQUENCE = 1
"""The dimension of an activation (batch, sequence, ...) that sequence parallelism splits."""


def column(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Returns a plan that shards linear layers by output features (weights and biases).

    Pass it to `pt.parallelize`.

    Args:
        names: patterns of the modules' names.
        axis: the mesh axis.
    """
    return {f"{name}.*": {axis: Shard(0)} for name in names}


def row(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Returns a plan that shards linear layers by input features, as after `column` layers.

    Their result is Partial, and one all-reduce or reduce-scatter sums it.

    Args:
        names: patterns of the modules' names.
        axis: the mesh axis.
    """
    return {f"{name}.weight": {axis: Shard(1)} for name in names}


def vocabulary(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Returns a plan that shards embeddings and output heads by words: each rank has some rows.

    `F.cross_entropy` takes the sharded logits of such a head.

    Args:
        names: patterns of the modules' names.
        axis: the mesh axis.
    """
    return {f"{name}.weight": {axis: Shard(0)} for name in names}


def inner(*names: str, axis: str = "tp", sequence: bool = False) -> dict[str, Any]:
    """Returns a plan for modules that begin with column layers and end with row layers.

    Examples are an attention and an MLP. The plan sets the layouts of their inputs and outputs.

    Args:
        names: patterns of the modules' names.
        axis: the mesh axis.
        sequence: True: inputs and outputs are sharded along the sequence, with an all-gather before
            and a reduce-scatter after. False: both are whole, with an all-reduce after.
    """
    around = {axis: Shard(_SEQUENCE) if sequence else Replicate()}
    # An attention may also return its weights or its cache, which stay as they are.
    return {name: [Inputs({axis: Replicate()}), Outputs(around, ...)] for name in names}


def outer(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Returns a plan for modules (a norm, a dropout) whose inputs are sharded along the sequence.

    Args:
        names: patterns of the modules' names.
        axis: the mesh axis.
    """
    return {name: Inputs({axis: Shard(_SEQUENCE)}) for name in names}


def transformer(
    *,
    columns: Sequence[str],
    rows: Sequence[str],
    inners: Sequence[str],
    norms: Sequence[str] = (),
    embed: str | None = None,
    head: str | None = None,
    axis: str = "tp",
    sequence: bool = False,
    split_words: bool = True,
) -> dict[str, Any]:
    """Returns a tensor-parallel plan of a transformer, given patterns of its modules' names.

    Args:
        columns: the linear layers whose output features are sharded.
        rows: the linear layers whose input features are sharded.
        inners: the modules that begin with columns and end with rows.
        norms: the modules between the inner ones. With `sequence`, their inputs are sharded along
            the sequence.
        embed: the embedding, sharded by words. If `embed` and `head` share one weight, it is
            sharded once.
        head: the output layer, sharded by words.
        axis: the mesh axis.
        sequence: True adds sequence parallelism. Between the inner modules, activations are sharded
            along the sequence. No activation is all-reduced.
        split_words: False keeps embed and head whole on every rank. This saves the collectives of a
            sharded loss, but costs memory and work. Use it for a small vocabulary.
    """
    between = {axis: Shard(_SEQUENCE) if sequence else Replicate()}
    plan = column(*columns, axis=axis) | row(*rows, axis=axis)
    plan |= inner(*inners, axis=axis, sequence=sequence)
    if sequence:
        plan |= outer(*norms, axis=axis)
    if embed is not None:
        plan |= {embed: Outputs(between)}
    if head is not None:
        logits = {axis: Shard(-1) if split_words else Replicate()}
        plan |= {head: [Inputs({axis: Replicate()}), Outputs(logits)]}
    if split_words:
        plan |= vocabulary(*(name for name in (embed, head) if name is not None), axis=axis)
    return plan


_OURS: dict[str, Any] = {
    "inners": ["blocks.*.attention", "blocks.*.mlp"],
    "norms": ["*norm*"],
    "embed": "embed",
    "head": "head",
}
"""The names that `partita.app.models` have in common."""


def gpt(axis: str = "tp", *, sequence: bool = False, split_words: bool = True) -> dict[str, Any]:
    """Returns the tensor-parallel plan of `partita.app.models.GPT`.

    Args:
        axis: the mesh axis.
        sequence: True adds sequence parallelism.
        split_words: False keeps the embedding and the head whole on every rank.
    """
    columns = ["blocks.*.attention.qkv", "blocks.*.mlp.up"]
    rows = ["blocks.*.attention.out", "blocks.*.mlp.down"]
    how: dict[str, Any] = {"axis": axis, "sequence": sequence, "split_words": split_words}
    return transformer(columns=columns, rows=rows, **_OURS, **how)


def llama(axis: str = "tp", *, sequence: bool = False, split_words: bool = True) -> dict[str, Any]:
    """Returns the tensor-parallel plan of `partita.app.models.Llama`.

    Args:
        axis: the mesh axis.
        sequence: True adds sequence parallelism.
        split_words: False keeps the embedding and the head whole on every rank.
    """
    columns = ["blocks.*.attention.[qkv]", "blocks.*.mlp.gate", "blocks.*.mlp.up"]
    rows = ["blocks.*.attention.o", "blocks.*.mlp.down"]
    how: dict[str, Any] = {"axis": axis, "sequence": sequence, "split_words": split_words}
    return transformer(columns=columns, rows=rows, **_OURS, **how)
