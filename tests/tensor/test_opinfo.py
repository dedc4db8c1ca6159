"""Is every op of torch right on DTensors, forward and backward, in every class of layouts?

A quick slice of `partita bench ops`, which says what an op is and what its arguments are: each op
of torch's own list with one sample in each class, on two ranks, against one device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partita as pt
from partita.rules.rule import RULES, store_rule
from partita.testing.op_case import Outcome, Reference, merge_outcomes, references, run_case
from partita.testing.op_layouts import CLASSES
from partita.testing.opinfo import list_names

REFUSED = {"resize_", "to_sparse", "sparse.mm.reduce", "sparse.sampled_addmm"}
"""They work on memory, or on tensors without strides, of which no layout can speak."""

SLICES = 12


def outcomes(some: list[str], samples: int) -> tuple[dict[str, dict[str, Outcome]], list[str]]:
    """What came of each op in each class, each time with its next sample; and what has none."""
    found: dict[str, dict[str, Outcome]] = {}
    left_out = []

    def run(mesh: Any, name: str, refs: list[Reference]) -> list[Outcome]:
        cases = [(i % len(refs), klass) for i, klass in enumerate(CLASSES)]
        return [run_case(mesh, name, i, refs[i], klass) for i, klass in cases]

    with pt.ranks(dp=2) as world:
        for name in some:
            try:
                refs, _ = references(name, samples)
            except Exception:  # its samples are of another library, or another device
                refs = []
            if not refs:
                left_out.append(name)
                continue
            per_class = zip(*world.run(run, name, refs), strict=True)
            found[name] = dict(zip(CLASSES, map(merge_outcomes, per_class), strict=True))
    return found, left_out


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(SLICES))
def test_each_op_gives_what_one_device_gives(turn: int) -> None:
    asked = list_names()[turn::SLICES]
    found, left_out = outcomes(asked, 3)
    bad = {
        f"{name} ({klass})": str(outcome)
        for name, by in found.items()
        for klass, outcome in by.items()
        if outcome.kind != ("raise" if name in REFUSED else "right")
    }
    assert not bad
    # Without tensors there is nothing to lay out, and some kernels are for GPUs.
    assert len(left_out) < 0.2 * len(asked), left_out


@pytest.mark.parametrize(
    ("op", "function", "wrong", "klass"),
    [
        ("exp", torch.exp, "+ ... -> ...", "partial"),
        ("tril", torch.tril, "... -> ...", "uneven"),
        ("mul", torch.mul, "... + ... -> ...", "partial"),
    ],
)
def test_the_sweep_finds_a_rule_that_is_wrong(op, function, wrong, klass) -> None:
    right = RULES[function]
    try:
        pt.rule(wrong, function)
        found, _ = outcomes([op], 3)
        assert found[op][klass].kind in ("wrong", "crash"), found[op]
    finally:
        store_rule(function, right)
