"""Optimizers that keep their state in every form that third-party optimizers do."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer


class _Small(Optimizer):
    """Steps by `update(p, grad, state, group)`, which returns a direction."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p, p.grad, self.state[p], group), alpha=group["lr"])

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> torch.Tensor:
        raise NotImplementedError


class CountsInGroup(_Small):
    """A counter and a tensor that groups get by stepping, as D-Adaptation's."""

    def begin(self, group):
        group["step"] = group.get("step", 0) + 1
        group.setdefault("weighted", torch.zeros(1, dtype=torch.float64)).add_(group["step"])

    def update(self, p, grad, state, group):
        return grad * (group["weighted"].item() / group["step"] ** 2)


class Lists(_Small):
    """Lists of tensors of other shapes than the parameter's, as SOAP's and Kron's."""

    def update(self, p, grad, state, group):
        if not state:
            sides = p.shape if p.ndim == 2 else ()
            state["sides"] = [torch.zeros(n, dtype=p.dtype) for n in sides]
            state["moments"] = [torch.zeros_like(p), None, 0]
            state["blocks"] = [{"mean": torch.zeros_like(p), "seen": {}}]
        state["moments"][2] += 1
        state["moments"][0].lerp_(grad, 0.5)
        state["blocks"][0]["mean"].add_(grad.square())
        state["sides"] = [s * 0.5 + grad.square().mean(1 - i) for i, s in enumerate(state["sides"])]
        scale = 1 + sum(s.sum() for s in state["sides"])
        return (
            state["moments"][0] / (state["blocks"][0]["mean"].sqrt() + state["moments"][2]) / scale
        )


class Queue(_Small):
    """A deque of gradients, as AdaShift's."""

    def update(self, p, grad, state, group):
        queue = state.setdefault("queue", deque(maxlen=2))
        queue.append(grad.clone())
        assert len(queue) <= 2
        return queue[0] + 0.5 * queue[-1]


class NumberKeys(_Small):
    """A dict with numbers as keys, as AggMo's, an ordered one and a tuple of tensors."""

    def update(self, p, grad, state, group):
        if not state:
            state["by_beta"] = {beta: torch.zeros_like(p) for beta in (0.0, 0.9)}
            state["empty"] = {}
            state["pair"] = (torch.zeros_like(p), OrderedDict(a=1.0))
        for beta, held in state["by_beta"].items():
            held.mul_(beta).add_(grad)
        first, second = state["pair"]
        state["pair"] = (first + grad, OrderedDict(a=second["a"] + len(state["empty"]) + 1))
        return sum(state["by_beta"].values()) / (1 + first.abs()) / second["a"]


class BesideParameters(_Small):
    """State by names that are no parameter's, as MADGRAD's, SPAM's and the Emo optimizers'."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.rate = 1.0

    def begin(self, group):
        self.state.setdefault("k", torch.tensor([0])).add_(1)
        self.state.setdefault("ema", {"short": 0.0})["short"] += 0.25
        self.state["total"] = self.state.get("total", 0) + 1
        self.rate *= 0.9

    def update(self, p, grad, state, group):
        k = self.state["k"].item() + self.state["ema"]["short"] + self.state["total"]
        return grad * self.rate / k

    def state_dict(self):
        return {**super().state_dict(), "rate": self.rate, "warmup": {}}

    def load_state_dict(self, state):
        assert state["warmup"] == {}
        super().load_state_dict({k: state[k] for k in ("state", "param_groups")})
        self.rate = state["rate"]


class Norm(Enum):
    SIGN = 1
    NONE = 2


class Chooses(_Small):
    """An option that is a member of an Enum, as SCION's."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options, norm=Norm.SIGN)

    def update(self, p, grad, state, group):
        state["step"] = state.get("step", 0) + 1
        step = grad if group["norm"] is Norm.NONE else grad.sign()
        if state["step"] == 3:
            group["norm"] = Norm.NONE
        return step * 0.1


class Wraps(Optimizer):
    """Slow weights around AdamW, by (group, index), as Lookahead's."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.inner = torch.optim.AdamW(params, lr=0.05)
        self.defaults, self.slow, self.count = {}, {}, 0
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = (
            OrderedDict(),
            OrderedDict(),
        )

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.inner.step()
        self.count += 1
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                slow = self.slow.setdefault((i, j), {"slow": p.detach().clone()})["slow"]
                if self.count % 2 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)

    def state_dict(self):
        return {"count": self.count, "slow": dict(self.slow), "inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.count, self.slow = state["count"], {k: dict(v) for k, v in state["slow"].items()}
        self.inner.load_state_dict(state["inner"])


HOME_MADE = [CountsInGroup, Lists, Queue, NumberKeys, BesideParameters, Chooses, Wraps]
