"""Which layers work on each sample, channel or head by itself?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .. import exceptions
from ..rule import Arg, Call, Rewrite, Said, rule

# -- normalisation ---------------------------------------------------------------------------------


def _affine(weight: Any, bias: Any, names: str) -> str:
    """The terms of a scale and a shift, either of which may be missing."""
    count = (weight is not None) + (bias is not None)
    return f", {'+ ' * (count == 1)}{' + '.join([names] * count)}" if count else ""


@rule(torch.layer_norm)
def layer_norm(
    input: Arg, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None
) -> str | Rewrite:
    dims = list(range(input.ndim - len(normalized_shape), input.ndim))

    def run(
        input: Any,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Any:
        return exceptions.layer_norm(input, dims, weight, bias, eps)

    if input.is_split(dims):
        return Rewrite(run)
    d = " ".join(f"d{i}!" for i in dims)
    return f"... {d}{_affine(weight, bias, d)} -> ... {d}"


@rule(torch.rms_norm)
def rms_norm(input: Arg, normalized_shape: Sequence[int], weight: Any = None) -> str | Rewrite:
    dims = list(range(input.ndim - len(normalized_shape), input.ndim))

    def run(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        wide = input if input.dtype in (torch.float32, torch.float64) else input.float()
        eps = torch.finfo(wide.dtype).eps if eps is None else eps
        square = (wide * wide).mean(dims, keepdim=True)
        out = (wide * torch.rsqrt(square + eps)).to(input.dtype)
        return out if weight is None else out * weight

    if input.is_split(dims):
        return Rewrite(run)
    d = " ".join(f"d{i}!" for i in dims)
    return f"... {d}{_affine(weight, None, d)} -> ... {d}"


@rule(torch.group_norm)
def group_norm(input: Arg, num_groups: int, weight: Any = None, bias: Any = None) -> Said:
    spatial = " ".join(f"s{i}!" for i in range(input.ndim - 2))
    channels = f"(g={num_groups} c)"
    x = f"n {channels}! {spatial}" if num_groups == 1 else f"n {channels} {spatial}"

    def local(call: Call) -> Callable[..., Any] | None:
        groups = call.pieces["g"][1] if call.is_split("g") else num_groups

        def run(
            input: Any,
            num_groups: int,
            weight: Any = None,
            bias: Any = None,
            eps: float = 1e-5,
            *_: Any,
        ) -> Any:
            return torch.group_norm(input, groups, weight, bias, eps)

        return run if call.pieces else None

    return Said(f"{x}{_affine(weight, bias, channels)} -> {x}", local)


@rule(F.batch_norm)
def batch_norm(
    input: Arg,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
) -> str | Rewrite | None:
    if input.ndim < 2:
        return None
    stats = [t for t in (running_mean, running_var) if t is not None]
    over = [d for d in range(input.ndim) if d != 1]
    if training and (
        input.is_split(over if not stats else None) or any(t.is_split() for t in stats)
    ):
        return Rewrite(_batch_norm_over_ranks)
    names = [n if d != 1 else f"{n}%" for d, n in enumerate(input.names)]
    if training:
        names = [f"{n}!" if stats or d != 1 else n for d, n in enumerate(names)]
        # Running statistics are written in place: no row may have moved them.
        names = [n.replace("%!", "!") for n in names]
    x, c = " ".join(names), names[1]
    return f"{x}{f', {c}' * len(stats)}{_affine(weight, bias, c)} -> {x}"


def _batch_norm_over_ranks(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """The statistics of the whole batch, as on one device; the running ones are updated once."""
    wide = input if input.dtype in (torch.float32, torch.float64) else input.float()
    dims = [d for d in range(input.ndim) if d != 1]
    count = math.prod(input.shape[d] for d in dims)
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.shape}"
        )
    mean, variance = exceptions.moments(wide, dims, 0, keepdim=True)
    variance = exceptions.settled(variance)
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.mul_(1 - momentum)
                running.add_(new.detach().reshape(-1).to(running.dtype), alpha=momentum)
    out = (exceptions.minus(wide, mean) * torch.rsqrt(variance + eps)).to(input.dtype)
    shape = [-1] + [1] * (input.ndim - 2)
    out = out if weight is None else out * weight.reshape(shape)
    return out if bias is None else out + bias.reshape(shape)


@rule(torch.batch_norm)
def batch_norm_builtin(input: Arg, weight: Any, bias: Any, *rest: Any) -> Rewrite:
    return Rewrite(
        lambda x, w, b, mean, var, training, momentum, eps, *_: F.batch_norm(
            x, mean, var, w, b, training, momentum, eps
        )
    )


@rule(F.instance_norm)
def instance_norm(
    input: Arg,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
) -> str | None:
    if running_mean is not None or running_var is not None or not use_input_stats:
        return None
    x = "n c% " + " ".join(f"s{i}!" for i in range(input.ndim - 2))
    return f"{x}{_affine(weight, bias, 'c%')} -> {x}"


# -- attention -------------------------------------------------------------------------------------


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Arg, key: Arg, value: Arg, attn_mask: Any = None
) -> Rewrite:
    # Whether there is dropout is told by a float, which no key may hold: it is asked at each call.
    return Rewrite(exceptions.scaled_dot_product_attention)


@rule(exceptions.attention)
def attention(
    query: Arg,
    key: Arg,
    value: Arg,
    attn_mask: Arg | None,
    is_causal: bool,
    _scale: Any,
    enable_gqa: bool,
) -> str | None:
    s = "q!" if is_causal else "q"
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if grouped and query.ndim != 4:
        return None
    lead, heads = (["b", "(g r)"], "b g") if grouped else (["..."], "...")
    mask = "" if attn_mask is None else f", {_mask(query, key, attn_mask, [*lead, s, 'k!'])}"
    ours = " ".join(lead)
    return f"{ours} {s} d!, {heads} k! d!, + {heads} k! e{mask} -> {ours} {s} e"


def _mask(query: Arg, key: Arg, mask: Arg, names: list[str]) -> str:
    """The names of a mask that is broadcast to the scores, which are `names`."""
    scores = (*query.shape[:-1], key.shape[-2])
    if names[0] == "...":
        names, front = names[1:], ["..."] * (mask.ndim > 2)
    else:
        front = []
    last = [
        "1" if have == 1 != want else name
        for have, want, name in zip(mask.shape[::-1], scores[::-1], names[::-1], strict=False)
    ]
    return " ".join(front + last[::-1])


# -- convolution -----------------------------------------------------------------------------------


def _of_none(run: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    """`run` of no sample, where it cannot take that: of one, which is dropped."""
    one = torch.cat([input, input.new_zeros((1, *input.shape[1:]))])
    out = run(one, *args, **kwargs)
    return tuple(x[:0] for x in out) if isinstance(out, tuple) else out[:0]


def _some(run: Callable[..., Any]) -> Callable[[Call], Any]:
    """`run`, for a rank that may have no sample at all."""

    def local(call: Call) -> Any:
        if not call.is_split("n") or call.pieces["n"][1]:
            return None
        return lambda input, *args, **kwargs: _of_none(run, input, *args, **kwargs)

    return local


def _conv(run: Callable[..., Any], ndim: int, transposed: bool) -> None:
    """`g` groups of `i` channels in and `o` out; a bias is added once where `i` is split."""
    ins, taps, outs = (" ".join(f"{c}{i}!" for i in range(ndim)) for c in "hky")

    def derive(
        input: Arg,
        weight: Arg,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Said:
        n = "n " * (input.ndim == ndim + 2)
        if groups == 1:
            x, y, w = "i%", "o%", "i% o%" if transposed else "o% i%"
        else:
            x, y = f"(g={groups} i)%", "(g o)%"
            w = "(g i)% o" if transposed else "(g o)% i"
        shift = f" + {y}" * (bias is not None)
        return Said(
            f"{n}{x} {ins} * {w} {taps}{shift} -> {n}{y} {outs}",
            lambda call: _conv_local(call, run),
        )

    def derive_transposed(
        input: Arg,
        weight: Arg,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Said:
        return derive(input, weight, bias, groups=groups)

    rule(run)(derive_transposed if transposed else derive)


def _conv_local(call: Call, run: Callable[..., Any]) -> Any:
    """A convolution of this rank's groups, and of no sample where it has none."""
    groups = call.pieces["g"][1] if call.is_split("g") else None
    empty = call.is_split("n") and not call.pieces["n"][1]
    if groups is None and not empty:
        return None

    def local(input: Any, *args: Any, **kwargs: Any) -> Any:
        if groups is not None and len(args) > 5:  # weight bias stride padding dilation groups
            args = (*args[:5], groups, *args[6:])
        elif groups is not None:
            kwargs["groups"] = groups
        return _of_none(run, input, *args, **kwargs) if empty else run(input, *args, **kwargs)

    return local


