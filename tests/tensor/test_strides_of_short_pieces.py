"""Strides are those of the whole, on all ranks: also where a rank has one row, or none."""

from __future__ import annotations

import pytest
import torch

import partita as pt

LAYOUTS = {
    "rows within columns": [pt.Shard(1), pt.Shard(0)],
    "columns within rows": [pt.Shard(0), pt.Shard(1)],
    "rows": [pt.Replicate(), pt.Shard(0)],
}
MADE = {
    "itself": lambda x: x,
    "product": lambda x: x * 2,
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 3, -1),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 1)),
    "joined": lambda x: torch.cat([x, x]),
}


@pytest.mark.parametrize("rows", [2, 4, 5])  # on three ranks: 1 1 0, 2 2 0, 2 2 1
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_one_answer(layout, rows):
    whole, placements = torch.arange(6.0 * rows).view(rows, 6), LAYOUTS[layout]

    def body(mesh):
        spread = pt.distribute_tensor(whole, mesh, placements)
        moved = pt.distribute_tensor(whole, mesh).redistribute(placements=placements)
        found = []
        for make in MADE.values():
            for x in map(make, (spread, moved)):
                found.append((x.stride(), x.is_contiguous()))
        return found

    expected = [(make(whole).stride(), make(whole).is_contiguous()) for make in MADE.values()]
    with pt.ranks(dp=2, tp=3) as world:
        for found in world.run(body):
            assert found[::2] == found[1::2] == expected


@pytest.mark.parametrize("part", [lambda x: x[:, 1:5], lambda x: x.chunk(2, 1)[1], lambda x: x[0]])
def test_ranks_agree_on_the_strides_of_a_part(part):
    def body(mesh):
        whole = torch.arange(30.0).view(5, 6)
        parts = [part(pt.distribute_tensor(whole, mesh, p)) for p in LAYOUTS.values()]
        return [(x.stride(), x.is_contiguous()) for x in parts]

    with pt.ranks(dp=2, tp=3) as world:
        first, *others = world.run(body)
    assert all(found == first for found in others)


def test_as_strided_is_taken_on_all_ranks():
    def body(mesh):
        x = pt.distribute_tensor(torch.arange(30.0).view(5, 6), mesh, [pt.Shard(1), pt.Shard(0)])
        return x.as_strided((3, 2), (6, 2)).full_tensor()

    with pt.ranks(dp=2, tp=3) as world:
        for found in world.run(body):
            assert torch.equal(found, torch.arange(30.0).as_strided((3, 2), (6, 2)))


@pytest.mark.parametrize(
    ("equation", "shapes", "split", "ranks"),
    [
        ("bhts,bshd->bthd", [(2, 3, 4, 4), (2, 4, 3, 2)], [0, 0], 2),
        ("bthd,bshd->bhts", [(2, 4, 3, 2), (2, 4, 3, 2)], [3, 3], 2),  # summed over one element
        ("abc,cd->dab", [(2, 3, 4), (4, 5)], [1, None], 3),
        ("abc,acd->dba", [(2, 3, 2), (2, 2, 5)], [2, 1], 2),
        ("abc,acd->dba", [(2, 3, 2), (2, 2, 5)], [2, 1], 3),
        ("abc,bcd->dab", [(2, 3, 2), (3, 2, 5)], [0, None], 3),
        ("i...,i...->...", [(6, 1), (1, 6, 3)], [None, 2], 3),
        ("i...,i...->...", [(6, 1), (1, 6, 3)], [None, 2], 4),  # one rank has no column
    ],
)
def test_noise_like_an_einsum_is_that_of_one_device(equation, shapes, split, ranks):
    """`einsum` lays out its result otherwise where an operand has a single element of a dimension;
    noise fills memory in its order."""
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def make_noise(operands):
        operands = [x.requires_grad_() for x in operands]
        product = torch.einsum(equation, operands)
        torch.manual_seed(1)
        noisy = torch.dropout(product, 0.5, True) + torch.randn_like(product)
        (noisy * product).sum().backward()
        return [product, noisy, *(x.grad for x in operands)]

    def body(mesh):
        spread = [pt.Replicate() if dim is None else pt.Shard(dim) for dim in split]
        operands = [pt.distribute_tensor(x, mesh, [p]) for x, p in zip(wholes, spread, strict=True)]
        return [x.detach().full_tensor() for x in make_noise(operands)]

    expected = [x.detach() for x in make_noise([x.clone() for x in wholes])]
    with pt.ranks(dp=ranks) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


BASES = {
    "transposed": lambda b: b.t(),
    "three dimensions": lambda b: b.unflatten(1, (4, 3)).transpose(0, 1),
    "permuted": lambda b: b.unflatten(1, (4, 3)).permute(2, 1, 0),
    "images": lambda b: b.view(-1, 2, 2, 3).contiguous(memory_format=torch.channels_last),
    "a part": lambda b: b[:, 1:5].t(),
}
OPS = {
    "exp": lambda x: x.exp(),
    "two": lambda x: x.neg().exp() + x,
    "dropout": lambda x: torch.dropout(torch.dropout(x.exp(), 0.5, True), 0.5, True),
    "rand_like": lambda x: torch.rand_like(x) + x,
    "randn_like": lambda x: torch.randn_like(torch.randn_like(x)).mul(x),
    "stack": lambda x: torch.stack([x, x]),
}


@pytest.mark.parametrize("rows", [2, 3])  # on two ranks: 1 1, and 2 1
@pytest.mark.parametrize("op", OPS)
def test_a_result_of_single_rows_is_copied_and_filled_as_on_one_device(op, rows):
    whole = torch.rand(rows, 12, dtype=torch.float64)

    def compute(make, base):
        torch.manual_seed(0)
        base = base.requires_grad_()
        y = OPS[op](make(base))
        copy = y.contiguous()
        (y.square() + torch.dropout(copy * 1, 0.5, True)).sum().backward()
        with torch.no_grad():
            copy.add_(1)
        return [y.detach(), base.grad], y.stride()

    def body(mesh):
        for name, make in BASES.items():
            expected, stride = compute(make, whole.clone())
            for dim in (0, 1):
                spread = pt.distribute_tensor(whole, mesh, [pt.Shard(dim)]).clone()
                found, its_stride = compute(make, spread.detach())
                found = [t.full_tensor() for t in found]
                torch.testing.assert_close(found, expected)
                assert its_stride == stride, (name, dim)

    with pt.ranks(dp=2) as world:
        world.run(body)


def test_a_captured_result_of_single_rows_is_copied_as_in_eager_code():
    def step(x):
        y = x.t().exp()
        y.contiguous().add_(1)
        return y * 1

    whole = torch.rand(3, 5)

    def body(mesh):
        x = pt.distribute_tensor(whole, mesh, [pt.Shard(0)])
        return pt.compile(step, backend="graph")(x).full_tensor()

    with pt.ranks(dp=3) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, step(whole))
