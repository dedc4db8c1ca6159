"""A gradient that one device does not have exists on no rank: not after a move, not without rows.

An `autograd.Function` may return None for an operand, and some of torch's derivatives do. Ranks
whose piece is empty take part in what the others send in backward, of every order, and in no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import partita as pt

Make = Callable[..., Any]
D = torch.float64
V = torch.arange(12.0, dtype=D).view(4, 3) / 7 - 0.5
PLACES = [pt.Shard(0), pt.Shard(1), pt.Replicate(), pt.Partial()]


class GradientForOne(torch.autograd.Function):
    """A product whose first factor gets no gradient."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a)
        return a * b

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return None, g * a


def value_of(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return [value_of(one) for one in x]
    if isinstance(x, pt.DTensor):
        return x.full_tensor().detach()
    return x.detach() if isinstance(x, torch.Tensor) else x


def compare(program: Callable[[Make], Any], place: Any, **sizes: int) -> None:
    right = value_of(program(lambda t: t.clone().requires_grad_()))

    def body(mesh):
        def make(t):
            fits = not place.is_shard() or place.dim < t.ndim
            where = [place if fits else pt.Replicate()] * mesh.ndim
            return pt.distribute_tensor(t, mesh, where).requires_grad_()

        return value_of(program(make))

    with pt.ranks(**sizes) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, right, equal_nan=True)


def operand_of_a_function(make: Make) -> Any:
    x, w, seen = make(V), make(V), []
    moved = x.softmax(0).softmax(1)
    moved.register_hook(lambda g: seen.append(g is None))
    x.register_hook(lambda g: seen.append(g is None))
    x.register_post_accumulate_grad_hook(lambda p: seen.append(2))
    GradientForOne.apply(moved, w).sum().backward()
    return seen, x.grad, w.grad


def both_ways(make: Make) -> Any:
    x = make(V)
    h = x @ x.t()
    (GradientForOne.apply(h, h.sum(0)) + h).sum().backward()
    return [x.grad]


def count_of_what_is_not_zero(make: Make) -> Any:
    x, y = make(V), make(V)
    torch.linalg.vector_norm(x.softmax(1), 0, dim=1).sum().backward()
    torch.linalg.vector_norm(y, 0).backward()
    return x.grad, y.grad, torch.linalg.vector_norm(make(V.relu()), 0)


@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 3}], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("program", [operand_of_a_function, both_ways, count_of_what_is_not_zero])
def test_a_gradient_is_missing_as_on_one_device(program, place, sizes):
    compare(program, place, **sizes)


class GradientOnTheFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_first):
        ctx.is_first = is_first
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return (g if ctx.is_first else None), None


TO_PIECES = {
    "to_local": lambda x: x.redistribute(placements=[pt.Replicate()]).to_local(
        grad_placements=[pt.Partial()]
    ),
    "full_tensor": lambda x: x.full_tensor(grad_placements=[pt.Partial()]),
    "shards": lambda x: x.redistribute(placements=[pt.Shard(0)]).to_local(),
}


@pytest.mark.parametrize("how", TO_PIECES)
def test_ranks_may_differ_in_what_a_function_behind_a_move_returns(how):
    def body(mesh):
        x = pt.distribute_tensor(V, mesh, [pt.Shard(1)]).requires_grad_()
        GradientOnTheFirst.apply(TO_PIECES[how](x), mesh.get_local_rank() == 0).sum().backward()
        return x.grad.full_tensor()

    wanted = [[1.0] * 3] * 2 + [[0.0 if how == "shards" else 1.0] * 3] * 2
    with pt.ranks(a=2) as world:
        for found in world.run(body):
            assert found.tolist() == wanted


BEHIND = {
    "product": lambda x: x * 2,
    "view": lambda x: x.view(2, 6),
    "rows": lambda x: x[:2],
    "moved again": lambda x: x.redistribute(placements=[pt.Replicate()]),
}


