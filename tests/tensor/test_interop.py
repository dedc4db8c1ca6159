"""Does what torch does with tensors and modules work with DTensors in them?"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import partita as pt
from partita import Invariant, Partial, Replicate, Shard

T = (torch.arange(24.0).view(6, 4) - 11) / 8
LAYOUTS = [
    [Replicate(), Replicate()],
    [Shard(0), Shard(1)],
    [Shard(0), Shard(0)],
    [Partial(), Replicate()],
    [Invariant(), Shard(1)],
]


def each(body, *args, **axes):
    with pt.ranks(**(axes or {"a": 2, "b": 2})) as world:
        return world.run(body, *args)


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


# -- copies and files ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_copy_has_the_layout_and_memory_of_its_own(layout):
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, layout)
        for y in (copy.deepcopy(x), copy.copy(x).clone(), x.clone()):
            assert y.placements == tuple(layout)
            y.mul_(0)
            torch.testing.assert_close(x.full_tensor(), T)

    each(body)


def test_a_copy_of_a_parameter_is_a_parameter_and_of_another_leaf_has_its_gradient():
    """As torch copies them."""

    def body(mesh):
        p = nn.Parameter(pt.distribute_tensor(T, mesh, [Replicate(), Shard(0)]))
        p.square().sum().backward()
        q = copy.deepcopy(p)
        assert isinstance(q, nn.Parameter) and q.is_leaf and q.requires_grad
        assert q.placements == p.placements and q.grad is None

        leaf = pt.distribute_tensor(T, mesh, [Replicate(), Shard(0)]).requires_grad_()
        leaf.square().sum().backward()
        copied = copy.deepcopy(leaf)
        assert copied.grad.placements == leaf.grad.placements
        torch.testing.assert_close(copied.grad.full_tensor(), 2 * T)

    each(body)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("safe", [True, False])
def test_what_is_saved_is_loaded_as_it_was(layout, safe):
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, layout)
        file = io.BytesIO()
        torch.save({"x": x, "p": nn.Parameter(x.detach())}, file)
        file.seek(0)
        back = torch.load(file, weights_only=safe)
        assert isinstance(back["p"], nn.Parameter)
        for y in (back["x"], back["p"].detach(), pickle.loads(pickle.dumps(x))):
            assert y.placements == tuple(layout)
            torch.testing.assert_close(y.full_tensor(), T)

    each(body)


def test_a_state_dict_is_loaded_into_another_layout():
    def body(mesh):
        one, other = net(), net()
        pt.parallelize(one, mesh, {"0.weight": {"b": Shard(0)}})
        pt.parallelize(other, mesh, {"*.weight": {"a": Shard(1)}})
        with torch.no_grad():
            one[0].weight.add_(1)
        missing = other.load_state_dict(one.state_dict())
        assert not missing.missing_keys and not missing.unexpected_keys
        assert other[0].weight.placements[0] == Shard(1)
        torch.testing.assert_close(other[0].weight.full_tensor(), one[0].weight.full_tensor())

    each(body)


# -- modules ---------------------------------------------------------------------------------------


def test_a_module_is_cast_in_place_and_its_parameters_stay_the_same_objects():
    def body(mesh):
        model = pt.distribute_module(net(), mesh)
        before = list(model.parameters())
        model.to(torch.float64)
        assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
        assert all(p.dtype == torch.float64 for p in model.parameters())
        model.half().float()
        assert [p.placements for p in model.parameters()] == [p.placements for p in before]

    each(body)


def test_functional_call_takes_other_parameters():
    one = net()
    wanted = functional_call(one, {n: p * 2 for n, p in one.named_parameters()}, T)

    def body(mesh):
        model = pt.distribute_module(net(), mesh)
        x = pt.distribute_tensor(T, mesh, [Shard(0), Replicate()])
        out = functional_call(model, {n: p * 2 for n, p in model.named_parameters()}, x)
        return out.full_tensor()

    for out in each(body):
        torch.testing.assert_close(out, wanted)


def test_weight_norm_and_vectors_of_parameters_work():
    def run(model, x):
        model(x).square().sum().backward()
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(vector * 0.5, model.parameters())
        return model(x)

    one = nn.Sequential(parametrizations.weight_norm(net()[0]))
    wanted = run(copy.deepcopy(one), T)

    def body(mesh):
        model = pt.distribute_module(copy.deepcopy(one), mesh)
        return run(model, pt.distribute_tensor(T, mesh, [Shard(0), Replicate()])).full_tensor()

    for out in each(body):
        torch.testing.assert_close(out, wanted)


# -- hooks -----------------------------------------------------------------------------------------


def test_hooks_of_a_tensor_see_and_give_typed_gradients():
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [Replicate(), Shard(1)]).requires_grad_()
        seen = []

        def double(grad):
            seen.append(grad.placements)
            return grad * 2

        x.register_hook(double)
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
        (x * 3).sum().backward()
        assert seen == [(Partial(), Shard(1))] * 2
        return x.grad.full_tensor()

    for grad in each(body):
        torch.testing.assert_close(grad, torch.full_like(T, 6))


def test_hooks_of_a_module_see_typed_values_and_gradients():
    one = net()
    x = T.clone().requires_grad_()
    one(x).sum().backward()

    def body(mesh):
        model = pt.distribute_module(net(), mesh)
        seen = []
        model[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
        model[0].register_forward_hook(lambda m, args, out: seen.append(out.shape))
        model[2].register_full_backward_hook(
            lambda m, before, after: seen.append((before[0].shape, after[0].placements))
        )
        x = pt.distribute_tensor(T, mesh, [Shard(0), Replicate()]).requires_grad_()
        model(x).sum().backward()
        assert seen[:2] == [(6, 4), (6, 8)]
        assert seen[2][0] == (6, 8) and seen[2][1][0] == Shard(0)
        return x.grad.full_tensor()

    for grad in each(body):
        torch.testing.assert_close(grad, x.grad)


# -- contexts --------------------------------------------------------------------------------------


def test_autocast_casts_as_on_one_device():
    with torch.autocast("cpu", torch.bfloat16):
        wanted = net()(T)

    def body(mesh):
        model = pt.distribute_module(net(), mesh)
        x = pt.distribute_tensor(T, mesh, [Shard(0), Replicate()])
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert model[0].weight.grad.dtype == torch.float32
        return out.full_tensor()

    for out in each(body):
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_to_the_same_gradients(reentrant):
    def step(model, x):
        x.requires_grad_()
        hidden = checkpoint(lambda x: F.dropout(model(x), 0.3), x, use_reentrant=reentrant)
        hidden.square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    model = net()
    torch.manual_seed(9)
    wanted = step(model, T.clone())

    def body(mesh):
        model = pt.distribute_module(net(), mesh)
        x = pt.distribute_tensor(T, mesh, [Shard(0), Replicate()])
        torch.manual_seed(9)
        return [g.full_tensor() for g in step(model, x)]

    for grads in each(body):
        torch.testing.assert_close(grads, wanted)


def test_inference_mode_and_no_grad_leave_no_graph():
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [Shard(0), Replicate()]).requires_grad_()
        with torch.no_grad():
            assert not (x * 2).requires_grad
        with torch.inference_mode():
            y = x.sum()
            assert y.is_inference()
        assert y.item() == T.sum().item()

    each(body)


# -- values that Python asks for -------------------------------------------------------------------


def test_a_pending_value_is_reduced_when_python_reads_it():
    def body(mesh):
        total = pt.distribute_tensor(T, mesh, [Shard(0), Shard(1)]).sum()
        assert total.placements == (Partial(), Partial())
        wanted = T.sum().item()
        assert total.item() == float(total) == total.tolist() == wanted
        assert int(total) == int(wanted) and bool(total == wanted)
        assert str(wanted) in str(total) and f"{total:.3f}" == f"{wanted:.3f}"
        assert total.placements == (Partial(), Partial())  # reading changes nothing

    each(body)


def test_repr_shows_the_layout_and_the_global_shape():
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [Shard(0), Replicate()])
        text = repr(x)
        assert "f32[6@a, 4]" in text and "a=2 b=2" in text
        assert x.shape == (6, 4) and len(x) == 6 and x.numel() == 24

    each(body)


def test_a_list_is_of_the_whole_value():
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [Shard(0), Partial()])
        assert x.tolist() == T.tolist()

    each(body)


# -- kernels of one's own --------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """On this rank's piece; it must not see a DTensor."""

    @staticmethod
    def forward(ctx, x):
        assert type(x) is torch.Tensor
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        assert type(x) is torch.Tensor and type(grad) is torch.Tensor
        return 3 * x**2 * grad


