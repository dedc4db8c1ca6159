"""The ways to train a model of the zoo, each against one process.

A mode takes three steps of AdamW on a rank's model and compares the loss, every gradient, every
buffer and every parameter of each step with those of one process, in float64.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import partita as pt

from .models import CLIENTS, ROWS, Client

__all__ = ["MODES", "Mode", "run_cell", "serves", "train_on_one_device", "train_truth"]

STEPS, RATE = 3, 1e-2
EPS = 1e-4
"""AdamW's: with a smaller one an update is the sign of a gradient that is rounding alone."""

Named = dict[str, Tensor | None]


@dataclass
class Trained:
    """What steps left: whole, plain values of each step, and the dtypes that were seen."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    parameters: list[Named] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)


class InFloat64(TorchFunctionMode):
    """Float64 where a model asks for float32 by name (a norm, a softmax, a loss).

    Else the sums of two layouts would differ by float32's rounding, and 1e-9 would say nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.backward and isinstance(args[0], pt.DTensor):
            with self:  # what is made again in backward is made alike
                return pt.DTensor.__torch_function__(func, types, args, kwargs or {})
        return func(*map(widen, args), **{k: widen(v) for k, v in (kwargs or {}).items()})


def widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


# -- one process -----------------------------------------------------------------------------------


def make_model(client: Client, dtype: torch.dtype, captured: bool = False) -> nn.Module:
    torch.manual_seed(3)
    model = (client.captured if captured and client.captured else client.make)().to(dtype)
    with torch.no_grad():
        for p in model.parameters():  # away from the ones and zeros of an initialisation
            p.add_(torch.randn(p.shape, dtype=torch.float64).to(dtype) * 0.1)
    return model.train()


def make_batches(client: Client, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    torch.manual_seed(4)
    batches = [client.batch(ROWS) for _ in range(STEPS)]
    return [
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        for batch in batches
    ]


@cache
def train_on_one_device(
    name: str, dtype: torch.dtype, autocast: bool = False, captured: bool = False
) -> Trained:
    client = CLIENTS[name]
    model = make_model(client, dtype, captured)
    return train(client, model, make_batches(client, dtype), autocast=autocast)


# -- three steps -----------------------------------------------------------------------------------


def to_plain(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    value = value.detach()
    return (value.full_tensor() if isinstance(value, pt.DTensor) else value).clone()


def read_step(trained: Trained, model: nn.Module, loss: Tensor) -> None:
    loss = to_plain(loss)
    assert loss is not None
    trained.losses.append(loss)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trained.gradients.append({n: to_plain(p.grad) for n, p in model.named_parameters()})
    trained.parameters.append({n: to_plain(p) for n, p in named.items()})


def note_dtypes(model: nn.Module, dtypes: dict[str, str]) -> None:
    """Remember the dtype of what each module gives."""

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                dtypes[name] = str(output.dtype)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))


def train(
    client: Client,
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    *,
    autocast: bool = False,
    compiled: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Trained:
    trained = Trained()
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS)
    if autocast:
        note_dtypes(model, trained.dtypes)

    def step(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = client.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    run = step if compiled is None else pt.compile(step, backend=compiled)
    wide = client.asks_for_float32 and not autocast
    for batch in batches:
        optimizer.zero_grad()  # not within the step: a captured one would keep no gradients
        with InFloat64() if wide else nullcontext():
            loss = run(batch)
        read_step(trained, model, loss)
    return trained


# -- against one process ---------------------------------------------------------------------------


def compare(ours: Trained, truth: Trained, first: int = 0) -> None:
    """Equal, to the rounding of sums in another order."""
    for i, (mine, theirs) in enumerate(zip(ours.losses, truth.losses[first:], strict=True), first):
        assert mine.dtype == theirs.dtype, f"step {i}: the loss is {mine.dtype}, not {theirs.dtype}"
        assert_near(f"step {i}: the loss", mine, theirs)
        for what in ("gradients", "parameters"):
            found, wanted = getattr(ours, what)[i - first], getattr(truth, what)[i]
            assert found.keys() == wanted.keys(), f"step {i}: {what} have other names"
            for name, value in wanted.items():
                mine = found[name]
                assert (mine is None) == (value is None), (
                    f"step {i}: {what} of {name}: {mine is not None}, not {value is not None}"
                )
                if value is not None:
                    assert mine.dtype == value.dtype, f"{what} of {name}: {mine.dtype}"
                    assert_near(f"step {i}: {what} of {name}", mine, value)


def assert_near(what: str, mine: Tensor, theirs: Tensor) -> None:
    assert mine.shape == theirs.shape, f"{what}: shape {mine.shape}, not {theirs.shape}"
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=lambda m: f"{what}: {m}")


