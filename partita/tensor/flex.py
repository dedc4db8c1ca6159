"""flex_attention on DTensors: the kernel of each rank's samples and heads, compiled where asked.

`flex_attention` asks no class what it means, and goes by way of Dynamo even where nobody compiles
it. So the function that torch has, whoever holds it by now, gets code that asks first. What score
and mask functions are told of samples and heads is shifted to the global place, and of a block mask
a rank takes its part. Queries, keys and values are not split along their sequence: pieces of it are
exchanged for samples or heads.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _EnableTorchFunction
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask

from partita.layout import Partial, Replicate
from partita.rules import Arg, Kernel, KernelCall, KernelRule
from partita.rules.rule import own_op
from partita.rules.rule import table_rule as rule

from .autograd import alias_without_base
from .dtensor import DTensor

_found = torchs.flex_attention
_plain = types.FunctionType(
    _found.__code__, _found.__globals__, _found.__name__, _found.__defaults__, _found.__closure__
)
_plain.__kwdefaults__ = _found.__kwdefaults__


def _call_plain_or_spread(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    # Runs as torch's own function, with the globals of its module.
    which = _partita_plain  # type: ignore[name-defined]  # noqa: F821
    for x in (query, key, value):
        if isinstance(x, _partita_dtensor):  # type: ignore[name-defined]  # noqa: F821
            which = _partita_spread  # type: ignore[name-defined]  # noqa: F821
    return which(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux=return_aux,
    )


def _run_on_dtensors(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    outputs = 1 + int(return_lse)
    if return_aux is not None:
        outputs += bool(return_aux.lse) + bool(return_aux.max_scores)
    out = _on_pieces(
        query,
        key,
        value,
        enable_gqa,
        outputs,
        _find_compiled_flex(),
        (_with_wholes(score_mod), block_mask, scale, return_lse, kernel_options, return_aux),
    )
    if return_aux is None:
        return out
    attended, *aux = out if outputs > 1 else (out,)
    lse = aux.pop(0) if return_aux.lse else None
    return attended, torchs.AuxOutput(lse=lse, max_scores=aux.pop(0) if aux else None)


def _find_compiled_flex() -> Callable[..., Any]:
    """torch's function, compiled as the call of a compiled function asks that led here."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            context = frame.f_locals.get("self")
            return context(_plain) if callable(context) else torch.compile(_plain)
        frame = frame.f_back  # type: ignore[assignment]
    return _plain


def _with_wholes(mod: Any) -> Any:
    """A score function whose closure has whole plain tensors in the place of DTensors."""
    cells = getattr(mod, "__closure__", None) or ()
    if not any(isinstance(c.cell_contents, DTensor) for c in cells):
        return mod

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        axes = len(value.placements)
        value = value.redistribute(placements=[Replicate()] * axes)
        return value.to_local(grad_placements=[Partial()] * axes)

    closure = tuple(types.CellType(whole(c.cell_contents)) for c in cells)
    return types.FunctionType(
        mod.__code__, mod.__globals__, mod.__name__, mod.__defaults__, closure
    )


@own_op
def _on_pieces(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    enable_gqa: bool,
    outputs: int,
    run: Callable[..., Any],
    more: tuple[Any, ...],
) -> Any:
    raise NotImplementedError  # on plain tensors torch's own function runs


@rule(_on_pieces)
def _derive_flex_rule(
    query: Arg, key: Arg, value: Arg, enable_gqa: bool, outputs: int
) -> KernelRule:
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    heads, group = ("(g r)", "g") if grouped else ("h", "h")
    batch = "1" if key.shape[0] == 1 != query.shape[0] else "b"
    linear = "+ " if outputs == 1 else ""
    terms = f"b {heads} q! d!, {batch} {group} k! d!, {linear}{batch} {group} k! e!"
    results = [f"b {heads} q! e!"] + [f"b {heads} q!"] * (outputs - 1)

    def local(call: KernelCall) -> Kernel:
        rows = call.pieces.get("b", (0, query.shape[0], query.shape[0]))
        some = call.pieces.get(group, (0, key.shape[1], key.shape[1]))
        times = query.shape[1] // key.shape[1]
        return _make_flex_kernel(rows[:2], (some[0] * times, some[1] * times))

    spread = heads.strip("()")
    work = (f"b {spread} q k d", f"b {spread} q k e")
    return KernelRule(f"{terms} -> {', '.join(results)}", local, work=work)


_Range = tuple[int, ...]
"""Where a rank's samples or heads begin, and how many they are."""


def _make_flex_kernel(rows: _Range, heads: _Range) -> Kernel:
    def run(
        query: Any, key: Any, value: Any, enable_gqa: bool, outputs: int, flex: Any, more: Any
    ) -> Any:
        score_mod, block_mask, scale, return_lse, options, aux = more
        if score_mod is not None and (rows[0] or heads[0]):
            score_mod = _shifted_score(score_mod, rows[0], heads[0])
        if block_mask is not None:
            block_mask = _slice_block_mask(block_mask, rows, heads)
        # Dynamo looks at what a tensor is a view of.
        pieces = [alias_without_base(x) for x in (query, key, value)]
        with _EnableTorchFunction():
            out = flex(
                *pieces,
                score_mod,
                block_mask,
                scale,
                enable_gqa,
                return_lse,
                options,
                return_aux=aux,
            )
        if aux is None:
            return out
        found = [out[0], *(t for t in (out[1].lse, out[1].max_scores) if t is not None)]
        return tuple(found) if len(found) > 1 else found[0]

    return run


def _shifted_score(mod: Callable[..., Any], row: int, head: int) -> Callable[..., Any]:
    def shifted(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return mod(score, b + row, h + head, q, k)

    return shifted


def _shifted_mask(mod: Callable[..., Any], row: int, head: int) -> Callable[..., Any]:
    def shifted(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mod(b + row, h + head, q, k)

    return shifted


def _slice_block_mask(mask: BlockMask, rows: _Range, heads: _Range) -> BlockMask:
    """The part of a block mask of a rank's samples and heads."""
    batch, count = mask.kv_num_blocks.shape[:2]
    if (
        (batch == 1 or rows == (0, batch))
        and (count == 1 or heads == (0, count))
        and not (rows[0] or heads[0])
    ):
        return mask

    def cut(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        for dim, piece in enumerate((rows, heads)):
            if t.shape[dim] > 1:
                t = t.narrow(dim, *piece)
        return t

    # As it is made of what is below: torch's own `from_kv_blocks` would sort anew.
    mod = mask.mask_mod
    return BlockMask(  # type: ignore[misc]
        mask.seq_lengths,
        *(  # type: ignore[arg-type]
            cut(getattr(mask, name))
            for name in (
                "kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices q_num_blocks "
                "q_indices full_q_num_blocks full_q_indices"
            ).split()
        ),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=_shifted_mask(mod, rows[0], heads[0]) if rows[0] or heads[0] else mod,
    )


def _take_place() -> None:
    """Give torch's function the code of `_call_plain_or_spread`, under its own name and file."""
    vars(torchs).update(
        _partita_plain=_plain, _partita_dtensor=DTensor, _partita_spread=_run_on_dtensors
    )
    _found.__code__ = _call_plain_or_spread.__code__.replace(
        co_name=_found.__code__.co_name, co_filename=_plain.__code__.co_filename
    )


_take_place()
