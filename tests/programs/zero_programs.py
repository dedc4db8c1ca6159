"""Random training programs, as people write them, on one device and under each stage of ZeRO.

`run_program(seed, how)` draws a model and what is done with it. It draws the same for the same
seed, wherever `how` says that it runs, and returns all values that the program computed. Ground
truth is `how=OneDevice()`.
"""

from __future__ import annotations

import copy
import gc
import io
import random
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint

import partita as pt

WORDS = 7


class OneDevice:
    """Runs a program as plain PyTorch in one process."""

    def shard(self, model: nn.Module, persistent: bool) -> nn.Module:
        return model

    def spread(self, t: torch.Tensor) -> torch.Tensor:
        return t

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def clip(self, params: Any, norm: float) -> Any:
        return nn.utils.clip_grad_norm_(params, norm)

    def pause(self) -> None:
        """A place where one rank may collect garbage, or be late."""


class OnRanks(OneDevice):
    """Runs a program under `pt.zero`, as the rank that calls it."""

    def __init__(self, mesh: Any, stage: int, garbage: random.Random | None = None):
        self.mesh, self.stage, self.garbage = mesh, stage, garbage

    def shard(self, model: nn.Module, persistent: bool) -> nn.Module:
        return pt.zero(model, self.mesh, stage=self.stage, persistent=persistent)

    def spread(self, t: torch.Tensor) -> torch.Tensor:
        return pt.distribute_tensor(t, self.mesh, [pt.Shard(0)])

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return pt.no_sync(model)

    def clip(self, params: Any, norm: float) -> Any:
        return pt.clip_grad_norm_(params, norm)

    def pause(self) -> None:
        if self.garbage is not None and self.garbage.random() < 0.3:
            gc.collect()


# -- models ----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Normed(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)) * self.scale + x


