"""Is a captured step told which object something is, though it runs on what stands for tensors?"""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import partita as pt


@dataclass(eq=False)
class Batch:
    x: torch.Tensor


@pytest.mark.slow
def test_parameters_are_known_by_their_identity():
    def rank(mesh):
        torch.manual_seed(0)
        model = pt.zero(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), mesh)
        names = {id(p): name for name, p in model.named_parameters()}
        hashes = {hash(p) for p in model[1].parameters()}

        @pt.compile(backend="graph")
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            found = [names[id(p)] for p in model.parameters()]
            return loss, found, sum(hash(p) in hashes for p in model.parameters())

        x = pt.distribute_tensor(torch.ones(4, 2), mesh, [pt.Shard(0)])
        step(x)
        return step(x)[1:]

    found, in_second = pt.ranks(dp=2).run(rank)[1]
    assert found == ["0.weight", "0.bias", "1.weight", "1.bias"] and in_second == 2
    assert "id" not in globals() and "hash" not in globals()


def test_another_tensor_of_a_call_is_another_program():
    held = torch.ones(2)
    known = {id(held)}
    step = pt.compile(lambda x: x * (2 if id(x) in known else 5), backend="graph")
    assert [step(x)[0].item() for x in (held, held.clone(), held)] == [2, 5, 2]


def test_what_the_step_makes_has_an_identity_of_its_own():
    def step(x):
        y = x + 1
        places = {id(x): 2.0, id(y): 3.0}
        return x * places[id(y)] * places[id(x)]

    assert pt.compile(step, backend="graph")(torch.ones(1)).item() == 6


def test_a_global_of_one_s_own_that_is_called_id_is_asked():
    code = compile("def step(x): return x * id(x)", __file__, "exec")
    space = {"id": lambda x: 2, "__name__": __name__}
    exec(code, space)
    step = pt.compile(space["step"], backend="graph")
    assert step(torch.ones(1)).item() == 2
    space["id"] = lambda x: 3
    assert step(torch.ones(1)).item() == 3


HELD = Batch(torch.ones(2))
WORDS = {"x": torch.ones(2)}


def of_object(b):
    return b.x * (2 if b is HELD else 5)


def of_container(b):
    return b["x"] * (2 if b is WORDS else 5)


@pytest.mark.parametrize(
    "step, batch",
    [(of_object, HELD), (of_object, Batch(torch.ones(2))), (of_container, WORDS)],
)
def test_an_argument_that_may_be_one_known_by_name_is_refused(step, batch):
    with pytest.raises(
        pt.CaptureError, match=r"(?s)uses `is` or `id`.*pass it, or read it"
    ) as error:
        pt.compile(step, backend="graph")(batch)
    assert "test_identity.py" in str(error.value)


def test_an_argument_is_compared_with_other_things():
    nothing = None
    step = pt.compile(lambda b: b.x * (2 if b is nothing else 5), backend="graph")
    assert step(HELD)[0].item() == 5


class Plain:
    def __init__(self, x):
        self.x = x


class Owner:
    pass


def make_holders(value):
    """Places in which a step finds `value`, by their names."""
    owner, inner, huge = Owner(), Owner(), [None] * 20_000 + [value]
    owner.held, inner.owner = value, owner
    table = {"batch": value, "inner": {"batch": value}}
    pair = [0, (1, value)]

    def with_default(found=value):
        return found

    return {
        "item": lambda: table["batch"],
        "item of an item": lambda: table["inner"]["batch"],
        "item of a tuple": lambda: pair[1][1],
        "attribute": lambda: owner.held,
        "attribute of an attribute": lambda: inner.owner.held,
        "default": lambda: with_default(),
        "cell": lambda: value,
        "entry of a huge list": lambda: huge[-1],
    }


IDENTITIES = {
    "is": lambda b, known: b is known(),
    "is not": lambda b, known: b is not known(),
    "a function": lambda b, known: operator.is_(b, known()),
    "any": lambda b, known: any(b is v for v in (None, known())),
    "id": lambda b, known: id(b) in {id(known())},
}
EQUALITIES = {
    "in": lambda b, known: b in [known()],
    "==": lambda b, known: b == known(),
    "index": lambda b, known: [None, known(), b].index(b) == 1,
    "count": lambda b, known: [known()].count(b) == 1,
}
MAKERS = {
    Batch: lambda: Batch(torch.ones(2)),
    Plain: lambda: Plain(torch.ones(2)),
    dict: lambda: {"x": torch.ones(2)},
    list: lambda: [torch.ones(2)],
    tuple: lambda: (torch.ones(2),),
}


def compared():
    for kind in MAKERS:
        ways = IDENTITIES if kind in (dict, list, tuple) else {**IDENTITIES, **EQUALITIES}
        for holder in make_holders(None):
            for way in ways:
                yield kind, holder, way


COMPARED = [*compared()]
SOME = random.Random(0).sample(COMPARED, min(len(COMPARED), 40))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("kind", "holder", "way"), SOME)
def test_an_argument_that_is_compared_with_what_is_held_is_refused(kind, holder, way, known):
    value = MAKERS[kind]()
    find, asks = make_holders(value)[holder], {**IDENTITIES, **EQUALITIES}[way]
    step = pt.compile(lambda b: torch.ones(2) * (2 if asks(b, find) else 5), backend="graph")
    with pytest.raises(pt.CaptureError, match="uses `is` or `id`"):
        step(value if known else MAKERS[kind]())


def test_containers_of_another_form_are_no_argument():
    table = {"scales": {"y": 2.0}, "rest": [torch.ones(2)]}
    step = pt.compile(
        lambda b: b["x"] * (3 if b is table["scales"] else table["scales"]["y"]), backend="graph"
    )
    assert step({"x": torch.ones(2)})[0].item() == 2


def test_an_object_is_compared_with_others_by_a_step_that_reaches_none_of_its_class():
    known = ["a", Owner()]
    step = pt.compile(lambda b: b.x * (2 if b in known or b == known[1] else 5), backend="graph")
    assert step(Plain(torch.ones(2)))[0].item() == 5
