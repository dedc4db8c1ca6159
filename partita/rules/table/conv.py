"""Convolutions, spread over samples, channels and groups.

`g` groups of `i` channels come in, and `o` go out. A bias is added once where `i` is split.
"""

from __future__ import annotations

from typing import Any

import torch

from ..piece_kernels import with_dummy_row
from ..rule import Arg, Kernel, KernelCall, KernelRule
from ..rule import table_rule as rule


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
