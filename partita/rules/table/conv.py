"""Rules of convolutions, pooling and resampling, sharded over samples, channels and groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import (
    Arg,
    Kernel,
    KernelCall,
    KernelRule,
    decomposed,
    empty_piece_kernel,
    own_op,
    rule_by_name,
    with_dummy_row,
)
from ..rule import builtin_rule as rule

# -- convolution -----------------------------------------------------------------------------------
# `g` is the number of groups, `i` of input channels and `o` of output channels in a group. If `i`
# is split, one rank adds the bias.


def _register_conv(takes: str, transposed: bool, *functions: Any) -> None:
    """Register the sentence of convolutions whose first four parameters are the same."""

    @rule_by_name(takes, *functions)
    def derive_conv(given: dict[str, Any]) -> KernelRule:
        input, weight, bias, stride = [*given.values()][:4]
        groups, spatial = given["groups"], weight.ndim - 2
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
        text = f"{n}{x} {ins} * {w} {taps}{shift} -> {n}{y} {outs}"
        return KernelRule(text, _make_conv_kernel, work=(work,))


def _make_conv_kernel(call: KernelCall) -> Kernel | None:
    """Returns a kernel for this rank's groups of a convolution, maybe without samples."""
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


_takes = "input weight bias=None stride=1 padding=0 dilation=1 groups=1"
_register_conv(_takes, False, torch.conv1d, torch.conv2d, torch.conv3d)
_takes = "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1"
_transposed = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_register_conv(_takes, True, *_transposed)


# -- pooling ---------------------------------------------------------------------------------------
# The rules declare the arguments that determine the size of the result, because these must be in
# the key, although only the kernel computes the size.


def _register_pool(
    ndim: int, takes: str, *functions: Any, linear: bool = False, outputs: int | None = None
) -> None:
    """Register the sentence of pools over `ndim` dimensions for functions.

    Args:
        outputs: the number of outputs; None if `return_indices` decides.
    """
    ins, outs = (" ".join(f"{c}{i}!" for i in range(ndim)) for c in "hy")

    @rule_by_name(takes, *functions)
    def derive_pool(given: dict[str, Any]) -> KernelRule:
        front = "n c%" if given["input"].ndim == ndim + 2 else "c%"
        count = outputs or 1 + given.get("return_indices", False)
        out = ", ".join([f"{front} {outs}"] * count)
        return KernelRule(f"{'+ ' * linear}{front} {ins} -> {out}", empty_piece_kernel("n"))


_AVERAGE = "input kernel_size stride=None padding=0 ceil_mode=False"
_NORM = "input _norm_type kernel_size stride=None ceil_mode=False"
_MAX = "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False"
_ADAPTIVE = "input output_size"
_ADAPTIVE_MAX = "input output_size return_indices=False"
for _n in (1, 2, 3):
    _register_pool(_n, _AVERAGE, getattr(F, f"avg_pool{_n}d"), linear=True)
    _register_pool(_n, _NORM, getattr(F, f"lp_pool{_n}d"))
    _register_pool(_n, _MAX, getattr(F, f"max_pool{_n}d"))
    _register_pool(_n, _MAX, getattr(torch, f"max_pool{_n}d"), outputs=1)
    _register_pool(_n, _MAX, getattr(F, f"max_pool{_n}d_with_indices"), outputs=2)
    _register_pool(_n, _ADAPTIVE, getattr(F, f"adaptive_avg_pool{_n}d"), linear=True)
    _register_pool(_n, _ADAPTIVE_MAX, getattr(F, f"adaptive_max_pool{_n}d"))
    _builtin = getattr(torch if _n == 1 else torch._C._nn, f"adaptive_max_pool{_n}d")
    _with_indices = getattr(F, f"adaptive_max_pool{_n}d_with_indices")
    _register_pool(_n, _ADAPTIVE_MAX, _builtin, _with_indices, outputs=2)


# -- resampling ------------------------------------------------------------------------------------


# The size of the result may depend on a float, which no key holds: it is computed each time.
@decomposed("input", F.interpolate)
def interpolate(
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


@own_op
def resized(
    input: torch.Tensor, after: tuple[int, ...], args: tuple[Any, ...], more: dict[str, Any]
) -> torch.Tensor:
    """Computes F.interpolate of `input`. It has its own sharding rule.

    Args:
        after: the spatial shape of the result.
        args, more: the other arguments of F.interpolate.
    """
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


def _as_pair(size: Any) -> tuple[int, int]:
    """Returns two sizes, which may be given as one number."""
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]


@rule(F.unfold)
def im2col(
    input: Arg, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> str | None:
    k = math.prod(_as_pair(kernel_size))
    return f"+ n% c h! w! -> n% (c k={k}) l!" if input.ndim == 4 else None


@rule(F.fold)
def col2im(input: Arg, output_size: Any, kernel_size: Any) -> str | None:
    k, (h, w) = math.prod(_as_pair(kernel_size)), _as_pair(output_size)
    if input.ndim != 3:
        return None
    one = input.shape[1] == k  # channel: the elements of its window stay together
    return f"+ n% {f'k={k}!' if one else f'(c k={k})'} l! -> n% {'1' if one else 'c'} h={h}! w={w}!"
