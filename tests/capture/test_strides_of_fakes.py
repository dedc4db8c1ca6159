"""The values of a captured graph lie in memory as their fakes do, forward and backward.

    PARTITA_EXAMPLES=6 python -m pytest tests/capture/test_strides_of_fakes.py --timeout 0

takes six samples of each op of torch's own list instead of one.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import partita as pt
from partita.testing.opinfo import choose_samples, form_of, list_names
from tests.programs.strides import watch_strides

SAMPLES = int(os.environ.get("PARTITA_EXAMPLES", "1"))
number_env = importlib.import_module("partita.capture.number_env")

ACTIVATIONS = {
    **{f.__name__: f for f in (F.softplus, F.elu, F.selu, F.celu, F.hardtanh, F.relu6, F.silu)},
    **{f.__name__: f for f in (F.hardswish, F.hardsigmoid, F.leaky_relu, F.gelu, F.logsigmoid)},
    "logit": lambda x: torch.logit(x, eps=0.1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "xlogy": lambda x: torch.xlogy(x, x.detach() * x.detach() + 1),
    "mse_loss": lambda x: F.mse_loss(x, x.detach().mT.contiguous().mT * 0, reduction="none"),
    "dropout": lambda x: F.dropout(x, 0.5),
}


def train(function, x, weights):
    """A step in which a gradient arrives transposed, is copied, and is shown in another shape."""
    hidden = function(F.linear(x, weights[0]))
    loss = (hidden.transpose(1, 2).contiguous() * weights[1]).sum()
    return torch.autograd.grad(loss, [x, weights[0]])


def operands():
    torch.manual_seed(0)
    x = torch.randn(2, 12, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    return x, [weight, torch.randn(2, 4, 12, dtype=torch.float64)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_step_through_an_activation_is_eager_s(name):
    def step(x, weights):
        return train(ACTIVATIONS[name], x, weights)

    torch.manual_seed(1)
    wanted = step(*operands())
    captured = pt.compile(step, backend="graph")
    torch.manual_seed(1)
    found = captured(*operands())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    with watch_strides(captured.program) as differing:
        captured(*operands())
    assert not differing


@pytest.mark.slow
def test_a_step_through_an_activation_is_eager_s_under_inductor():
    def step(x, weights):
        return train(F.softplus, x, weights)

    torch.testing.assert_close(pt.compile(step)(*operands()), step(*operands()), rtol=0, atol=1e-9)


def test_a_step_is_right_where_a_fake_lies_otherwise_than_its_value(monkeypatch):
    """Where no kernel says how large operands lie, a view by a fake's strides may have to copy."""
    monkeypatch.setattr(number_env, "KernelStridesMode", FakeTensorMode)

    def step(x, weights):
        return train(F.softplus, x, weights)

    captured = pt.compile(step, backend="graph")
    torch.testing.assert_close(captured(*operands()), step(*operands()), rtol=0, atol=1e-9)
    with watch_strides(captured.program) as differing:
        captured(*operands())
    assert any("softplus_backward" in line for line in differing)


# -- torch's own list ------------------------------------------------------------------------------

KINDS = ("norm", "loss", "pool", "pad", "softm", "activ", "interp", "upsample", "dropout", "logit")
LEFT_OUT = ("sparse", "linalg", "fft", "signal", "masked", "quant", "_segment", "histogram")
SLICES = 8


def names_of_ops() -> list[str]:
    """Pointwise ops, norms, losses, pooling and what is like these, of torch's own list."""
    pointwise = {
        p.__name__ if hasattr(p, "__name__") else str(p)
        for p in (getattr(torch.ops.aten, n, None) for n in dir(torch.ops.aten))
        if p is not None
        and hasattr(p, "overloads")
        and any(torch.Tag.pointwise in getattr(p, o).tags for o in p.overloads())
    }
    names = [n for n in list_names() if not n.startswith(LEFT_OUT)]
    last = {n: n.rpartition(".")[2] for n in names}
    return [n for n in names if last[n] in pointwise or any(kind in n for kind in KINDS)]


def permuted(t: Any, turn: int) -> Any:
    """`t` with its dimensions in another order in memory."""
    if not isinstance(t, torch.Tensor) or t.dim() < 2 or t.layout is not torch.strided:
        return t
    dims = [*range(t.dim())]
    order = [dims[::-1], [0, *dims[2:], 1], [*dims[:-2], dims[-1], dims[-2]]][turn % 3]
    inverse = [order.index(d) for d in dims]
    return t.detach().permute(order).contiguous().permute(inverse).requires_grad_(t.requires_grad)


def thicken(sample: Any) -> Any:
    """The sample with three dimensions in place of one, which has only one order in memory."""
    if not isinstance(sample.input, torch.Tensor) or sample.input.dim() != 1:
        return sample
    if len(sample.input) < 2 or pytree.tree_leaves((sample.args, sample.kwargs)):
        return sample
    flat = sample.input.detach()
    flat = flat[torch.arange(24) % len(flat)].view(2, 3, 4)
    return type(sample)(flat.requires_grad_(sample.input.requires_grad))


def differing_strides(op: Any, sample: Any, turn: int) -> list[str]:
    """The values of the graph of an op, forward and backward, that lie otherwise than their fakes.

    Every other turn the operands are permuted and gradients are not, or the other way round.
    """
    of_operands, of_gradients = (turn, -1) if turn % 2 else (-1, turn)
    given = (sample.input, sample.args, sample.kwargs)
    given = pytree.tree_map(lambda t: t if of_operands < 0 else permuted(t, of_operands), given)
    leaves, structure = pytree.tree_flatten(given)
    places = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)]

    def run(tensors):
        values = [*leaves]
        for i, t in zip(places, tensors, strict=True):
            values[i] = t
        first, args, kwargs = pytree.tree_unflatten(values, structure)
        return [t for t in pytree.tree_leaves(op(first, *args, **kwargs)) if torch.is_tensor(t)]

    def step(tensors, cotangents):
        made = run(tensors)
        graded = [t for t in made if t.requires_grad]
        inputs = [t for t in tensors if t.requires_grad]
        if not graded:
            return [made, []]
        found = torch.autograd.grad(graded, inputs, cotangents, allow_unused=True)
        return [[t.detach() for t in made], [g for g in found if g is not None]]

    tensors = [leaves[i] for i in places]
    graded = [t for t in run(tensors) if t.requires_grad]
    cotangents = [torch.ones(t.shape, dtype=t.dtype) for t in graded]
    if of_gradients >= 0:
        cotangents = [permuted(t, of_gradients) for t in cotangents]
    captured = pt.compile(step, backend="graph")
    captured(tensors, cotangents)
    with watch_strides(captured.program) as differing:
        captured(tensors, cotangents)
    return differing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(SLICES))
def test_each_op_of_torch_lies_in_graphs_as_its_fake_says(part):
    names = names_of_ops()[part::SLICES]
    bad, tried, refused = {}, 0, []
    for name in names:
        form = form_of(name)
        for number, sample in enumerate(choose_samples(form, SAMPLES)):
            for turn in range(2 if SAMPLES == 1 else 6):
                try:
                    found = differing_strides(form.call, thicken(sample), turn + number)
                except (
                    pt.CaptureError,
                    pt.LayoutError,
                    RuntimeError,
                    ValueError,
                    TypeError,
                ) as error:
                    refused.append(f"{name}: {error}"[:200])
                    continue
                tried += 1
                if found:
                    bad[name] = found[0]
    print(f"{len(names)} ops, {tried} graphs, {len(bad)} differ, {len(refused)} refused: {refused}")
    assert not bad
    assert tried > 2 * len(refused)
