"""Is a layout that cannot be one clear error on every rank, with a way out that works?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partita as pt
from partita import Invariant, LayoutError, Partial, Replicate, Shard
from tests.programs.refused import each_rank, refusal

T = torch.arange(32.0).view(8, 4)
MESHES = [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}, {"dp": 1, "tp": 1}]
WORDS = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial, "Invariant": Invariant}


def refused(fn, **axes):
    return refusal(fn, place=__file__, **axes)


def spread(mesh, t=T, first=None):
    """`t` split over the first axis, whole along the others."""
    return pt.distribute_tensor(t, mesh, [first or Shard(0), *[Replicate()] * (mesh.ndim - 1)])


def placements_of(fix):
    """The placements that a fix tells the user to write."""
    return eval(fix.write.removeprefix("placements="), WORDS)


# -- a plain tensor that requires grad -------------------------------------------------------------


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_plain_parameter_is_refused_and_each_way_out_works(axes):
    weight = torch.linspace(-1, 1, 12).view(3, 4)

    def body(mesh, made):
        w = made(nn.Parameter(weight.clone()), mesh)
        loss = F.linear(spread(mesh), w).pow(2).sum()
        loss.backward()
        return loss.item(), w.grad.full_tensor() if isinstance(w, pt.DTensor) else None

    error = refused(lambda mesh: body(mesh, lambda w, mesh: w), **axes)
    assert "linear: a plain tensor that requires grad" in error.fact
    assert "(3, 4)" in str(error)
    assert [f.write.partition("(")[0] for f in error.fixes] == [
        "pt.distribute_tensor",
        "pt.DTensor.from_local",
        "t.detach",
    ]
    one = weight.clone().requires_grad_()
    loss = F.linear(T, one).pow(2).sum()
    loss.backward()
    with pt.ranks(**axes) as world:
        for made in (
            lambda w, mesh: pt.distribute_tensor(w, mesh),
            lambda w, mesh: pt.DTensor.from_local(w.detach(), mesh).requires_grad_(),
            lambda w, mesh: w.detach(),
        ):
            try:
                results = world.run(body, made)
            except RuntimeError as told:  # nothing is left that requires grad
                assert "does not require grad" in str(told)
                continue
            for value, grad in results:
                torch.testing.assert_close(value, loss.item())
                torch.testing.assert_close(grad, one.grad)


def test_where_no_gradient_is_asked_for_it_may_stand_there():
    def body(mesh):
        with torch.no_grad():
            return (spread(mesh) + torch.ones(4, requires_grad=True)).full_tensor()

    with pt.ranks(dp=2) as world:
        assert all(torch.equal(out, T + 1) for out in world.run(body))


# -- two meshes ------------------------------------------------------------------------------------

TWO_MESHES = {
    "an operator": lambda x, y: x + y,
    "a list": lambda x, y: torch.cat([x, y]),
    "foreach": lambda x, y: torch._foreach_add([x], [y]),
    "an op without a rule": lambda x, y: torch.cdist(x, y),
    "a composite": lambda x, y: F.mse_loss(x, y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "in place": lambda x, y: x.mul_(y),
    "copy_": lambda x, y: x.copy_(y),
    "setitem": lambda x, y: x.__setitem__(0, y[0]),
    "a mask": lambda x, y: x.__setitem__(y > 0, 0.0),
    "where": lambda x, y: torch.where(y > 0, x, x),
    "a root's gradient": lambda x, y: (x.requires_grad_() * 2).backward(y),
    "a gradient": lambda x, y: setattr(x.requires_grad_(), "grad", y),
    "out=": lambda x, y: torch.neg(x, out=y),
    "redistribute": lambda x, y: x.redistribute(y.device_mesh, [Shard(0)]),
    "distribute_tensor": lambda x, y: pt.distribute_tensor(x, y.device_mesh, [Shard(0)]),
}


@pytest.mark.parametrize("how", TWO_MESHES)
def test_two_meshes_do_not_meet_in_one_op(how):
    def body(mesh):
        return TWO_MESHES[how](spread(mesh["dp"]), spread(mesh["tp"]))

    error = refused(body, dp=2, tp=2)
    assert "mesh" in error.fact
    assert any("full_tensor()" in fix.write or "mesh" in fix.write for fix in error.fixes)


def test_a_tensor_that_is_brought_to_the_other_mesh_meets_it():
    def body(mesh):
        x, y = spread(mesh["dp"]), spread(mesh["tp"])
        y = pt.distribute_tensor(y.full_tensor(), x.device_mesh, x.placements)
        return (x + y).full_tensor()

    with pt.ranks(dp=2, tp=2) as world:
        assert all(torch.equal(out, T + T) for out in world.run(body))


# -- placements that do not fit --------------------------------------------------------------------

TAKES_PLACEMENTS = {
    "distribute_tensor": lambda mesh, p: pt.distribute_tensor(T, mesh, p),
    "from_local": lambda mesh, p: pt.DTensor.from_local(T, mesh, p),
    "zeros": lambda mesh, p: pt.zeros(8, 4, device_mesh=mesh, placements=p),
    "randn": lambda mesh, p: pt.randn(8, 4, device_mesh=mesh, placements=p),
    "full": lambda mesh, p: pt.full((8, 4), 3.0, device_mesh=mesh, placements=p),
    "redistribute": lambda mesh, p: spread(mesh).redistribute(placements=p),
    "to_local": lambda mesh, p: spread(mesh).to_local(grad_placements=p),
    "full_tensor": lambda mesh, p: spread(mesh).full_tensor(grad_placements=p),
    "local_map": lambda mesh, p: pt.local_map(lambda x: x, p)(spread(mesh, first=Replicate())),
}
BAD_PLACEMENTS = {
    "too few": ([Shard(0)], "1 placement for mesh dp=2 tp=2"),
    "too many": ([Shard(0)] * 3, "3 placements for mesh dp=2 tp=2"),
    "not a list": (Shard(0), "1 placement for mesh dp=2 tp=2"),
    "out of range": ([Replicate(), Shard(2)], "Shard(2) on axis tp is out of range"),
    "below range": ([Shard(-3), Replicate()], "Shard(-3) on axis dp is out of range"),
    "no placement": ([Shard(0), "tp"], "'tp' on axis tp is not a placement"),
}


@pytest.mark.parametrize("how", TAKES_PLACEMENTS)
@pytest.mark.parametrize("bad", BAD_PLACEMENTS)
def test_placements_that_do_not_fit_are_refused_and_the_ones_proposed_do(how, bad):
    given, fact = BAD_PLACEMENTS[bad]
    error = refused(lambda mesh: TAKES_PLACEMENTS[how](mesh, given), dp=2, tp=2)
    assert fact in error.fact
    proposed = placements_of(error.fixes[0])
    with pt.ranks(dp=2, tp=2) as world:
        made = world.run(lambda mesh: TAKES_PLACEMENTS[how](mesh, proposed))
    assert all(isinstance(x, torch.Tensor) for x in made)


def test_a_scalar_has_no_dimension_to_shard():
    error = refused(lambda mesh: pt.distribute_tensor(torch.tensor(1.0), mesh, [Shard(0)]), dp=2)
    assert "Shard(0) on axis dp is out of range for shape ()" in error.fact
    assert placements_of(error.fixes[0]) == [Replicate()]


# -- meshes and axes -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "cpu", (2, 2)], ids=repr)
def test_what_is_no_mesh_is_refused(given):
    error = refused(lambda mesh: pt.distribute_tensor(T, given, [Replicate()]))
    assert f"device_mesh is {given!r}" in error.fact
    assert "init_device_mesh" in error.fixes[0].write


def test_a_factory_without_a_mesh_says_so():
    assert "device_mesh is None" in refused(lambda mesh: pt.zeros(4)).fact


@pytest.mark.parametrize("ask", ["part", "size", "rank", "number"])
def test_an_unknown_axis_is_named_beside_those_that_there_are(ask):
    def body(mesh, axis):
        if ask == "part":
            return mesh[axis].size()
        if ask == "rank":
            return mesh.get_local_rank(axis)
        return mesh.size(axis)

    wrong = 7 if ask == "number" else "pp"
    error = refused(lambda mesh: body(mesh, wrong), dp=2, tp=3)
    assert error.fact == f"no axis {wrong!r} on mesh dp=2 tp=3"
    with pt.ranks(dp=2, tp=3) as world:
        for fix in error.fixes:
            world.run(body, eval(fix.write))


# -- local pieces that do not go together ----------------------------------------------------------


def test_a_piece_that_does_not_fit_the_stated_shape_is_refused_by_all_ranks():
    def body(mesh):
        n = 3 if mesh.get_rank() == 2 else 4
        return pt.DTensor.from_local(torch.ones(n, 4), mesh, [Shard(0), Replicate()], shape=(8, 4))

    results = each_rank(body, dp=2, tp=2)
    assert [isinstance(r, LayoutError) for r in results] == [True] * 4
    for error in results:
        assert "the piece of rank 2 does not fit the stated shape (8, 4)" in error.fact
        assert error.fixes[0].write == "a piece of shape (4, 4)"


BAD_PIECES = {
    "one is short": lambda r: (torch.ones(3 if r == 2 else 4, 4), {"shape": (8, 4)}),
    "all are short": lambda r: (torch.ones(3, 4), {"shape": (8, 4)}),
    "one is short and no shape is stated": lambda r: (torch.ones(3 if r == 2 else 4, 4), {}),
    "one has another rank": lambda r: (torch.ones(4) if r == 2 else torch.ones(4, 4), {}),
    "one has another dtype": lambda r: (torch.ones(4, 4).to([torch.float64, T.dtype][r < 3]), {}),
    "one states another shape": lambda r: (torch.ones(4, 4), {"shape": (8, 4) if r else (9, 4)}),
    "one states other placements": lambda r: (
        torch.ones(4, 4),
        {"placements": [Replicate(), Shard(0)] if r == 1 else [Shard(0), Replicate()]},
    ),
}


@pytest.mark.parametrize("how", BAD_PIECES)
def test_with_run_check_all_ranks_refuse_what_one_brings(how):
    def body(mesh):
        local, options = BAD_PIECES[how](mesh.get_rank())
        options.setdefault("placements", [Shard(0), Replicate()])
        return pt.DTensor.from_local(local, mesh, run_check=True, **options)

    error = refused(body, dp=2, tp=2)
    assert error.fact.startswith("from_local: ")
    assert len(error.operands) == 2  # what was brought, and what it does not go together with


def test_the_shape_that_uneven_pieces_make_is_told_and_is_right():
    def body(mesh, **options):
        n = [3, 3, 1][mesh.get_local_rank("dp")]
        local = torch.full((n, 2), float(mesh.get_local_rank("dp")))
        placements = [Shard(0), Replicate()]
        return pt.DTensor.from_local(local, mesh, placements, run_check=True, **options)

    error = refused(body, dp=3, tp=2)
    assert error.fixes[0].write == "shape=(7, 2)"
    with pt.ranks(dp=3, tp=2) as world:
        for x in world.run(lambda mesh: body(mesh, shape=(7, 2)).full_tensor()):
            assert x[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("placement", [Replicate(), Invariant()], ids=str)
def test_a_false_whole_value_is_refused_and_not_overwritten(placement):
    def body(mesh, last=placement):
        local = T[:4] + mesh.get_local_rank("tp")
        try:
            x = pt.DTensor.from_local(local, mesh, [Shard(0), last], run_check=True)
        finally:
            assert torch.equal(local, T[:4] + mesh.get_local_rank("tp"))
        return x.full_tensor()

    error = refused(body, dp=2, tp=2)
    assert "the ranks along tp do not hold the same value" in error.fact
    last = placements_of(error.fixes[1])[-1]
    with pt.ranks(dp=2, tp=2) as world:
        for out in world.run(lambda mesh: body(mesh, last)):
            assert torch.equal(out, torch.cat([T[:4], T[:4]]) * 2 + 1)


def test_from_local_of_a_dtensor_is_refused_and_each_way_out_works():
    places = [Replicate(), Shard(0)]
    error = refused(lambda mesh: pt.DTensor.from_local(spread(mesh), mesh, places))
    assert len(error.fixes) == 2

    def body(mesh):
        x = spread(mesh)
        again = pt.DTensor.from_local(x.to_local(), mesh, x.placements)
        return x.redistribute(placements=places).full_tensor(), again.full_tensor()

    with pt.ranks(dp=2, tp=2) as world:
        assert all(torch.equal(a, T) and torch.equal(b, T) for a, b in world.run(body))


# -- tensors that ranks spread ---------------------------------------------------------------------


def test_ranks_that_spread_different_things_are_told_both():
    error = refused(lambda mesh: pt.distribute_tensor(torch.ones(4 - mesh.get_rank()), mesh), dp=2)
    assert "distribute_tensor: the ranks pass different arguments" in error.fact
    assert "rank 0  [4]" in error.operands[0] and "rank 1  [3]" in error.operands[1]


def test_a_source_that_is_no_rank_of_the_mesh_is_refused():
    error = refused(lambda mesh: pt.distribute_tensor(T, mesh, src_data_rank=4), dp=2, tp=2)
    assert "src_data_rank=4" in error.fact
    with pt.ranks(dp=2, tp=2) as world:
        body = lambda mesh: pt.distribute_tensor(T + mesh.get_rank(), mesh, src_data_rank=3)  # noqa: E731
        assert all(torch.equal(x.to_local(), T + 3) for x in world.run(body))


def test_a_tensor_with_a_history_is_not_spread_but_taken():
    def history():
        leaf = T.clone().requires_grad_()
        return leaf, leaf * 2

    error = refused(lambda mesh: pt.distribute_tensor(history()[1], mesh), dp=2)
    assert [f.write for f in error.fixes] == [
        "pt.distribute_tensor(t.detach(), ...)",
        "pt.DTensor.from_local(t, ...)",
    ]

    def body(mesh):
        leaf, t = history()
        pt.DTensor.from_local(t, mesh, grad_placements=[pt.Partial()]).sum().backward()
        return leaf.grad

    # Along a Replicate axis gradients are shares: theirs add up to one device's.
    with pt.ranks(dp=2) as world:
        assert torch.equal(sum(world.run(body)), torch.full_like(T, 2))