@pytest.mark.parametrize("on_pieces", [False, True], ids=["to_local", "local_map"])
@pytest.mark.parametrize("name", BEHIND)
def test_ranks_may_differ_where_an_op_stands_between_the_move_and_the_piece(name, on_pieces):
    def body(mesh):
        x = pt.distribute_tensor(V, mesh, [pt.Shard(1)]).requires_grad_()
        moved = BEHIND[name](x.redistribute(placements=[pt.Replicate()]))

        def skip(t):
            return GradientOnTheFirst.apply(t, mesh.get_local_rank() == 0)

        if on_pieces:
            pt.local_map(skip, out_placements=[pt.Partial()])(moved).sum().backward()
        else:
            skip(moved.to_local(grad_placements=[pt.Partial()])).sum().backward()
        return x.grad.full_tensor()

    wanted = V.clone().requires_grad_()
    (wanted if name == "moved again" else BEHIND[name](wanted)).sum().backward()
    with pt.ranks(a=2) as world:
        for found in world.run(body):
            assert torch.equal(found, wanted.grad)


class NoGradient(torch.autograd.Function):
    """The first operand; the second gets no gradient."""

    @staticmethod
    def forward(ctx, x, w):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g, None


def read_after_a_function(x, w):
    return NoGradient.apply(x * 2, w), None


def read_for_a_log(x, w):
    return NoGradient.apply(x, (w * 2).cos()), w * 2


def read_for_a_log_before_an_op(x, w):
    h = w * 2
    return NoGradient.apply(x, h.cos()), h


@pytest.mark.parametrize(
    "program", [read_after_a_function, read_for_a_log, read_for_a_log_before_an_op]
)
@pytest.mark.parametrize("how", ["to_local", "local_map", "full_tensor"])
def test_a_piece_changes_no_gradient_behind_it(how, program):
    """Zeros would be a gradient: an optimizer with weight_decay would then write the parameter."""
    parts = [pt.Partial()]

    def read(x):
        if how == "local_map":
            return pt.local_map(lambda t: t * 3, out_placements=parts)(x)
        return getattr(x, how)(grad_placements=parts) * 3

    def body(mesh):
        x, w = (pt.distribute_tensor(V, mesh, [pt.Shard(0)]).requires_grad_() for _ in range(2))
        whole = [t.redistribute(placements=[pt.Replicate()]) for t in (x, w)]
        out, log = program(*whole)
        if log is not None:
            read(log)
        read(out).sum().backward()
        return x.grad.full_tensor(), w.grad

    factor = 12.0 if program is read_after_a_function else 6.0
    with pt.ranks(a=2) as world:
        for grad, missing in world.run(body):
            assert missing is None
            torch.testing.assert_close(grad, torch.full_like(V, factor))


def test_pieces_of_a_long_graph_are_made_without_reading_all_of_it():
    def body(mesh):
        x = pt.distribute_tensor(V, mesh, [pt.Shard(0)]).requires_grad_()
        h = x
        for _ in range(1100):
            h = h + h
        # No move is found in as many nodes, so that the gradient is completed.
        GradientOnTheFirst.apply(h.to_local(), False).sum().backward()
        return x.grad.full_tensor()

    with pt.ranks(a=2) as world:
        for found in world.run(body):
            assert torch.equal(found, torch.zeros_like(V))


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("on_pieces", [False, True], ids=["to_local", "local_map"])
@pytest.mark.parametrize("moved", [False, True], ids=["computed", "moved"])
def test_a_write_to_a_piece_is_a_write_to_its_tensor(moved, on_pieces, rows):
    def body(mesh):
        x = pt.distribute_tensor(V[:rows], mesh, [pt.Shard(0)]).requires_grad_()
        y = x.redistribute(placements=[pt.Shard(1)]) if moved else x * 1
        if on_pieces:
            z = pt.local_map(lambda t: t.mul_(2), out_placements=y.placements)(y)
            (z * y).sum().backward()
        else:
            (y.to_local().mul_(2) * y.to_local()).sum().backward()
        with pytest.raises(RuntimeError, match="leaf"):
            pt.local_map(lambda t: t.mul_(2), out_placements=x.placements)(x)
        return x.grad.full_tensor(), y.full_tensor().detach()

    with pt.ranks(a=2) as world:
        for grad, written in world.run(body):
            torch.testing.assert_close((grad, written), (8 * V[:rows], 2 * V[:rows]))


