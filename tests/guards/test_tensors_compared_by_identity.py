"""A tensor or an object that the step is given is the same one under any other name; or refused."""

from __future__ import annotations

import dataclasses
import enum

import pytest
import torch

import partita as pt

ONE, OTHER = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])


class Held:
    one = ONE
    many = (7, [ONE])


class Meta(type):
    one = ONE


class OfMeta(metaclass=Meta):
    pass


class Slotted:
    __slots__ = ("one",)


class Color(enum.Enum):
    RED = 1


Color.RED.one = ONE
Held.slotted = Slotted()
Held.slotted.one = ONE
ERROR = ValueError(ONE)
GIVEN = torch.zeros(3)
GIVEN.one = ONE


def with_default(x, one=ONE):
    return x is one


WAYS = {
    "a class": lambda x: x is Held.one,
    "a list in a tuple in a class": lambda x: x is Held.many[1][0],
    "a metaclass": lambda x: x is OfMeta.one,
    "a slot": lambda x: x is Held.slotted.one,
    "an enum": lambda x: x is Color.RED.one,
    "a default": with_default,
    "an exception": lambda x: x is ERROR.args[0],
    "a tensor": lambda x: x is GIVEN.one,
    "in": lambda x: any(x is t for t in Held.many[1]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["1010", "0110", "0011"])
def test_an_argument_is_the_tensor_that_stands_elsewhere(way, order):
    is_one = WAYS[way]

    def step(x):
        return x * 2 + GIVEN if is_one(x) else x * 3

    compiled = pt.compile(step, backend="graph")
    for which in order:
        x = ONE if which == "1" else OTHER
        try:
            found = compiled(x)
        except pt.CaptureError as error:
            assert way == "an exception" and "ERROR.args[0]" in str(error)
            return
        assert way != "an exception" or which == "0"
        torch.testing.assert_close(found, step(x))


@dataclasses.dataclass(eq=False)
class Batch:
    x: torch.Tensor


BATCHES = [Batch(ONE), Batch(OTHER * 2)]
SCALES = {batch: 2.0 + i for i, batch in enumerate(BATCHES)}
KNOWN = {BATCHES[0]}


def removed(batch):
    left = set(KNOWN)
    left.remove(batch)
    return 2.0 + len(left)


@pytest.mark.parametrize(
    "scale",
    [
        lambda batch: SCALES[batch],
        lambda batch: SCALES.setdefault(batch, 7.0),
        lambda batch: 1.0 + len(KNOWN & {batch}),
        lambda batch: 1.0 + len(KNOWN - {batch}),
        lambda batch: 1.0 + len(KNOWN.union([batch])),
        lambda batch: 3.0 if KNOWN.isdisjoint([batch]) else 4.0,
        lambda batch: {**SCALES, batch: 2.0}[BATCHES[0]],
        removed,
    ],
)
def test_an_argument_that_others_know_as_a_key_is_refused_in_words(scale):
    step = pt.compile(lambda batch: batch.x * scale(batch), backend="graph")
    with pytest.raises(pt.CaptureError, match=r"an argument is a Batch|made anew"):
        step(BATCHES[0])


def test_objects_that_the_step_makes_may_be_keys():
    def step(batch):
        return batch.x * {batch: 2.0}[batch] * len({batch} | {Batch(batch.x)})

    compiled = pt.compile(step, backend="graph")
    for batch in BATCHES:
        torch.testing.assert_close(compiled(batch), step(batch))