for _n in (1, 2, 3):
    _conv(getattr(torch, f"conv{_n}d"), _n, False)
    _conv(getattr(torch, f"conv_transpose{_n}d"), _n, True)


# -- pooling and resampling ------------------------------------------------------------------------


def _pooled(input: Arg, ndim: int, run: Callable[..., Any], linear: bool, outputs: int) -> Said:
    ins, outs = (" ".join(f"{c}{i}!" for i in range(ndim)) for c in "hy")
    front = "n c%" if input.ndim == ndim + 2 else "c%"
    out = ", ".join([f"{front} {outs}"] * outputs)
    return Said(f"{'+ ' * linear}{front} {ins} -> {out}", _some(run))


# What decides the size of the result is declared: it must be in the key, although only the kernel
# works the size out.


def _average_pool(run: Callable[..., Any], ndim: int) -> None:
    def derive(
        input: Arg,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        _count_include_pad: Any = True,
        _divisor_override: Any = None,
    ) -> Said:
        return _pooled(input, ndim, run, True, 1)

    rule(run)(derive)


def _norm_pool(run: Callable[..., Any], ndim: int) -> None:
    def derive(
        input: Arg, _norm_type: Any, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
    ) -> Said:
        return _pooled(input, ndim, run, False, 1)

    rule(run)(derive)


