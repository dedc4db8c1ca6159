"""A captured step takes tensors in whatever holds a batch, as it takes them in a dictionary."""

from __future__ import annotations

import collections
import dataclasses
import types
import typing
from types import SimpleNamespace

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
        assert len(step.programs) == 2  # another k is another graph
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


def captured(step):
    return pt.compile(step, backend="graph")


def test_two_classes_of_one_name_are_two_programs():
    def kind(factor):
        @dataclasses.dataclass
        class Batch:
            x: torch.Tensor

            def scaled(self):
                return self.x * factor

        return Batch

    step, twice, thrice = captured(lambda batch: batch.scaled()), kind(2), kind(3)
    for _ in range(2):
        assert torch.equal(step(twice(X)), X * 2)
        assert torch.equal(step(thrice(X)), X * 3)
    assert len(step.reasons) == 2


def test_the_class_of_an_argument_is_guarded():
    class Scaled(Own):
        factor = 2

    step = captured(lambda batch: batch.x * batch.factor)
    assert torch.equal(step(Scaled(X, 1)), X * 2)
    Scaled.factor = 3
    assert torch.equal(step(Scaled(X, 1)), X * 3)


def test_arguments_that_are_one_object_stay_one():
    def step(a, b):
        return a.x * (2 if a is b.x else 5), Own(a, [a, b])

    run, first, second = captured(step), Own(X, 1), Own(X + 1, 1)
    for other in (first, second, first):
        out, made = run(first, Own(other, 1))
        assert torch.equal(out, X * (2 if other is first else 5))
        assert made.k[0] is made.x
    assert len(run.reasons) == 2


def test_objects_that_know_one_another_are_walked_once():
    nodes = [types.SimpleNamespace(x=X) for _ in range(40)]
    for node in nodes:
        node.peers = [n for n in nodes if n is not node]  # as many paths as orders of forty
    ladder = types.SimpleNamespace(x=X)
    for _ in range(30):
        ladder = types.SimpleNamespace(left=ladder, right=ladder)

    def down(ladder):
        while not hasattr(ladder, "x"):
            assert ladder.left is ladder.right
            ladder = ladder.left
        return ladder.x * 2

    assert torch.equal(captured(down)(ladder), X * 2)
    with pytest.raises(pt.CaptureError, match="holds tensors"):
        captured(lambda x, node: x * 2)(X, nodes[0])


def test_a_chain_of_objects_is_no_end_of_the_stack():
    chain = None
    for _ in range(1000):
        chain = Own(chain, 1)
    assert torch.equal(captured(lambda x, chain: x * 2)(X, chain), X * 2)


def test_an_argument_keeps_what_stands_in_private_slots():
    class Slots:
        __slots__ = ("__factor", "x")

        def __init__(self, x, factor):
            self.x, self.__factor = x, factor

        def scaled(self):
            return self.x * self.__factor

    step = captured(lambda batch: batch.scaled())
    assert all(torch.equal(step(Slots(X, k)), X * k) for k in (2, 3))


def exchange_and_restore(given, named):
    before = given["x"]
    given["x"] = before * 2
    found = named["h"]["x"].sum()
    given["x"] = before
    return found


def write_by_the_name(given, named):
    named["h"]["y"] = named["h"]["x"] * 2
    return given["x"].sum() + named["h"].pop("y").sum()


def read_both(given, named):
    return given["x"].sum() + named["h"]["x"].sum()


def write_an_own_list(given, named):
    found = []
    for key in given:
        found.append(given[key] + named["h"][key])
    return found[0].sum()


@pytest.mark.parametrize(
    "program", [exchange_and_restore, write_by_the_name, read_both, write_an_own_list]
)
def test_a_container_that_is_an_argument_and_has_a_name_is_only_read(program):
    """The argument is rebuilt for the graph, and a write to one is not seen in the other."""
    given = {"x": X.clone()}
    named = {"h": given}

    def step(given):
        return program(given, named)

    compiled = pt.compile(step, backend="graph")
    if program in (read_both, write_an_own_list):
        assert compiled(given) == step(given)
    else:
        with pytest.raises(pt.CaptureError, match="changes items of a container"):
            compiled(given)
        assert torch.equal(given["x"], X) and [*given] == ["x"]
        named["h"] = {"x": X + 1}
        assert compiled(given) == step(given)


@pytest.mark.parametrize("is_state", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    ("rows", "second"), [(2, lambda x: x), (2, lambda x: x[:, :1]), (5, lambda x: x[:, 1:])]
)
def test_ranks_whose_pieces_do_not_overlap_refuse_inputs_as_the_others_do(
    rows, second, is_first, is_state
):
    """An empty piece overlaps nothing, and two columns of a single row have no memory in common."""

    def run(mesh):
        def make():
            whole = torch.arange(2.0 * rows).view(rows, 2)
            return pt.distribute_tensor(whole, mesh, [pt.Shard(0)])

        def step(a, b):
            a.mul_(2)
            return b * 1

        held = SimpleNamespace(a=None, b=None)
        step_of_state = pt.compile(lambda: step(held.a, held.b), backend="graph")
        step_of_arguments, x = pt.compile(step, backend="graph"), make()

        def call(a, b):
            held.a, held.b = a, b
            return step_of_state() if is_state else step_of_arguments(a, b)

        if not is_first:
            call(make()[:, :1], second(make()))
        with pytest.raises(pt.CaptureError) as caught:
            call(x[:, :1], second(x))
        return str(caught.value), x.full_tensor().tolist()

    with pt.ranks(dp=4) as world:
        (text, x), *others = world.run(run)
    names = ("held.a", "held.b") if is_state else ("argument[0]", "argument[1]")
    assert " and ".join(names) + " share memory" in text
    assert x == torch.arange(2.0 * rows).view(rows, 2).tolist()
    assert others == [(text, x)] * 3
