"""A rank without rows does in backward what the others do, and raises the errors that they do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pt

X = torch.arange(6.0, dtype=torch.float64).view(2, 3) + 1
W = torch.arange(6.0, dtype=torch.float64).view(3, 2) - 2


class SkipsEmptyRows(torch.autograd.Function):
    """A kernel of a user's, whose backward has nothing to say where there are no rows."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        if x.numel() == 0:
            return None, None
        return g @ w.t(), x.t() @ g


@pytest.mark.parametrize("place", [pt.Replicate(), pt.Shard(0)])
def test_a_function_without_gradients_where_there_are_no_rows_has_zeros(place):
    def body(mesh):
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)]).requires_grad_()
        w = pt.distribute_tensor(W, mesh, [place]).requires_grad_()
        on_pieces = pt.local_map(
            SkipsEmptyRows.apply,
            out_placements=[pt.Shard(0)],
            in_placements=([pt.Shard(0)], [pt.Replicate()]),
            redistribute_inputs=True,
        )
        on_pieces(x, w).square().sum().backward()
        return x.grad.full_tensor(), w.grad.full_tensor()

    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    (x @ w).square().sum().backward()
    with pt.ranks(a=3) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, (x.grad, w.grad))


@torch.library.custom_op("empty_pieces_test::times", mutates_args=())
def times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 0:
        raise RuntimeError("rows are not for this kernel")
    return x.clone()


@times.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 0:
        raise RuntimeError("rows are not for this kernel")
    return torch.empty_like(x)


def test_an_error_of_the_ops_own_is_heard_where_there_are_no_rows():
    pt.rule("n d, d -> n d", torch.ops.empty_pieces_test.times)

    def body(mesh):
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)]).requires_grad_()
        w = pt.distribute_tensor(torch.ones(3, dtype=torch.float64), mesh).requires_grad_()
        with pytest.raises(RuntimeError, match="rows are not for this kernel"):
            torch.ops.empty_pieces_test.times(x, w)
        return True

    with pt.ranks(a=3) as world:
        assert all(world.run(body))


def test_what_cannot_be_told_without_values_is_known_by_its_text():
    meta = torch.empty(3, device="meta")
    for ask in (
        lambda: meta.sum().item(),
        lambda: bool(meta.sum() > 0),
        lambda: meta.nonzero(),
        lambda: meta.tolist(),
        lambda: meta.numpy(),
        lambda: meta.unique(),
        lambda: torch.nn.functional.layer_norm(meta, (3,), torch.ones(3)),
    ):
        with pytest.raises((RuntimeError, TypeError), match=r"(?i)meta"):
            ask()


def write_row(x):
    x = x.clone()
    x[1] += 2
    x.select(0, 0).mul_(3)
    return x


ROWS = {
    "index": lambda x: x[1],
    "number": lambda x: x[1, -1],
    "select": lambda x: x.select(0, 1),
    "write": write_row,
}


@pytest.mark.parametrize("row", ROWS)
def test_a_rank_without_rows_takes_an_index_of_the_whole(row):
    take = ROWS[row]

    def body(mesh):
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)]).requires_grad_()
        out = take(x)
        out.sum().backward()
        return out.full_tensor(), x.grad.full_tensor()

    one = X.clone().requires_grad_()
    expected = take(one)
    expected.sum().backward()
    with pt.ranks(a=3) as world:
        for out, grad in world.run(body):
            assert torch.equal(out, expected) and torch.equal(grad, one.grad)


@pytest.mark.parametrize("name", ["_foreach_addcmul", "_foreach_addcdiv"])
@pytest.mark.parametrize("value", [0.5, [0.5, 0.25], torch.tensor([0.5, 0.25])])
def test_a_foreach_op_takes_its_number_on_a_rank_without_rows(name, value):
    one = [X[:1].clone(), X.clone()]
    expected = getattr(torch, name)(one, one, one, value)

    def body(mesh):
        xs = [pt.distribute_tensor(x, mesh, [pt.Shard(0)]) for x in one]
        return [x.full_tensor() for x in getattr(torch, name)(xs, xs, xs, value)]

    with pt.ranks(a=2) as world:
        for found in world.run(body):
            assert all(map(torch.equal, found, expected))


