"""Whether an op copies is told by the whole's memory: what is written afterwards shows the same.

A piece of one row is contiguous, and what had to be moved is a copy. One device is the truth: the
same lines on plain tensors.
"""

from __future__ import annotations

import pytest
import torch

import partita as pt

BASES = {
    "itself": lambda b: b,
    "transposed": lambda b: b.t(),
    "columns": lambda b: b[:, 1:5],
    "one column": lambda b: b[:, 2],
    "half": lambda b: b.chunk(2, 1)[1],
    "three dimensions": lambda b: b.unflatten(1, (4, 3)).transpose(0, 1),
    "expanded": lambda b: b[:1].expand(4, -1),
    "rows of columns": lambda b: b[:, 1:5].chunk(2, 0)[0],
    "images": lambda b: b.view(-1, 2, 2, 3).contiguous(memory_format=torch.channels_last),
}
OPS = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(-1),
    "rows": lambda x: x.reshape(-1, x.shape[-1]),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "to": lambda x: x.to(memory_format=torch.contiguous_format),
    "images": lambda x: x.to(memory_format=torch.channels_last if x.ndim == 4 else None),
    "a device": lambda x: x.to("cpu"),
    "a device and a dtype": lambda x: x.to(torch.device("cpu"), x.dtype),
    "both": lambda x: x.contiguous().reshape(-1),
    "broadcast": lambda x: x.broadcast_to((1, *x.shape)),
    "atleast": lambda x: torch.atleast_2d(x),
}


def written(base, make, op):
    """What stands in all three after each is written."""
    found = []
    for writes in (
        lambda b, x, y: b.mul_(3),
        lambda b, x, y: x.mul_(2),
        lambda b, x, y: y.add_(1),
    ):
        b = base.clone()
        x = make(b)
        y = op(x)
        try:
            writes(b, x, y)
        except RuntimeError as error:
            assert "more than one element" in str(error)
        found += [b, x, y]
    return found


@pytest.mark.parametrize("rows", [2, 3])  # on two ranks: 1 1, and 2 1
@pytest.mark.parametrize("op", OPS)
def test_what_is_written_afterwards_shows_where_it_does_on_one_device(op, rows):
    base = torch.arange(12.0 * rows).view(rows, 12)

    def body(mesh):
        for made, make in BASES.items():
            wanted = written(base, make, OPS[op])
            for dim in (0, 1):
                spread = pt.distribute_tensor(base, mesh, [pt.Shard(dim)])
                for mine, theirs in zip(written(spread, make, OPS[op]), wanted, strict=True):
                    assert torch.equal(mine.full_tensor(), theirs), (made, dim)

    with pt.ranks(dp=2) as world:
        world.run(body)


def test_strides_of_a_copied_view_are_the_views():
    def body(mesh):
        base = torch.arange(24.0).view(2, 12)
        for dim in (0, 1):
            for make in BASES.values():
                x = make(pt.distribute_tensor(base, mesh, [pt.Shard(dim)]))
                assert x.stride() == make(base).stride()

    with pt.ranks(dp=2) as world:
        world.run(body)


def test_a_captured_step_copies_as_eager_does():
    def body(mesh):
        x = pt.distribute_tensor(torch.arange(24.0).view(2, 12), mesh, [pt.Shard(0)])

        def step(x):
            part = x[:, 1:5]
            part.contiguous().mul_(2)
            x.view(2, 4, 3).flatten(0, 1).add_(1)
            return part * 1

        assert torch.equal(pt.compile(step)(x).full_tensor(), step(x - 1).full_tensor())

    with pt.ranks(dp=2) as world:
        world.run(body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16, torch.complex64])
def test_a_conversion_to_the_dtype_that_a_tensor_has_is_the_tensor(dtype):
    base = torch.arange(24.0).view(2, 12).to(dtype)
    same = (lambda x: x.to(dtype), lambda x: x.to("cpu", dtype), lambda x: x.type(dtype))
    other = (lambda x: x.to(dtype, copy=True), lambda x: x.to(torch.complex128).real.to(dtype))

    def body(mesh):
        for op in (*same, *other):
            wanted = written(base, BASES["columns"], op)
            spread = pt.distribute_tensor(base, mesh, [pt.Shard(0)])
            for mine, theirs in zip(written(spread, BASES["columns"], op), wanted, strict=True):
                assert torch.equal(mine.full_tensor(), theirs)

    with pt.ranks(dp=2) as world:
        world.run(body)


def test_ranks_with_short_pieces_move_the_value_that_the_others_move():
    """Ranks compare which value they move by the call that made it, also where one has copied it.

    The gradient lies in a buffer with others: its piece on the last rank is empty, its memory not.
    """

    def body(mesh):
        torch.manual_seed(0)
        model = pt.zero(torch.nn.Linear(6, 4).double(), mesh)
        x = pt.distribute_tensor(torch.ones(6, 6).double(), mesh, [pt.Shard(0)])
        model(x).square().sum().backward()
        g = model.bias.grad
        found = [
            op(g) for op in (lambda g: g.reshape(-1).to(torch.float64), lambda g: g.contiguous())
        ]
        return [t.norm(2).item() for t in found], g.full_tensor().norm(2).item()

    with pt.ranks(dp=3) as world:
        for norms, wanted in world.run(body):
            assert norms == pytest.approx([wanted] * 2)


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("place", [pt.Shard(0), pt.Shard(1)], ids=str)
def test_ranks_mark_a_reshaped_value_alike_whatever_their_strides_show(place, mode, rows):
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(4, 1, batch_first=True).double().eval()
    x = torch.randn(rows, 3, 4, dtype=torch.float64)

    def attend(x):
        with mode():
            out = attention(x, x, x, need_weights=False)[0]
            return out.full_tensor() if isinstance(out, pt.DTensor) else out

    with pt.ranks(a=2) as world:
        found = world.run(lambda mesh: attend(pt.distribute_tensor(x, mesh, [place])))
    for one in found:
        torch.testing.assert_close(one, attend(x))
