"""What do a plain program and `torch.compile` notice of partita: nothing, and that it says no?"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import partita as pt
from partita import Replicate, Shard
from partita.app.models import GPT, Llama
from partita.bench.models import MODELS as BENCH_MODELS
from partita.tensor import torch_patches

PLAIN = """
import copy, io, sys, warnings
warnings.simplefilter("ignore")
import torch
if sys.argv[1] == "partita": import partita
from torch import nn
from torch.utils.checkpoint import checkpoint

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 4))

x = torch.linspace(-1, 1, 8).view(2, 4)

def train(optimizer, compiled=True):
    m = model()
    opt = optimizer(m.parameters())
    def step(x):
        opt.zero_grad()
        loss = m(x).square().sum()
        loss.backward()
        opt.step()
        return loss
    run = torch.compile(step, backend="eager") if compiled else step
    return [run(x).item() for _ in range(3)]

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 2

class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch._dynamo.graph_break()
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 3

def around_breaks(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return Breaks.apply(y)

class Sub(torch.Tensor):
    pass

def flex(q):
    from torch.nn.attention.flex_attention import flex_attention
    return flex_attention(q, q, q)

def graph(f, *args):
    torch._dynamo.reset()
    return torch.compile(f, backend="eager", fullgraph=True)(*args)

def hooked():
    m, leaf = model(), x.clone().requires_grad_()
    m[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    m(leaf).sum().backward()
    return leaf.grad

def scripted(x):
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0])

def saved():
    file = io.BytesIO()
    torch.save(model().state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)

def backward(f):
    leaf = x.clone().requires_grad_()
    f(leaf).sum().backward()
    return leaf.grad

def breaks(f):
    found = torch._dynamo.explain(f)(x)
    return found.graph_break_count, found.graph_count, [str(b.reason) for b in found.break_reasons]

def seen():
    names = []
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))
    with Mode():
        torch.tensor(1.0) + torch.as_tensor([2.0])
    return names

def one_step(x):
    m = nn.Linear(4, 4)
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    opt.step()
    return m(x)

programs = {
    "AdamW": lambda: train(lambda p: torch.optim.AdamW(p, lr=0.1)),
    "eager": lambda: train(lambda p: torch.optim.AdamW(p, lr=0.1), compiled=False),
    "breaks": lambda: breaks(one_step),
    "vmap": lambda: graph(lambda x: torch.vmap(torch.sin)(x), x),
    "grad": lambda: graph(lambda x: torch.func.grad(lambda y: y.sin().sum())(x), x),
    "hessian": lambda: torch.func.hessian(lambda y: y.sin().sum())(x[0]),
    "tensor": lambda: graph(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), x),
    "as_tensor": lambda: graph(lambda x: x + torch.as_tensor(2.0) + torch.asarray(1.0), x),
    "Tensor": lambda: graph(lambda x: x + torch.Tensor([1.0, 2.0, 3.0, 4.0]), x),
    "Parameter": lambda: graph(lambda x: x + nn.Parameter(torch.ones(4)), x),
    "subclass": lambda: type(graph(lambda x: x * 2, x.as_subclass(Sub))).__name__,
    "flex": lambda: graph(flex, x.view(1, 1, 2, 4)),
    "function": lambda: backward(lambda x: graph(Double.apply, x)),
    "function": lambda: backward(lambda x: graph(Double.apply, x)),
    "called function": lambda: backward(lambda x: graph(lambda x: Double.apply(x).sum(), x)),
    "function that breaks": lambda: backward(torch.compile(around_breaks, backend="eager")),
    "broken checkpoint": lambda: backward(
        torch.compile(
            lambda x: checkpoint(around_breaks, x, use_reentrant=False), backend="eager"
        )
    ),
    "checkpoint": lambda: backward(lambda x: checkpoint(lambda t: t.sin(), x, use_reentrant=False)),
    "reentrant": lambda: backward(lambda x: checkpoint(lambda t: t.sin(), x, use_reentrant=True)),
    "compiled checkpoint": lambda: backward(
        lambda x: graph(lambda t: checkpoint(lambda t: t.sin(), t, use_reentrant=False), x)
    ),
    "hooks": hooked,
    "deepcopy": lambda: copy.deepcopy(model())(x),
    "saved": saved,
    "script": lambda: torch.jit.script(scripted)(x),
    "export": lambda: torch.export.export(model(), (x,)).module()(x),
    "mode": seen,
    "device": lambda: torch.device("meta").__enter__() and torch.tensor([1.0]).device,
}
for name, program in programs.items():
    torch.manual_seed(1)
    try:
        print(name, program())
    except Exception as error:
        print(name, type(error).__name__, error)
