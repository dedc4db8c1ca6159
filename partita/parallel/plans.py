"""Ready plans: tensor and sequence parallelism of usual models.

Each function returns a plan for `parallelize`, an ordinary dict to print, to join with others
(`{**column("*.up"), **row("*.down")}`) and to change. Names are patterns: `blocks.*.attention`
stands for that module of every block.

| plan         | the weight is split by | it takes            | it gives                         |
|--------------|------------------------|---------------------|----------------------------------|
| `column`     | outputs                | whole features      | its own features                 |
| `row`        | inputs                 | its own features    | shares of the whole              |
| `vocabulary` | words                  | whole tokens        | shares (embedding); its words'   |
|              |                        |                     | logits (head)                    |
| `inner`      | -                      | whole sequences     | whole ones, or (sequence) pieces |
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
    """Linear layers split by their outputs: each rank has some of the features, and their biases.

    Args:
        names: patterns of the modules' names.
    """
    return {f"{name}.*": {axis: Shard(0)} for name in names}


def row(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Linear layers split by their inputs, which are the features that a column-split layer gives.

    Their result is pending: shares, which one move makes whole or cuts into pieces.
    """
    return {f"{name}.weight": {axis: Shard(1)} for name in names}


def vocabulary(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Embeddings and heads split by words. `F.cross_entropy` takes the head's split logits."""
    return {f"{name}.weight": {axis: Shard(0)} for name in names}


def inner(*names: str, axis: str = "tp", sequence: bool = False) -> dict[str, Any]:
    """Modules (an attention, an MLP) that begin split by columns and end split by rows.

    Args:
        sequence: what they take and give is cut along the sequence: an all-gather before, a
            reduce-scatter after. Else both are whole: an all-reduce after.
    """
    around = {axis: Shard(_SEQUENCE) if sequence else Replicate()}
    # An attention may return its weights or its cache beside: they stay as they are.
    return {name: [Inputs({axis: Replicate()}), Outputs(around, ...)] for name in names}


def outer(*names: str, axis: str = "tp") -> dict[str, Any]:
    """Modules (a norm, a dropout) that work on their piece of the sequence."""
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
    """A whole transformer.

    Args:
        columns: its linear layers that are split by outputs.
        rows: those that are split by inputs.
        inners: the modules that begin with columns and end with rows.
        norms: the modules between those, which `sequence` lets work on pieces.
        embed: the embedding, split by words. Where it and `head` share one weight, that is split
            once.
        head: likewise.
        split_words: False leaves embed and head whole on every rank, which costs memory and work,
            and saves the moves of a split loss: for a small vocabulary.
        sequence: sequence parallel: between the inner modules, activations are cut along the
            sequence, and no all-reduce of an activation remains.
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
    """The plan of `partita.app.models.GPT`."""
    columns = ["blocks.*.attention.qkv", "blocks.*.mlp.up"]
    rows = ["blocks.*.attention.out", "blocks.*.mlp.down"]
    how: dict[str, Any] = {"axis": axis, "sequence": sequence, "split_words": split_words}
    return transformer(columns=columns, rows=rows, **_OURS, **how)


def llama(axis: str = "tp", *, sequence: bool = False, split_words: bool = True) -> dict[str, Any]:
    """The plan of `partita.app.models.Llama`."""
    columns = ["blocks.*.attention.[qkv]", "blocks.*.mlp.gate", "blocks.*.mlp.up"]
    rows = ["blocks.*.attention.o", "blocks.*.mlp.down"]
    how: dict[str, Any] = {"axis": axis, "sequence": sequence, "split_words": split_words}
    return transformer(columns=columns, rows=rows, **_OURS, **how)