def test_a_function_may_write_its_piece_where_a_rank_has_no_rows():
    def body(mesh):
        x = pt.distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [pt.Shard(0)])
        x.requires_grad_()
        double = pt.local_map(
            lambda a: a.mul_(2), out_placements=[pt.Shard(0)], in_placements=([pt.Shard(0)],)
        )
        y = double(x * 1)
        y.sum().backward()
        return y.full_tensor().tolist(), x.grad.full_tensor().tolist()

    with pt.ranks(dp=3) as world:
        for found in world.run(body):
            assert found == ([[0, 2, 4], [6, 8, 10]], [[2, 2, 2]] * 2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [F.multilabel_margin_loss, F.multi_margin_loss])
def test_a_loss_of_no_rows_adds_nothing_where_torch_leaves_it_unwritten(loss, reduction):
    x = torch.randn(2, 4).double()
    classes = torch.tensor([[1, 2, -1, -1], [3, -1, -1, -1]])
    classes = classes if loss is F.multilabel_margin_loss else classes[:, 0]
    want = loss(x, classes, reduction=reduction)

    def body(mesh):
        garbage = [torch.full((1,), 7e99, dtype=torch.float64) for _ in range(64)]
        del garbage  # what is made next lies where these did
        split = [pt.distribute_tensor(t, mesh, [pt.Shard(0)]) for t in (x, classes)]
        split[0].requires_grad_()
        found = loss(*split, reduction=reduction)
        found.backward()
        return found.full_tensor().detach(), split[0].grad.full_tensor()

    x.requires_grad_()
    loss(x, classes, reduction=reduction).backward()
    with pt.ranks(dp=3) as world:
        for found, grad in world.run(body):
            torch.testing.assert_close(found, want.detach())
            torch.testing.assert_close(grad, x.grad)


REFUSED = {
    "cumsum_ of bool": lambda x: (x > 0).cumsum_(1),
    "softmax of int": lambda x: torch.softmax(x.int(), 1),
    "bitwise_and of float": lambda x: x.bitwise_and(1),
    "gelu of int": lambda x: F.gelu(x.int()),
    "index_select by floats": lambda x: x.index_select(1, torch.tensor([0.5])),
    "gather by floats": lambda x: x.gather(1, x),
    "scatter_ by floats": lambda x: x.scatter_(1, x, 1.0),
    "sort of complex": lambda x: (x + 0j).sort(1),
    "kthvalue of bool": lambda x: (x > 0).kthvalue(1, 1),
    "round of complex": lambda x: (x + 0j).round(),
    "sigmoid_ of int": lambda x: x.int().sigmoid_(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_a_kernel_does_not_have_are_refused_where_there_is_no_row(name):
    def refusal(x):
        with pytest.raises(RuntimeError) as error:
            REFUSED[name](x)
        return str(error.value)

    with pt.ranks(dp=3) as world:
        found = world.run(
            lambda mesh: refusal(pt.distribute_tensor(torch.ones(2, 2), mesh, [pt.Shard(0)]))
        )
    assert {*found} == {refusal(torch.ones(2, 2))}


TAKEN = {  # what is refused of some values only
    "cholesky": lambda x: torch.linalg.cholesky(x[:, :1, None] + 1),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "one_hot": lambda x: F.one_hot(x.long(), 2),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x / 2, x / 2, reduction="none"),
    "rows by number": lambda x: x.gather(1, (x > 0).long()),
}


@pytest.mark.parametrize("name", TAKEN)
def test_values_are_not_asked_for_where_there_is_no_row(name):
    x = torch.ones(2, 2)

    def give(mesh):
        torch.manual_seed(0)
        return TAKEN[name](pt.distribute_tensor(x, mesh, [pt.Shard(0)])).full_tensor()

    with pt.ranks(dp=3) as world:
        found = world.run(give)
    torch.manual_seed(0)
    wanted = TAKEN[name](x)
    for one in found:
        torch.testing.assert_close(one, wanted)


def test_a_mode_does_not_hear_what_is_asked_where_there_is_no_row():
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type != "meta":
                self.elements += out.numel()
            return out

    def count(mesh):
        x = pt.distribute_tensor(torch.ones(2, 2), mesh, [pt.Shard(0)])
        with Names() as names:
            x.cumsum(1).cumsum_(1)
        return names.elements

    with pt.ranks(dp=3) as world:
        assert world.run(count)[2] == 0


@pytest.mark.parametrize("op", [torch.sum, torch.sigmoid, lambda x: x @ x.new_ones(3, 2)])
def test_a_call_that_was_made_in_inference_has_gradients_afterwards(op):
    def train(mesh):
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)]).requires_grad_()
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                y = op(x)
        y.sum().backward()
        return x.grad.full_tensor()

    x = X.clone().requires_grad_()
    op(x).sum().backward()
    with pt.ranks(dp=3) as world:
        for found in world.run(train):
            torch.testing.assert_close(found, x.grad)


