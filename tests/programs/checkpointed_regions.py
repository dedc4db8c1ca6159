"""Regions that are checkpointed selectively: alike, nested, of equal shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[..., Any]


def gradients(fn: Function, *inputs: Tensor) -> list[Tensor]:
    leaves = [x for x in inputs if x.requires_grad]
    return list(torch.autograd.grad(fn(*inputs).sum(), leaves))


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def scores(x: Tensor) -> Tensor:
    """An integer result: a mask of the shape of x."""
    return (torch.arange(x.shape[-1]) % 3 == 0).int().expand_as(x).contiguous()


def squash(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def stretch(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w)


def same_shape_twice(compiled: Function, remember: dict[str, Tensor]) -> Function:
    """Regions of equal shapes, the first integer; it is remembered, and so left out later."""
    mask, first, second = compiled(scores), compiled(squash), compiled(stretch)

    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        if "mask" not in remember:
            remember["mask"] = mask(x.detach())
        y = first(x, w)
        return second(y * remember["mask"], v) * y

    return program


def ranked(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A float result and an integer one."""
    y = torch.tanh(x @ w)
    return y, (y > 0).int()


def spread_program(region: Function, other: Function, remember: dict[str, Any]) -> Function:
    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        if "sign" not in remember:
            remember["sign"] = region(x.detach(), w.detach())[1]
        y, sign = region(x, w)
        z, _ = other(y * remember["sign"], v)
        return z * sign + y

    return program


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.down, self.drop = nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.relu(self.norm(self.up(x)))))


def trains_as_its_twin(program: Function, block: Block, twin: Block) -> None:
    """`program` runs `block` twice: its gradients and statistics are those of the twin."""
    x = leaf(6, 4)
    torch.manual_seed(4)
    program(x).sum().backward()
    ours, x.grad = x.grad, None
    torch.manual_seed(4)
    twin(twin(x).sin()).sum().backward()
    torch.testing.assert_close(ours, x.grad)
    for (name, mine), (_, theirs) in zip(
        block.named_parameters(), twin.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    for (name, mine), (_, theirs) in zip(block.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
