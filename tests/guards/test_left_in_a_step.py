"""What a step makes and leaves anywhere is refused, and nothing fake stays there."""

from __future__ import annotations

import builtins
import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import partita as pt
from partita.guards import capture_run

KEPT = None


class Box:
    def __init__(self, made):
        self.made = made


class Lazy:
    """Makes what it lacks, as a lazy configuration does."""

    def __init__(self, make):
        self.make = make

    def __getattr__(self, name):
        assert name == "made"  # partita asks for nothing that the step does not ask for
        self.__dict__[name] = self.make()
        return self.__dict__[name]


def by_cache(make):
    return functools.lru_cache(make)


def by_bounded_cache(make):
    return functools.lru_cache(maxsize=4)(make)


def by_unbounded_cache(make):
    return functools.cache(make)


def by_builtins(make):
    builtins.kept_ = None

    def get():
        if builtins.kept_ is None:
            builtins.kept_ = make()
        return builtins.kept_

    return get


def by_module_of_torch(make):
    torch.kept_ = None

    def get():
        if torch.kept_ is None:
            torch.kept_ = make()
        return torch.kept_

    return get


def by_class_statement(make):
    global KEPT
    KEPT = None

    def get():
        global KEPT
        if KEPT is None:

            class KEPT:
                made = make()

        return KEPT.made

    return get


def by_globals(make):
    globals()["KEPT"] = None

    def get():
        if globals()["KEPT"] is None:
            globals()["KEPT"] = Box(make())
        return globals()["KEPT"].made

    return get


def by_new_global(make):
    globals().pop("NEW", None)

    def get():
        if "NEW" not in globals():
            globals()["NEW"] = Box(make())
        return globals()["NEW"].made

    return get


def by_dispatch(make):
    @functools.singledispatch
    def find(value):
        return None

    def get():
        if find(1) is None:
            made = make()
            find.register(int)(lambda value: made)
        return find(1)

    return get


def by_attribute_of_a_function(make):
    def get():
        if not hasattr(get, "made"):
            get.made = Box(make())
        return get.made.made

    return get


def by_getattr(make):
    lazy = Lazy(make)
    return lambda: lazy.made


WAYS = [by_cache, by_bounded_cache, by_unbounded_cache, by_builtins, by_module_of_torch]
WAYS += [by_class_statement, by_globals, by_new_global, by_dispatch]
WAYS += [by_attribute_of_a_function, by_getattr]


def make_optimizer(weight):
    return torch.optim.SGD([weight], lr=0.1, momentum=0.9)


def make_averages(weight):
    return [weight.detach().clone()]


def train(made, weight):
    loss = weight.square().sum()
    if isinstance(made, list):
        with torch.no_grad():
            made[0].add_(weight)
        return made[0].sum()
    made.zero_grad()
    loss.backward()
    made.step()
    return loss.detach()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [make_optimizer, make_averages])
def test_what_a_step_makes_is_refused_each_time_and_not_left(way, make):
    weight = torch.nn.Parameter(torch.ones(3))
    get = way(lambda: make(weight))

    compiled = pt.compile(lambda: train(get(), weight), backend="graph")
    for _ in range(2):
        with pytest.raises(pt.CaptureError, match="leaves"):
            compiled()
    torch.testing.assert_close(weight.detach(), torch.ones(3))
    made = get()  # outside of a capture: what is there now is real
    tensors = made if isinstance(made, list) else made.param_groups[0]["params"]
    assert not any(isinstance(t, FakeTensor) for t in tensors)
    other = torch.nn.Parameter(torch.ones(3))
    plain = make(other)
    for _ in range(3):
        torch.testing.assert_close(compiled(), train(plain, other))


def test_a_lazy_object_is_asked_for_what_the_step_asks():
    lazy = Lazy(lambda: 1)
    assert pt.compile(lambda: torch.ones(3).sum() * lazy.made, backend="graph")().item() == 3


