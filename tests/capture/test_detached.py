"""What is detached of a tensor in a captured step is a tensor of its own, in the same memory."""

from __future__ import annotations

import pytest
import torch

import partita as pt

CHANGES = {
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.unsqueeze_(1).squeeze_(),
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "resize_": lambda t: t.resize_(2),
    "resize_as_": lambda t: t.resize_as_(torch.empty(2)),
    "as_strided_": lambda t: t.as_strided_((2,), (1,)),
    "set_": lambda t: t.set_(torch.zeros(2)),
    "add_": lambda t: t.add_(3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("given", "on_detached"), [(True, True), (False, True), (False, False)])
def test_a_change_of_one_is_no_change_of_the_other(change, on_detached, given):
    def step(x):
        kept = x if given else x * 2
        detached = kept.detach()
        CHANGES[change](detached if on_detached else kept)
        return kept + 0, detached + 0, kept.sum(), detached.sum(0), kept.detach().shape

    def values(step):
        with torch.no_grad():
            found = step(torch.arange(6.0).view(2, 3))
        return found[-1], [t.clone() for t in found[:-1]]

    shape, wanted = values(step)
    found_shape, found = values(pt.compile(step, backend="graph"))
    assert found_shape == shape
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert all(map(torch.equal, found, wanted))


def test_a_loss_that_is_logged_with_a_dimension_more_stays_a_number():
    weight = torch.nn.Parameter(torch.ones(3))

    def step(x):
        loss = (weight * x).sum()
        logged = loss.detach().unsqueeze_(0)
        loss.backward()
        return loss * 2, logged

    for _ in range(2):
        loss, logged = pt.compile(step, backend="graph")(torch.arange(3.0))
        assert loss.shape == () and logged.shape == (1,) and loss.item() == 6
