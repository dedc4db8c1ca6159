"""A tensor or an object that the step is given is the same one under any other name; or refused."""

from __future__ import annotations

import dataclasses
import enum
import types

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

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
IN_VIEW = types.MappingProxyType({"one": ONE})
IN_TUPLES = (7, (ONE,))
IN_ERROR = ValueError({"one": ONE})
MODULE = nn.Linear(3, 3)
MODULE.kept = (7, [ONE])
DATA = TensorDataset(ONE)
LOADER = DataLoader(ConcatDataset([DATA]))
NORMAL = torch.distributions.Normal(ONE, torch.ones(3))
SCHEDULER = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(MODULE.parameters()))
SCHEDULER._last_lr = [ONE]
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
    "a dictionary in an exception": lambda x: x is IN_ERROR.args[0]["one"],
    "a view of a dictionary": lambda x: x is IN_VIEW["one"],
    "a tuple in a tuple": lambda x: x is IN_TUPLES[1][0],
    "a list in a module's tuple": lambda x: x is MODULE.kept[1][0],
    "a library's object": lambda x: x is DATA.tensors[0],
    "an object within a library's": lambda x: x is LOADER.dataset.datasets[0].tensors[0],
    "a distribution": lambda x: x is NORMAL.loc,
    "a scheduler": lambda x: x is SCHEDULER.get_last_lr()[0],
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
        torch.testing.assert_close(compiled(x), step(x))


IN_SLICE = slice(ONE, None)  # which nothing can exchange there


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("fallback", [None, "eager"])
def test_a_step_that_was_refused_once_is_right_or_refused_in_each_later_call(fallback):
    def step(x, y):
        return x * 2 if IN_SLICE.start is y else x * 3

    compiled = pt.compile(step, backend="graph", fallback=fallback)
    refused = []
    for which in "0110101":
        y = ONE if which == "1" else OTHER
        try:
            torch.testing.assert_close(compiled(GIVEN + 1, y), step(GIVEN + 1, y))
        except pt.CaptureError:
            refused.append(which)
    assert refused == ([] if fallback else ["1"] * 4)


@pytest.mark.parametrize(
    "is_found",
    [
        lambda t, y: y in [t],
        lambda t, y: (t,) == (y,),
        lambda t, y: [7, t].count(y) > 0,
        lambda t, y: {"a": t} == {"a": y},
        lambda t, y: id(t) == id(y),
        lambda t, y: len({t, y}) == 1,
        lambda t, y: {t: True}.get(y, False),
    ],
)
def test_other_comparisons_of_a_tensor_without_a_stand_in_are_refused(is_found):
    one = torch.ones(1)
    bound = slice(one, None)
    step = pt.compile(lambda x, y: x * 2 if is_found(bound.start, y) else x, backend="graph")
    with pytest.raises(pt.CaptureError, match=r"no fake can replace it|not among its inputs"):
        step(torch.ones(3), one)


class Mode(enum.Enum):
    TRAIN = "train"


KIND, NAMES, MODE = "plain", {"weight"}, Mode.TRAIN


def of_others(model, optimizer):
    return sum(p.square().sum() for p in model.parameters() if p is not model.bias)


def of_kind(model, optimizer):
    kind = "".join(["pl", "ain"])
    return model.weight.sum() * (2.0 if kind == KIND else 3.0)


def of_names(model, optimizer):
    return sum(p.sum() for name, p in model.named_parameters() if name in NAMES)


def of_mode(model, optimizer):
    mode = MODE
    return model.weight.sum() * (2.0 if mode is Mode.TRAIN else 3.0)


def of_rates(model, optimizer):
    (group,) = optimizer.param_groups
    return model.weight.sum() * (2.0 if group["lr"] is optimizer.defaults["lr"] else 3.0)


def of_each_once(model, optimizer):
    seen, total = set(), 0.0
    for p in (*model.parameters(), model.weight):
        if p not in seen:
            seen.add(p)
            total = total + p.sum()
    return total


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("loss", [of_others, of_kind, of_names, of_mode, of_rates, of_each_once])
def test_a_step_whose_rate_is_a_tensor_compares_other_things(loss, kind):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = kind(model.parameters(), lr=torch.tensor(0.01))

        def step(x):
            optimizer.zero_grad()
            total = model(x).square().mean() + loss(model, optimizer)
            total.backward()
            optimizer.step()
            return total.detach()

        return model, optimizer, step

    model, optimizer, step = make()
    expected_model, expected_optimizer, expected_step = make()
    compiled = pt.compile(step, backend="graph")
    for i in range(3):
        for each in (optimizer, expected_optimizer):
            each.param_groups[0]["lr"].mul_(0.5)
        x = torch.full((2, 3), i + 1.0)
        torch.testing.assert_close(compiled(x), expected_step(x))
    assert compiled.reasons[0] == "the first call" and len(compiled.reasons) <= 2
    torch.testing.assert_close(model.state_dict(), expected_model.state_dict())


def test_a_rate_that_was_replaced_is_another_tensor_than_the_default():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01))

    def step(x):
        return x * (2.0 if optimizer.param_groups[0]["lr"] is optimizer.defaults["lr"] else 3.0)

    compiled = pt.compile(step, backend="graph")
    x = torch.ones(3)
    for rate in (optimizer.defaults["lr"], torch.tensor(0.01), optimizer.defaults["lr"]):
        optimizer.param_groups[0]["lr"] = rate
        torch.testing.assert_close(compiled(x), step(x))
    given = pt.compile(lambda x, t: x * 2 if optimizer.defaults["lr"] is t else x, backend="graph")
    for t in (torch.tensor(0.01), optimizer.defaults["lr"], torch.tensor(0.01)):
        torch.testing.assert_close(given(x, t), x * 2 if optimizer.defaults["lr"] is t else x)


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
    with pytest.raises(pt.CaptureError, match=r"an argument is a Batch|arguments are rebuilt"):
        step(BATCHES[0])


def test_objects_that_the_step_makes_may_be_keys():
    def step(batch):
        return batch.x * {batch: 2.0}[batch] * len({batch} | {Batch(batch.x)})

    compiled = pt.compile(step, backend="graph")
    for batch in BATCHES:
        torch.testing.assert_close(compiled(batch), step(batch))
