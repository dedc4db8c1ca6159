"""A tensor that a captured step has read may be deleted between two calls, wherever it stood."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import partita as pt


class Slotted:
    __slots__ = ("v",)


class SlottedWithDict:
    __slots__ = ("__dict__", "v")


class ItsClass:
    pass


READS = {
    "hasattr": lambda k: k.v if hasattr(k, "v") else 1.0,
    "getattr": lambda k: getattr(k, "v", 1.0),
    "a computed name": lambda k: getattr(k, "".join(["v"]), 1.0),
}
OWNERS = [Slotted, SlottedWithDict, SimpleNamespace, threading.local, lambda: ItsClass]


def call_as_it_changes(step, put, delete):
    found = [step().item()]
    for value in (3.0, 4.0):
        put(torch.tensor(value))
        found.append(step().item())
    delete()
    found.append(step().item())
    put(torch.tensor(5.0))
    found.append(step().item())
    delete()
    return found


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("make", OWNERS)
def test_a_step_reads_that_an_attribute_is_gone(make, read):
    k, read = make(), READS[read]

    def step():
        return torch.ones(2).sum() * read(k)

    found = call_as_it_changes(
        pt.compile(step, backend="graph"), lambda v: setattr(k, "v", v), lambda: delattr(k, "v")
    )
    assert found == [2.0, 6.0, 8.0, 2.0, 10.0]


def test_a_step_reads_that_a_nonlocal_variable_is_gone():
    def step():
        try:
            return torch.ones(2).sum() * held
        except NameError:
            return torch.ones(2).sum()

    def put(value):
        nonlocal held
        held = value

    def delete():
        nonlocal held
        del held

    held = None
    del held
    found = call_as_it_changes(pt.compile(step, backend="graph"), put, delete)
    assert found == [2.0, 6.0, 8.0, 2.0, 10.0]


def test_a_step_reads_that_an_item_is_gone():
    held = {}

    def step():
        return torch.ones(2).sum() * held.get("v", 1.0)

    found = call_as_it_changes(
        pt.compile(step, backend="graph"), lambda v: held.update(v=v), lambda: held.pop("v")
    )
    assert found == [2.0, 6.0, 8.0, 2.0, 10.0]