def _group_norm(mesh):
    x = _lay_out(torch.arange(6.0).view(3, 2), mesh, [pt.Shard(1)])
    w, b = (_lay_out(torch.ones(2) * n, mesh, [pt.Replicate()]) for n in (2, 3))
    return F.group_norm(x, 2, w, b), [x, w, b]


def _batch_of_groups(mesh):
    x = _lay_out(torch.arange(12.0).view(1, 4, 3), mesh, [pt.Shard(0)])
    w = _lay_out(torch.ones(4), mesh, [pt.Replicate()])
    return F.group_norm(x, 2, w), [x, w]


def _padded_embedding(row):
    def run(mesh):
        w = _lay_out(torch.arange(4.0).view(2, 2), mesh, [pt.Shard(0)])
        return F.embedding(torch.tensor([0, 1, 1]), w, padding_idx=row), [w]

    return run


def _convolution(function, shape, places):
    def run(mesh):
        x = _lay_out(torch.arange(6.0).view(1, 2, 3), mesh, places)
        w = _lay_out(torch.linspace(-1, 2, torch.Size(shape).numel()).view(shape), mesh, [])
        return function(x, w, groups=2), [x, w]

    return run


def _lay_out(t, mesh, placements):
    t = t.double().clone()
    if mesh is not None:
        rest = [pt.Replicate()] * (mesh.ndim - len(placements))
        t = pt.distribute_tensor(t, mesh, [*placements, *rest])
    return t.requires_grad_()


SPLIT = [[pt.Shard(0), pt.Shard(1)], [pt.Shard(1), pt.Shard(0)], [pt.Shard(0), pt.Shard(0)]]
ONCE_ALONE = {
    "group_norm": ({"a": 3}, _group_norm),
    "group_norm of no samples": ({"a": 2}, _batch_of_groups),
    "embedding": ({"a": 3}, _padded_embedding(1)),
    "embedding, from behind": ({"a": 3}, _padded_embedding(-2)),
    **{
        f"{f.__name__} {i}": ({"a": 2, "b": 2}, _convolution(f, shape, places))
        for i, places in enumerate(SPLIT)
        for f, shape in ((F.conv_transpose1d, (2, 2, 2)), (F.conv1d, (2, 1, 2)))
    },
}


@pytest.mark.parametrize("name", ONCE_ALONE)
def test_a_rank_without_elements_does_not_go_alone(name):
    mesh, run = ONCE_ALONE[name]

    def differentiate(mesh):
        out, leaves = run(mesh)
        out.square().sum().backward()
        found = [out.detach(), *[x.grad for x in leaves]]
        return [t.full_tensor() if isinstance(t, pt.DTensor) else t for t in found]

    truth = differentiate(None)
    with pt.ranks(**mesh) as world:
        for found in world.run(differentiate):
            torch.testing.assert_close(found, truth)


def test_a_view_stays_one_where_there_are_no_rows():
    def body(mesh):
        x = _lay_out(X, mesh, [pt.Shard(0)])
        y = x * 1
        view = y[:, 1:]
        y.mul_(2)
        view.mul_(3)
        y.sum().backward()
        return y.detach().full_tensor(), view.detach().full_tensor(), x.grad.full_tensor()

    whole = X * torch.tensor([2.0, 6, 6], dtype=torch.float64)
    with pt.ranks(a=3) as world:
        for y, view, grad in world.run(body):
            assert torch.equal(y, whole) and torch.equal(view, whole[:, 1:])
            assert torch.equal(grad, torch.tensor([[2.0, 6, 6]] * 2, dtype=torch.float64))