class Trained:
    """A model that a step trains, with a count that the step may not change in a graph."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.calls = [0]

    def train(self, x):
        self.optimizer.zero_grad()
        self.model(x).mean().backward()
        self.optimizer.step()


def count_and_raise(held, x, bad):
    held.calls[0] += 1
    held.train(x)
    raise KeyError("always")


def raise_if_told(held, x, bad):
    held.train(x)
    if bad:
        raise ValueError("told to")
    return x * 2


def raise_by_a_shape(held, x, bad):
    held.train(x)
    return x.view(7) if bad else x * 2


def raise_on_a_float(held, x, bad):
    held.train(x)
    if x.shape[0] * float(bad) > 1:
        raise RuntimeError("too large")
    return x * 2


def raise_by_an_index(held, x, bad):
    """Torch's own error, which no Python function of torch raises."""
    held.train(x)
    return x.sum()[1] if bad else x * 2


@pytest.mark.parametrize(
    "body",
    [count_and_raise, raise_if_told, raise_by_a_shape, raise_on_a_float, raise_by_an_index],
)
def test_what_a_step_writes_before_its_own_error_is_kept(body):
    def run(wrap):
        held = Trained()
        step = wrap(lambda x, bad: body(held, x, bad))
        found = []
        for bad in (True, False, True, False):
            try:
                found.append(step(torch.ones(2, 3), bad))
            except (KeyError, ValueError, RuntimeError, IndexError) as error:
                found.append(type(error))
            found += [held.model.weight.detach().clone(), held.calls[0]]
        return found

    for want, got in zip(run(lambda f: f), run(pt.compile(backend="graph")), strict=True):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want)
        else:
            assert got == want


@torch.library.custom_op("tests_of_left::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def raise_for_a_fake(x):
    if isinstance(x, FakeTensor):
        raise ValueError("it is a fake")
    return x * 2


@pytest.fixture
def call_three_times(monkeypatch):
    """A function that returns what each call returns or raises, and the number of captures."""

    def find(body, fallback):
        captures, trace = [], capture_run.trace_once
        monkeypatch.setattr(capture_run, "trace_once", lambda r: (captures.append(1), trace(r))[1])
        step, found = pt.compile(lambda x: body(x).sum(), backend="graph", fallback=fallback), []
        for _ in range(3):
            try:
                found.append(step(torch.ones(3)).item())
            except pt.CaptureError as error:
                found.append(str(error).split(" (at")[0])
        return found, len(captures)

    return find


@pytest.mark.parametrize("body", [twice, raise_for_a_fake])
def test_a_step_that_raises_in_its_capture_alone_is_captured_once(body, call_three_times):
    with pytest.warns(UserWarning, match="eager") as warned:
        assert call_three_times(body, "eager") == ([6.0] * 3, 1)
    assert len(warned) == 1


def test_without_a_fallback_later_calls_of_such_a_step_raise(call_three_times):
    with pytest.warns(UserWarning, match="ValueError: it is a fake"):
        (first, *later), captures = call_three_times(raise_for_a_fake, None)
    assert (first, captures) == (6.0, 1)
    assert all(text == "capture: the step raised ValueError: it is a fake" for text in later)


def test_an_op_without_a_fake_implementation_is_refused_by_its_name(call_three_times):
    error = "capture: the step calls tests_of_left::twice, which needs memory"
    assert call_three_times(twice, None) == ([error] * 3, 3)


def test_the_error_for_a_tensor_that_is_left_offers_what_works():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def update(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def schedules(x):
        update(x)
        scheduler.step()

    def stores(x):
        model.seen = torch.nn.Parameter(x * 2, requires_grad=False)

    def stores_a_tensor(x):
        model.seen = x * 2

    x = torch.ones(2)
    with pytest.raises(pt.CaptureError, match=r"_last_lr(?s:.*)call it outside the step"):
        pt.compile(schedules, backend="graph")(x)
    before = model.bias.detach().clone()
    fast = pt.compile(update, backend="graph")
    fast(x)
    scheduler.step()
    fast(x)
    torch.testing.assert_close(model.bias, before - 0.1 - 0.01)
    with pytest.raises(pt.CaptureError, match=r"model\.seen(?s:.*)one tensor and no nn.Parameter"):
        pt.compile(stores, backend="graph")(x)
    pt.compile(stores_a_tensor, backend="graph")(x)
    assert torch.equal(model.seen, x * 2)