def _max_pool(run: Callable[..., Any], ndim: int, outputs: int | None = None) -> None:
    def derive(
        input: Arg,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Said:
        return _pooled(input, ndim, run, False, outputs or 1 + return_indices)

    rule(run)(derive)


def _adaptive_pool(
    run: Callable[..., Any], ndim: int, linear: bool, outputs: int | None = None
) -> None:
    def derive(input: Arg, output_size: Any, return_indices: bool = False) -> Said:
        return _pooled(input, ndim, run, linear, outputs or 1 + return_indices)

    rule(run)(derive)


for _n in (1, 2, 3):
    _home = torch if _n == 1 else torch._C._nn
    _average_pool(getattr(F, f"avg_pool{_n}d"), _n)
    _norm_pool(getattr(F, f"lp_pool{_n}d"), _n)
    _max_pool(getattr(torch, f"max_pool{_n}d"), _n, 1)
    _max_pool(getattr(F, f"max_pool{_n}d"), _n)
    _max_pool(getattr(F, f"max_pool{_n}d_with_indices"), _n, 2)
    _adaptive_pool(getattr(F, f"adaptive_avg_pool{_n}d"), _n, True, 1)
    _adaptive_pool(getattr(F, f"adaptive_max_pool{_n}d"), _n, False)
    _adaptive_pool(getattr(F, f"adaptive_max_pool{_n}d_with_indices"), _n, False, 2)
    _adaptive_pool(getattr(_home, f"adaptive_max_pool{_n}d"), _n, False, 2)


@rule(F.interpolate)
def interpolate(input: Arg) -> Rewrite:
    # The size of the result may be told by a float, which no key holds: it is worked out each time.
    def run(input: Any, size: Any = None, scale_factor: Any = None, *args: Any, **more: Any) -> Any:
        spatial = tuple(input.shape[2:])
        if size is not None:
            after = (size,) * len(spatial) if isinstance(size, int) else tuple(size)
        else:
            one = not isinstance(scale_factor, list | tuple)
            scales = [scale_factor] * len(spatial) if one else scale_factor
            after = tuple(math.floor(n * k) for n, k in zip(spatial, scales, strict=True))
        return resized(input, after, (size, scale_factor, *args), more)

    return Rewrite(run)


@exceptions.op
def resized(
    input: torch.Tensor, after: tuple[int, ...], args: tuple[Any, ...], more: dict[str, Any]
) -> torch.Tensor:
    """F.interpolate; `after` is the spatial shape that comes out."""
    return F.interpolate(input, *args, **more)


@rule(resized)
def _resized(input: Arg, after: Sequence[int]) -> Said:
    ins = " ".join(f"h{i}!" for i in range(input.ndim - 2))
    outs = " ".join(f"y{i}={n}!" for i, n in enumerate(after))
    return Said(f"+ n c% {ins} -> n c% {outs}", _some(resized))


@rule(F.grid_sample)
def grid_sample(input: Arg, grid: Arg) -> str:
    ins, outs = (" ".join(f"{c}{i}{'!' * (c == 'h')}" for i in range(input.ndim - 2)) for c in "hy")
    return f"+ n% c% {ins}, n% {outs} z! -> n% c% {outs}"


@rule(F.unfold)
def im2col(
    input: Arg, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> str | None:
    k = math.prod(kernel_size) if isinstance(kernel_size, list | tuple) else kernel_size**2
    return f"+ n% c h! w! -> n% (c k={k}) l!" if input.ndim == 4 else None


@rule(F.fold)
def col2im(input: Arg, output_size: Any, kernel_size: Any) -> str | None:
    k = math.prod(kernel_size) if isinstance(kernel_size, list | tuple) else kernel_size**2
    h, w = (output_size,) * 2 if isinstance(output_size, int) else output_size
    return f"+ n% (c k={k}) l! -> n% c h={h}! w={w}!" if input.ndim == 3 else None


# -- the rest --------------------------------------------------------------------------------------


@rule(F.glu)
def glu(input: Arg, dim: int = -1) -> str:
    n = input.shape[input.names.at(dim)] // 2
    return f"{input.names.whole(dim)} -> {input.names.put(dim, f'z={n}!')}"


@rule(F.one_hot)
def one_hot(tensor: Arg, num_classes: int = -1) -> str | None:
    return f"... -> ... z={num_classes}!" if num_classes > 0 else None


@rule(F.cosine_similarity)
def cosine_similarity(x1: Arg, x2: Arg, dim: int = 1) -> str | None:
    if x1.shape != x2.shape:
        return None
    names = x1.names.whole(dim)
    return f"{names}, {names} -> {x1.names.without(dim)}"


@rule(F.pairwise_distance)
def pairwise_distance(
    x1: Arg, x2: Arg, _p: Any = 2.0, _eps: Any = 1e-6, keepdim: bool = False
) -> str:
    return f"... d!, ... d! -> ...{' 1' * keepdim}"