class Cast(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(x.float(), self.weight.float()).to(x.dtype)


class Twice(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.linear, self.unused = nn.Linear(width, width), nn.Linear(inner, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.sin(self.linear(x)))


class Writing(nn.Module):
    """Writes its weight and a buffer in training, before it uses them."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 4)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.weight.mul_(0.98)
                self.mean.lerp_(x.mean(0), 0.1)
        return x @ self.weight - self.mean


class Normalized(nn.Module):
    """A weight norm by torch's parametrization, and two-dimensional biases."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(width, inner))
        self.back = nn.Parameter(torch.randn(inner, width) / 4)
        self.bias = nn.Parameter(torch.zeros(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) @ self.back + self.bias


class Convolution(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.conv = nn.Conv1d(1, inner, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x.unsqueeze(1)).mean(1)


KINDS = (Mlp, Normed, Cast, Twice, Writing, Normalized, Convolution)


class Model(nn.Module):
    """Blocks, which may be called twice, checkpointed, or have a head whose result nobody uses."""

    def __init__(self, rng: random.Random):
        super().__init__()
        width = self.width = rng.choice((3, 4, 5))
        inner = rng.choice((2, 4, 7))
        kinds = [rng.choice(KINDS) for _ in range(rng.randint(1, 4))]
        self.casts = Cast in kinds
        self.writes = Writing in kinds
        self.embed = nn.Embedding(WORDS, width) if rng.random() < 0.4 else None
        self.blocks = nn.ModuleList(kind(width, inner) for kind in kinds)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=rng.random() < 0.5)
        if self.embed is not None and rng.random() < 0.6:
            self.head.weight = self.embed.weight
        self.classes = nn.ModuleList([nn.Linear(width, 3)]) if rng.random() < 0.3 else None
        self.again = rng.randrange(len(kinds)) if rng.random() < 0.3 else None
        choices = ("no", "no", "no", "kept", "reentrant", "remat", "composable")
        self.recompute = "no" if self.writes else rng.choice(choices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        kept = []
        for i, block in enumerate(self.blocks):
            if self.recompute in ("kept", "reentrant"):
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
            if self.classes is not None:
                kept.append(self.classes[0](x))
            if self.again == i:
                x = block(x * 0.5)
        out = self.head(self.norm(x))
        return out if not kept else out + F.pad(kept[-1], (0, WORDS - 3))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-2),
}


# -- what is done with them ------------------------------------------------------------------------


class Planned(Exception):
    """An exception that a program raises and catches."""


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, pt.DTensor) else t


@dataclass
class Program:
    """A program in the making: what it holds, and the values that it has computed."""

    rng: random.Random
    how: OneDevice
    values: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        torch.manual_seed(rng.randrange(1 << 30))
        self.draws = torch.Generator().manual_seed(rng.randrange(1 << 30))
        self.rows = rng.choice((6, 6, 5, 7, 4))
        model = Model(rng)
        self.tolerance = 2e-5 if model.casts else 1e-9
        self.persistent = rng.random() < 0.2
        early = rng.random() < 0.3
        name = rng.choice((*OPTIMIZERS,))
        make = OPTIMIZERS[name]
        if early:
            self.optimizer = make(model.parameters())
        if rng.random() < 0.15:  # frozen before it is sharded
            model.blocks[0].requires_grad_(False)
        self.model = self.how.shard(model, self.persistent)
        if not early:
            self.optimizer = make(self.model.parameters())
        self.make_optimizer = make
        if model.recompute == "remat":
            for block in self.model.blocks:
                pt.remat(block)
        if model.recompute == "composable":
            for block in self.model.blocks:
                composable_checkpoint(block)
        self.copies: list[nn.Module] = []
        self.hooks: list[Any] = []
        self.saved: Any = None
        self.does(f"{name} of {[type(b).__name__ for b in model.blocks]} {model.recompute}")

    # -- small parts --

    def does(self, what: str) -> None:
        self.names.append(what)

    def keep(self, *tensors: Any) -> None:
        self.values += [
            t if t is None or not isinstance(t, torch.Tensor) else whole(t).detach().clone()
            for t in tensors
        ]

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def some(self, params: list[Any] | None = None) -> list[Any]:
        params = self.params if params is None else params
        chosen = [p for p in params if self.rng.random() < 0.5]
        return chosen or params[:1]

    def batch(self) -> torch.Tensor:
        if self.model.embed is not None:
            x = torch.randint(0, WORDS, (self.rows,), generator=self.draws)
        else:
            x = torch.randn(self.rows, self.model.width, generator=self.draws)
        return self.how.spread(x)

    def loss(self, model: nn.Module | None = None) -> torch.Tensor:
        out = (model or self.model)(self.batch())
        kind = self.rng.randrange(3)
        if kind == 0:
            return out.square().mean()
        if kind == 1:
            targets = torch.randint(0, WORDS, (self.rows,), generator=self.draws)
            return F.cross_entropy(out, self.how.spread(targets))
        targets = torch.randn(self.rows, WORDS, generator=self.draws)
        return F.mse_loss(out, self.how.spread(targets))

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.how.pause()
        if loss.requires_grad:
            loss.backward(**options)

    def step(self) -> None:
        self.change_gradients()
        self.how.pause()
        self.optimizer.step()

    def clear(self) -> None:
        if self.rng.random() < 0.7:
            self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.7)
        else:
            self.model.zero_grad()

    def change_gradients(self) -> None:
        rng = self.rng
        kind = rng.choice(("no", "no", "clip", "torch clip", "value", "each", "some", "norm"))
        self.does(f"gradients: {kind}")
        held = [p for p in self.params if p.grad is not None]
        if kind == "clip":
            self.keep(self.how.clip(self.params, 0.1))
        elif kind == "torch clip":
            self.keep(nn.utils.clip_grad_norm_(self.params, 0.1))
        elif kind == "value":
            nn.utils.clip_grad_value_(self.params, 0.01)
        elif kind == "each":
            change = rng.randrange(7)
            with torch.no_grad():
                for p in held:
                    if change == 0:
                        p.grad.clamp_(-0.01, 0.01)
                    elif change == 1:
                        p.grad.add_(p, alpha=0.1)
                    elif change == 2:
                        p.grad = p.grad * 0.5
                    elif change == 3:
                        p.grad.mul_(10).tanh_()
                    elif change == 4:
                        p.grad.data.mul_(0.5)
                    elif change == 5:
                        p.grad.copy_(p * 0.1)
                    else:
                        g = p.grad
                        (g[:1] if g.ndim else g).fill_(0.01)
        elif kind == "some":
            for p in self.some(held) if held else ():
                p.grad = None
        elif kind == "norm":
            self.keep(*[p.grad.norm() for p in held])

    # -- actions --

    def train(self) -> None:
        self.clear()
        loss = self.loss()
        self.backward(loss)
        self.step()
        self.keep(loss)

    def accumulate(self) -> None:
        self.clear()
        n = self.rng.randint(2, 3)
        last = self.rng.random() < 0.8
        for i in range(n):
            held = self.how.no_sync(self.model) if not last or i + 1 < n else nullcontext()
            with held:
                loss = self.loss()
                self.backward(loss)
            self.keep(loss)
            if self.rng.random() < 0.3:
                self.evaluate()
            if self.rng.random() < 0.2:
                self.keep(*[p.grad for p in self.params])
        self.step()

    def accumulate_plainly(self) -> None:
        for _ in range(2):
            self.backward(self.loss())
        self.step()
        self.clear()

    def two_losses(self) -> None:
        self.clear()
        one, other = self.loss(), self.loss()
        way = self.rng.randrange(4)
        if way == 0:
            self.backward(one + other)
        elif way == 1:
            self.backward(one)
            self.backward(other)
        elif way == 2:
            self.backward(other)
            self.keep(*[p.grad for p in self.params])
            self.backward(one)
        else:
            self.backward(one, retain_graph=True)
            self.backward(one + other)
        self.step()
        self.keep(one, other)

    def evaluate(self) -> None:
        mode = self.rng.randrange(3)
        self.does(f"evaluate {mode}")
        with torch.no_grad() if mode else torch.inference_mode():
            if mode == 2:
                self.model.eval()
            self.keep(self.loss())
            self.model.train()

    def evaluate_between(self) -> None:
        self.clear()
        loss = self.loss()
        self.evaluate()
        self.backward(loss)
        self.step()

    def freeze(self) -> None:
        for p in self.some():
            p.requires_grad_(self.rng.random() < 0.4)

    def freeze_between(self) -> None:
        self.clear()
        if self.model.recompute == "remat":  # what a region reads must stay as it was
            return self.train()
        loss = self.loss()
        chosen = self.some()
        if self.rng.random() < 0.5:
            self.backward(loss)
            for p in chosen:
                p.requires_grad_(False)
            self.backward(self.loss())
        else:
            for p in chosen:
                p.requires_grad_(False)
            self.backward(loss)
        self.step()
        for p in chosen:
            p.requires_grad_(True)
        return None

    def hook_parameters(self) -> None:
        kind = self.rng.choice(
            ("scale", "clamp", "count", "post", "post clamp", "post count", "all")
        )
        self.does(f"hook {kind}")
        count: list[int] = []
        params = [p for p in self.some() if p.requires_grad]
        for p in params:
            if kind == "scale":
                self.hooks.append(p.register_hook(lambda g: g * 0.5))
            elif kind == "clamp":
                self.hooks.append(p.register_hook(lambda g: g.clamp(-0.02, 0.02)))
            elif kind == "count":
                self.hooks.append(p.register_hook(lambda g: count.append(1)))
            elif kind == "post":
                self.hooks.append(p.register_post_accumulate_grad_hook(halve_gradient))
            elif kind == "post clamp":
                self.hooks.append(p.register_post_accumulate_grad_hook(clamp_gradient))
            elif kind == "post count":
                hook = lambda p: count.append(1)  # noqa: E731
                self.hooks.append(p.register_post_accumulate_grad_hook(hook))
        if kind == "all" and params:
            handle = torch.autograd.graph.register_multi_grad_hook(
                params, lambda grads: count.append(sum(g is not None for g in grads))
            )
            self.hooks.append(handle)
        self.train()
        self.keep(len(count) if kind != "all" else list(count))

    def hook_modules(self) -> None:
        kind = self.rng.choice(("forward", "pre", "backward", "pre backward", "read"))
        self.does(f"hook modules {kind}")
        block = self.rng.choice([*self.model.blocks])
        if kind == "forward":
            self.hooks.append(block.register_forward_hook(lambda m, args, out: out * 0.9))
        elif kind == "pre":
            self.hooks.append(block.register_forward_pre_hook(lambda m, args: (args[0] * 0.9,)))
        elif kind == "backward":
            self.hooks.append(block.register_full_backward_hook(lambda m, gi, go: halve(gi)))
        elif kind == "pre backward":
            self.hooks.append(block.register_full_backward_pre_hook(lambda m, go: halve(go)))
        else:
            norms: list[Any] = []
            self.hooks.append(
                block.register_forward_hook(
                    lambda m, args, out: norms.append(next(m.parameters()).detach().norm())
                )
            )
            self.train()
            self.keep(*norms[:2])
        self.train()

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def step_in_backward(self) -> None:
        self.clear()
        params = [p for p in self.params if p.requires_grad]
        optimizers = {p: self.make_optimizer([p]) for p in params}

        def update(p: Any) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(update) for p in params]
        self.backward(self.loss())
        for handle in handles:
            handle.remove()

    def fail_in_forward(self) -> None:
        def fail(*_: Any) -> None:
            raise Planned

        block = self.rng.choice([*self.model.blocks])
        hook = block.register_forward_hook(fail)
        if self.rng.random() < 0.5:
            hook.remove()
            hook = self.model.norm.register_forward_pre_hook(fail)
        grad = self.rng.random() < 0.7
        with suppress(Planned), torch.enable_grad() if grad else torch.no_grad():
            self.loss()
        hook.remove()
        self.train()

    def fail_in_backward(self) -> None:
        def fail(*_: Any) -> None:
            raise Planned

        self.clear()
        block = self.rng.choice([*self.model.blocks])
        handles: list[Any] = []

        def watch(m: Any, args: Any, out: torch.Tensor) -> None:
            if out.requires_grad:
                handles.append(out.register_hook(fail))

        hook = block.register_forward_hook(watch)
        loss = self.loss()
        hook.remove()
        with suppress(Planned):
            self.backward(loss)
        self.optimizer.zero_grad()
        self.model.zero_grad()
        self.train()

    def copy_model(self) -> None:
        way = self.rng.randrange(3)
        frozen = self.rng.random() < 0.5
        self.does(f"copy {way} frozen={frozen}")
        before = [p.requires_grad for p in self.params]
        if frozen and self.rng.random() < 0.5:
            self.model.requires_grad_(False)
        if way == 2 and not self.hooks and self.model.recompute not in ("remat", "composable"):
            file = io.BytesIO()
            torch.save(self.model, file)
            file.seek(0)
            new = torch.load(file, weights_only=False)
        elif self.hooks:
            return
        else:
            new = copy.deepcopy(self.model)
        for p, was in zip(self.params, before, strict=True):
            p.requires_grad_(was)
        new.requires_grad_(not frozen)
        new.zero_grad()
        self.copies.append(new)

    def average(self) -> None:
        if not self.copies:
            return
        teacher = self.copies[-1]
        way = self.rng.randrange(4)
        self.does(f"average {way}")
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), self.params, strict=True):
                if way == 0:
                    a.data.mul_(0.9).add_(b.data, alpha=0.1)
                elif way == 1:
                    a.lerp_(b, 0.1)
                elif way == 2:
                    a.data = a.data * 0.9 + b.data * 0.1
                else:
                    a.data.copy_(b.data)
            self.keep(self.loss(teacher))

    def teach(self) -> None:
        """One loss of two models, whose teacher is written between their forwards."""
        if not self.copies:
            return
        teacher = self.copies[-1]
        self.clear()
        x = self.batch()
        out = self.model(x)
        self.average()
        with torch.no_grad():
            wanted = teacher(x)
        loss = (out - wanted).square().mean()
        self.backward(loss)
        self.step()
        self.keep(loss)

    def train_copy(self) -> None:
        if not self.copies:
            return
        model = self.copies[-1]
        optimizer = self.make_optimizer(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.loss(model)
            if loss.requires_grad:
                self.backward(loss)
                optimizer.step()
            self.keep(loss)

    def save_state(self) -> None:
        state = self.model.state_dict(), self.optimizer.state_dict()
        if self.rng.random() < 0.5:  # whole values, as a file of one device has them
            state = map_tensors(state, lambda t: whole(t).detach().clone())
        else:
            state = map_tensors(state, lambda t: t.detach().clone())
        self.saved = state

    def load_state(self) -> None:
        if self.saved is None:
            self.save_state()
            self.train()
        model, optimizer = copy.deepcopy(self.saved)
        if self.rng.random() < 0.8:
            self.model.load_state_dict(model)
        if self.rng.random() < 0.8:
            self.optimizer.load_state_dict(optimizer)
        self.train()

    def write(self) -> None:
        self.write_parameters(self.some(), self.rng.randrange(6))

    def write_parameters(self, params: list[Any], way: int) -> None:
        self.does(f"write {way}")
        with torch.no_grad():
            for p in params:
                if way == 0:
                    p.mul_(0.9)
                elif way == 1:
                    p.data.mul_(0.9)
                elif way == 2:
                    p.data = p.data * 0.9
                elif way == 3:
                    p.detach().mul_(0.9)
                elif way == 4:
                    p.copy_(p * 0.9)
                else:
                    torch._foreach_mul_([p.data], 0.9)

    def write_between(self) -> None:
        """Through `.data`, which autograd does not count, between forward and backward."""
        self.clear()
        loss = self.loss()
        before = [p.data.clone() for p in self.params]
        self.write_parameters(self.params, self.rng.choice((1, 2, 5)))
        if self.rng.random() < 0.6:
            for p, old in zip(self.params, before, strict=True):
                p.data.copy_(old)
        self.backward(loss)
        self.step()

    def write_in_forward(self) -> None:
        """A hook of one block writes those of a later one, which may be being gathered."""
        blocks = [*self.model.blocks]
        i = self.rng.randrange(len(blocks))
        others = [*(self.model.head, self.model.norm), *blocks[i + 1 :]]
        other = self.rng.choice(others)
        way = self.rng.choice((1, 2, 5))

        def write(*_: Any) -> None:
            self.write_parameters(list(other.parameters()), way)

        hook = blocks[i].register_forward_hook(write)
        if self.rng.random() < 0.3:
            hook.remove()

            def write_vector(*_: Any) -> None:
                with torch.no_grad():
                    v = nn.utils.parameters_to_vector(other.parameters())
                    nn.utils.vector_to_parameters(v * 0.9, other.parameters())

            hook = blocks[i].register_forward_hook(write_vector)
        with self.without_recompute():
            self.train()
            self.train()
        hook.remove()

    @contextmanager
    def without_recompute(self) -> Iterator[None]:
        before, self.model.recompute = self.model.recompute, "no"
        try:
            yield
        finally:
            self.model.recompute = before

    def swap_averages(self) -> None:
        averages = [p.detach().clone() * 0.9 for p in self.params]
        for _ in range(2):
            old = [p.data.clone() for p in self.params]
            for p, a in zip(self.params, averages, strict=True):
                p.data.copy_(a)
            with torch.no_grad():
                self.keep(self.loss())
            for p, b in zip(self.params, old, strict=True):
                if self.rng.random() < 0.5:
                    p.data.copy_(b)
                else:
                    p.data = b
        self.train()

    def differentiate_twice(self) -> None:
        if self.model.recompute in ("reentrant", "remat", "composable") or self.hooks:
            return self.train()
        self.clear()
        wanted = [p for p in self.params if p.requires_grad]
        if not wanted:
            return None
        loss = self.loss()
        if self.rng.random() < 0.5:
            grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            penalty = sum(g.square().sum() for g in grads if g is not None)
            self.keep(*grads)
        else:
            loss.backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in wanted if p.grad is not None)
            penalty = penalty * 0.1
        self.backward(loss + penalty if self.rng.random() < 0.5 else penalty)
        self.keep(*[p.grad for p in self.params])
        self.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()
        return None

    def ask_gradients(self) -> None:
        if self.model.recompute in ("reentrant", "composable"):  # as torch's own cannot
            return self.train()
        wanted = [p for p in self.some() if p.requires_grad]
        if not wanted:
            return None
        loss = self.loss()
        if not loss.requires_grad:
            return None
        self.how.pause()
        self.keep(*torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
        if self.rng.random() < 0.5:
            self.backward(loss, inputs=wanted)
        else:
            self.backward(loss)
        self.step()
        self.clear()
        return None

    def call_block_alone(self) -> None:
        self.clear()
        x = torch.randn(self.rows, self.model.width, generator=self.draws)
        block = self.rng.choice([*self.model.blocks])
        loss = block(self.how.spread(x)).square().mean()
        if self.rng.random() < 0.5:
            loss = loss + self.loss()
        self.backward(loss)
        self.step()
        self.keep(loss)

    def two_optimizers(self) -> None:
        """One steps between the forward and the backward of the other's loss."""
        self.clear()
        x = torch.randn(self.rows, self.model.width, generator=self.draws)
        one = self.model.blocks[0]
        rest = [*self.model.norm.parameters()]
        other = self.make_optimizer(rest)
        loss = one(self.how.spread(x)).square().mean()
        second = self.model.norm(self.how.spread(x)).square().mean()
        self.backward(second)
        other.step()
        other.zero_grad()
        self.backward(loss)
        self.step()
        self.keep(loss, second)

    def forget(self) -> None:
        """A forward whose loss is dropped, or kept and never used."""
        loss = self.loss()
        if self.rng.random() < 0.5:
            self.keep(loss)
        del loss
        self.train()

    def clear_some(self) -> None:
        self.backward(self.loss())
        for p in self.some():
            p.grad = None
        self.backward(self.loss())
        self.step()
        self.clear()

    def finish(self) -> None:
        self.keep(*self.params, *[p.grad for p in self.params], *self.model.buffers())
        for model in self.copies:
            self.keep(*model.parameters())


def halve_gradient(p: Any) -> None:
    p.grad.mul_(0.5)


def clamp_gradient(p: Any) -> None:
    p.grad.clamp_(-0.02, 0.02)


def halve(grads: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in grads)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(v, change) for v in value])
    return value