def test_an_operand_of_pieces_that_gets_no_gradient_has_none():
    def body(mesh):
        x, y = (pt.distribute_tensor(V, mesh, [pt.Shard(0)]).requires_grad_() for _ in range(2))
        placed = ([pt.Shard(0)],) * 2
        for f in (lambda t, u: GradientOnTheFirst.apply(t, False) * u, lambda t, u: u * 2):
            rows = pt.local_map(f, out_placements=[pt.Shard(0)], in_placements=placed)
            rows(x, y).sum().backward()
        return x.grad, y.grad.full_tensor()

    with pt.ranks(a=2) as world:
        for missing, found in world.run(body):
            assert missing is None
            torch.testing.assert_close(found, V + 2)


def test_ranks_may_differ_in_what_a_function_on_pieces_returns():
    def body(mesh):
        x = pt.distribute_tensor(V, mesh, [pt.Shard(1)]).requires_grad_()
        rows = pt.local_map(
            lambda t: GradientOnTheFirst.apply(t, mesh.get_local_rank() == 0),
            out_placements=[pt.Shard(0)],
            in_placements=([pt.Shard(0)],),
            redistribute_inputs=True,
        )
        rows(x).sum().backward()
        return x.grad.full_tensor()

    with pt.ranks(a=2) as world:
        for found in world.run(body):
            assert found.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2


UNUSED = {
    "not read": (lambda x, w: x * 2, pt.Shard(0)),
    "a share": (lambda x, w: x.sum(), pt.Partial()),
}


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("name", UNUSED)
def test_an_operand_that_no_rank_gives_a_gradient_has_none_on_a_rank_without_rows(name, moved):
    def body(mesh):
        x = pt.distribute_tensor(V[:1], mesh, [pt.Shard(0)]).requires_grad_()
        w = pt.distribute_tensor(V[0], mesh, [pt.Shard(0)] if moved else None).requires_grad_()
        f, place = UNUSED[name]
        placed = ([pt.Shard(0)], [pt.Replicate()])
        pt.local_map(f, [place], placed, redistribute_inputs=True)(x, w).sum().backward()
        torch.optim.SGD([x, w], 0.1).step()
        return x.grad is None, w.grad is None

    with pt.ranks(a=2) as world:
        assert world.run(body) == [(False, True)] * 2


def test_an_operand_that_is_read_where_there_are_rows_gets_zeros_elsewhere():
    def body(mesh):
        x = pt.distribute_tensor(V[:1], mesh, [pt.Shard(0)])
        w = pt.distribute_tensor(V[0], mesh, [pt.Shard(0)]).requires_grad_()
        rows = pt.local_map(
            lambda x, w: x * w if len(x) else x.clone(),
            out_placements=[pt.Shard(0)],
            in_placements=([pt.Shard(0)], [pt.Replicate()]),
            redistribute_inputs=True,
        )
        rows(x, w).sum().backward()
        return w.grad.full_tensor()

    with pt.ranks(a=2) as world:
        for found in world.run(body):
            assert torch.equal(found, V[0])


# -- ranks without rows, in backward passes of backward passes -------------------------------------

OPS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 1), [(2, 3)]),
    "cumprod": (lambda x: torch.cumprod(x, 1), [(2, 3)]),
    "cummax": (lambda x: torch.cummax(x, 1)[0], [(2, 3)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 4)] * 3),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), [(2, 3), (3,), (3,)]),
    "instance_norm": (F.instance_norm, [(2, 3, 4)]),
    "linear": (F.linear, [(2, 3), (4, 3), (4,)]),
    "addmm": (torch.addmm, [(2, 4), (2, 3), (3, 4)]),
    "softmax": (lambda x: x.softmax(0), [(2, 3)]),
    "gelu": (F.gelu, [(2, 3)]),
    "prelu": (F.prelu, [(2, 3), (3,)]),
    "conv1d": (F.conv1d, [(2, 3, 5), (4, 3, 2), (4,)]),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 1], [1, 1]]), w), [(2, 3)]),
    "gaussian_nll": (lambda x, y, z: F.gaussian_nll_loss(x, y, z.exp()), [(2, 3)] * 3),
    "inv": (lambda x: torch.linalg.inv(x + 3 * torch.eye(2, dtype=D)), [(2, 2, 2)]),
    "fold": (lambda x: F.fold(x, (4, 4), 2), [(2, 4, 9)]),
}


