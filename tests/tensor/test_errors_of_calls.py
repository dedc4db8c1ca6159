"""Is a call that cannot be made one clear error on every rank, with a way out that works?"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import partita as pt
from partita import Partial, Replicate, Shard
from tests.programs.refused import each_rank, refusal

T = torch.arange(32.0).view(8, 4)
MESHES = [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}]


def refused(fn, **axes):
    return refusal(fn, place=__file__, **axes)


def spread(mesh, t=T, first=None):
    """`t` split over the first axis, whole along the others."""
    return pt.distribute_tensor(t, mesh, [first or Shard(0), *[Replicate()] * (mesh.ndim - 1)])


# -- in place --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", MESHES, ids=str)
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
    "an op in place": lambda t, x: t.add_(x),
    "copy_": lambda t, x: t.copy_(x),
    "setitem": lambda t, x: t.__setitem__(..., x),
    "out=": lambda t, x: torch.neg(-x, out=t),
    "a method without a rule": lambda t, x: t.addcdiv_(x, x + 1),
}


@pytest.mark.parametrize("how", INTO_PLAIN)
def test_a_plain_tensor_of_the_ranks_own_takes_no_dtensor_but_the_same_one_does(how):
    write = INTO_PLAIN[how]

    def make_disagreement_error(mesh):
        t = torch.full((8, 4), float(sum(mesh.get_coordinate())))
        write(t, spread(mesh))

    if how not in ("copy_", "out="):  # which leave nothing of what ranks held
        error = refused(make_disagreement_error)
        assert "plain tensor" in error.fact and "differs between ranks" in error.fact

    def body(mesh):
        t, one = torch.zeros(8, 4), torch.zeros(8, 4)
        write(t, spread(mesh))
        write(one, T)
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


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated"
)  # torch loads its formulas by it
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


# -- sizes and meshes ------------------------------------------------------------------------------

NO_SIZES = {
    "a text": lambda mesh: pt.zeros("4", device_mesh=mesh),
    "a fraction": lambda mesh: pt.randn(2.5, device_mesh=mesh),
    "none of several": lambda mesh: pt.full((2, None), 1.0, device_mesh=mesh),
    "two sizes": lambda mesh: pt.empty((2, 3), (4,), device_mesh=mesh),
}


@pytest.mark.parametrize("what", NO_SIZES)
def test_a_size_that_is_none_names_the_line_and_what_to_write(what):
    for error in each_rank(NO_SIZES[what], dp=2):
        assert isinstance(error, TypeError)
        assert "a size takes whole numbers, not " in str(error), error
        assert "test_errors_of_calls.py:" in str(error), error


NO_MESHES = {
    "one size": (("cpu", 2), {}),
    "a text": (("cpu", "2"), {}),
    "none": (("cpu", None), {}),
    "a fraction": (("cpu", (2.0,)), {}),
    "no ranks": (("cpu", (0, 2)), {}),
    "one name": (("cpu", (2,)), {"mesh_dim_names": "dp"}),
    "too many names": (("cpu", (2,)), {"mesh_dim_names": ("dp", "tp")}),
    "no device": ((2, (2,)), {}),
}


@pytest.mark.parametrize("what", NO_MESHES)
def test_a_mesh_of_other_arguments_is_refused_with_what_to_write(what):
    args, kwargs = NO_MESHES[what]
    with pytest.raises(TypeError, match=r"init_device_mesh takes .*: pt.init_device_mesh\("):
        pt.init_device_mesh(*args, **kwargs)