ACTIONS = tuple(
    name
    for name, method in vars(Program).items()
    if callable(method)
    and not name.startswith("_")
    and name
    not in (
        "does keep some batch loss backward step clear change_gradients finish write_parameters "
        "without_recompute"
    ).split()
)


def run_program(seed: int, how: OneDevice) -> tuple[Program, BaseException | None]:
    """Run the program of `seed`. Returns it with what it computed, and the error that ended it.

    The caller has set float64 as the default dtype, which all ranks of one process share.
    """
    program = None
    try:
        rng = random.Random(seed)
        program = Program(rng, how)
        program.train()
        for _ in range(rng.randint(2, 6)):
            action = rng.choice(ACTIONS)
            program.does(action)
            getattr(program, action)()
            how.pause()
        program.finish()
    except Exception as error:
        if program is None:
            raise
        error.add_note("".join(traceback.format_tb(error.__traceback__)[-3:]))
        return program, error
    return program, None


@dataclass
class Report:
    """What runs of many programs have come to, on one rank.

    Attributes:
        wrong, unclear: a line for each program that computed other values, or raised an error that
            one device does not and that is no documented refusal.
        refused: how many were refused in words.
        right, skipped: how many were right, and how many one device refuses.
        moves: a digest of what this rank has sent in each program.
    """

    wrong: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    refused: int = 0
    right: int = 0
    skipped: int = 0
    moves: list[int] = field(default_factory=list)


