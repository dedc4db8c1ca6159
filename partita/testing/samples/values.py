"""Tensors for the sample calls with which the prover checks rules.

Sizes are small, differ from each other and do not divide evenly by 3, so that on some rank a shard
is short or missing. Floating-point values are float64.
"""

from __future__ import annotations

from typing import Any

import torch

Sample = tuple[tuple[Any, ...], dict[str, Any]]
Part = list[tuple[Any, list[Sample]]]
"""Pairs: a function, or a tuple of functions; and the sample calls of each of them."""
RANDOM = torch.Generator()


def begin() -> None:
    """Seeds the generator of sample values, so that they are the same each time."""
    RANDOM.manual_seed(3)


def x(*shape: int) -> torch.Tensor:
    """Returns a tensor of this shape with normally distributed values, for a sample."""
    return torch.randn(shape, generator=RANDOM, dtype=torch.float64)


def u(*shape: int) -> torch.Tensor:
    """Returns a tensor of this shape with uniform values from 0.1 to 0.9, for a sample.

    Most functions are defined for these.
    """
    return torch.rand(shape, generator=RANDOM, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> torch.Tensor:
    """Returns a tensor of this shape with integers from 0 to high - 1, for a sample."""
    return torch.randint(0, high, shape, generator=RANDOM)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=RANDOM) > 0.5


def c(*args: Any, **kwargs: Any) -> Sample:
    """Returns a sample call with these arguments, as `(args, kwargs)`."""
    return args, kwargs
