"""Which places of a tensor can a captured step read and write, when pieces begin at other places
on each rank and an index has no value yet?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import partita as pt

R, S = pt.Replicate(), pt.Shard
x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
odd = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
i = torch.tensor([0, 2, 1, 3])
row = torch.arange(6.0)


def written(write):
    def step(x, *more):
        y = x * 2
        write(y, *more)
        return y

    return step


def put(index, value=None):
    return written(lambda y, *v: y.__setitem__(index, v[0] if v else value))


STEPS = {
    "x[i]": (lambda x, i: x[i], x, i),
    "x[:, [0, 2]]": (lambda x: x[:, [0, 2]], x),
    "x[arange, i]": (lambda x, i: x[torch.arange(4), i], x, i),
    "x[b[:, None], i]": (lambda x, i: (x > 0)[i[:, None], i], x, i),
    "x[i[0]]": (lambda x, i: x[i[1]], x, i),
    "x[..., i[0], None]": (lambda x, i: x[..., i[1], None], x, i),
    "x[i, :, i[0]]": (lambda x, i: x[None].expand(4, 5, 6)[i, :, i[1]], odd, i),
    "x[2]": (lambda x: x[2], x),
    "x[-1, 1] of uneven pieces": (lambda x: x[None, -1, ..., 1], odd),
    "select": (lambda x: x.select(0, 4), odd),
    "triu": (lambda x: x.triu(1) + x.tril(-1), odd),
    "repeat_interleave": (lambda x, i: x.repeat_interleave(i, 0, output_size=6), x, i),
    "class weights": (lambda x, i, w: F.cross_entropy(x, i, weight=w), x, i, row + 1),
    "y[:, 0] = 3": (put((slice(None), 0), 3), x),
    "y[1:5:3, ::2] = 2.5": (put((slice(1, 5, 3), slice(0, None, 2)), 2.5), odd),
    "y[-1] = row": (put(-1), odd, row),
    "y[1:4, 2:4] = column": (put((slice(1, 4), slice(2, 4))), odd, row[:3, None]),
    "y[2:2] = 1": (put(slice(2, 2), 1.0), odd),
    "y[1:] = y[:-1]": (written(lambda y: y.__setitem__(slice(1, None), y[:-1].clone())), odd),
    "y[i[0]] = row": (written(lambda y, i, v: y.__setitem__(i[1], v)), x, i, row),
    "y[:, 0].fill_(3)": (written(lambda y: y[:, 0].fill_(3)), x),
}


def gradient_of(step, *given):
    first, *more = given
    first = first.detach().clone().requires_grad_()
    out = step(first, *more)
    if not out.requires_grad:
        return out, None
    weight = torch.arange(1.0, out.numel() + 1).view(out.shape)
    if isinstance(out, pt.DTensor):
        weight = pt.distribute_tensor(weight, out.device_mesh, [R])
    (out * weight).sum().backward()
    return out.detach(), first.grad


@pytest.mark.parametrize("placement", [R, S(0), S(1), pt.Partial()], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_a_captured_step_reads_and_writes_the_places_that_one_device_does(name, placement):
    step, *given = STEPS[name]
    want, want_grad = gradient_of(step, *given)

    def run(mesh):
        fast = pt.compile(step, backend="graph")
        first, *more = given
        first = pt.distribute_tensor(first, mesh, [placement])
        out, grad = gradient_of(fast, first, *[pt.distribute_tensor(t, mesh, [R]) for t in more])
        return out.full_tensor(), grad if grad is None else grad.full_tensor()

    with pt.ranks(dp=2) as world:
        for out, grad in world.run(run):
            torch.testing.assert_close(out, want)
            assert (grad is None) == (want_grad is None)
            if grad is not None:
                torch.testing.assert_close(grad, want_grad)


def test_a_place_out_of_bounds_is_an_error_when_the_graph_runs():
    step, *given = STEPS["y[i[0]] = row"]

    def run(mesh):
        fast = pt.compile(step, backend="graph")
        for last in (0, 9):
            places = torch.tensor([0, last])
            fast(*[pt.distribute_tensor(t, mesh, [S(0)]) for t in (given[0], places, row)])

    with pt.ranks(dp=2) as world, pytest.raises(IndexError, match="out of bounds"):
        world.run(run)


@pytest.mark.parametrize("index", ["mask", "nonzero"])
def test_a_shape_that_depends_on_data_is_refused_with_its_line(index):
    def step(x):
        return x[x > 0] if index == "mask" else (x > 0).nonzero()

    def run(mesh):
        return pt.compile(step, backend="graph")(pt.distribute_tensor(x, mesh, [S(0)]))

    match = r"depends on data.*test_indices"
    with pt.ranks(dp=2) as world, pytest.raises(pt.CaptureError, match=match):
        world.run(run)
