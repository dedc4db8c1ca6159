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
    """Plan of linear layers split by their outputs: each rank computes some features, with their
    biases.

    Args:
        names: patterns of the modules' names.
    """
    return {f"{name}.*": {axis: Shard(0)} for name in names}


def row(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Plan of linear layers split by their inputs, the features that a column layer returns.

    Their result is Partial. One move reduces it or shards it.

    Args:
        names: patterns of the modules' names.
    """
    return {f"{name}.weight": {axis: Shard(1)} for name in names}


def vocabulary(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Plan of embeddings and heads split by words: each rank has the rows of some words.

    `F.cross_entropy` takes the split logits of such a head.

    Args:
        names: patterns of the modules' names.
    """
    return {f"{name}.weight": {axis: Shard(0)} for name in names}


def inner(*names: str, axis: str = "tp", sequence: bool = False) -> dict[str, Any]:
    """Plan of modules (an attention, an MLP) that begin with column layers and end with row layers.

    Args:
        names: patterns of the modules' names.
        sequence: True: inputs and outputs are sharded along the sequence, with an all-gather before
            and a reduce-scatter after. False: both are whole, with an all-reduce after.
    """
    around = {axis: Shard(_SEQUENCE) if sequence else Replicate()}
    # An attention may return its weights or its cache beside: they stay as they are.
    return {name: [Inputs({axis: Replicate()}), Outputs(around, ...)] for name in names}


def outer(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Plan of modules (a norm, a dropout) that work on their rank's piece of the sequence.

    Args:
        names: patterns of the modules' names.
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
    """Plan of a whole transformer.

    Args:
        columns: its linear layers that are split by outputs.
        rows: its linear layers that are split by inputs.
        inners: the modules that begin with columns and end with rows.
        norms: the modules between those. With `sequence` they work on pieces of the sequence.
        embed: the embedding, split by words. If `embed` and `head` share one weight, it is split
            once.
        head: the output layer, split by words.
        split_words: False keeps embed and head whole on every rank. This saves the moves of a split
            loss, but costs memory and work. Use it for a small vocabulary.
        sequence: True adds sequence parallelism. Between the inner modules, activations are sharded
            along the sequence. No activation is all-reduced.
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
    """Plan of `partita.app.models.GPT`."""
    columns = ["blocks.*.attention.qkv", "blocks.*.mlp.up"]
    rows = ["blocks.*.attention.out", "blocks.*.mlp.down"]
    how: dict[str, Any] = {"axis": axis, "sequence": sequence, "split_words": split_words}
    return transformer(columns=columns, rows=rows, **_OURS, **how)


def llama(axis: str = "tp", *, sequence: bool = False, split_words: bool = True) -> dict[str, Any]:
    """Plan of `partita.app.models.Llama`."""
    columns = ["blocks.*.attention.[qkv]", "blocks.*.mlp.gate", "blocks.*.mlp.up"]
    rows = ["blocks.*.attention.o", "blocks.*.mlp.down"]
    how: dict[str, Any] = {"axis": axis, "sequence": sequence, "split_words": split_words}
    return transformer(columns=columns, rows=rows, **_OURS, **how)
