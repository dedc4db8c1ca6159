"""What is the ordinary training step that many tests run?"""

from __future__ import annotations

__all__ = ["squares"]


def squares(model, optimizer):
    """A step that has `model` learn to give zeros."""

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step
