"""Is the module named that made the first nan?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt


class Block(nn.Module):
    """Finite, unless `fault` says in which pass it is not."""

    def __init__(self, fault: str):
        super().__init__()
        self.up, self.down, self.fault = nn.Linear(8, 8), nn.Linear(8, 8), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.fault == "forward":
            h = h * 0 / 0
        if self.fault == "backward":  # the slope of a root at 0 is infinite, and times 0 no number
            h = h + 0 * (h - h.detach()).abs().sqrt()
        if self.fault == "mask":
            h = self.masked(h)
        return self.down(h)

    def masked(self, h: torch.Tensor) -> torch.Tensor:
        return h.masked_fill(h < 0, -torch.inf).exp()


def watched(mesh, fault: str, how: str = "plain") -> str:
    """What `check` raises in a step of a model whose third part has the fault; "" for nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Block(""), Block(fault), nn.Linear(8, 3))
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    if fault == "a rank's own rows":
        x[5] = torch.inf
    if mesh is not None:
        pt.zero(model, mesh, stage=3) if "zero" in how else pt.parallelize(model, mesh)
        x, y = pt.distribute_batch((x, y), mesh)
    if "remat" in how:
        pt.remat(model, blocks=list(model))
    with pt.detect_nan(model) as watch:
        loss = F.cross_entropy(model(x), y)
        if fault == "loss":
            loss = loss * 0 / 0
        loss.backward()
        try:
            watch.check(loss, step=3)
        except pt.NanError as error:
            return str(error)
    return ""


SAID = {
    "forward": "the loss of step 3 is nan\n  the first nan is in the result of 2 (Block), whose "
    "inputs had none: not made by a module in it, but by its own forward (on rank 0)",
    "backward": "a gradient of step 3 is nan\n  the first nan gradient is that of the result of "
    "2.up (Linear); that of the result of 2 (Block), just before, is finite (on rank 0)",
    "loss": "the loss of step 3 is nan, though every module gave a finite result: code after "
    "the model produced it",
    "mask": "",
    "": "",
}


@pytest.mark.parametrize("fault", SAID)
def test_on_one_device_the_step_and_the_first_module_are_named(fault):
    assert watched(None, fault).startswith(SAID[fault])
    assert bool(watched(None, fault)) == bool(SAID[fault])


@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("how", ["plain", "remat", "zero", "zero, remat"])
def test_every_rank_names_them_alike(fault, how):
    with pt.ranks(dp=2) as world:
        said = world.run(lambda mesh: watched(mesh, fault, how))
    assert said[0] == said[1]
    assert said[0].startswith(SAID[fault]) and bool(said[0]) == bool(SAID[fault])


def test_a_nan_in_the_rows_of_one_rank_is_told_by_all_and_its_rank_is_named():
    with pt.ranks(dp=2) as world:
        said = world.run(lambda mesh: watched(mesh, "a rank's own rows"))
    assert said[0] == said[1]
    assert "(on rank 1)" in said[0] and "(on rank 0)" not in said[0]


def test_a_parameter_that_is_spoilt_already_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].bias[2] = torch.nan
    with (
        pt.detect_nan(model) as watch,
        pytest.raises(pt.NanError, match=r"result of 1 \(Linear\).*its bias is not finite"),
    ):
        watch.check(model(torch.ones(1, 4)).sum())


def test_watching_ends_and_leaves_no_hook():
    model = nn.Linear(2, 2)
    with pt.detect_nan(model):
        assert model._forward_hooks
    assert not model._forward_hooks