@pytest.mark.parametrize("layout", [[Shard(0), Shard(1)], [Replicate(), Shard(0)]], ids=str)
def test_local_map_runs_a_kernel_on_the_pieces(layout):
    def body(mesh):
        cube = pt.local_map(Cube.apply, out_placements=layout, in_placements=(layout,))
        x = pt.distribute_tensor(T, mesh, layout).requires_grad_()
        y = cube(x)
        assert y.placements == tuple(layout)
        y.sum().backward()
        return y.full_tensor(), x.grad.full_tensor()

    for y, grad in each(body):
        torch.testing.assert_close(y, T**3)
        torch.testing.assert_close(grad, 3 * T**2)


def test_local_map_cuts_whole_arguments_into_uneven_pieces():
    def body(mesh):
        rows = [Shard(0), Replicate()]
        cube = pt.local_map(Cube.apply, rows, (rows,), redistribute_inputs=True)
        x = pt.distribute_tensor(torch.arange(5.0), mesh, [Replicate(), Replicate()])
        y = cube(x.requires_grad_())
        y.sum().backward()
        return y.full_tensor(), x.grad.full_tensor()

    for y, grad in each(body):
        torch.testing.assert_close(y, torch.arange(5.0) ** 3)
        torch.testing.assert_close(grad, 3 * torch.arange(5.0) ** 2)
