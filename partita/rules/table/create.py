"""Factories: ops that make a new tensor in the layout of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..rule import Arg, Kernel, KernelCall, LikeRule
from ..rule import table_rule as rule


def _register_like(*functions: Kernel, pending: bool = False) -> None:
    def derive(input: Arg) -> LikeRule:
        return LikeRule(input.shape, pending)

    rule(*functions)(derive)


_register_like(torch.zeros_like, torch.ones_like, torch.full_like)
_register_like(torch.empty_like, pending=True)


def _make_kernel_factory(rest: int) -> Callable[[KernelCall], Kernel]:
    """`run(input, local shape, ...)`; the arguments after the shape begin at number `rest`."""

    def local(call: KernelCall) -> Kernel:
        def allocate_local(input: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("size", None)
            # As a list: of an empty tuple torch makes "no sizes given".
            return call.run(input, list(call.outputs[0]), *args[rest:], **kwargs)

        return allocate_local

    return local


def _register_new(*functions: Kernel, pending: bool = False) -> None:
    def derive(input: Arg, *sizes: Any, size: Any = None) -> LikeRule:
        size = sizes if size is None else (size,)
        one = len(size) >= 1 and isinstance(size[0], list | tuple)
        shape = tuple(size[0]) if one else tuple(n for n in size if type(n) is int)
        # Whether the sizes came one by one or as one tuple: nothing positional follows them.
        return LikeRule(shape, pending, _make_kernel_factory(len(shape) + 1))

    rule(*functions)(derive)


_register_new(torch.Tensor.new_zeros, torch.Tensor.new_ones)
_register_new(torch.Tensor.new_empty, pending=True)


@rule(torch.Tensor.new_full)
def new_full(input: Arg, size: Sequence[int]) -> LikeRule:
    return LikeRule(tuple(size), False, _make_kernel_factory(1))


@rule(torch.Tensor.new_empty_strided)
def new_empty_strided(input: Arg, size: Sequence[int]) -> LikeRule:
    def make_strided_kernel(call: KernelCall) -> Kernel:
        def new(input: Any, size: Any, stride: Sequence[int], **kwargs: Any) -> Any:
            # The order of the strides is kept; their sizes are those of this rank's piece.
            shape = call.outputs[0]
            if tuple(size) == tuple(shape):
                return input.new_empty_strided(shape, stride, **kwargs)
            order = sorted(range(len(shape)), key=lambda d: -stride[d])
            return torch.empty_permuted(
                shape, order, dtype=kwargs.get("dtype", input.dtype), device=input.device
            )

        return new

    return LikeRule(tuple(size), True, make_strided_kernel)