# -- second derivatives ----------------------------------------------------------------------------

TABLE = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)
SCORES = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
TARGETS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], dtype=torch.float64)

TWICE_DIFFERENTIABLE = {
    "rows of an embedding": [0, 3],
    "rows and columns of an embedding": [[0, 3, 3], [1, 2, 0]],
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("name", TWICE_DIFFERENTIABLE)
def test_a_rank_without_rows_differentiates_twice(name, split):
    what = TWICE_DIFFERENTIABLE[name]

    def body(mesh):
        def place(t, placement=None):
            if mesh is None:
                return t.clone()
            dim = min(split, t.dim() - 1)
            return pt.distribute_tensor(t, mesh, [placement or pt.Shard(dim)])

        if isinstance(what, list):
            x = place(TABLE, pt.Replicate()).requires_grad_()
            y = F.embedding(place(torch.tensor(what)), x).square().sum()
        else:
            x = place(SCORES).requires_grad_()
            y = what(x * 0.5 + 0.1, place(TARGETS))
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, allow_unused=True)
        found = first.detach(), second
        return found if mesh is None else tuple(g.full_tensor() for g in found)

    truth = body(None)
    with pt.ranks(a=4) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)


CONVERSIONS = {
    "to": lambda x: x.to(x.dtype),
    "double": lambda x: x.double(),
    "type": lambda x: x.type(torch.float64),
    "contiguous": lambda x: x.contiguous(),
    "cpu": lambda x: x.cpu(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_of_nothing_is_the_leaf_where_there_are_no_rows(name):
    def body(mesh):
        x = pt.distribute_tensor(SCORES, mesh, [pt.Shard(0)]).requires_grad_()
        y = CONVERSIONS[name](x)
        (x * y).sum().backward()
        return y is x, x.grad.full_tensor()

    with pt.ranks(a=3) as world:
        for is_same, grad in world.run(body):
            assert is_same
            torch.testing.assert_close(grad, 2 * SCORES)


def test_an_argument_may_be_passed_by_name_after_a_call_by_position():
    def body(mesh):
        x = pt.distribute_tensor(X[:1], mesh, [pt.Shard(0)])
        w, b = (pt.distribute_tensor(t, mesh).requires_grad_() for t in (W.t().contiguous(), W[0]))
        F.linear(x, w, b).sum().backward()
        F.linear(x, w, bias=b).sum().backward()
        F.linear(x, bias=b, weight=w).sum().backward()
        return w.grad.full_tensor(), b.grad.full_tensor()

    with pt.ranks(a=2) as world:
        for weight, bias in world.run(body):
            assert torch.equal(weight, 3 * X[:1].expand(2, 3)) and bias.tolist() == [3.0, 3.0]


PICKED = {
    "embedding": lambda w, i: F.embedding(i, w),
    "rows": lambda w, i: w[i],
    "index_select": lambda w, i: w.index_select(0, i),
}


@pytest.mark.parametrize("name", PICKED)
def test_indices_are_global_on_a_rank_with_a_part_of_the_rows_and_no_columns(name):
    def body(mesh):
        w = pt.distribute_tensor(torch.arange(8.0).view(8, 1), mesh, [pt.Shard(0), pt.Shard(1)])
        i = pt.distribute_tensor(torch.tensor([0, 3, 7, 5]), mesh)
        return PICKED[name](w, i).full_tensor().flatten().tolist()

    with pt.ranks(a=2, b=2) as world:
        assert world.run(body) == [[0.0, 3.0, 7.0, 5.0]] * 4


def test_a_rank_without_rows_goes_backward_twice_where_nothing_is_saved():
    def run(mesh):
        x = torch.ones(2, 3)
        x = x if mesh is None else pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        total = x.requires_grad_().sum(0) + 1  # one device saves nothing, so nothing is freed
        total.sum().backward(inputs=[x])
        (total.sum() - 1).backward()
        return x.grad if mesh is None else x.grad.full_tensor()

    with pt.ranks(dp=3) as world:
        for grad in world.run(run):
            torch.testing.assert_close(grad, run(None))
