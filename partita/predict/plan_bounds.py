"""Bounds of a plan: what a way of spreading a model takes at least, and guesses of what it takes.

A bound is never above what a simulation finds, whatever the model is, so that it may leave ways
out; a guess is near it, and says only which way to simulate next. Both are reckoned from one run of
the unsharded model over tensors without memory, of one block and of two.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .machine import Machine, MeasuredCurve
from .strategy import ModelShape, Way

_PRODUCTS = ("matmul", "batched_matmul", "convolution", "convolution_backward")
_LEAST_SIZE = 2
"""Bytes of an element that is sent or computed with: no precision has fewer."""
_KERNELS = 8
"""Kernels to each product, guessed."""


@dataclass
class _ModelNeeds:
    """What one micro-batch of an unsharded model needs: of bytes, where not said otherwise.

    Attributes:
        weights: of all parameters.
        state: what AdamW keeps of those that get a gradient.
        gradients: of these, in the smallest dtype in which they could be sent.
        results: of the blocks' results, likewise.
        saved: what backward reads of forward, parameters left out.
        flops: operations of products by dtype.
        products: how many there are.
    """

    weights: float = 0.0
    state: float = 0.0
    gradients: float = 0.0
    results: float = 0.0
    saved: float = 0.0
    flops: Counter[torch.dtype] = field(default_factory=Counter)
    products: float = 0.0

    def extend_to_layers(self, two: _ModelNeeds, layers: int) -> _ModelNeeds:
        """Of so many blocks: this is of one, and each further one adds what the second does."""

        def extend(a: float, b: float) -> float:
            return max(a + (layers - 1) * (b - a), 0.0)

        names = ("weights", "state", "gradients", "results", "saved", "products")
        found = {name: extend(getattr(self, name), getattr(two, name)) for name in names}
        dtypes = self.flops.keys() | two.flops.keys()
        flops = Counter({d: extend(self.flops[d], two.flops[d]) for d in dtypes})
        return _ModelNeeds(**found, flops=flops)


# -- bounds ----------------------------------------------------------------------------------------


def least_bytes(shape: ModelShape, way: Way) -> float:
    """Bytes that a rank holds between steps at least: its weights, and AdamW's state of those that
    get a gradient; a lower bound of the peak of a simulation."""
    of, needs = way.strategy, _needs_of(shape, way)
    weights = needs.weights / way.tp / (way.dp if of.zero == 3 else 1)
    return weights + needs.state / way.tp / (way.dp if of.zero else 1)


def least_seconds(shape: ModelShape, way: Way, machine: Machine) -> float:
    """Seconds of a step at least: the longest of what the processor and each link must do.

    The processor makes the products of the unsharded model, each rank of tp its part. Over dp each
    gradient is summed once a step; stage 3 also gathers each weight once a micro-batch. Over tp
    each block sums its results forward, once a micro-batch.
    """
    of, needs = way.strategy, _needs_of(shape, way)
    compute = of.micro_batches * _least_compute(needs, way, machine)
    over_dp = over_tp = 0.0
    if way.dp > 1:
        # Of one block a gathered weight may be kept from one micro-batch to the next.
        gathers = of.micro_batches if (of.layers or shape.layers) > 1 else 1
        times = 1 + (gathers if of.zero == 3 else 0)
        sent = times * needs.gradients / way.tp * (way.dp - 1) / way.dp
        over_dp = sent / _fastest_link(machine, "dp", way)
    if way.tp > 1:
        sent = shape.sums * of.micro_batches * needs.results * (way.tp - 1) / way.tp
        over_tp = sent / _fastest_link(machine, "tp", way)
    return max(compute, over_dp, over_tp)


def _least_compute(needs: _ModelNeeds, way: Way, machine: Machine) -> float:
    """Seconds of a micro-batch's products, each in the faster of its dtype and the precision."""
    curves = [machine.kernels[name] for name in _PRODUCTS if name in machine.kernels]
    reached = machine.efficiency["matmul"]
    seconds = 0.0
    for dtype, flops in needs.flops.items():
        names = (str(dtype).removeprefix("torch."), way.strategy.precision)
        peak = max(map(machine.peak_flops, names))
        slower = machine.peak_flops("float32") / peak
        rates = [peak * reached, *(_fastest_rate(curve) / slower for curve in curves)]
        seconds += flops / way.tp / max(rates)
    return seconds + (0.0 if curves else needs.products * machine.kernel_seconds)


def _fastest_link(machine: Machine, axis: str, way: Way) -> float:
    """Bytes per second that a rank sends over an axis at most."""
    reached = machine.reached_link((axis,), way.mesh).bandwidth
    if machine.given_link((axis,)) is not None:
        return reached
    ranks = way.mesh[axis]
    measured = [c for name, c in machine.collectives.items() if name.endswith(f"-{ranks}")]
    return max([reached, *map(_fastest_rate, measured)])


def _fastest_rate(curve: MeasuredCurve) -> float:
    """Amounts per second at most: at a point, between two, or beyond the last."""
    points = [*zip(curve.amounts, curve.seconds, strict=True)]
    if len(points) == 1:
        return math.inf
    (a, s), (b, t) = points[-2:]
    beyond = (b - a) / (t - s) if t > s else math.inf
    return max(beyond, *(amount / seconds for amount, seconds in points))


