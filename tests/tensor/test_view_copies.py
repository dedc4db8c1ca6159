"""Does a view behave as one where a layout had to change to make it, so that it is a copy?

One device is the truth: the same lines, run on plain tensors.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import partita as pt

Lines = Callable[[Tensor], list[Tensor]]


def written_base(x: Tensor) -> list[Tensor]:
    view = x.reshape(4, 4, 3)
    x.mul_(2)
    return [view * 1, view, x]


def view_of_a_view(x: Tensor) -> list[Tensor]:
    view = x.reshape(4, 4, 3)
    part = view[1:3]
    x[0] = 0.5
    return [part + 1, part, view]


def written_view(x: Tensor) -> list[Tensor]:
    view, other = x.reshape(4, 12), x.reshape(4, 4, 3)
    view[1:].add_(1)
    return [other * 1, view, x]


def reshaped_in_place(x: Tensor) -> list[Tensor]:
    view = x.reshape(4, 12)
    view.unsqueeze_(0)
    x.add_(1)
    view.mul_(2)
    return [view, view * 3, x]


def base_reshaped_in_place(x: Tensor) -> list[Tensor]:
    view = x.reshape(4, 12)
    x.unsqueeze_(0)
    x.add_(1)
    return [view * 1, view, x]


def detached(x: Tensor) -> list[Tensor]:
    view = x.reshape(4, 12)
    view.detach().mul_(3)
    return [view * 1, view, x]


def halves(x: Tensor) -> list[Tensor]:
    first, second = x[:, :2], x[:, 2:]
    x.mul_(2)
    x[:, 1:3].add_(1)
    return [first * 1, second, x]


def without_a_rule(x: Tensor) -> list[Tensor]:
    view = x.reshape(4, 12)
    x.mul_(2)
    return [torch.linalg.pinv(view), torch.cat([view, view]), x]


def written_into_another(x: Tensor) -> list[Tensor]:
    view = x.reshape(4, 12)
    other = torch.zeros_like(x).reshape(4, 12)
    x.mul_(2)
    other.copy_(view)
    other[0] = view[1]
    return [other, view]


def windows_that_overlap(x: Tensor) -> list[Tensor]:
    windows = x.unfold(0, 2, 1)
    windows[1].mul_(2)
    windows[0, 2:].add_(1)
    return [windows * 1, windows, x]


def windows_of_windows(x: Tensor) -> list[Tensor]:
    windows = x.flatten().unfold(0, 6, 2).unfold(1, 2, 1)
    windows[2, 1].mul_(2)
    return [windows * 1, windows, x]


def rows_of_an_expanded_tensor(x: Tensor) -> list[Tensor]:
    rows = x[1].reshape(1, 16).expand(3, -1)
    rows[2, 3:].mul_(2)
    return [rows * 1, rows, x]


def parts_of_a_detached_expanded_tensor(x: Tensor) -> list[Tensor]:
    first, second = x.reshape(1, 48).expand(2, -1).detach().unbind(0)
    with torch.no_grad():
        first.mul_(2)
    return [second * 1, first, x]


LINES: list[Lines] = [
    windows_that_overlap,
    windows_of_windows,
    rows_of_an_expanded_tensor,
    parts_of_a_detached_expanded_tensor,
    written_base,
    view_of_a_view,
    written_view,
    reshaped_in_place,
    base_reshaped_in_place,
    detached,
    halves,
    without_a_rule,
    written_into_another,
]


def values_and_gradient(lines: Lines, leaf: Tensor, whole: Callable[[Any], Tensor]) -> list[Tensor]:
    out = lines(leaf * 1)
    found = [whole(t).detach().clone() for t in out]
    total: Any = 0
    for i, t in enumerate(out):
        total = total + (t * (i + 1)).sum()
    total.backward()
    return [*found, whole(leaf.grad)]


def value() -> Tensor:
    return torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("lines", LINES, ids=lambda f: f.__name__)
def test_a_copied_view_and_its_base_show_what_is_written_into_either(
    lines: Lines, dim: int
) -> None:
    truth = values_and_gradient(lines, value().requires_grad_(), lambda t: t)

    def run(mesh: Any) -> None:
        leaf = pt.distribute_tensor(value(), mesh, [pt.Shard(dim)]).requires_grad_()
        got = values_and_gradient(lines, leaf, lambda t: t.full_tensor())
        for mine, expected in zip(got, truth, strict=True):
            torch.testing.assert_close(mine, expected)

    with pt.ranks(a=2) as world:
        world.run(run)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("lines", LINES, ids=lambda f: f.__name__)
def test_so_it_is_without_gradients(lines: Lines, mode: Callable[[], Any]) -> None:
    def run(mesh: Any) -> None:
        with mode():
            truth = lines(value())
            got = lines(pt.distribute_tensor(value(), mesh, [pt.Shard(1)]))
            for mine, expected in zip(got, truth, strict=True):
                torch.testing.assert_close(mine.full_tensor(), expected)

    with pt.ranks(a=2) as world:
        world.run(run)


def test_a_write_that_would_miss_other_elements_of_the_same_memory_is_refused() -> None:
    """The windows are a view of each piece, and only a column of them is a copy."""

    def run(mesh: Any) -> None:
        x = pt.distribute_tensor(value()[0], mesh, [pt.Shard(1)])
        windows = x.unfold(0, 2, 1)
        column = windows.select(1, 2)
        before = column.full_tensor().clone()
        with pytest.raises(pt.LayoutError, match=r"share memory[^\n]*test_view_copies"):
            column[1].mul_(2)
        assert torch.equal(x.full_tensor(), value()[0])
        assert torch.equal(column.full_tensor(), before)

    with pt.ranks(a=2) as world:
        world.run(run)


def test_all_ranks_refuse_a_write_if_a_piece_of_one_rank_alone_shares_memory() -> None:
    def run(mesh: Any) -> None:
        x = pt.distribute_tensor(value()[0][:, :1].contiguous(), mesh, [pt.Shard(1)])
        column = x.unfold(0, 2, 1).select(1, 0)  # the second rank has no element
        with pytest.raises(pt.LayoutError, match=r"share memory[^\n]*test_view_copies"):
            column[1].mul_(2)

    with pt.ranks(a=2) as world:
        world.run(run)


def saved_and_loaded(view: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    return torch.load(file)


def given_as_data(view: Tensor) -> Tensor:
    other = torch.zeros_like(view)
    other.data = view
    return other


@pytest.mark.parametrize(
    "read", [copy.deepcopy, copy.copy, lambda view: view.data, given_as_data, saved_and_loaded]
)
def test_a_copy_of_a_view_has_what_was_written_to_its_base(read: Callable[[Any], Any]) -> None:
    def run(mesh: Any) -> None:
        x = pt.distribute_tensor(value()[0], mesh, [pt.Shard(0)])
        row = x[1]
        x.add_(1)
        assert torch.equal(read(row).full_tensor(), value()[0, 1] + 1)

    with pt.ranks(a=2) as world:
        world.run(run)


@pytest.mark.parametrize("placement", [pt.Replicate(), pt.Shard(0), pt.Shard(1)])
@pytest.mark.parametrize("view", [lambda x: x[1:3], lambda x: x[:, 1:3], Tensor.t])
def test_a_shallow_copy_of_a_view_shares_its_memory(
    view: Callable[[Tensor], Tensor], placement: pt.Placement
) -> None:
    def written(x: Tensor) -> list[Tensor]:
        part = view(x)
        same = copy.copy(part)
        x.add_(1)
        shown = same * 1
        same.mul_(2)
        return [shown, same, part, x]

    def run(mesh: Any) -> None:
        got = written(pt.distribute_tensor(value()[0], mesh, [placement]))
        for mine, expected in zip(got, written(value()[0]), strict=True):
            torch.testing.assert_close(mine.full_tensor(), expected)

    with pt.ranks(a=2) as world:
        world.run(run)


@pytest.mark.parametrize("captured", [False, True])
def test_a_write_through_the_data_of_a_view_reaches_its_base(captured: bool) -> None:
    def step(x: Any) -> Any:
        x[1].data.mul_(2)
        return x * 1

    truth = step(value()[0])

    def run(mesh: Any) -> None:
        x = pt.distribute_tensor(value()[0], mesh, [pt.Shard(0)])
        result = (pt.compile(step, backend="graph") if captured else step)(x)
        assert torch.equal(result.full_tensor(), truth)
        assert torch.equal(x.full_tensor(), truth)

    with pt.ranks(a=2) as world:
        world.run(run)


def test_a_view_that_is_given_other_data_is_no_view_of_its_base_any_more() -> None:
    def run(mesh: Any) -> None:
        x = pt.distribute_tensor(value()[0], mesh, [pt.Shard(0)])
        row, other = x[1], pt.distribute_tensor(value()[0, 2], mesh, [pt.Replicate()])
        row.data = other
        x.add_(1)
        assert torch.equal(row.full_tensor(), value()[0, 2])
        row.mul_(2)
        assert torch.equal(other.full_tensor(), value()[0, 2] * 2)
        assert torch.equal(x.full_tensor(), value()[0] + 1)

    with pt.ranks(a=2) as world:
        world.run(run)


def test_a_region_that_runs_again_reads_a_given_view_as_its_first_run_did() -> None:
    def run(mesh: Any) -> Tensor:
        x = value()[0] if mesh is None else pt.distribute_tensor(value()[0], mesh, [pt.Shard(0)])
        y = x.requires_grad_() * 1
        row = y[1]
        with torch.no_grad():
            y.add_(1)
        if mesh is None:
            row = y[1]
        pt.remat(lambda row: row * row)(row).sum().backward()
        return x.grad if mesh is None else x.grad.full_tensor()

    truth = run(None)
    with pt.ranks(a=2) as world:
        for found in world.run(run):
            torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)


def test_a_copied_view_that_nothing_was_written_into_is_not_moved_again() -> None:
    def run(mesh: Any) -> None:
        x = pt.distribute_tensor(value(), mesh, [pt.Shard(1)])
        with pt.ledger() as log:
            view = x.reshape(4, 12)
        assert log.moves, "what is a view on one device was no copy here"
        with pt.ledger() as log:
            view.to_local()
            view.detach() * 2
        assert not log.moves
        x.add_(1)
        with pt.ledger() as log:
            view.to_local()
            view * 2
            view.to_local()
        assert len(log.moves) == 1

    with pt.ranks(a=2) as world:
        world.run(run)


def test_a_view_taken_without_gradients_is_read_anew_where_there_are_some():
    def run(mesh):
        x = torch.ones(5, 7)
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        x.requires_grad_()
        with torch.no_grad():
            held = x.flatten()
            x.mul_(2)
        return held.detach().sum().item(), held.detach().requires_grad

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [run(None)] * 2


UNCOUNTED = {
    "x.data.mul_": lambda x: x.data.mul_(2),
    "x.data[0] = y": lambda x: x.data.__setitem__(0, 5.0),
    "x.detach().data.mul_": lambda x: x.detach().data.mul_(2),
    "x.view().data.mul_": lambda x: x.view(x.shape).data.mul_(2),
    "a .data from before": lambda x: x.before.add_(1),
}


@pytest.mark.parametrize("way", UNCOUNTED)
@pytest.mark.parametrize("view", [lambda x: x.view(-1), lambda x: x[0], lambda x: x[:, 1:].T])
def test_what_is_written_through_data_is_seen_in_views(way, view):
    def run(x):
        x.before = x.data
        part = view(x)
        first = part * 1
        UNCOUNTED[way](x)
        return first, part * 1

    def body(mesh, placement):
        x = pt.distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [placement])
        return [t.full_tensor() for t in run(x)]

    truth = run(torch.arange(12.0).view(3, 4))
    for placement in (pt.Shard(0), pt.Shard(1), pt.Partial(), pt.Replicate()):
        with pt.ranks(a=2) as world:
            for found in world.run(body, placement):
                assert all(map(torch.equal, found, truth))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("placement", [pt.Shard(0), pt.Shard(1), pt.Replicate()])
def test_deep_copies_of_tensors_that_share_memory_share_theirs(placement, ranks):
    def program(mesh: Any) -> list[Tensor]:
        x = torch.arange(14.0, dtype=torch.float64).view(7, 2)
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, [placement])
        rows = x[1:3]
        given = [x, rows, rows[0], x.view(-1), x.t()]
        copies = copy.deepcopy(given)
        copies[0].add_(1)
        found = [t * 1 for t in copies]
        copies[1].mul_(3)
        copies[2].add_(1)
        copies[3][0] = 9.0
        copies[4][1, 1] = -1.0
        alone = copy.deepcopy(rows)
        alone.add_(1)
        found += [t * 1 for t in (*copies, alone, *given)]
        return [t if mesh is None else t.full_tensor() for t in found]

    truth = program(None)
    with pt.ranks(tp=ranks) as world:
        for found in world.run(program):
            torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("placement", [pt.Shard(0), pt.Shard(1)])
def test_norms_and_numbers_that_c_reads_are_up_to_date(placement, ranks):
    def program(mesh: Any) -> list[Tensor]:
        x = torch.arange(14.0, dtype=torch.float64).view(7, 2)
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, [placement])
        rows, number = x[1:3], x.view(-1)[3]
        x.mul_(2)
        found = [*torch._foreach_norm([rows, x]), torch.nn.utils.get_total_norm([rows])]
        found.append(torch.add(torch.ones(2), torch.ones(2), alpha=number))
        return [t.full_tensor() if isinstance(t, pt.DTensor) else t for t in found]

    truth = program(None)
    with pt.ranks(tp=ranks) as world:
        for found in world.run(program):
            torch.testing.assert_close(found, truth)


def test_a_view_of_a_base_that_was_written_has_gradients():
    def program(mesh: Any) -> list[Tensor]:
        x = torch.arange(14.0, dtype=torch.float64).view(7, 2)
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        x.requires_grad_()
        base = x * 1
        rows = base[1:3]
        rows.retain_grad()
        base.mul_(2)
        loss = rows.square().sum()
        found = torch.autograd.grad(loss, rows, retain_graph=True)
        loss.backward()
        found = [*found, rows.grad, x.grad]
        return [t.full_tensor() if isinstance(t, pt.DTensor) else t for t in found]

    truth = program(None)
    with pt.ranks(tp=2) as world:
        for found in world.run(program):
            torch.testing.assert_close(found, truth)


def test_a_collective_of_torch_refuses_a_view_copy():
    def program(mesh: Any) -> None:
        x = pt.distribute_tensor(torch.ones(4, 2), mesh, [pt.Shard(0)])
        with pytest.raises(pt.LayoutError, match="a view whose layout had to change"):
            torch.distributed.all_reduce(x[1])

    with pt.ranks(tp=2) as world:
        world.run(program)


UPDATES = {
    "neg_": lambda v: v.neg_(),
    "+=": lambda v: v.__iadd__(1),
    "foreach": lambda v: torch._foreach_mul_([v], 2.0),
    "detach": lambda v: v.detach().mul_(2),
    "items": lambda v: v.__setitem__(v > 3, 0.5),
    "a window": lambda v: v.__setitem__(0, 0.5),
}
SETS = {
    "fill_": lambda v: v.fill_(3),
    "copy_": lambda v: v.copy_(v * 2),
}


COPIES = {
    "out=": lambda v: torch.mul(v, 2, out=v),
    "a sum into out=": lambda v: torch.sum(v[..., None].clone(), -1, out=v),
    "moved first": lambda v: v.cumsum_(0),
}


@pytest.mark.parametrize("name", [*COPIES])
def test_no_result_is_copied_into_elements_that_share_memory(name):
    """Torch writes such an element once for each place of the view, and reads it in between."""
    with pt.ranks(dp=2) as world:

        def run(mesh):
            x = pt.distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [pt.Shard(0)])
            with pytest.raises(pt.LayoutError, match="whose elements share memory"):
                COPIES[name](x.unfold(1, 3, 1))
            assert torch.equal(x.full_tensor(), torch.arange(24.0).view(4, 6))

        world.run(run)


@pytest.mark.parametrize("name", [*UPDATES, *SETS])
@pytest.mark.parametrize("placement", [pt.Shard(0), pt.Shard(1)], ids=str)
def test_a_view_whose_elements_share_memory_is_updated_as_often_as_on_one_device(name, placement):
    """Or it is refused, where the view is a copy that updates each element once."""

    def run(mesh):
        x = torch.arange(24.0).view(4, 6)
        x = x if mesh is None else pt.distribute_tensor(x, mesh, [placement])
        refused = False
        try:
            (UPDATES | SETS)[name](x.unfold(0, 2, 1))
        except pt.LayoutError as error:
            refused = "whose elements share memory" in str(error)
        return refused, x if mesh is None else x.full_tensor()

    _, want = run(None)
    refusal = name in UPDATES and placement == pt.Shard(0)
    with pt.ranks(dp=2) as world:
        for refused, got in world.run(run):
            assert refused == refusal
            torch.testing.assert_close(got, torch.arange(24.0).view(4, 6) if refusal else want)


def train_a_leaf_that_is_a_view(x, make):
    leaf = make(x)
    x.add_(1)
    optimizer = torch.optim.SGD([leaf], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (leaf * leaf).sum().backward()
        optimizer.step()
        x.mul_(2)
    return [leaf.detach(), leaf.grad, x]


@pytest.mark.parametrize(
    "make", [lambda x: x[1].requires_grad_(), lambda x: torch.nn.Parameter(x[1:][0])]
)
def test_a_leaf_that_is_a_view_copy_gets_its_gradient_after_a_write_to_its_base(make):
    x = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    want = train_a_leaf_that_is_a_view(x.clone(), make)

    def run(mesh):
        given = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        return [t.full_tensor() for t in train_a_leaf_that_is_a_view(given, make)]

    with pt.ranks(dp=4) as world:
        for got in world.run(run):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


OVERLAPS = {
    "rows": lambda t: t[1:].add_(t[:-1]),
    "a row": lambda t: t.sub_(t[0]),
    "an element": lambda t: t.__itruediv__(t[1, 1]),
    "turned": lambda t: t[:2].mul_(t[:2].t()),
    "flat": lambda t: t.view(-1)[1:].lerp_(t.view(-1)[:-1], 0.5),
    "copied": lambda t: t[1:].copy_(t[:-1]),
    "assigned": lambda t: t.__setitem__(slice(1, None), t[:-1]),
    "out=": lambda t: torch.mul(t[:-1], 2, out=t[1:]),
    "out= of one op": lambda t: torch.cumsum(t[:-1], 0, out=t[1:]),
}
NO_OVERLAPS = {
    "itself": lambda t: t.add_(t),
    "the same rows": lambda t: t[1:].add_(t[1:]),
    "other rows": lambda t: t[:1].copy_(t[2:]),
    "a clone": lambda t: t[1:].add_(t[:-1].clone()),
    "a value": lambda t: t.masked_fill_(t > 3, t[0, 1]),
    "with gaps": lambda t: t[:, :1].mul_(t[:, 1:]),
    "products": lambda t: t[1:].addmm_(t[:-1].clone(), t[1:].clone()),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("placement", [pt.Shard(0), pt.Shard(1)], ids=str)
def test_an_operand_that_partly_overlaps_the_written_tensor_is_an_error_as_on_one_device(
    placement, compiled
):
    programs = OVERLAPS | NO_OVERLAPS
    names = ["rows", "turned", "out=", "other rows"] if compiled else [*programs]

    def run_one(name, mesh):
        t = torch.arange(6.0, dtype=torch.float64).view(3, 2) + 1
        t = t if mesh is None else pt.distribute_tensor(t, mesh, [placement])

        def step(t):
            programs[name](t)

        try:
            (pt.compile(step, backend="graph") if compiled and mesh else step)(t)
        except RuntimeError as error:
            return "refer to a single memory location" in str(error)
        return (t if mesh is None else t.full_tensor()).tolist()

    want = {name: run_one(name, None) for name in names}
    assert all((want[name] is True) == (name in OVERLAPS) for name in names)
    with pt.ranks(dp=2) as world:
        for got in world.run(lambda mesh: {name: run_one(name, mesh) for name in names}):
            assert got == want
