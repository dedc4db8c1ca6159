"""Draws of random numbers: where a place first draws, the ranks' generators are compared.

Every rank draws one device's numbers from a generator of its own, so all must be in one state: else
a dropout mask, or a weight that is made on each rank, is another one on each, and nobody is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from partita.comm import Wire, agree, call_site, is_agreed, is_alone, remember_agreed
from partita.comm.device import default_generator
from partita.layout import Fix

from .names import Form

__all__ = ["run_with_generator_check", "with_generator_check"]


def with_generator_check(
    kernel: Callable[..., Any], form: Form, wire: Wire
) -> Callable[..., Any] | None:
    """`kernel` of an op that draws, which compares the generators where a place first does so; None
    where there is nobody to compare with."""
    if is_alone(wire):
        return None
    return partial(run_with_generator_check, kernel, form.name, wire)


def run_with_generator_check(
    run: Callable[..., Any], op: str, wire: Wire, /, *args: Any, **kwargs: Any
) -> Any:
    """`run(*args, **kwargs)`; raise on all ranks if it has drawn from generators that differ."""
    # A dropout that is switched off draws nothing: its numbers tell calls of one line apart.
    numbers = tuple([a for a in (*args, *kwargs.values()) if isinstance(a, (int, float))])
    key = (call_site(), "draw", op, numbers)
    if is_agreed(wire, key):
        return run(*args, **kwargs)
    generator = kwargs.get("generator") or default_generator(wire.device)
    before = generator.get_state()
    out = run(*args, **kwargs)
    if not torch.equal(before, generator.get_state()):
        state = hashlib.blake2b(bytes(before.tolist()), digest_size=6).hexdigest()
        agree(
            op,
            f"draws from a generator of seed {generator.initial_seed()}, in state {state}",
            wire,
            fact="the ranks' random generators are not in the same state",
            reason="each rank draws one device's numbers and keeps its part of them",
            fixes=(
                Fix("torch.manual_seed(seed)", "the same on every rank"),
                Fix("with torch.random.fork_rng(): ...", "around what draws on some ranks only"),
            ),
        )
    remember_agreed(wire, key)
    return out