def differentiate_twice(op: Callable[..., Any], shapes: list[tuple[int, ...]]) -> Any:
    def program(make: Make) -> Any:
        torch.manual_seed(1)
        xs = [make(torch.randn(*shape, dtype=D)) for shape in shapes]
        firsts = torch.autograd.grad(op(*xs).square().sum(), xs, create_graph=True)
        sum(g.square().sum() * (i + 1) for i, g in enumerate(firsts)).backward()
        # Of one operand only, and of what is linear: some gradients do not exist.
        (one,) = torch.autograd.grad(op(*xs).sum(), xs[:1], create_graph=True)
        held = [x.grad for x in xs]
        for x in xs:
            x.grad = None
        if one.requires_grad:
            one.sin().sum().backward()
        return list(firsts), held, one, one.requires_grad, [x.grad for x in xs]

    return program


@pytest.mark.parametrize("place", [pt.Shard(0), pt.Shard(1)], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_a_rank_without_rows_differentiates_again(name, place):
    compare(differentiate_twice(*OPS[name]), place, a=3)


def test_it_does_so_in_anomaly_mode():
    """Torch looks for NaN in all gradients there, also in those without memory."""
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        compare(differentiate_twice(*OPS["linear"]), pt.Shard(0), a=3)


def test_a_derivative_that_torch_lacks_is_an_error_on_all_ranks():
    def body(mesh):
        x = pt.distribute_tensor(V[:2], mesh, [pt.Shard(0)]).requires_grad_()
        with pytest.raises(NotImplementedError, match="derivative"):
            (g,) = torch.autograd.grad(torch.cdist(x, V).sum(), x, create_graph=True)
            g.square().sum().backward()
        return True

    with pt.ranks(a=3) as world:
        assert all(world.run(body))


# -- infinities and the sign of zero ---------------------------------------------------------------

ZEROS = torch.tensor([[-0.0, 0.0, 1], [0, -0.0, -0.0], [-0.0, -0.0, 0], [2, -0.0, 0]], dtype=D)
SIGNED = {
    "itself": lambda make: make(ZEROS),
    "negative": lambda make: -make(ZEROS),
    "multiples": lambda make: [make(ZEROS) * 3, make(ZEROS) / -2],
    "sum": lambda make: make(ZEROS) + make(ZEROS),
    "rows": lambda make: [make(ZEROS)[i] for i in (0, 1, -1, [0, 2], slice(1, 3))],
    "columns": lambda make: [make(ZEROS)[:, 1], make(ZEROS)[2, 1], make(ZEROS).select(1, 2)],
    "picked": lambda make: [
        make(ZEROS).index_select(0, torch.tensor([3, 0])),
        make(ZEROS).gather(0, torch.zeros(1, 3, dtype=torch.long)),
        make(ZEROS).take(torch.tensor([0, 4])),
        F.embedding(torch.tensor([0, 2]), make(ZEROS)),
    ],
    "filled": lambda make: [make(V).fill_(-0.0), torch.full_like(make(V), -0.0)],
    "complex": lambda make: torch.view_as_real(make(torch.complex(ZEROS, ZEROS))),
}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", SIGNED)
def test_zeros_keep_their_sign(name, place):
    with torch.no_grad():
        right = value_of(SIGNED[name](lambda t: t.clone()))

    def body(mesh):
        with torch.no_grad():
            return value_of(SIGNED[name](lambda t: pt.distribute_tensor(t, mesh, [place])))

    with pt.ranks(a=2) as world:
        for found in world.run(body):
            pairs = zip(found, right, strict=True) if isinstance(right, list) else [(found, right)]
            for one, other in pairs:
                torch.testing.assert_close(one, other)
                assert torch.equal(one.signbit(), other.signbit())


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, torch.logsumexp])
def test_an_infinity_spreads_over_its_split_row_as_on_one_device(function):
    inf = float("inf")
    rows = [[inf, -inf, 0.0], [inf, 1, 2], [-inf] * 3, [-inf, 0, 1], [float("nan"), 0, 1]]
    x = torch.tensor(rows, dtype=D)

    def body(mesh):
        return function(pt.distribute_tensor(x, mesh, [pt.Shard(1)]), 1).full_tensor()

    with pt.ranks(a=2) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, function(x, 1), equal_nan=True)
