"""Convolutions, pooling and resampling, spread over samples, channels and groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import (
    Arg,
    Decomposition,
    Kernel,
    KernelCall,
    KernelRule,
    empty_piece_kernel,
    own_op,
    with_dummy_row,
)
from ..rule import table_rule as rule

# -- convolution -----------------------------------------------------------------------------------
# `g` groups of `i` channels come in, and `o` go out. A bias is added once where `i` is split.


def _derive_conv(
    input: Arg, weight: Arg, bias: Any, stride: Any, groups: int, transposed: bool
) -> KernelRule:
    spatial = weight.ndim - 2
    n = "n " * (input.ndim == weight.ndim)
    ins, taps, outs = (" ".join(f"{c}{i}!" for i in range(spatial)) for c in "hky")
    if groups == 1:
        x, y, w = "i%", "o%", "i% o%" if transposed else "o% i%"
    else:
        x, y = f"(g={groups} i)%", "(g o)%"
        w = "(g i)% o" if transposed else "(g o)% i"
    shift = f" + {y}" * (bias is not None)
    # Each tap is read at each place of the result (transposed: of the input), borders aside.
    steps = [stride] * spatial if isinstance(stride, int) else [*stride] * spatial
    places = [
        size if transposed else -(-size // step)
        for size, step in zip(input.shape[input.ndim - spatial :], steps, strict=False)
    ]
    channels = "i o" if groups == 1 else "g i o"
    work = f"{n}{channels} {taps.replace('!', '')} {' '.join(map(str, places))}"
    return KernelRule(
        f"{n}{x} {ins} * {w} {taps}{shift} -> {n}{y} {outs}", _make_conv_kernel, work=(work,)
    )


def _make_conv_kernel(call: KernelCall) -> Kernel | None:
    """A convolution of this rank's groups, and of no sample where it has none."""
    empty = call.is_split("n") and not call.pieces["n"][1]
    run = with_dummy_row(call.run) if empty else call.run
    if not call.is_split("g"):
        return run if empty else None
    groups = call.pieces["g"][1]

    def kernel(input: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 5:  # weight bias stride padding dilation groups, or output_padding groups
            return run(input, *args[:5], groups, *args[6:], **kwargs)
        return run(input, *args, **{**kwargs, "groups": groups})

    return kernel


@rule(torch.conv1d, torch.conv2d, torch.conv3d)
def conv(
    input: Arg,
    weight: Arg,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> KernelRule:
    return _derive_conv(input, weight, bias, stride, groups, transposed=False)


@rule(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def conv_transpose(
    input: Arg,
    weight: Arg,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> KernelRule:
    return _derive_conv(input, weight, bias, stride, groups, transposed=True)


# -- pooling ---------------------------------------------------------------------------------------
# What decides the size of the result is declared: it must be in the key, although only the kernel
# works the size out.


def _derive_pool(input: Arg, ndim: int, linear: bool = False, outputs: int = 1) -> KernelRule:
    ins, outs = (" ".join(f"{c}{i}!" for i in range(ndim)) for c in "hy")
    front = "n c%" if input.ndim == ndim + 2 else "c%"
    out = ", ".join([f"{front} {outs}"] * outputs)
    return KernelRule(f"{'+ ' * linear}{front} {ins} -> {out}", empty_piece_kernel("n"))


def _average_pool(ndim: int) -> Any:
    def derive_average_pool(
        input: Arg, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False
    ) -> KernelRule:
        return _derive_pool(input, ndim, linear=True)

    return derive_average_pool


def _norm_pool(ndim: int) -> Any:
    def derive_norm_pool(
        input: Arg, _norm_type: Any, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
    ) -> KernelRule:
        return _derive_pool(input, ndim)

    return derive_norm_pool


def _max_pool(ndim: int, outputs: int | None = None) -> Any:
    """`outputs`: where it is not for `return_indices` to say."""

    def derive_max_pool(
        input: Arg,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> KernelRule:
        return _derive_pool(input, ndim, outputs=outputs or 1 + return_indices)

    return derive_max_pool


def _adaptive_average_pool(ndim: int) -> Any:
    def derive_adaptive_average_pool(input: Arg, output_size: Any) -> KernelRule:
        return _derive_pool(input, ndim, linear=True)

    return derive_adaptive_average_pool


def _adaptive_max_pool(ndim: int, outputs: int | None = None) -> Any:
    def derive_adaptive_max_pool(
        input: Arg, output_size: Any, return_indices: bool = False
    ) -> KernelRule:
        return _derive_pool(input, ndim, outputs=outputs or 1 + return_indices)

    return derive_adaptive_max_pool


for _n in (1, 2, 3):
    _builtins = torch if _n == 1 else torch._C._nn
    rule(getattr(F, f"avg_pool{_n}d"))(_average_pool(_n))
    rule(getattr(F, f"lp_pool{_n}d"))(_norm_pool(_n))
    rule(getattr(torch, f"max_pool{_n}d"))(_max_pool(_n, 1))
    rule(getattr(F, f"max_pool{_n}d"))(_max_pool(_n))
    rule(getattr(F, f"max_pool{_n}d_with_indices"))(_max_pool(_n, 2))
    rule(getattr(F, f"adaptive_avg_pool{_n}d"))(_adaptive_average_pool(_n))
    rule(getattr(F, f"adaptive_max_pool{_n}d"))(_adaptive_max_pool(_n))
    rule(getattr(F, f"adaptive_max_pool{_n}d_with_indices"))(_adaptive_max_pool(_n, 2))
    rule(getattr(_builtins, f"adaptive_max_pool{_n}d"))(_adaptive_max_pool(_n, 2))


# -- resampling ------------------------------------------------------------------------------------


@rule(F.interpolate)
def interpolate(input: Arg) -> Decomposition:
    # The size of the result may be told by a float, which no key holds: it is worked out each time.
    def interpolate_to_size(
        input: Any, size: Any = None, scale_factor: Any = None, *args: Any, **more: Any
    ) -> Any:
        spatial = tuple(input.shape[2:])
        if size is not None:
            after = (size,) * len(spatial) if isinstance(size, int) else tuple(size)
        else:
            one = not isinstance(scale_factor, list | tuple)
            scales = [scale_factor] * len(spatial) if one else scale_factor
            after = tuple(math.floor(n * k) for n, k in zip(spatial, scales, strict=True))
        return resized(input, after, (size, scale_factor, *args), more)

    return Decomposition(interpolate_to_size)


@own_op
def resized(
    input: torch.Tensor, after: tuple[int, ...], args: tuple[Any, ...], more: dict[str, Any]
) -> torch.Tensor:
    """F.interpolate; `after` is the spatial shape that comes out."""
    return F.interpolate(input, *args, **more)


@rule(resized)
def _derive_resize(input: Arg, after: Sequence[int]) -> KernelRule:
    ins = " ".join(f"h{i}!" for i in range(input.ndim - 2))
    outs = " ".join(f"y{i}={n}!" for i, n in enumerate(after))
    return KernelRule(f"+ n c% {ins} -> n c% {outs}", empty_piece_kernel("n"))


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
