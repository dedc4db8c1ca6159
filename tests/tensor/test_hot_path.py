"""Does the hot path in C do what the one in Python does?

It stands in for key functions, for `handle` and for methods. So the keys are compared with Python's
own, and whole programs with the same programs under `PARTITA_HOT_PATH=python`.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import partita as pt
from partita import Partial, Replicate, Shard
from partita.tensor import plan
from partita.tensor.dispatch import op_of
from partita.tensor.tensor_state import spec_on_mesh

needs_c = pytest.mark.skipif(plan.IN_C is None, reason="the hot path in C was not built")

KEYED = [
    torch.add,
    torch.where,
    torch.sum,
    torch.cat,
    torch.topk,
    torch.clamp,
    torch.Tensor.view,
    torch.Tensor.var,
    torch.Tensor.__getitem__,
    torch.nn.functional.relu,
    torch.nn.functional.embedding,
    torch.nn.functional.layer_norm,
    torch.nn.functional.scaled_dot_product_attention,
]
NAMES = ["input", "other", "dim", "keepdim", "k", "out", "axis", "eps", "alpha", "weight"]


class Row(tuple):
    """A tuple of its own class."""


class Index:
    def __index__(self) -> int:
        return 2


@pytest.fixture(scope="module")
def tensors() -> Any:
    with pt.ranks(dp=2) as world:
        x = world.run(lambda mesh: pt.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))[0]
    return [x, torch.ones(2, 3), torch.ones(2) > 0]


PLAIN = [0, 1, -1, True, False, 0.5, None, "mean", torch.float32, ..., slice(None), slice(1, None)]
PLAIN += [torch.Size([4, 2]), Row((1, 2.0)), Index(), 1j, torch.device("cpu"), {"a": 1.5}, object]
VALUES = st.recursive(
    st.one_of(st.sampled_from(PLAIN), st.integers(0, 2).map(lambda i: ("tensor", i))),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


def filled(value: Any, tensors: Any) -> Any:
    """`value`, with the tensors for their numbers."""
    if type(value) is tuple and value[:1] == ("tensor",):
        return tensors[value[1]]
    if type(value) in (tuple, list):
        return type(value)(filled(v, tensors) for v in value)
    return value


def outcome(key: Any, args: Any, kwargs: Any) -> Any:
    try:
        return key(*args, **kwargs)
    except TypeError as error:
        return type(error), str(error)


@pytest.mark.slow
@needs_c
@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(KEYED),
    st.lists(VALUES, max_size=5),
    st.dictionaries(st.sampled_from(NAMES), VALUES),
    st.sampled_from([None, False, True]),
)
def test_a_key_in_c_is_the_key_in_python(tensors, func, args, kwargs, inplace):
    if inplace is not None:
        kwargs = {**kwargs, "inplace": inplace}
    key = op_of(func).key
    assert type(key) is plan.IN_C.Key
    args = [filled(v, tensors) for v in args]
    kwargs = {name: filled(v, tensors) for name, v in kwargs.items()}
    # Twice: the first call of an argument that no rule reads learns that it is harmless.
    for _ in range(2):
        expected = outcome(key.slow, args, kwargs)
        got = outcome(key, args, kwargs)
        assert got == expected and type(got) is type(expected)
        assert str(got) == str(expected)  # 1, 1.0 and True are equal


# -- programs --------------------------------------------------------------------------------------

PROGRAM = """
import json, torch, partita as pt
from partita.bench import dispatch as bench_dispatch
from partita.tensor import plan

def everything(mesh):
    tensors, found = bench_dispatch._spread(pt, mesh), {}
    for name, call in bench_dispatch.OPS.items():
        for _ in range(3):
            outs = call(tensors)
        outs = outs if isinstance(outs, (tuple, list)) else [outs]
        found[name] = [[str(o.layout_over_mesh), o.full_tensor().tolist()] for o in outs]
    return found

with pt.ranks(dp=2) as world:
    found = world.run(everything)[0]
    info = pt.cache_info()
print(json.dumps({"in_c": plan.IN_C is not None, "found": found, "by_op": info.by_op,
                  "hits": info.hits, "misses": info.misses}))