"""


def output_of(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    file = tmp_path / "plain.py"
    file.write_text(PLAIN)
    here = str(Path(pt.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, str(file), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": here},
    )


@pytest.mark.slow
def test_a_plain_program_does_not_notice_that_partita_is_imported(tmp_path):
    without, with_partita = (output_of(tmp_path, how) for how in ("nothing", "partita"))
    right, mine = without.communicate()[0], with_partita.communicate()[0]
    assert "AdamW [" in right and "device meta" in right
    assert mine == right


# -- with DTensors ---------------------------------------------------------------------------------

X = torch.arange(8.0).view(4, 2) / 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


def losses(step, m, opt, x) -> list[float]:
    def whole(x):
        opt.zero_grad()
        loss = m(x).square().sum()
        loss.backward()
        opt.step()
        return loss

    run = torch.compile(whole, backend="eager") if step == "step" else whole
    return [run(x).item() for _ in range(3)]


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.compile cannot compile code with a DTensor")
@pytest.mark.parametrize("compiled", ["step", "model", "module.compile", "optimizer"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_torch_compile_meets_with_dtensors_runs_as_it_is_written(compiled, stage):
    one = model()
    right = losses("", one, torch.optim.AdamW(one.parameters(), lr=0.1), X)

    def body(mesh):
        m = model()
        m = pt.zero(m, mesh, stage=3) if stage else pt.distribute_module(m, mesh)
        opt = torch.optim.AdamW(m.parameters(), lr=0.1)
        run = m
        if compiled == "model":
            run = torch.compile(m, backend="eager")
        elif compiled == "module.compile":
            m.compile(backend="eager")
        elif compiled == "optimizer":
            opt.step = torch.compile(opt.step, backend="eager")
        return losses(compiled, run, opt, pt.distribute_tensor(X, mesh, [Shard(0)]))

    with pt.ranks(dp=2) as world:
        for mine in world.run(body):
            assert mine == pytest.approx(right, rel=1e-5)


@pytest.mark.filterwarnings("ignore:torch.compile cannot compile code with a DTensor")
def test_a_compiled_function_makes_reads_and_returns_dtensors():
    def body(mesh):
        held = {"x": [pt.distribute_tensor(X, mesh, [Shard(0)])]}

        def make(x):
            d = pt.distribute_tensor(x, mesh, [Shard(0)]) + held["x"][0]
            return (d * d).sum(), pt.DTensor.from_local(x[:1], mesh, [Shard(0)])

        total, rows = torch.compile(make, backend="eager")(X)
        return total.item(), rows.shape, torch.compile(torch.sin, backend="eager")(rows).shape

    with pt.ranks(dp=2) as world:
        right = (2 * X).square().sum().item()
        assert world.run(body) == [(pytest.approx(right), (2, 2), (2, 2))] * 2


@pytest.mark.filterwarnings("ignore:torch.compile cannot compile code with a DTensor")
def test_a_compiled_function_takes_plain_tensors_and_dtensors_by_turns():
    def body(mesh):
        f = torch.compile(lambda x: (x * 2).sin().sum(), backend="eager")
        d = pt.distribute_tensor(X, mesh, [Shard(0)])
        return [f(x).item() for x in (X, d, X, d)]

    with pt.ranks(dp=2) as world:
        right = (X * 2).sin().sum().item()
        assert world.run(body) == [pytest.approx([right] * 4)] * 2


def test_it_is_said_once_and_names_pt_compile(monkeypatch):
    monkeypatch.setattr(torch_patches, "WARNED", [])

    def body(mesh):
        d = pt.distribute_tensor(X, mesh, [Replicate()])
        for f in (torch.sin, torch.cos):
            torch.compile(lambda x, f=f: f(x), backend="eager")(d)

    with pt.ranks(dp=2) as world, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        world.run(body)
    assert len([w for w in said if "pt.compile(step)" in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore:torch.compile cannot compile code with a DTensor")
def test_a_whole_graph_of_what_takes_a_dtensor_is_refused_in_our_words():
    def body(mesh):
        d = pt.distribute_tensor(X, mesh, [Shard(0)])
        with pytest.raises(
            RuntimeError, match=r"torch.compile cannot compile code with a DTensor.*pt.compile"
        ):
            torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(d)
        return torch.compile(lambda x: x * 2, backend="eager")(d).sum().item()

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [pytest.approx(2 * X.sum().item())] * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo hides, if it can
def test_what_is_local_is_compiled_as_any_plain_tensor():
    def body(mesh):
        x = pt.distribute_tensor(X, mesh, [Shard(0)]).requires_grad_()
        f = torch.compile(lambda t: t * 2, backend="eager", fullgraph=True)
        pieces = [x.detach().to_local(), x.to_local(), (x * 2).to_local()]
        spread = pt.local_map(f, out_placements=[Shard(0)])(x)
        return [torch.equal(f(t), t * 2) for t in pieces], spread.full_tensor()

    with pt.ranks(dp=2) as world:
        for right, out in world.run(body):
            assert all(right)
            assert torch.equal(out, 2 * X)


def test_a_copy_of_a_dtensor_does_not_trip_over_what_dynamo_asks():
    def body(mesh):
        d = pt.distribute_tensor(X, mesh, [Shard(0)])
        assert not hasattr(d, "_dynamo_static_input_type")
        return copy.deepcopy(d).sum().item()

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [X.sum().item()] * 2


def test_what_torch_compile_compiled_is_captured_as_it_is_written():
    m, x = model(), torch.randn(3, 2)
    scale = [2.0]
    called = torch.compile(lambda y: y * scale[0], backend="eager")
    called(x)
    m.compile(backend="eager")
    step = pt.compile(lambda: called(m(x)).sum(), backend="graph")
    for scale[0] in (2.0, 3.0):
        torch.testing.assert_close(step(), scale[0] * m(x).sum())


def test_gradients_of_functorch_are_refused_by_name():
    step = pt.compile(lambda x: torch.func.grad(lambda y: y.sin().sum())(x), backend="graph")
    with pytest.raises(pt.CaptureError, match=r"takes gradients by torch\.func"):
        step(torch.ones(3))


# -- models that are shipped -----------------------------------------------------------------------


def example_model(name):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"compiled_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build() if name == "cnn" else module.Model()


def images(n=4):
    return torch.rand(n, 1, 8, 8)


def tokens(n=4):
    return torch.randint(0, 256, (n, 16))


SHIPPED = {
    "gpt": lambda: (GPT(layers=2, width=16, heads=2, context=16), tokens()),
    "llama": lambda: (Llama(layers=2, width=16, heads=2, groups=1, context=16), tokens()),
    **{
        f"bench {name}": lambda case=case: (case.make(1), *case.batch(1, 4))
        for name, case in BENCH_MODELS.items()
    },
    "examples/cnn": lambda: (example_model("cnn"), images()),
    "examples/moe": lambda: (example_model("moe"), torch.randint(0, 256, (2, 64))),
}


def train_once(run, model, batch):
    torch.manual_seed(1)
    out = run(*batch)
    loss = sum(t.square().mean() for t in (out if isinstance(out, tuple) else (out,)))
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return loss.item(), grads


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo hides, if it can
@pytest.mark.parametrize(
    "name, beside", [(name, "") for name in SHIPPED] + [("gpt", "DTensors"), ("llama", "DTensors")]
)
def test_a_shipped_model_is_compiled_by_torch_and_is_right(name, beside):
    def body(mesh=None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, *batch = SHIPPED[name]()
        loss, grads = train_once(model, model, batch)
        torch._dynamo.utils.counters.clear()
        found = train_once(torch.compile(model, backend="aot_eager"), model, batch)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
        assert found[0] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found[1], grads, rtol=1e-4, atol=1e-6)

    body()
    if not beside:
        return
    with pt.ranks(dp=1) as world:
        world.run(body)


@pytest.mark.parametrize("name", ["gpt", "llama", "bench unet", "bench cnn"])
def test_a_shipped_model_is_one_graph(name):
    model, *batch = SHIPPED[name]()
    torch.compile(model, backend="eager", fullgraph=True)(*batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.compile cannot compile code with a DTensor")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_a_shipped_model_of_dtensors_runs_under_torch_compile_as_it_is_written(how, stage):
    torch.manual_seed(0)
    one, x = SHIPPED["gpt"]()
    right, grads = train_once(one, one, (x,))

    def body(mesh):
        model = copy.deepcopy(one)
        if how == "blocks":
            for block in model.blocks:
                block.compile(backend="eager")
        pt.zero(model, mesh, stage=stage)
        run = torch.compile(model, backend="eager") if how == "whole" else model
        loss = run(pt.distribute_tensor(x, mesh, [Shard(0)])).square().mean()
        loss.backward()
        return loss.item(), [p.grad.full_tensor() for p in model.parameters()]

    with pt.ranks(dp=2) as world:
        for loss, found in world.run(body):
            assert loss == pytest.approx(right, rel=1e-5)
            torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-6)
