"""Is bad input one clear error on every rank, with a way out that works, and never a hang?"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import partita as pt
from partita import Invariant, LayoutError, Partial, Replicate, Shard
from tests.ranks.refused import each_rank, refusal

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
def test_a_plain_tensor_that_requires_grad_is_refused_and_each_way_out_works(axes):
    weight = torch.linspace(-1, 1, 12).view(3, 4)

    def body(mesh, made):
        w = weight.clone().requires_grad_()
        w = made(w, mesh)
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
            lambda w, mesh: w.detach().requires_grad_(False),
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
    "too few": ([Shard(0)], "1 placements for mesh dp=2 tp=2"),
    "too many": ([Shard(0)] * 3, "3 placements for mesh dp=2 tp=2"),
    "not a list": (Shard(0), "1 placements for mesh dp=2 tp=2"),
    "out of range": ([Replicate(), Shard(2)], "Shard(2) on axis tp is out of range"),
    "below range": ([Shard(-3), Replicate()], "Shard(-3) on axis dp is out of range"),
    "no placement": ([Shard(0), "tp"], "'tp' on axis tp is no placement"),
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


def test_a_piece_that_does_not_fit_the_stated_shape_is_refused_by_its_rank():
    def body(mesh):
        n = 3 if mesh.get_rank() == 2 else 4
        return pt.DTensor.from_local(torch.ones(n, 4), mesh, [Shard(0), Replicate()], shape=(8, 4))

    results = each_rank(body, dp=2, tp=2)
    assert [isinstance(r, LayoutError) for r in results] == [False, False, True, False]
    assert "the piece of rank 2 does not fit the stated shape (8, 4)" in results[2].fact
    assert results[2].fixes[0].write == "a piece of shape (4, 4)"


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
    assert "distribute_tensor: the ranks do not ask for the same" in error.fact
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
        pt.DTensor.from_local(t, mesh).sum().backward()
        return leaf.grad

    # Along a Replicate axis gradients are shares: theirs add up to one device's.
    with pt.ranks(dp=2) as world:
        assert torch.equal(sum(world.run(body)), torch.full_like(T, 2))


# -- in place --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", MESHES[:2], ids=str)
def test_in_place_into_a_layout_that_would_have_to_change_is_refused(axes):
    def body(mesh, inplace=True):
        x = spread(mesh, T[:1])
        return x.squeeze_(0) if inplace else x.squeeze(0).full_tensor()

    error = refused(body, **axes)
    assert "squeeze in place" in error.fact
    assert "1@dp 4" in str(error)
    assert error.fixes[0].write == "x = x.squeeze(...)"
    with pt.ranks(**axes) as world:
        assert all(torch.equal(out, T[0]) for out in world.run(body, False))


def test_out_of_another_shape_is_refused():
    error = refused(lambda mesh: torch.neg(spread(mesh), out=pt.zeros(3, device_mesh=mesh)))
    assert "out= has another shape" in error.fact


INTO_PLAIN = {
    "an op in place": (lambda t, x: t.add_(x), lambda t, x: t.add_(x.full_tensor())),
    "copy_": (lambda t, x: t.copy_(x), lambda t, x: t.copy_(x.full_tensor())),
    "setitem": (
        lambda t, x: t.__setitem__(..., x),
        lambda t, x: t.__setitem__(..., x.full_tensor()),
    ),
    "out=": (lambda t, x: torch.neg(-x, out=t), lambda t, x: t.copy_(x.full_tensor())),
    "a method without a rule": (
        lambda t, x: t.addcdiv_(x, x + 1),
        lambda t, x: t.addcdiv_(x.full_tensor(), (x + 1).full_tensor()),
    ),
}


@pytest.mark.parametrize("how", INTO_PLAIN)
def test_a_dtensor_is_not_written_into_a_plain_tensor(how):
    bad, good = INTO_PLAIN[how]
    error = refused(lambda mesh: bad(torch.zeros(8, 4), spread(mesh)))
    assert "plain tensor" in error.fact

    def body(mesh):
        t, one = torch.zeros(8, 4), torch.zeros(8, 4)
        good(t, spread(mesh))
        bad(one, T)
        return t, one

    with pt.ranks(dp=2, tp=2) as world:
        assert all(torch.equal(t, one) for t, one in world.run(body))


def test_a_plain_gradient_of_a_dtensor_is_refused_and_a_spread_one_taken():
    def body(mesh, made):
        x = spread(mesh).requires_grad_()
        x.grad = made(mesh)
        return x.grad.full_tensor()

    error = refused(lambda mesh: body(mesh, lambda mesh: T))
    assert "the gradient of a DTensor is a DTensor" in error.fact
    with pt.ranks(dp=2, tp=2) as world:
        results = world.run(body, lambda mesh: pt.distribute_tensor(T, mesh))
        assert all(torch.equal(g, T) for g in results)


WORKS_ON_MEMORY = {
    "set_": (T,),
    "resize_": (3,),
    "as_strided_": ((2,), (1,)),
    "share_memory_": (),
    "as_subclass": (torch.Tensor,),
}


@pytest.mark.parametrize("name", WORKS_ON_MEMORY)
def test_what_works_on_memory_is_refused_and_works_on_a_piece(name):
    given = WORKS_ON_MEMORY[name]
    error = refused(lambda mesh: getattr(spread(mesh), name)(*given))
    assert f"{name} cannot take a DTensor" in error.fact
    assert error.fixes[0].write == f"x.to_local().{name}(...)"
    with pt.ranks(dp=2) as world:
        assert world.run(lambda mesh: type(getattr(spread(mesh).to_local(), name)(*given))) == [
            torch.Tensor,
            torch.Tensor,
        ]


# -- functions that do not ask ---------------------------------------------------------------------


def squares(x):
    return (x * x).sum()


def transformed(name, x):
    transform = getattr(torch.func, name)
    if name in ("vjp", "linearize"):
        return transform(squares, x)
    if name == "jvp":
        return transform(squares, (x,), (x,))
    return transform(squares)(x)


@pytest.mark.parametrize(
    "name",
    "functionalize grad grad_and_value hessian jacfwd jacrev jvp linearize vjp vmap".split(),
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch's own code
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_a_function_transform_is_refused_and_works_on_the_whole_value(name):
    error = refused(lambda mesh: transformed(name, spread(mesh)))
    assert f"torch.func: {name} cannot take a DTensor" in error.fact
    with pt.ranks(dp=2) as world:
        for out in world.run(lambda mesh: transformed(name, spread(mesh).full_tensor())):
            torch.testing.assert_close(
                [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)],
                [
                    t
                    for t in torch.utils._pytree.tree_leaves(transformed(name, T))
                    if isinstance(t, torch.Tensor)
                ],
            )


def test_the_gradient_that_a_refused_transform_was_to_give_is_autograds():
    def body(mesh):
        x = spread(mesh).requires_grad_()
        (grad,) = torch.autograd.grad(squares(x), x)
        return grad.full_tensor()

    with pt.ranks(dp=2, tp=2) as world:
        assert all(torch.equal(g, 2 * T) for g in world.run(body))


@pytest.mark.parametrize("name", ["grad", "vmap"])
def test_a_transform_meets_a_dtensor_that_its_function_has_already(name):
    def body(mesh):
        x = spread(mesh)
        if name == "vmap":
            return torch.vmap(lambda t: x * t)(torch.ones(3))
        return torch.func.grad(lambda t: (x * t).sum())(torch.tensor(2.0))

    assert f"torch.func: {name}" in refused(body).fact


def test_forward_mode_is_refused():
    def body(mesh):
        x = spread(mesh)
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.make_dual(x, x)

    assert "torch.func: jvp" in refused(body).fact


TO_DLPACK = {
    "from_dlpack": lambda x: torch.from_dlpack(x),
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "torch.to_dlpack": lambda x: torch.to_dlpack(x),
    "its own method": lambda x: x.__dlpack__(),
    "its device": lambda x: x.__dlpack_device__(),
}


@pytest.mark.parametrize("how", TO_DLPACK)
def test_dlpack_is_refused_and_each_way_out_works(how):
    error = refused(lambda mesh: TO_DLPACK[how](spread(mesh)))
    assert "dlpack cannot take a DTensor" in error.fact
    assert [f.moves for f in error.fixes] == ["this rank's piece", "the whole value"]
    with pt.ranks(dp=2) as world:
        for piece, whole in world.run(
            lambda mesh: (
                torch.from_dlpack(spread(mesh).to_local()),
                torch.from_dlpack(spread(mesh).full_tensor()),
            )
        ):
            assert piece.shape == (4, 4) and torch.equal(whole, T)


# -- what one device refuses -----------------------------------------------------------------------

REFUSED_BY_TORCH = {
    "expand to fewer dimensions": lambda x: x.expand(3),
    "expand to another size": lambda x: x.expand(3, 4),
    "broadcast_to": lambda x: torch.broadcast_to(x, (8, 5)),
    "expand by -1": lambda x: x.expand(-1, 8, 4),
    "flatten backwards": lambda x: x.flatten(1, 0),
    "a view of another size": lambda x: x.view(5, 5),
    "select": lambda x: x.select(0, 8),
    "select from the end": lambda x: x.select(0, -9),
    "an int": lambda x: x[8],
    "a negative length": lambda x: x.narrow(0, 0, -1),
    "no chunks": lambda x: x.chunk(0),
    "a negative repeat": lambda x: x.repeat(2, -1),
    "a pad that takes too much": lambda x: F.pad(x, (-3, -3)),
    "a gather": lambda x: x.gather(0, torch.tensor([[9]])),
    "an index_select": lambda x: x.index_select(0, torch.tensor([8])),
    "an index": lambda x: x[torch.tensor([8])],
    "a token": lambda x: F.embedding(torch.tensor([8]), x),
    "a negative token": lambda x: F.embedding(torch.tensor([-1]), x),
    "a class": lambda x: F.cross_entropy(x[:1], torch.tensor([4])),
    "weights of other classes": lambda x: F.cross_entropy(
        x, torch.zeros(8, dtype=torch.long), torch.ones(3)
    ),
    "layer_norm of another shape": lambda x: F.layer_norm(x, (5,)),
    "rms_norm of another shape": lambda x: F.rms_norm(x, (5,)),
    "the largest of nothing": lambda x: x[:0].max(),
    "a matmul": lambda x: x @ x,
    "an addition": lambda x: x + torch.ones(5),
    "a bias": lambda x: F.linear(x, torch.ones(3, 4), torch.ones(4)),
    "topk": lambda x: x.topk(5),
    "item": lambda x: x.item(),
    "bool": lambda x: bool(x),
    "a dimension": lambda x: x.sum(2),
    "a leaf in place": lambda x: x.clone().requires_grad_().add_(1),
    "backward of no scalar": lambda x: (x.clone().requires_grad_() * 2).backward(),
}


@pytest.mark.parametrize("first", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("what", REFUSED_BY_TORCH)
def test_what_one_device_refuses_every_rank_refuses(what, first):
    call = REFUSED_BY_TORCH[what]
    with pytest.raises(Exception):  # noqa: B017  # torch's own type, whichever
        call(T.clone())
    errors = each_rank(lambda mesh: call(spread(mesh, first=first)), dp=2)
    assert all(isinstance(e, Exception) for e in errors), errors
