"""A compiled step reruns only while what its capture read is as it was; the rest is an error."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import io
import re
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import partita as pt
from partita.app.models import GPT, gpt
from partita.graph.graph_nodes import note_of
from tests.programs.changes import (  # noqa: F401 (entries)
    arguments,
    calls,
    containers,
    functions,
    identities,
    libraries,
    modules,
    numbers,
    objects,
    refused_programs,
    surroundings,
    tensors,
    training,
    unread,
    world,
)
from tests.programs.changes.state import CHANGES, HOOKS, REFUSED

SLICES = 8


def run(name, wrap):
    """What four calls give and what can be seen after each; the third after the change."""
    torch.manual_seed(0)
    what = CHANGES[name]()
    step = wrap(what.step)
    found = []
    try:
        for i in range(4):
            if i == 2:
                what.change()
            x = torch.linspace(-1, 2, 6).reshape(2, 3) * (i + 1)
            result = step(x, *what.arguments(i))
            found.append((result.detach().clone(), copy.deepcopy(what.seen())))
    finally:
        torch.set_default_dtype(torch.float32)
        while HOOKS:
            HOOKS.pop().remove()
    return found


def same(a, b):
    """Equal but for rounding, signs of zeros too; NaN is NaN."""
    if isinstance(a, torch.Tensor):
        close = torch.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True)
        small = a == 0
        return a.dtype == b.dtype and close and torch.equal(a.signbit()[small], b.signbit()[small])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def outcome(name):
    want = run(name, lambda step: step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = run(name, lambda step: pt.compile(step, backend="graph"))
        except pt.CaptureError as error:
            return "refused" if str(error).startswith("capture: the step ") else "crash"
        except Exception as error:
            return f"crash: {error!r}"
    if same([g[0] for g in got], [w[0] for w in want]):
        return "equal" if same(got, want) else "lost"
    return "stale"


def programs_of(part):
    """One slice, with its share of those that are named as refused."""
    return sorted(CHANGES, key=lambda name: name in REFUSED)[part::SLICES]


# A slice runs in one process, so that its tally is whole however the tests are spread.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLICES))
def test_most_changes_of_state_are_equal_to_eager_the_rest_refused_and_none_stale(part):
    found = {name: outcome(name) for name in programs_of(part)}
    tally = collections.Counter(found.values())
    print(f"{len(found)} changes of state: {dict(sorted(tally.items()))}")
    odd = {n: how for n, how in found.items() if (how == "refused") != (n in REFUSED)}
    assert not odd and {*tally} <= {"equal", "refused"}, (odd, tally)


def test_every_change_of_state_is_in_one_slice():
    names = [name for part in range(SLICES) for name in programs_of(part)]
    assert sorted(names) == sorted(CHANGES) and len(names) >= 250
    # Each slice holds its outcomes against this list, so the share is the list's.
    assert len(CHANGES) - len(REFUSED) >= 0.85 * len(CHANGES)


def test_a_program_is_found_again_when_the_value_returns():
    cfg = {"k": 2}
    step = pt.compile(lambda x: x * cfg["k"], backend="graph")
    x = torch.ones(3)
    for k in (2, 3, 2, 3, 2):
        cfg["k"] = k
        assert torch.equal(step(x), x * k)
    assert step.reasons == ["the first call", "cfg['k']: 2 became 3"]


def test_what_the_step_does_not_read_makes_no_capture():
    class Trainer:
        def __init__(self):
            self.k, self.steps = 2, 0

        def step(self, x):
            return x * self.k

    trainer = Trainer()
    step = pt.compile(trainer.step, backend="graph")
    for _ in range(4):
        step(torch.ones(3))
        trainer.steps += 1
    assert len(step.reasons) == 1


def test_what_cannot_be_written_is_named_with_its_line_and_left_as_it_was():
    history, cfg = [], {"n": 0}

    def keeps(x):
        history.append(x.detach())
        return x * 2

    def counts(x):
        cfg["n"] += 1
        return x * 2

    with pytest.raises(pt.CaptureError, match=r"leaves a tensor in history"):
        pt.compile(keeps, backend="graph")(torch.ones(3))
    with pytest.raises(pt.CaptureError, match=r"changes cfg\['n'\] \(0 became 1\) \(at .*:\d+\)"):
        pt.compile(counts, backend="graph")(torch.ones(3))
    assert history == [] and cfg == {"n": 0}
    with pytest.warns(UserWarning, match="runs eagerly"):
        eager = pt.compile(counts, backend="graph", fallback="eager")
        eager(torch.ones(3))
    eager(torch.ones(3))
    assert cfg == {"n": 2}


def test_no_tensor_without_memory_stays_where_a_capture_fails():
    class Holder:
        seen = None

    held, log = Holder(), {}

    def step(x):
        held.seen, log["x"] = x * 2, [x * 3]
        return x.nonzero()

    with pytest.raises(pt.CaptureError):
        pt.compile(step, backend="graph", fallback=None)(torch.ones(3))
    assert held.seen is None and log == {} and "__getattribute__" not in vars(Holder)
    assert "__getattribute__" not in vars(torch.nn.Module)


def test_a_print_is_said_to_run_once(capsys):
    def step(x):
        print("here")
        return x * 2

    step = pt.compile(step, backend="graph")
    with pytest.warns(UserWarning, match=r"print at .*test_guards.py:\d+ runs only during capture"):
        step(torch.ones(3))
    step(torch.ones(3))
    assert capsys.readouterr().out == "here\n"


def test_a_thread_that_uses_the_model_meanwhile_sees_none_of_the_capture():
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(8)])
    x = torch.ones(2, 4)
    with torch.no_grad():
        want = model(x)
    wrong, stop = [], threading.Event()

    def evaluate():
        with torch.no_grad():
            while not stop.is_set():
                try:
                    if torch.compiler.is_compiling() or not torch.equal(model(x), want):
                        wrong.append("another result")
                except Exception as error:
                    wrong.append(repr(error))

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for k in range(3):
            pt.compile(lambda x, k=k: model(x) * k, backend="graph")(x)
    finally:
        stop.set()
        thread.join()
    assert wrong == []


def test_a_capture_that_is_broken_off_leaves_nothing_changed():
    class Stop(BaseException):
        pass

    model = torch.nn.Linear(4, 4)
    weight = model.weight

    def step(x):
        model(x)
        raise Stop

    with pytest.raises(Stop):
        pt.compile(step, backend="graph")(torch.ones(2, 4))
    assert model.weight is weight and not torch.compiler.is_compiling()
    assert "__getattribute__" not in vars(torch.nn.Module) and sys.getprofile() is None


def test_a_profiler_in_place_does_not_hide_what_is_read():
    cfg = {"k": 2}
    step = pt.compile(lambda x: x * cfg["k"], backend="graph")
    sys.setprofile(lambda *_: None)
    try:
        step(torch.ones(3))
    finally:
        sys.setprofile(None)
    cfg["k"] = 4
    assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0))


@pytest.mark.slow
def test_what_a_collection_of_garbage_runs_is_no_part_of_a_step():
    read = []

    def hear(*_):
        read.append(time.perf_counter())

    gc.callbacks.append(hear)
    try:

        def step(x):
            gc.collect()
            return x.sum()

        assert pt.compile(step, backend="graph")(torch.ones(3)).item() == 3 and read
    finally:
        gc.callbacks.remove(hear)


@pytest.mark.slow
def test_what_is_within_the_entries_of_a_huge_container_is_said_not_to_be_seen():
    table = [{"k": 2} for _ in range(100_001)]
    step = pt.compile(lambda x: x * table[3]["k"], backend="graph")
    with pytest.warns(UserWarning, match=r"table has 100,001 entries: .* not when its contents"):
        step(torch.ones(3))
    table[3] = {"k": 4}
    with pytest.warns(UserWarning, match="table has 100,001 entries"):
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0))


class Counted:
    def __init__(self):
        self.n = 0


def test_what_a_step_writes_into_the_dict_of_an_object_that_it_reaches_later_is_an_error():
    counted = Counted()
    attributes = [vars(counted)]

    def read(x):
        return x * counted.n

    def step(x):
        attributes[0]["n"] += 1
        return read(x)

    with pytest.raises(pt.CaptureError, match=r"the step changes counted\.n \(0 became 1\)"):
        pt.compile(step, backend="graph")(torch.ones(1))
    assert counted.n == 0


@pytest.mark.parametrize("file", [io.BytesIO(b"ab"), io.StringIO("ab")], ids=["bytes", "text"])
def test_a_file_in_memory_that_a_step_writes_is_named_and_is_as_it_was(file):
    def step(x):
        file.truncate()
        return x * 2

    with pytest.raises(pt.CaptureError, match=rf"changes file \(a {type(file).__name__} became"):
        pt.compile(step, backend="graph")(torch.ones(1))
    assert len(file.getvalue()) == 2


def test_the_seed_of_a_gpu_that_a_step_asks_for_is_guarded(monkeypatch):
    generator = torch.Generator()
    generator.manual_seed(3)
    monkeypatch.setattr(torch.cuda.random, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.random, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    step = pt.compile(lambda x: x * torch.cuda.initial_seed(), backend="graph")
    assert step(torch.ones(1)).item() == 3
    generator.manual_seed(5)
    assert step(torch.ones(1)).item() == 5


def test_the_reason_of_another_capture_shows_a_value_of_a_library():
    held = [Path("one"), {Path("key"): 2}]
    step = pt.compile(lambda x: x * (len(str(held[0])) + len(held[1])), backend="graph")
    step(torch.ones(1))
    held[0] = Path("three")
    assert step(torch.ones(1)).item() == 6
    assert re.search(r"PosixPath\('one'\) became PosixPath\('three'\)", step.reasons[-1])
    held[1].clear()
    step(torch.ones(1))
    assert re.search(r"\[PosixPath\('key'\)\]: there became gone", step.reasons[-1])


def test_what_a_step_writes_into_a_huge_container_is_an_error():
    table = [2] * 100_001

    def step(x):
        table[3] += 1
        return x * 2

    with pytest.raises(pt.CaptureError, match="the step changes table"):
        pt.compile(step, backend="graph")(torch.ones(3))
    assert table[3] == 2


def test_a_counter_beside_a_setting_is_named_when_each_call_is_captured():
    cfg = {"k": 2, "calls": 0}
    step = pt.compile(lambda x: x * cfg["k"], backend="graph")
    for _ in range(2):
        step(torch.ones(3))
        cfg["calls"] += 1
    advice = r"at each call: cfg\['calls'\]: .* do not read it in the step"
    with pytest.warns(UserWarning, match=advice):
        for _ in range(3):
            step(torch.ones(3))
            cfg["calls"] += 1


def test_values_that_serve_many_calls_are_no_counters():
    cfg = {"k": 2}
    step = pt.compile(lambda x: x * cfg["k"], backend="graph")
    for k in range(6):
        cfg["k"] = k
        for _ in range(2):
            step(torch.ones(3))
    assert len(step.reasons) == 6


def test_a_step_that_runs_eagerly_is_tried_again_when_what_it_reads_is_another():
    cfg = {"how": "values", "calls": 0}

    def step(x):
        if cfg["how"] == "values":
            cfg["calls"] += 1
            return x[x > 0].sum()
        return x * 2

    compiled = pt.compile(step, backend="graph", fallback="eager")
    with pytest.warns(UserWarning, match="runs eagerly") as told:
        for _ in range(3):
            compiled(torch.ones(3))
    assert len(told) == 1 and cfg["calls"] == 3  # what it changes itself is no reason
    cfg["how"] = "plain"
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert len(compiled.reasons) == 1
    cfg["how"] = "values"
    assert compiled(torch.ones(3)) == 3 and cfg["calls"] == 4


def test_a_class_that_another_capture_listens_to_is_as_it_was():
    class Settings:
        k = 2

    settings = Settings()
    inner = pt.compile(lambda x: x * settings.k, backend="graph")
    inner(torch.ones(3))
    go, done = threading.Lock(), threading.Lock()  # a step may take one; it must not use an Event
    go.acquire()
    done.acquire()

    def outer(x):
        k = settings.k
        go.release()
        assert done.acquire(timeout=250)
        return x * k

    other = pt.compile(outer, backend="graph")
    thread = threading.Thread(target=other, args=(torch.ones(3),))
    thread.start()
    assert go.acquire(timeout=250)
    try:
        for _ in range(2):
            inner(torch.ones(3))
    finally:
        done.release()
        thread.join()
    assert inner.reasons == ["the first call"]
    Settings.k = 3
    assert torch.equal(inner(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.slow
def test_captures_of_several_threads_do_not_meet():
    before = torch.nn.Module.__call__, torch.nn.Module.__getattr__

    def train(losses, wrap):
        generator = torch.Generator().manual_seed(0)
        w = torch.nn.Parameter(torch.randn(4, 4, generator=generator))
        optimizer = torch.optim.AdamW([w], lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = (x @ w).tanh().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = wrap(step)
        losses += [float(run(torch.linspace(-1, 1, 8).view(2, 4)).detach()) for _ in range(3)]

    want, found = [], [[] for _ in range(3)]
    train(want, lambda step: step)
    threads = [
        threading.Thread(target=train, args=(one, lambda s: pt.compile(s, backend="graph")))
        for one in found
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        assert one == pytest.approx(want)
    assert (torch.nn.Module.__call__, torch.nn.Module.__getattr__) == before


def test_a_threading_local_is_another_program_in_each_thread():
    held = threading.local()
    held.k = 2.0
    step = pt.compile(lambda x: x * held.k, backend="graph")
    assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0))
    found = []

    def other():
        held.k = 5.0
        found.append(step(torch.ones(3)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert torch.equal(found[0], torch.full((3,), 5.0))
    assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0))


def test_rates_that_an_optimizer_loads_are_those_of_the_next_step():
    w = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([w], lr=0.5)

    def step():
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.step()

    compiled, want = pt.compile(step, backend="graph"), 0.0
    for lr in (0.5, 2.0, 4.0, 0.25):  # each load makes new dictionaries of the groups
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = lr
        optimizer.load_state_dict(state)
        compiled()
        want -= lr
        assert torch.equal(w.detach(), torch.full((3,), want))


def test_a_step_that_never_can_be_captured_is_not_tried_for_ever():
    cfg = {"calls": 0}
    compiled = pt.compile(lambda x: x[x > 0] * cfg["calls"], backend="graph", fallback="eager")
    with pytest.warns(UserWarning, match="runs eagerly") as told:
        for i in range(40):
            cfg["calls"] = i
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), float(i)))
    assert len(told) == 16


def test_an_optimizer_that_another_thread_steps_is_none_of_the_step():
    go, done = threading.Lock(), threading.Lock()
    go.acquire()
    done.acquire()
    w = torch.nn.Parameter(torch.ones(3))
    elsewhere = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    def step(x):
        go.release()
        assert done.acquire(timeout=250)
        return (w * x).sum()

    fast = pt.compile(step, backend="graph")
    thread = threading.Thread(target=fast, args=(torch.ones(3),))
    thread.start()

    def captured_meanwhile():
        done.release()
        thread.join(60)
        return torch.zeros(())

    assert go.acquire(timeout=250)
    elsewhere.step(captured_meanwhile)
    phases = {note_of(n).phase for n in fast.graph.nodes if n.op == "call_function"}
    assert "update" not in phases


def test_dictionaries_with_ways_of_their_own_stay_as_they_are():
    class Made(collections.OrderedDict):
        def __getitem__(self, key):
            return super().__getitem__(key)()

    made = Made(one=lambda: 1.0, two=lambda: 2.0)
    model = torch.nn.Linear(3, 3)
    model.register_forward_hook(lambda *_: None)

    def step(x):
        heard = model.register_forward_hook(lambda m, args, out: out * made["two"])
        try:
            return model(x)
        finally:
            heard.remove()

    fast = pt.compile(step, backend="graph")
    assert torch.equal(fast(torch.ones(3)), step(torch.ones(3)))
    assert [f() for f in made.values()] == [1.0, 2.0]
    assert len(list(model._forward_hooks.values())) == 1


def test_a_dictionary_that_is_taken_whole_may_have_keys_that_are_no_names():
    def look(name):
        return getattr(look, name, None), vars(look), [_by_kind[kind] for kind in _by_kind]

    def step(x):
        return x * look("one" + str(len(_by_kind)))[-1][0]

    compiled = pt.compile(step, backend="graph")
    x = torch.ones(2)
    for value in (2.0, 5.0):
        _by_kind[int] = value
        assert torch.equal(compiled(x), step(x))


_by_kind = {int: 1.0, "a": 3.0}


@contextlib.contextmanager
def default_double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def less_precise():
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("setting", [default_double, less_precise, deterministic])
def test_what_computes_under_settings_of_its_own_is_refused_with_its_line(setting):
    """The kernels of a graph would have those of its caller."""

    def step(x):
        first = torch.ones(1)
        with setting():
            second = torch.ones(1)
        return x + (first.dtype == second.dtype)

    with pytest.raises(pt.CaptureError, match=r"default dtype.*test_guards\.py"):
        pt.compile(step, backend="graph")(torch.zeros(2))
    assert torch.get_default_dtype() == torch.float32

    def within(x):
        with setting():
            return x + 1

    fast = pt.compile(within, backend="graph", fallback="eager")
    with pytest.warns(UserWarning, match="runs eagerly"):
        assert fast(torch.zeros(2)).tolist() == [1, 1]
    with setting():
        assert pt.compile(lambda x: x + torch.ones(1), backend="graph")(
            torch.zeros(2)
        ).tolist() == [1, 1]


@pytest.mark.slow
def test_partitas_own_models_are_recorded_as_a_users_are(monkeypatch):
    model = GPT(layers=1, width=16, heads=2, context=8)
    tokens = torch.randint(0, 256, (2, 8))

    def step(tokens):
        return model(tokens).square().mean()

    fast = pt.compile(step, backend="graph")
    torch.testing.assert_close(fast(tokens), step(tokens))
    monkeypatch.setattr(gpt, "rotate", lambda x, cos, sin: x)
    torch.testing.assert_close(fast(tokens), step(tokens))
    assert len(fast.reasons) == 2 and "rotate" in fast.reasons[1]


class KeepingCalls(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_that_keeps_what_it_hears_in_a_list_is_named():
    step = pt.compile(torch.nn.Linear(4, 4), backend="graph")
    with KeepingCalls(), pytest.raises(pt.CaptureError, match=r"the step changes \S+\.calls"):
        step(torch.ones(2, 4))


def test_a_reason_speaks_of_one_object_only_if_that_changed():
    one, pair = object(), {"n": 1}
    held = [one, one]

    def step(x, a, b):
        return x * (2 if held[0] is held[1] else 3) * a["n"] * b["n"]

    fast = pt.compile(step, backend="graph")
    fast(torch.ones(4), {"n": 1}, {"n": 1})
    fast(torch.ones(3), {"n": 1}, {"n": 1})
    assert fast.reasons[1] == "argument[0]: shape (4,) became (3,)"
    fast(torch.ones(3), pair, pair)
    assert "are one object, and were two" in fast.reasons[2]