# -- guesses ---------------------------------------------------------------------------------------


def guess_seconds(shape: ModelShape, way: Way, machine: Machine) -> float:
    """Seconds that a step may take: products and kernels beside them, and links that are waited
    for. It orders ways, and leaves none out."""
    of, needs = way.strategy, _needs_of(shape, way)
    n, dp, tp = of.micro_batches, way.dp, way.tp
    again = 4 / 3 if of.remat else 1.0
    small = _KERNELS * needs.products * machine.kernel_seconds
    compute = n * again * (_least_compute(needs, way, machine) + small)
    over_dp = over_tp = 0.0
    if dp > 1:
        times = 2 + (2 * n - 1 if of.zero == 3 else 0)
        sent = times * needs.gradients / tp * (dp - 1) / dp
        over_dp = sent / _fastest_link(machine, "dp", way)
    if tp > 1:
        sent = 4 * shape.sums * again * n * needs.results * (tp - 1) / tp
        over_tp = sent / _fastest_link(machine, "tp", way)
    return compute + over_tp + max(over_dp - compute / 2, over_dp / 10)


def guess_bytes(shape: ModelShape, way: Way) -> float:
    """Bytes that a rank may hold at most: what it holds between steps, gradients, and what backward
    reads. It orders ways, and leaves none out."""
    of, needs = way.strategy, _needs_of(shape, way)
    layers = of.layers or shape.layers
    share = needs.weights / way.tp
    gradients = share / layers if of.micro_batches == 1 else share / (way.dp if of.zero > 1 else 1)
    gathered = share / layers if of.zero == 3 else 0.0
    saved = needs.saved / (2 if of.precision == "bfloat16" else 1)
    if of.remat:
        saved = saved / layers + needs.results
    split = way.tp if of.sequence else 2 * way.tp / (1 + way.tp)
    return least_bytes(shape, way) + gradients + gathered + saved / split


# -- the run that both are reckoned from -----------------------------------------------------------


def _needs_of(shape: ModelShape, way: Way) -> _ModelNeeds:
    of = way.strategy
    layers, context = of.layers or shape.layers, of.context or shape.context
    if layers <= 2:
        return _measure_needs(shape, layers, of.batch, context)
    one, two = (_measure_needs(shape, n, of.batch, context) for n in (1, 2))
    return one.extend_to_layers(two, layers)


@functools.lru_cache(maxsize=256)
def _measure_needs(shape: ModelShape, layers: int, batch: int, context: int) -> _ModelNeeds:
    """Of a model that cannot be run over tensors without memory no more than its weights."""
    with torch.device("meta"):
        module = shape.make(layers, context)
    parameters = [*module.parameters()]
    needs = _ModelNeeds(weights=_count_bytes(parameters))
    try:
        with torch.device("meta"):
            inputs, targets = shape.make_batch(batch, context)
            with _counting_needs(module, needs):
                shape.loss(module(inputs), targets).backward()
    except Exception:  # it reads a value, or calls what has no kernel for tensors without memory
        return _ModelNeeds(weights=needs.weights)
    trained = [p for p in parameters if p.grad is not None]
    needs.state = 2 * _count_bytes(trained)
    needs.gradients = sum(float(p.numel() * _least_size(p)) for p in trained)
    return needs


def _count_bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


@contextmanager
def _counting_needs(module: nn.Module, needs: _ModelNeeds) -> Iterator[None]:
    """Within, what the module does is counted into `needs`."""
    own = {id(p) for p in module.parameters()}
    seen: dict[int, Tensor] = {}

    def keep(saved: Tensor) -> Tensor:
        if id(saved) not in own and id(saved._base) not in own:
            owner = saved if saved._base is None else saved._base
            if id(owner) not in seen:
                seen[id(owner)] = owner
                needs.saved += owner.numel() * owner.element_size()
        return saved

    def count(block: nn.Module, args: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            needs.results += result.numel() * _least_size(result)

    blocks: Any = getattr(module, "blocks", ())
    hooks = [block.register_forward_hook(count) for block in blocks]
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved),
            _WithoutAttention(),
            _ProductCounter(needs),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _least_size(x: Tensor) -> int:
    return min(x.element_size(), _LEAST_SIZE)


class _WithoutAttention(TorchFunctionMode):
    """Attention is not counted: kernels of it differ in their operations."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        q, k, v = (given[name] for name in ("query", "key", "value"))
        return q.sum(-1, keepdim=True).expand(*q.shape[:-1], v.shape[-1]) + k.sum() + v.sum()


class _ProductCounter(TorchDispatchMode):
    """Counts products, their operations and their dtypes."""

    def __init__(self, needs: _ModelNeeds):
        super().__init__()
        self.needs = needs

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            first = next(a for a in args if isinstance(a, Tensor))
            self.needs.flops[first.dtype] += int(count(*args, **(kwargs or {}), out_val=result))
            self.needs.products += 1
        return result
