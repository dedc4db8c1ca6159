"""`local_map` is torch's, and torch's own placements are taken wherever ours are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.tensor as theirs

import partita as pt
from partita.comm import Wire

T = torch.arange(24.0).view(6, 4) - 11


def on_ranks(body, **axes):
    with pt.ranks(**(axes or {"dp": 2})) as world:
        return world.run(body)


def test_it_decorates():
    @pt.local_map(out_placements=[pt.Shard(0)], in_placements=([pt.Shard(0)], None))
    def scaled(x, factor):
        assert type(x) is torch.Tensor
        return x * factor

    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [pt.Shard(0)])
        return scaled(x, 3).full_tensor()

    assert scaled.__name__ == "scaled"
    assert all(torch.equal(out, 3 * T) for out in on_ranks(body))


def test_without_a_dtensor_the_function_runs_as_it_is():
    plain = pt.local_map(lambda x: x + 1, [pt.Shard(0)], ([pt.Shard(0)],))
    assert type(plain(T)) is torch.Tensor and torch.equal(plain(T), T + 1)

    def body(mesh):
        out = pt.local_map(lambda: torch.ones(2, 2), [pt.Shard(0)], device_mesh=mesh)()
        assert out.shape == (4, 2)

    on_ranks(body)


def test_arguments_and_results_may_be_nested():
    def both(pair, options, *, bias):
        x, y = pair
        assert all(type(t) is torch.Tensor for t in (x, y, options["w"], bias))
        return {"sum": x + y + bias, "more": [x @ options["w"], "done"]}

    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [pt.Shard(0)])
        w = pt.distribute_tensor(T.t().contiguous(), mesh)
        rows = [pt.Shard(0)]
        run = pt.local_map(both, (rows, rows, None), (rows, rows, [pt.Replicate()]))
        out = run([x, x], {"w": w}, bias=x)
        assert out["more"][1] == "done"
        return out["sum"].full_tensor(), out["more"][0].full_tensor()

    for total, product in on_ranks(body):
        assert torch.equal(total, 3 * T) and torch.equal(product, T @ T.t())


@pytest.mark.parametrize("what", ["in_placements", "in_grad_placements", "out_placements"])
def test_placements_for_more_or_fewer_are_refused(what):
    given = {"out_placements": [pt.Shard(0)], what: ([pt.Shard(0)],) * 2}

    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [pt.Shard(0)])
        with pytest.raises(pt.LayoutError, match=f"{what} has 2 entries"):
            pt.local_map(lambda x: x, **given)(x)

    on_ranks(body)


# -- torch's placements ----------------------------------------------------------------------------

PAIRS = [
    (theirs.Shard(1), pt.Shard(1)),
    (theirs.Shard(-1), pt.Shard(-1)),
    (theirs.Replicate(), pt.Replicate()),
    (theirs.Partial(), pt.Partial()),
]


@pytest.mark.parametrize("given, same", PAIRS, ids=lambda p: str(p))
def test_torchs_placements_are_taken_wherever_ours_are(given, same):
    def body(mesh):
        wanted = pt.distribute_tensor(T, mesh, [same]).layout_over_mesh
        x = pt.distribute_tensor(T, mesh, [given])
        assert x.layout_over_mesh == wanted
        moved = pt.distribute_tensor(T, mesh).redistribute(placements=[given])
        assert moved.layout_over_mesh == wanted
        assert pt.zeros(6, 4, device_mesh=mesh, placements=[given]).layout_over_mesh == wanted
        assert pt.randn(6, 4, device_mesh=mesh, placements=(given,)).layout_over_mesh == wanted
        assert pt.DTensor.from_local(x.to_local(), mesh, [given]).layout_over_mesh == wanted
        run = pt.local_map(lambda x: x, [given], ([given],))
        assert run(x).layout_over_mesh == wanted
        if not same.is_partial():
            model = pt.parallelize(torch.nn.Linear(4, 6), mesh, {"weight": {"dp": given}})
            assert model.weight.layout_over_mesh == wanted
        w = pt.distribute_tensor(T, mesh).requires_grad_()
        if not same.is_shard():
            w.to_local(grad_placements=[given]).sum().backward()
            assert w.grad is not None

    on_ranks(body)


def test_the_order_of_axes_that_a_strided_shard_says_is_taken():
    strided = theirs.placement_types._StridedShard

    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [strided(0, split_factor=3), theirs.Shard(0)])
        assert x.layout_over_mesh.shards == (("tp", "dp"), ())
        with pytest.raises(pt.LayoutError, match="is not a placement"):
            pt.distribute_tensor(T, mesh, [strided(0, split_factor=2), theirs.Shard(0)])
        return x.full_tensor()

    assert all(torch.equal(out, T) for out in on_ranks(body, dp=2, tp=3))


@pytest.mark.parametrize(
    "given", [theirs.Partial("avg"), theirs.Partial("product"), "S(0)"], ids=str
)
def test_what_is_no_placement_of_ours_is_refused(given):
    def body(mesh):
        with pytest.raises(pt.LayoutError, match="is not a placement"):
            pt.distribute_tensor(T, mesh, [given])

    on_ranks(body)


def test_a_result_without_placements_may_be_a_tensor_on_one_rank_alone():
    def body(mesh):
        x = pt.distribute_tensor(T[:3], mesh, [pt.Shard(0)]).requires_grad_()
        f = pt.local_map(
            lambda t: (t * 2, t.max() if len(t) > 1 else 0.0), out_placements=([pt.Shard(0)], None)
        )
        f(x)[0].sum().backward()
        return x.grad.full_tensor()

    assert all(torch.equal(g, torch.full((3, 4), 2.0)) for g in on_ranks(body))


def test_uneven_pieces_are_compared_once_in_forward_and_not_in_backward(monkeypatch):
    said = []
    gather = Wire.gather_ints
    monkeypatch.setattr(
        Wire, "gather_ints", lambda wire, v, what="": said.append(what) or gather(wire, v, what)
    )

    def body(mesh, steps):
        x = pt.distribute_tensor(T[:3], mesh, [pt.Shard(0)])
        w, b = (pt.distribute_tensor(t, mesh).requires_grad_() for t in (T[:4], T[0]))
        f = pt.local_map(lambda t, w, b: t @ w + b, out_placements=[pt.Shard(0)])
        for _ in range(steps):
            f(x, w, b).sum().backward()

    counts = []
    for steps in (1, 4):
        on_ranks(lambda mesh, steps=steps: body(mesh, steps))
        counts.append(len(said))
        said.clear()
    assert counts[1] - counts[0] == 2 * 3  # one of each rank in a step