"""


def told(how: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PARTITA_HOT_PATH": how},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_c
def test_programs_do_the_same_with_it_and_without():
    in_c, in_python = told("c"), told("python")
    assert (in_c.pop("in_c"), in_python.pop("in_c")) == (True, False)
    assert in_c == in_python
    assert in_c["hits"] > 40


def test_a_module_of_older_sources_is_left_aside(monkeypatch):
    monkeypatch.delenv("PARTITA_HOT_PATH", raising=False)
    old = SimpleNamespace(FORM=plan.FORM - 1)
    monkeypatch.setitem(sys.modules, "partita.tensor._hot_path", old)
    monkeypatch.setattr("partita.tensor._hot_path", old, raising=False)
    assert plan.load_extension() is None


# -- what C has to take care of itself -------------------------------------------------------------


def calls(x: pt.DTensor, y: pt.DTensor, pending: pt.DTensor) -> None:
    """Hits of all kinds, what has no plan, and what raises."""
    x + y, x * 0.5, -x, x @ y.t(), F.relu(x), F.relu(x, True), x.chunk(2, -1), torch.cat([x, y])
    (
        x[:, 0],
        x[1:2],
        x.view(-1, 4, 2),
        x.sum(-1, keepdim=True),
        x.sum(dim=-1),
        x.add_(y),
        pending + x,
    )
    (
        x.add(other=y),
        torch.where(x > 0, x, y),
        x.to(torch.bfloat16),
        x.unbind(-1),
        torch.add(x, 1, alpha=2),
    )
    for wrong in (
        lambda: x.view(3, 5),
        lambda: x.sigmoid(1, 2),
        lambda: x + torch.ones(7),
        lambda: torch.topk(x),
        lambda: x.sum([[object()]]),
        lambda: pt.DTensor.__torch_function__(torch.exp, (), (x,), ("no dictionary",)),
    ):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            wrong()


@pytest.mark.slow
@needs_c
def test_no_object_is_left_behind_and_none_freed_too_early():
    with pt.ranks(dp=1) as world:

        def rank(mesh: Any) -> list[int]:
            x, y = (pt.distribute_tensor(torch.rand(8, 8), mesh, [Replicate()]) for _ in range(2))
            pending = pt.DTensor.from_local(torch.rand(8, 8), mesh, [Partial()])
            spec, counts = spec_on_mesh(mesh, (8, 8), [Replicate()]), []
            for _ in range(4):
                for _ in range(20):
                    calls(x, y, pending)
                gc.collect()
                counts.append(sys.getrefcount(spec) + len(gc.get_objects()))
            return counts

        counts = world.run(rank)[0]
    assert counts[3] - counts[1] < 20


def test_a_list_that_holds_itself_is_an_error():
    with pt.ranks(dp=1) as world:

        def rank(mesh: Any) -> None:
            x = pt.distribute_tensor(torch.rand(4), mesh, [Replicate()])
            itself: list[Any] = [1]
            itself.append(itself)
            with pytest.raises(RecursionError):
                x.sum(itself)

        world.run(rank)


def test_arguments_may_be_any_sequence():
    with pt.ranks(dp=1) as world:

        def rank(mesh: Any) -> Any:
            x = pt.distribute_tensor(torch.ones(4), mesh, [Replicate()])
            handle = pt.DTensor.__torch_function__
            for args in ((x, x), [x, x]):
                out = handle(torch.add, (pt.DTensor,), args, {"alpha": 2})
            return handle(torch.exp, (pt.DTensor,), (x,)).shape, out.to_local().tolist()

        assert world.run(rank)[0] == ((4,), [3.0] * 4)


def test_a_key_in_python_looks_at_undeclared_arguments_only_where_a_call_has_some(monkeypatch):
    looked, look = [], plan.check_rest
    monkeypatch.setattr(plan, "IN_C", None)
    monkeypatch.setattr(plan, "check_rest", lambda *args: looked.append(1) or look(*args))

    def call(size: Any, *, _stacklevel: int = 3) -> None: ...

    def declared(size: Any) -> None: ...

    for function, looks in ((declared, 0), (call, 1)):
        looked.clear()
        params = list(inspect.signature(function).parameters.values())
        assert plan.declared_key(params)(4) == plan.declared_key(params)(size=4)
        assert len(looked) == 2 * looks
