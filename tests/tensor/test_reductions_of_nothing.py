"""What is made of no elements is torch's answer, or torch's error, on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import partita as pt

NAMES = "mean var std sum prod nansum nanmean amax amin max min argmax argmin median any all norm"
PLACES = {"all": {}, "dim": {"dim": 0}, "kept": {"dim": 0, "keepdim": True}, "other": {"dim": 1}}


def reduction(name, options):
    return lambda x: getattr(torch, name)(x, **options)


OPS = {
    f"{name} {place}": reduction(name, options)
    for name in NAMES.split()
    for place, options in PLACES.items()
} | {
    "var_mean": torch.var_mean,
    "aminmax": torch.aminmax,
    "logsumexp": lambda x: x.logsumexp(0),
    "largest norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "softmax": lambda x: F.softmax(x, 0),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, x[:, 0].long()),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x, x.abs()),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)),
    "gradient": lambda x: torch.autograd.grad((x.requires_grad_() * 2).mean(), x)[0],
}


def answer(run, x):
    try:
        found = run(x)
    except (RuntimeError, IndexError) as error:
        return type(error), str(error)
    found = found if isinstance(found, torch.Tensor) else found[0]
    found = found.full_tensor() if isinstance(found, pt.DTensor) else found
    return tuple(found.shape), found.dtype, str(found.tolist())


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("shape, dim", [((0, 3), 0), ((0, 3), 1), ((3, 0), 0)])
def test_what_is_made_of_nothing_is_torchs(shape, dim):
    def body(mesh):
        found = {}
        for name, run in OPS.items():
            if shape[1] or name not in ("cross_entropy", "batch_norm"):
                x = pt.distribute_tensor(torch.ones(shape), mesh, [pt.Shard(dim)])
                found[name] = answer(run, x)
        return found

    with pt.ranks(a=2) as world:
        for found in world.run(body):
            assert found == {name: answer(OPS[name], torch.ones(shape)) for name in found}
