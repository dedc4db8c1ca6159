"""Is a captured step over uneven shards the step, and is what pads them never seen?"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from tests.programs.uneven_steps import X, Y, close, compiled, on, train, widths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "spread_out", "rows"),
    [
        ({"dp": 2}, pt.zero, 6),
        ({"dp": 3}, pt.zero, 5),
        ({"dp": 4}, pt.zero, 5),
        ({"dp": 3}, pt.parallelize, 1),
        ({"dp": 2, "tp": 3}, pt.parallelize, 5),
    ],
)
def test_uneven_parameters_and_batches_train_as_in_eager_with_one_key(axes, spread_out, rows):
    with pt.ranks(**axes) as world:
        eager = world.run(train, spread_out, rows, False)
        fast = world.run(train, spread_out, rows, True)
    close(fast[0][0], eager[0][0])
    close(fast[0][0], train(None, None, rows, False)[0], rtol=1e-5)
    assert len({key for _, key, _ in fast}) == 1
    assert all(torch.equal(fast[0][0], losses) for losses, _, _ in fast)


# -- moves -----------------------------------------------------------------------------------------

PLACES = [pt.Shard(0), pt.Shard(1), pt.Replicate(), pt.Partial()]


def some_moves(mesh, seed, count):
    """The same choice on every rank, moved in one step."""
    choose, ndim = random.Random(seed), mesh.ndim
    values, xs, places = [], [], []
    for _ in range(count):
        shape = choose.choice([5, 7, 1, 9]), choose.choice([7, 3, 4, 2])
        before, after = ([choose.choice(PLACES) for _ in range(ndim)] for _ in range(2))
        values.append(torch.arange(1.0, 1 + shape[0] * shape[1]).view(shape))
        xs.append(pt.distribute_tensor(values[-1], mesh, before))
        places.append(after)

    def step(xs):
        return [x.redistribute(placements=to) for x, to in zip(xs, places, strict=True)]

    found = compiled(step)(xs)
    for x, y, wanted, value in zip(xs, found, step(xs), values, strict=True):
        told = (x.placements, wanted.placements, value.shape)
        assert y.placements == wanted.placements and torch.equal(y.full_tensor(), value), told
        assert y.to_local().shape == wanted.to_local().shape, told


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "seed"), [({"dp": 3}, 1), ({"dp": 2, "tp": 3}, 1)])
def test_a_move_of_uneven_pieces_gives_the_value(axes, seed):
    with pt.ranks(**axes) as world:
        world.run(some_moves, seed, 24)


@pytest.mark.parametrize("rows", [6, 9, 12, 4, 1])
def test_a_move_that_reorders_the_axes_of_a_dimension_gives_the_value_and_says_what_it_sends(rows):
    def run(mesh):
        value = torch.arange(4.0 * rows).view(rows, 4)
        x = pt.distribute_tensor(value, mesh, [pt.Shard(1), pt.Shard(0)])
        step = compiled(lambda x: x.redistribute(placements=[pt.Shard(0)] * 2))
        y = step(x)
        with pt.ledger() as log:
            step(x)
        wanted = pt.distribute_tensor(value, mesh, [pt.Shard(0)] * 2)
        assert y.to_local().equal(wanted.to_local())
        assert y.full_tensor().equal(value)
        return log.count("all_to_all")

    with pt.ranks(dp=2, tp=3) as world:
        assert world.run(run) == [0] * 6


# -- what is reduced -------------------------------------------------------------------------------

TARGET = torch.tensor([2, -100, 0, 3, 1])
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0]).double()
REDUCED = {
    "sum": lambda x, y, t: x.sum(0),
    "mean": lambda x, y, t: x.mean(),
    "negative": lambda x, y, t: (-x).mean(0),
    "matmul": lambda x, y, t: x.t() @ y,
    "linear": lambda x, y, t: F.linear(x.t(), y.t(), y.sum(0)),
    "einsum": lambda x, y, t: torch.einsum("bi,bj->ij", x, y),
    "largest": lambda x, y, t: (-x).amax(0),
    "smallest": lambda x, y, t: x.amin(0),
    "where largest": lambda x, y, t: (-x).max(0).values,
    "norm": lambda x, y, t: x.norm(),
    "norm 0.5": lambda x, y, t: torch.linalg.vector_norm(x, 0.5, 0),
    "norm -2": lambda x, y, t: torch.linalg.vector_norm(x, -2.0, 0),
    "std": lambda x, y, t: x.std(0),
    "softmax": lambda x, y, t: (x.softmax(0) * y).sum(),
    "logsumexp": lambda x, y, t: x.logsumexp(0),
    "mse": lambda x, y, t: F.mse_loss(x, y),
    "huber": lambda x, y, t: F.huber_loss(x, y, reduction="sum"),
    "kl": lambda x, y, t: F.kl_div(x.log(), y, reduction="batchmean"),
    "bce": lambda x, y, t: F.binary_cross_entropy(x / 2, y / 2),
    "bce logits": lambda x, y, t: F.binary_cross_entropy_with_logits(
        x, y, pos_weight=y.detach().sum()
    ),
    "poisson": lambda x, y, t: F.poisson_nll_loss(x, y),
    "poisson linear": lambda x, y, t: F.poisson_nll_loss(x, y, log_input=False),
    "hinge": lambda x, y, t: F.hinge_embedding_loss(x, (y > 1).double() * 2 - 1),
    "ranking": lambda x, y, t: F.margin_ranking_loss(x, y, torch.ones_like(x), 0.3),
    "cosine": lambda x, y, t: F.cosine_embedding_loss(x, y, (t > 0).double() * 2 - 1),
    "poisson without eps": lambda x, y, t: F.poisson_nll_loss(x, y, log_input=False, eps=0),
    # Operands that are broadcast over the padding.
    "kl and a row": lambda x, y, t: F.kl_div(x.log(), y.mean(0), reduction="batchmean"),
    "kl of a row": lambda x, y, t: F.kl_div(x.mean(0), y, log_target=True, reduction="sum"),
    "poisson and a row": lambda x, y, t: F.poisson_nll_loss(x, y.mean(0)),
    "hinge and a row": lambda x, y, t: F.hinge_embedding_loss(x, SIGNS) + y.sum(),
    "ranking and rows": lambda x, y, t: F.margin_ranking_loss(
        x.mean(0, keepdim=True), y, SIGNS.view(1, 4), 0.3
    ),
    "cross entropy": lambda x, y, t: F.cross_entropy(x, t),
    "cross entropy sum": lambda x, y, t: F.cross_entropy(x, t, reduction="sum"),
    "cross entropy y": lambda x, y, t: F.cross_entropy(x, y, label_smoothing=0.1),
    "nll sum": lambda x, y, t: F.nll_loss(x.log_softmax(1), t, reduction="sum"),
    "embedding": lambda x, y, t: F.embedding(torch.tensor([4, 0, 2]), x),
    "rows": lambda x, y, t: x.index_select(0, torch.tensor([4, 0, 2])),
    "batch norm": lambda x, y, t: F.batch_norm(x, None, None, training=True) * y,
    "layer norm": lambda x, y, t: F.layer_norm(x.t(), (5,)) * y.t(),
}
COUNTED = {
    "any": lambda x, y, t: (x < 0).any(0),
    "all": lambda x, y, t: (x > 0).all(),
    "count": lambda x, y, t: (x > 1).count_nonzero(0),
    "argmax": lambda x, y, t: (-x).argmax(0),
    "argmin of all": lambda x, y, t: x.argmin(),
}


def reduced(mesh, names, rows):
    """What each function gives of `rows` of the data, and its gradients, captured in one step."""
    spread = (lambda t: t) if mesh is None else on(mesh)
    t, functions = spread(TARGET[:rows]), {**REDUCED, **COUNTED}
    pairs = [
        [spread(v[:rows, :4].double()).requires_grad_(name in REDUCED) for v in (X, Y)]
        for name in names
    ]

    def step(pairs, t):
        outs = []
        for (x, y), name in zip(pairs, names, strict=True):
            outs.append(functions[name](x, y, t))
            if name in REDUCED:
                (outs[-1] * outs[-1]).sum().backward()
        return [out.detach() for out in outs]

    outs = (step if mesh is None else compiled(step))(pairs, t)
    found = [[out, x.grad, y.grad] for out, (x, y) in zip(outs, pairs, strict=True)]
    if mesh is not None:
        found = [[v if v is None else v.full_tensor() for v in values] for values in found]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 4])
def test_no_reduction_and_no_gradient_of_one_sees_the_padding(rows):
    names = [*REDUCED, *COUNTED]
    if rows == 4:  # of three ranks the last one has none
        names = [n for n in names if n not in ("embedding", "rows", "layer norm")]
    with pt.ranks(dp=3) as world:
        found = world.run(reduced, names, rows)[0]
    for name, values, wanted in zip(names, found, reduced(None, names, rows), strict=True):
        for a, b in zip(values, wanted, strict=True):
            if a is None or b is None:  # a gradient of zeros
                assert all(v is None or not v.any() for v in (a, b)), name
            else:
                assert torch.allclose(a, b, rtol=1e-6, atol=1e-9), (name, a, b)


def kl_of_rows_and_a_row(mesh, spread_rows, spread_row):
    """The divergence of uneven rows from one row, and gradients of both."""
    rows, row = X[:5, :5].double(), Y[0].double()
    if mesh is not None:
        rows = pt.distribute_tensor(rows, mesh, spread_rows)
        row = pt.distribute_tensor(row, mesh, spread_row)
    rows.requires_grad_(), row.requires_grad_()

    def step(rows, row):
        loss = F.kl_div(rows, row, reduction="batchmean")
        loss.backward()
        return loss.detach()

    loss = (step if mesh is None else compiled(step))(rows, row)
    found = [loss, rows.grad, row.grad]
    return found if mesh is None else [t.full_tensor() for t in found]


@pytest.mark.slow
def test_a_loss_does_not_count_what_is_broadcast_over_the_padding_of_another_operand():
    def run(mesh):
        spread = [pt.Shard(0)] if mesh.ndim == 1 else [pt.Partial(), pt.Shard(0)]
        found = kl_of_rows_and_a_row(
            mesh, [pt.Replicate()] * (mesh.ndim - 1) + [pt.Shard(0)], spread
        )
        for t, wanted in zip(found, kl_of_rows_and_a_row(None, None, None), strict=True):
            torch.testing.assert_close(t, wanted, rtol=1e-9, atol=1e-9)

    for axes in ({"b": 2}, {"b": 3}, {"a": 2, "b": 3}):
        with pt.ranks(**axes) as world:
            world.run(run)


def split_words(mesh, fast):
    """A vocabulary of 7 over 3 ranks, in the embedding, the head and the loss."""
    torch.manual_seed(0)
    words, head = nn.Embedding(7, 4), nn.Linear(4, 7)
    tokens, targets = torch.arange(10).view(5, 2) % 7, torch.arange(3, 13).view(5, 2) % 7
    if mesh is not None:
        for module in (words, head):
            for name, p in list(module.named_parameters()):
                p = pt.distribute_tensor(p.detach(), mesh, [pt.Shard(0)])
                module.register_parameter(name, nn.Parameter(p))
        tokens, targets = (pt.distribute_tensor(t, mesh) for t in (tokens, targets))
    params = [*words.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(params, lr=0.1)

    def step(tokens, targets):
        logits = head(words(tokens).log1p().nan_to_num())
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = compiled(step) if fast else step
    return [step(tokens, targets).item() for _ in range(3)]


@pytest.mark.slow
def test_a_vocabulary_that_does_not_divide_is_learnt():
    with pt.ranks(tp=3) as world:
        fast = world.run(split_words, True)
    close(torch.tensor(fast[0]), torch.tensor(split_words(None, False)), rtol=1e-5)


@pytest.mark.slow
def test_uneven_parameters_are_gathered_again_for_backward():
    with pt.ranks(dp=3) as world:
        _, _, step = world.run(train, pt.zero, 6, True)[0]
    (again,) = [c for c in step.program.changes if c.name == "regather"]
    assert again.saved[1] == 0 < again.saved[0]


@pytest.mark.filterwarnings("ignore:runs eagerly")
def test_what_no_table_knows_is_refused_and_runs_eagerly_where_that_is_asked_for():
    def run(mesh):
        edges = on(mesh)(torch.arange(5.0))
        step = lambda edges: torch.bucketize(torch.tensor([1.5]), edges)  # noqa: E731
        with pytest.raises(pt.CaptureError, match="bucketize of 1, 5@dp reduces uneven pieces"):
            compiled(step)(edges)
        found = pt.compile(step, backend="graph", fallback="eager")(edges)
        assert found.full_tensor().item() == 2
        for out in (lambda x: x.to_local(), pt.local_map(lambda x: x, [pt.Shard(0)])):
            with pytest.raises(pt.CaptureError, match="would show the padding"):
                compiled(out)(edges)

    with pt.ranks(dp=2) as world:
        world.run(run)


# -- padding stays finite --------------------------------------------------------------------------


class Singular(nn.Module):
    """Undefined at zero in many ways, so that padding with zeros would show."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(7, 4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, tokens, x):
        words = self.words(tokens) + x.unsqueeze(1)
        q, k, v = self.qkv(words).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = attended / attended.norm(dim=-1, keepdim=True)
        h = (h / h.std(-1, keepdim=True)).softmax(-1).log() + x.log().unsqueeze(1)
        return self.out(h / x.rsqrt().unsqueeze(1)).sum(1) / x.sum(-1, keepdim=True)