_REFUSALS = ("no rank keeps that cast", "given other memory")


def run_programs(
    seeds: Any, mesh: Any, stages: Any = (0, 1, 2, 3), garbage: random.Random | None = None
) -> Report:
    """Run programs as a rank of `mesh`, under each of `stages`, and compare with one device."""
    report = Report()
    for seed in seeds:
        wanted, error = run_program(seed, OneDevice())
        if error is not None:
            report.skipped += 1
            continue
        for stage in stages:
            with pt.ledger() as log:
                found, error = run_program(seed, OnRanks(mesh, stage, garbage))
            # A line "kept" is of this rank's memory: nothing is sent.
            sent = [
                (r.kind, r.axes, r.nbytes, r.op, r.reason) for r in log.moves if r.kind != "kept"
            ]
            report.moves.append(zlib.crc32(repr(sent).encode()))
            what = f"seed {seed}, stage {stage}: "
            if error is None:
                difference = compare(wanted, found)
                if difference is None:
                    report.right += 1
                else:
                    report.wrong.append(f"{what}{difference} after {found.names}")
            elif isinstance(error, pt.LayoutError) or any(w in str(error) for w in _REFUSALS):
                report.refused += 1
            else:
                report.unclear.append(f"{what}{error!r} after {found.names}")
    return report


def compare(wanted: Program, found: Program) -> str | None:
    """The first value in which two runs of a program differ, in words; None where they agree."""
    if len(wanted.values) != len(found.values):
        return f"{len(found.values)} values, not {len(wanted.values)}"
    for i, (a, b) in enumerate(zip(wanted.values, found.values, strict=True)):
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
            return f"value {i} of {len(wanted.values)}: {b} in place of {a}"
        if isinstance(a, torch.Tensor):
            near = torch.allclose(a, b, rtol=wanted.tolerance, atol=wanted.tolerance)
            if a.shape != b.shape or not near:
                return f"value {i} of {len(wanted.values)}: off by {(a - b).abs().max().item():.3g}"
        elif (
            a != b if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) else True
        ):
            return f"value {i} of {len(wanted.values)}: {b} in place of {a}"
    return None
