"""A captured step takes tensors in whatever holds a batch, as it takes them in a dictionary."""

from __future__ import annotations

import collections
import dataclasses
import types
import typing

import pytest
import torch

import partita as pt

X = torch.arange(8.0).view(4, 2)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    k: int = 2

    def doubled(self):
        return self.x * self.k


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    k: int


class Named(typing.NamedTuple):
    x: torch.Tensor
    k: int


class Own:
    def __init__(self, x, k):
        self.x, self.k = x, k


class Items(collections.UserDict):
    def __getattr__(self, name):
        return self.data[name]


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Nested:
    def __init__(self, x, k):
        self.parts = {"first": [Batch(x, k)]}

    x = property(lambda self: self.parts["first"][0].x)
    k = property(lambda self: self.parts["first"][0].k)


KINDS = {
    "dataclass": Batch,
    "frozen": Frozen,
    "named tuple": Named,
    "class": Own,
    "UserDict": lambda x, k: Items(x=x, k=k),
    "dict": lambda x, k: Attributes(x=x, k=k),
    "SimpleNamespace": lambda x, k: types.SimpleNamespace(x=x, k=k),
    "nested": Nested,
}


def on_ranks(body, *args):
    with pt.ranks(a=2) as world:
        return world.run(body, *args)


def placed(mesh, x=X):
    return pt.distribute_tensor(x, mesh, [pt.Shard(0)])


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_computes_with_what_its_argument_holds(kind):
    make = KINDS[kind]

    def body(mesh):
        step = pt.compile(lambda batch, more: batch.x * batch.k + more[0].x, backend="graph")
        found = []
        for i, k in ((0, 2), (1, 2), (2, 2), (0, 3)):
            more = [make(placed(mesh, X + i), k)]
            found.append(step(make(placed(mesh, X - i), k), more).full_tensor())
        assert len(step._programs) == 2  # another k is another graph
        return found

    for found in on_ranks(body):
        for out, (i, k) in zip(found, ((0, 2), (1, 2), (2, 2), (0, 3)), strict=True):
            assert torch.equal(out, (X - i) * k + X + i)


def test_a_step_may_return_such_an_object():
    def body(mesh):
        step = pt.compile(lambda batch: Batch(batch.doubled(), 5), backend="graph")
        first, second = step(Batch(placed(mesh))), step(Batch(placed(mesh, X + 1)))
        assert type(second) is Batch and second.k == 5 and first is not second
        return second.x.full_tensor()

    assert all(torch.equal(out, (X + 1) * 2) for out in on_ranks(body))


def leaves_a_tensor(batch):
    batch.y = batch.x + 1
    return batch.x.sum()


def counts(batch):
    batch.k += 1
    return batch.x.sum() * batch.k


@pytest.mark.parametrize("kind", ["dataclass", "class", "SimpleNamespace"])
def test_what_a_step_leaves_in_its_argument_is_an_error_or_there(kind):
    make = KINDS[kind]

    def body(mesh):
        with pytest.raises(pt.CaptureError, match=r"leaves a tensor in argument.*y"):
            pt.compile(leaves_a_tensor, backend="graph")(make(placed(mesh), 2))
        batch, step = make(placed(mesh), 2), pt.compile(counts, backend="graph")
        try:
            found = [step(batch).full_tensor().item() for _ in range(3)]
        except pt.CaptureError as error:
            assert "argument" in str(error)
            return
        assert found == [28 * 3, 28 * 4, 28 * 5] and batch.k == 5

    on_ranks(body)


@pytest.mark.parametrize("hold", [lambda x: {x}, lambda x: types.MappingProxyType({"x": x})])
def test_what_cannot_be_taken_apart_is_named(hold):
    def body(mesh):
        with pytest.raises(pt.CaptureError, match=r"argument\[0\] is a \w+ that holds tensors"):
            pt.compile(lambda batch: next(iter(batch)), backend="graph")(hold(placed(mesh)))

    on_ranks(body)


def test_an_object_that_holds_itself_is_left_alone():
    def body(mesh):
        options = Own(None, 2)
        options.x = options
        step = pt.compile(lambda options, x: x * options.x.k, backend="graph")
        return step(options, placed(mesh)).full_tensor()

    assert all(torch.equal(out, X * 2) for out in on_ranks(body))