def finite(mesh, rows, fast):
    model = Singular()
    tokens, x = torch.arange(3 * rows).view(rows, 3) % 7, X[:rows, :4]
    if mesh is not None:
        model, tokens, x = pt.parallelize(model, mesh), on(mesh)(tokens), on(mesh)(x)

    def step(tokens, x):
        out = model(tokens, x)
        loss = out.square().mean() + (out.log_softmax(-1) / x.sqrt().sum()).sum()
        loss.backward()
        return loss

    loss = (compiled(step) if fast else step)(tokens, x)
    grads = [p.grad for p in model.parameters()]
    if mesh is not None:
        grads = [g.full_tensor() for g in grads]
        loss = loss.full_tensor()
    return [loss.detach(), *grads]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 1])
def test_nothing_infinite_comes_out_of_the_padding(rows):
    with pt.ranks(dp=3) as world:
        fast = world.run(finite, rows, True)
    for a, b in zip(fast[0], finite(None, rows, False), strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- what goes in and out --------------------------------------------------------------------------


def test_gradients_that_a_caller_gives_and_hooks_change_are_zero_in_the_padding():
    def run(mesh, fast):
        w = torch.nn.Parameter(torch.full((6, 2), 0.5))
        if mesh is not None:
            w = nn.Parameter(pt.distribute_tensor(w.detach(), mesh))
        spread = (lambda t: t) if mesh is None else on(mesh)

        def step(x, g):
            h = x @ w
            h.register_hook(lambda grad: grad + 1)
            h.backward(g)
            return h.detach()

        (compiled(step) if fast else step)(spread(X[:5]), spread(torch.ones(5, 2)))
        return w.grad if mesh is None else w.grad.full_tensor()

    with pt.ranks(dp=3) as world:
        found = world.run(run, True)
    torch.testing.assert_close(found[0], run(None, False))


@pytest.mark.slow
def test_inputs_are_written_and_gradients_accumulate_in_their_true_shapes():
    def run(mesh, fast):
        model, x = widths(), X[:5]
        if mesh is not None:
            model, x = pt.zero(model, mesh), on(mesh)(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = torch.zeros(5, 6) if mesh is None else on(mesh)(torch.zeros(5, 6))

        def backward(x, seen):
            seen.add_(x)
            model(x).square().mean().backward()

        def update():
            optimizer.step()
            optimizer.zero_grad()

        backward, update = (compiled(f) if fast else f for f in (backward, update))
        for _ in range(2):
            backward(x, seen)
            backward(x, seen)
            update()
        values = [seen, *model.parameters()]
        values += [s["momentum_buffer"] for s in optimizer.state.values()]
        return [v if mesh is None else v.full_tensor() for v in values]

    with pt.ranks(dp=3) as world:
        found = world.run(run, True)[0]
    for a, b in zip(found, run(None, False), strict=True):
        torch.testing.assert_close(a, b)


def held(t):
    """Bytes of the memory in which a tensor is."""
    return pt.DTensor.to_local(t).untyped_storage().nbytes()


@pytest.mark.slow
def test_a_smaller_piece_is_written_where_it_is_and_is_as_large_as_it_was_to_all_who_see_it():
    def run(mesh):
        model, x = pt.zero(widths(), mesh), on(mesh)(X[:5])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        weight = model[0].weight
        seen = weight.detach().to_local()

        def train(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step, places = compiled(train), []
        for _ in range(3):
            step(x)
            places.append(weight.to_local().data_ptr())
        assert torch.equal(seen, weight.to_local())  # it changed with the weight
        moment = optimizer.state[weight]["exp_avg"]
        return tuple(seen.shape), places, held(weight), held(moment), held(model[3].weight)

    with pt.ranks(dp=3) as world:
        found = world.run(run)
    pieces = [(3, 6), (3, 6), (1, 6)]  # of 7 x 6, and of 5 x 7
    for (shape, places, *whole), piece in zip(found, pieces, strict=True):
        assert shape == piece and len(set(places)) == 1
        # The padding is behind it, in memory that no storage of the user's shows.
        rows = piece[0] * 6 * 4
        assert whole == [rows, rows, (2 if piece[0] == 3 else 1) * 7 * 4]


@pytest.mark.parametrize("behind", ["rows", "columns", "nothing"])
def test_what_lies_behind_a_piece_is_not_written(behind):
    def run(mesh):
        place = mesh.get_local_rank("dp")
        around = torch.arange(24.0).view(4, 6)
        if behind == "rows":
            piece = around[: 3 - place]
        elif behind == "columns":
            piece = around[: 3 - place, :4]
        else:
            piece = around[place + 1 :]
        before = around.clone()
        size, row = (5, piece.shape[1]), [pt.Shard(0)]
        x = pt.DTensor.from_local(piece, mesh, row, shape=size, stride=(size[1], 1))
        w = torch.arange(float(piece.shape[1])) + 1
        for _ in range(2):
            total = compiled(lambda x: (x.square() @ w).sum().redistribute(placements=[R]))(x)
        assert torch.equal(around, before)
        return total.to_local(), (piece.square() @ w).sum()

    R = pt.Replicate()
    with pt.ranks(dp=2) as world:
        found = world.run(run)
    wanted = sum(mine for _, mine in found)
    for total, _ in found:
        torch.testing.assert_close(total, wanted)


@pytest.mark.slow
def test_memory_that_processes_share_is_padded_in_a_copy():
    def run(mesh):
        model = pt.zero(widths(), mesh)
        for p in model.parameters():
            p.to_local().share_memory_()
        before = [held(p) for p in model.parameters()]
        loss = compiled(lambda x: model(x).square().mean())(on(mesh)(X[:5]))
        assert [held(p) for p in model.parameters()] == before
        return loss.item()

    with pt.ranks(dp=3) as world:
        found = world.run(run)
    assert found == pytest.approx([widths()(X[:5]).square().mean().item()] * 3, rel=1e-5)


def test_what_a_caller_brings_along_is_left_as_it_is():
    def run(mesh, inference):
        with torch.inference_mode(inference):
            mine = X[:3].clone() if mesh.get_local_rank("dp") == 0 else X[3:5].clone()
            x = pt.DTensor.from_local(mine, mesh, [pt.Shard(0)], shape=(5, 6), stride=(6, 1))
        address, nbytes = mine.data_ptr(), held(x)
        with torch.no_grad():
            total = compiled(lambda x: x.sum().redistribute(placements=[pt.Replicate()]))(x)
        assert (mine.data_ptr(), held(x)) == (address, nbytes)
        return total.item()

    with pt.ranks(dp=2) as world:
        for inference in (False, True):
            assert world.run(run, inference) == pytest.approx([X[:5].sum().item()] * 2)


def test_padding_a_weight_is_no_change_of_it_to_a_graph_that_waits_for_its_backward():
    def run(mesh, fast):
        torch.manual_seed(0)
        w, x = torch.randn(5, 4, dtype=torch.float64), X[:, :4].double()
        if mesh is not None:
            w, x = pt.distribute_tensor(w, mesh, [pt.Shard(0)]), on(mesh)(x)
            x = x.redistribute(placements=[pt.Replicate()])
        w.requires_grad_()
        region = lambda x, w: (x @ w.T).sin()  # noqa: E731
        region = compiled(region) if fast else region
        first = region(x, w) * w.sum(1).cos()
        second = region(first @ w, w)
        (second.sum() + first.sum()).backward()
        return w.grad if mesh is None else w.grad.full_tensor()

    with pt.ranks(dp=3) as world:
        found = world.run(run, True)
    torch.testing.assert_close(found[0], run(None, False))


def test_the_ledger_tells_of_the_elements_that_ranks_without_any_are_lent():
    def run(mesh, rows):
        step = compiled(lambda x: x.square().sum(0).redistribute(placements=[R]))
        step(on(mesh)(X[:rows]))
        with pt.ledger() as log:
            step(on(mesh)(X[:rows]))
        return [(m.kind, m.axes, m.nbytes) for m in log.moves if m.reason == "padding"]

    R = pt.Replicate()
    with pt.ranks(dp=3) as world:
        for found in world.run(run, 1):
            assert found == [("all_gather", ("dp",), 2 * 6 * 4)]  # a row of x, to two others
        assert world.run(run, 5) == [[], [], []]


def test_random_numbers_of_uneven_pieces_are_those_of_one_device():
    def run(mesh):
        x = on(mesh)(torch.ones(5, 4))

        def step(x):
            return F.dropout(x, 0.5) + torch.rand_like(x)

        torch.manual_seed(1)
        found = compiled(step)(x).full_tensor()
        torch.manual_seed(1)
        assert torch.equal(found, step(torch.ones(5, 4)))

    with pt.ranks(dp=3) as world:
        world.run(run)


def test_even_shards_pay_nothing():
    def run(mesh, rows):
        step = compiled(lambda x: (x @ torch.ones(6, 2)).mean(0).redistribute(placements=[R]))
        step(on(mesh)(X[:rows]))
        return str(step.program.graph.graph), bool(step.program.entering)

    R = pt.Replicate()
    with pt.ranks(dp=3) as world:
        (uneven, padded), *_ = world.run(run, 5)
        (even, as_it_is), *_ = world.run(run, 6)
    assert "masked_fill" in uneven and padded
    assert not any(word in even for word in ("masked_fill", "arange", "index", "pad"))
    assert not as_it_is