def compare_rounded(ours: Trained, rounded: Trained, truth: Trained) -> None:
    """The dtypes of one process, and values as near to float64's as its own."""
    assert ours.dtypes == rounded.dtypes, {
        n: (ours.dtypes.get(n), d) for n, d in rounded.dtypes.items() if ours.dtypes.get(n) != d
    }
    for i in range(len(truth.losses)):
        assert ours.losses[i].dtype == rounded.losses[i].dtype, (
            f"the loss is {ours.losses[i].dtype}"
        )
        # Steps drift apart: what was rounded otherwise in one is other weights in the next.
        near = 1.25 if i == 0 else 2.0
        check_rounded(
            f"step {i}: gradients", *(t.gradients[i] for t in (ours, rounded, truth)), near
        )
        check_rounded(
            f"step {i}: parameters", *(t.parameters[i] for t in (ours, rounded, truth)), 2
        )


def check_rounded(what: str, mine: Named, theirs: Named, truth: Named, near: float) -> None:
    """All together are at most `near` times as far off as one process, and each is not far off."""
    ours = own = size = 0.0
    far = {}
    for name, value in truth.items():
        a, b = mine[name], theirs[name]
        assert (a is None) == (b is None), f"{what}: {name}"
        if a is None or b is None or value is None or not value.is_floating_point():
            continue
        assert a.dtype == b.dtype, f"{what}: {name} is {a.dtype}, not {b.dtype}"
        assert a.isfinite().all(), f"{what}: {name} is not finite"
        mine_off, own_off = ((t.double() - value.double()).norm().item() for t in (a, b))
        norm = value.double().norm().item()
        ours, own, size = ours + mine_off**2, own + own_off**2, size + norm**2
        far[name] = (mine_off, 4 * own_off + 2**-7 * norm)
    assert ours**0.5 <= near * own**0.5 + 2**-10 * size**0.5, f"{what}: {ours**0.5}, {own**0.5}"
    for name, (off, allowed) in far.items():
        assert off <= allowed + 2**-12 * size**0.5, f"{what}: {name} is off by {off:.2e}"


