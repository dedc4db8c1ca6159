"""Is a captured step told which object something is, though it runs on what stands for tensors?"""

from __future__ import annotations

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
        pt.CaptureError, match=r"(?s)is another object.*pass it, or read it"
    ) as error:
        pt.compile(step, backend="graph")(batch)
    assert "test_identity.py" in str(error.value)


def test_an_argument_is_compared_with_other_things():
    nothing = None
    step = pt.compile(lambda b: b.x * (2 if b is nothing else 5), backend="graph")
    assert step(HELD)[0].item() == 5
