"""Writes through views in a region give the values and gradients of one device, or an error."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita as pt

F64 = torch.float64
functionalize = importlib.import_module("partita.capture.functionalize")


def rows(t):
    t[1:].mul_(2)


def rows_of_a_transpose(t):
    t[1:].t()[1:].mul_(2)


def diagonal(t):
    t.diagonal().fill_(0.0)


def diagonal_of_rows(t):
    t[1:].diagonal(1).mul_(3)


def by_strides(t):
    t.fill_diagonal_(0.0)


def flat(t):
    t.view(-1)[1:].exp_()


def windows(t):
    t.unfold(0, 2, 2).mul_(2)  # the last row is in no window


def windows_of_a_transpose(t):
    t.t().unfold(0, 2, 3).mul_(2)


def many(t):
    t[1:].mul_(2)
    t[:4].add_(1)
    t.diagonal()[1:].zero_()
    t[2].copy_(t[3] + t[0])


def row_of_an_expanded_tensor(t):
    t[:1].expand(3, -1)[1].mul_(2)


def cell_of_expanded_columns(t):
    t[:, :1].expand(-1, 4)[1:, 2].exp_()


def part_of_stacked_copies(t):
    stacked = t.expand(3, *t.shape).permute(1, 2, 0)
    stacked[1:, 1:, 2].copy_(stacked[1:, 1:, 0] + stacked[1:, 1:, 1])
    stacked[0, :, 1].add_(1)


def filled_row_of_copies(t):
    t.expand(2, *t.shape)[1, 1].fill_(7.0)


def one_of_windows(t):
    windows = t.unfold(0, 3, 1)
    windows[1].mul_(2)
    windows[0, :, 1].add_(windows[2, :, 0])


def window_of_windows(t):
    t.unfold(0, 2, 1).unfold(1, 2, 1)[1, 0].mul_(2)


OVERLAPPING = [row_of_an_expanded_tensor, cell_of_expanded_columns, part_of_stacked_copies]
OVERLAPPING += [filled_row_of_copies, one_of_windows, window_of_windows]
WRITES = [rows, rows_of_a_transpose, diagonal, diagonal_of_rows, by_strides, flat, windows]
WRITES += [windows_of_a_transpose, many]
WRITES += OVERLAPPING[:-1]  # windows of windows of pieces are refused
LAYOUTS = [
    ({"dp": 2}, ["S0"]),
    ({"dp": 2}, ["P"]),
    ({"dp": 3}, ["S1"]),
    ({"a": 2, "b": 2}, ["S1", "S0"]),
]
PLACEMENTS = {"S0": pt.Shard(0), "S1": pt.Shard(1), "P": pt.Partial()}


def region(write):
    def two_results(x):
        t = x * 1
        write(t)
        return t * 2, t * t, t.t()

    return two_results


def gradient_and_results(function, x):
    results = function(x)
    weights = [torch.linspace(0.5, 2, t.numel(), dtype=F64).view(t.shape) for t in results]
    parts = [(t * w).sum() for t, w in zip(results, weights, strict=True)]
    sum(10**i * part for i, part in enumerate(parts)).backward()
    return [x.grad, *results]


def values(size=(5, 3)):
    count = size[0] * size[1]
    return torch.arange(count, dtype=F64).view(size) / 7


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_a_view_reaches_all_results_and_gradients(write):
    wanted = gradient_and_results(region(write), values().requires_grad_())

    def run(mesh, names):
        x = pt.distribute_tensor(values(), mesh, [PLACEMENTS[n] for n in names])
        step = pt.compile(region(write), backend="graph")
        for _ in range(2):
            found = gradient_and_results(step, x.detach().requires_grad_())
        return [t.full_tensor().detach() for t in found]

    for sizes, names in LAYOUTS:
        with pt.ranks(**sizes) as world:
            for found in world.run(run, names):
                torch.testing.assert_close(found, [t.detach() for t in wanted], rtol=0, atol=1e-9)


@pytest.mark.parametrize("write", WRITES)
def test_gradients_of_two_results_stay_apart_where_a_graph_is_traced_again(write, monkeypatch):
    wanted = gradient_and_results(region(write), values().requires_grad_())

    def unsure(*_):
        raise functionalize.UnsureOfWrites

    monkeypatch.setattr(functionalize, "rewrite_without_writes", unsure)
    step = pt.compile(region(write), backend="graph")
    # Torch would set to zero what is in no window, and add the rows of an expanded tensor.
    if write in (windows, windows_of_a_transpose, *OVERLAPPING):
        with pytest.raises(pt.CaptureError, match=r"(unfold|expand)\(\)"):
            step(values().requires_grad_())
        return
    found = gradient_and_results(step, values().requires_grad_())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_gradients_of_two_results_stay_apart_under_inductor():
    wanted = gradient_and_results(region(by_strides), values().requires_grad_())
    found = gradient_and_results(pt.compile(region(by_strides)), values().requires_grad_())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(size=st.tuples(st.integers(1, 4), st.integers(1, 4)), data=st.data())
def test_as_strided_of_a_view_writes_what_it_shows(size, data):
    """It counts from where the memory begins, whichever view of it is given."""
    count = size[0] * size[1]
    first = data.draw(st.integers(0, count - 1))
    step = data.draw(st.integers(1, 3))
    length = data.draw(st.integers(1, (count - 1 - first) // step + 1))
    view = data.draw(st.sampled_from(["t", "view", "rows"]))

    def write(t):
        shown = t.t() if view == "t" else t.view(-1) if view == "view" else t[size[0] // 2 :]
        shown.as_strided((length,), (step,), first).mul_(3)

    wanted = gradient_and_results(region(write), values(size).requires_grad_())
    step_of_graph = pt.compile(region(write), backend="graph")
    found = gradient_and_results(step_of_graph, values(size).requires_grad_())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("write", OVERLAPPING)
def test_a_view_whose_elements_share_memory_shows_a_write_to_one_of_them(write):
    def region_of_views(x):
        t = x * 1
        views = (
            t[:1].expand(3, -1),
            t[:, :1].expand(-1, 4),
            t.expand(3, *t.shape),
            t.unfold(0, 2, 1),
        )
        write(t)
        return [v * 1 for v in views]

    wanted = gradient_and_results(region_of_views, values().requires_grad_())
    found = gradient_and_results(
        pt.compile(region_of_views, backend="graph"), values().requires_grad_()
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fill", [lambda t: t.fill_(7.0), lambda t: t.zero_()])
def test_an_expanded_tensor_can_be_filled(fill):
    def step(x):
        wide = x[1:3].unsqueeze(0).expand(3, -1, -1)
        fill(wide)
        return wide * 1, x * 1

    for x in (values(), values().t()):
        mine = x.clone()
        found = pt.compile(step, backend="graph")(mine)
        torch.testing.assert_close([*found, mine], [*step(x), x], rtol=0, atol=0)


def an_input_whose_rows_share_memory(x):
    x[1].mul_(2)
    return x * 2


def masked_rows_of_an_expanded_tensor(x):
    t = x[:1] * 1
    t.expand(3, -1).masked_fill_(torch.tensor([[True], [False], [False]]), 9.0)
    return t


@pytest.mark.parametrize(
    "step", [an_input_whose_rows_share_memory, masked_rows_of_an_expanded_tensor]
)
def test_what_no_graph_can_write_to_shared_memory_is_refused(step):
    x = values()[:1].expand(5, -1)
    with pytest.raises(pt.CaptureError, match=r"expand|share"):
        pt.compile(step, backend="graph")(x)
    assert torch.equal(x, values()[:1].expand(5, -1))


def beside_an_input(x):
    x.as_strided((2,), (1,), 3).fill_(1.0)
    return x * 2


def given_memory(x):
    t = x * 1
    t.set_(x[1:])
    t.mul_(3)
    return t * 2


def bits_of_another_type(x):
    t = x * 1
    t.view(torch.int64).as_strided((2,), (3,)).fill_(3)
    return t * 2


def windows_that_overlap(x):
    t = x * 1
    t.unfold(0, 3, 1).fill_(3.0)
    return t


@pytest.mark.parametrize(
    "step", [beside_an_input, given_memory, bits_of_another_type, windows_that_overlap]
)
def test_a_write_that_a_graph_would_lose_is_refused_with_its_line(step):
    before = torch.arange(20, dtype=F64)
    with pytest.raises(
        pt.CaptureError, match=r"writes (in|through)[^\n]*test_writes_through_views"
    ):
        pt.compile(step, backend="graph")(before[2:14:2])
    assert torch.equal(before, torch.arange(20, dtype=F64))


def test_what_shares_a_fake_with_another_input_is_no_legal_graph():
    verify = importlib.import_module("partita.graph.verify")
    step = pt.compile(region(rows), backend="graph")
    step(values().requires_grad_())
    program = step.program
    one, other, *_ = program.graph.graph.find_nodes(op="placeholder")
    other.meta["val"] = one.meta["val"]
    with pytest.raises(pt.LayoutError, match="shares its fake tensor"):
        verify.verify(program, "a test")