# -- modes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """One column of the table.

    Attributes:
        run: one rank's part: the mesh and the model's name.
        mesh: its ranks.
        serves: whether a model is trained so.
        graph: it goes through `pt.compile`.
    """

    run: Callable[[Any, str], None]
    mesh: dict[str, int]
    serves: Callable[[Client], bool] = lambda client: True
    graph: bool = False


MODES: dict[str, Mode] = {}


def serves(name: str, mode: str) -> bool:
    """True if a model is trained in a mode."""
    client = CLIENTS[name]
    return MODES[mode].serves(client) and (not client.modes or mode in client.modes)


def _mode(name: str, *, mesh: dict[str, int] | None = None, **more: Any) -> Callable[..., Any]:
    def register(run: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
        MODES[name] = Mode(run, mesh or {"dp": 2}, **more)
        return run

    return register


def train_here(
    mesh: Any,
    name: str,
    place: Callable[[nn.Module, Client], None],
    *,
    compiled: str | None = None,
) -> None:
    client = CLIENTS[name]
    model = make_model(client, torch.float64, compiled is not None)
    place(model, client)
    batches = [pt.distribute_batch(b, mesh) for b in make_batches(client, torch.float64)]
    ours = train(client, model, batches, compiled=compiled)
    compare(
        ours,
        train_on_one_device(
            name, torch.float64, captured=compiled is not None and client.captured is not None
        ),
    )


@_mode("data parallel")
def data_parallel(mesh: Any, name: str) -> None:
    train_here(mesh, name, lambda model, client: pt.parallelize(model, mesh))


@_mode("ZeRO-3")
def zero(mesh: Any, name: str) -> None:
    train_here(mesh, name, lambda model, client: pt.zero(model, mesh))


@_mode("ZeRO-3, pt.remat")
def zero_remat(mesh: Any, name: str) -> None:
    def place(model: nn.Module, client: Client) -> None:
        pt.zero(model, mesh)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config.use_cache = False  # a block made again would find itself in the cache
        pt.remat(model, blocks=list(client.blocks))

    train_here(mesh, name, place)


@_mode("ZeRO-3, own checkpointing", serves=lambda client: client.checkpoints)
def zero_checkpointing(mesh: Any, name: str) -> None:
    def place(model: nn.Module, client: Client) -> None:
        pt.zero(model, mesh)
        if hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable()
        else:
            model.enable_gradient_checkpointing()

    train_here(mesh, name, place)


@_mode("pt.compile", graph=True)
def compiled(mesh: Any, name: str) -> None:
    train_here(mesh, name, lambda model, client: pt.parallelize(model, mesh), compiled="graph")


@_mode("pt.compile, ZeRO-3", graph=True)
def compiled_zero(mesh: Any, name: str) -> None:
    train_here(mesh, name, lambda model, client: pt.zero(model, mesh), compiled="graph")


@_mode("Inductor", serves=lambda client: client.inductor, graph=True)
def inductor(mesh: Any, name: str) -> None:
    train_here(mesh, name, lambda model, client: pt.parallelize(model, mesh), compiled="inductor")


@_mode("Inductor, ZeRO-3", serves=lambda client: client.inductor, graph=True)
def inductor_zero(mesh: Any, name: str) -> None:
    train_here(mesh, name, lambda model, client: pt.zero(model, mesh), compiled="inductor")


@_mode("saved, loaded elsewhere", mesh={"dp": 2, "tp": 2})
def reloaded(mesh: Any, name: str) -> None:
    """One step on ZeRO-3 over all ranks; the rest on another layout, from the files."""
    client = CLIENTS[name]
    batches = make_batches(client, torch.float64)

    def begin(there: Any, rows: dict[str, Any], place: Callable[[nn.Module], Any]) -> Any:
        model = make_model(client, torch.float64)
        place(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS)
        spread = [pt.distribute_batch(b, there, rows) for b in batches]
        return model, optimizer, spread

    model, optimizer, spread = begin(
        mesh, {"dp": pt.Shard(0)}, lambda m: pt.zero(m, mesh, ("dp", "tp"))
    )
    train(client, model, spread[:1], optimizer=optimizer)
    path = shared_folder(name)
    pt.save({"model": model, "optimizer": optimizer}, path)

    def elsewhere(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        pt.parallelize(model, mesh, client.plan or {})

    model, optimizer, spread = begin(mesh, {"dp": pt.Shard(0)}, elsewhere)
    pt.load({"model": model, "optimizer": optimizer}, path)
    ours = train(client, model, spread[1:], optimizer=optimizer)
    compare(ours, train_on_one_device(name, torch.float64), first=1)


def shared_folder(name: str) -> str:
    """One path for all ranks of this run."""
    return os.path.join(tempfile.gettempdir(), f"zoo-{os.getpid()}-{name.replace('.', '')}")


@_mode("bf16 autocast")
def autocast(mesh: Any, name: str) -> None:
    client = CLIENTS[name]
    truth = train_on_one_device(name, torch.float64)
    rounded = train_on_one_device(name, torch.float32, autocast=True)
    for place in (pt.parallelize, pt.zero):
        model = make_model(client, torch.float32)
        place(model, mesh)
        batches = [pt.distribute_batch(b, mesh) for b in make_batches(client, torch.float32)]
        compare_rounded(train(client, model, batches, autocast=True), rounded, truth)


@_mode("tensor parallel", mesh={"dp": 2, "tp": 2}, serves=lambda client: client.plan is not None)
def tensor_parallel(mesh: Any, name: str) -> None:
    train_here(mesh, name, lambda model, client: pt.parallelize(model, mesh, client.plan))


def train_truth(name: str, mode: str) -> None:
    """Train on one device what a mode is compared with: once for all ranks of this process."""
    client, how = CLIENTS[name], MODES[mode]
    if how.run is autocast:
        train_on_one_device(name, torch.float32, autocast=True)
    train_on_one_device(name, torch.float64, captured=how.graph and client.captured is not None)


def run_cell(name: str, mode: str) -> None:
    """Train a model in one mode, on ranks of this process.

    Raises:
        AssertionError: it is not what one process trains.
        Exception: whatever the model or partita raised.
    """
    train_truth(name, mode)
    with pt.ranks(**MODES[mode].mesh) as world:
        world.run(MODES[mode].run, name)
