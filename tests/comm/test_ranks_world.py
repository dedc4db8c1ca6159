"""Do ranks of one process keep their order, their promises and their errors apart?"""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch

from partita import comm
from partita.comm import Request
from partita.layout import LayoutError
from tests.programs.wire_moves import move

GATHER_DP = move("all_gather", "dp", "[4@dp]", "[4]")
REDUCE_DP = move("all_reduce", "dp", "[2] {sum dp}", "[2]")
REDUCE_TP = move("all_reduce", "tp", "[2] {sum tp}", "[2]")


def carry(mesh, which, x=None):
    return comm.wire_of(mesh).carry(
        which, torch.ones(2) if x is None else x, op="add", reason="explicit"
    )


def error_of(call, *args):
    try:
        call(*args)
    except LayoutError as error:
        return str(error)
    return None


# -- order ---------------------------------------------------------------------------------------


def test_one_rank_runs_at_a_time_and_always_in_the_same_order():
    def body(mesh, seen):
        for _ in range(3):
            seen.append(mesh.get_rank())
            carry(mesh, REDUCE_DP)
            seen.append(mesh.get_rank())

    runs = []
    for _ in range(3):
        seen = []
        comm.ranks(dp=2, tp=2).run(body, seen)
        runs.append(seen)
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][:4] == [0, 1, 2, 3]


def test_results_come_in_rank_order_and_arguments_go_to_every_rank():
    world = comm.ranks(dp=2, tp=3)
    assert world.run(lambda mesh, a, b: (mesh.get_rank(), a + b), 1, 2) == [
        (r, 3) for r in range(6)
    ]


def test_every_rank_draws_the_numbers_that_one_rank_would_draw():
    def body(mesh):
        first = torch.rand(3)
        if mesh.get_rank() == 1:
            torch.rand(100)  # does not disturb the others
        carry(mesh, REDUCE_DP)
        return first, torch.rand(2)

    torch.manual_seed(7)
    results = comm.ranks(dp=3).run(body)
    after = torch.rand(4)
    torch.manual_seed(7)
    alone = torch.rand(3), torch.rand(2)
    assert torch.equal(after, torch.rand(4))  # the caller goes on as rank 0 left it
    for rank in (0, 2):
        assert torch.equal(results[rank][0], alone[0]) and torch.equal(results[rank][1], alone[1])
    assert torch.equal(results[1][0], alone[0]) and not torch.equal(results[1][1], alone[1])


def test_ranks_inherit_the_callers_grad_mode_and_autocast():
    def body(mesh):
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    assert comm.ranks(dp=2).run(body) == [(True, False)] * 2
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert comm.ranks(dp=2).run(body) == [(False, True)] * 2


class _Sum(torch.autograd.Function):
    """Carries in forward and in backward."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return carry(mesh, REDUCE_DP, x)

    @staticmethod
    def backward(ctx, gradient):
        return carry(ctx.mesh, REDUCE_DP, gradient), None


def test_collectives_inside_backward_meet_too():
    def body(mesh):
        x = torch.full((2,), float(mesh.get_rank() + 1), requires_grad=True)
        y = _Sum.apply(x * 2, mesh)
        (y * (mesh.get_rank() + 1)).sum().backward()
        return y.detach().tolist(), x.grad.tolist()

    assert comm.ranks(dp=3).run(body) == [([12.0, 12.0], [12.0, 12.0])] * 3


def test_a_world_runs_again_after_success_and_after_failure():
    world = comm.ranks(dp=2)
    meshes = world.run(lambda mesh: mesh)
    with pytest.raises(KeyError):
        world.run(lambda mesh: {}["missing"])
    again = world.run(lambda mesh: (mesh, carry(mesh, REDUCE_DP).tolist()))
    assert [m for m, _ in again] == meshes and meshes[0] is not meshes[1]
    assert [v for _, v in again] == [[2, 2], [2, 2]]


def test_random_programs_of_many_collectives_end():
    moves = [GATHER_DP, REDUCE_DP, REDUCE_TP]

    def body(mesh):
        choose = random.Random(3)
        total = 0.0
        for _ in range(200):
            total += carry(mesh, choose.choice(moves)).sum().item()
        return total

    results = comm.ranks(dp=2, tp=2).run(body)
    assert len(set(results)) == 1


# -- errors --------------------------------------------------------------------------------------


def differ(mesh, one, other, x=None):
    if mesh.get_rank() == 1:
        return carry(mesh, other)  # line B
    return carry(mesh, one, x)  # line A


@pytest.mark.parametrize(
    ("one", "other", "x", "said"),
    [
        (REDUCE_DP, GATHER_DP, None, "all_gather over dp: 4@dp -> 4, for add (float32)"),
        (REDUCE_DP, REDUCE_TP, None, "all_reduce over tp: 2 {sum tp} -> 2, for add (float32)"),
        (REDUCE_DP, move("all_reduce", "dp", "[1, 2] {sum dp}", "[1, 2]"), None, "1 2 {sum dp}"),
        (REDUCE_DP, REDUCE_DP, torch.ones(2, dtype=torch.float64), "for add (float64)"),
        (
            REDUCE_DP,
            move("all_reduce", "dp", "[2] {max dp}", "[2]"),
            None,
            "all_reduce (max) over dp: 2 {max dp} -> 2",
        ),
    ],
    ids=["kind", "axis", "shape", "dtype", "op"],
)
def test_ranks_that_ask_for_different_things_are_all_told_both_calls_and_lines(one, other, x, said):
    def body(mesh):
        second = torch.ones(other.before.shape if other is not GATHER_DP else 2)
        if mesh.get_rank() == 1:
            return error_of(carry, mesh, other, second)
        return error_of(differ, mesh, one, other, x)

    for message in comm.ranks(dp=2, tp=2).run(body):
        assert message.startswith("ranks ask for different things")
        assert "rank 0  all_reduce over dp: 2 {sum dp} -> 2, for add" in message
        assert said in message
        assert "rank 1" in message
        assert message.count("test_ranks_world.py:") == 2


def gather_of(mesh, axis, count):
    """What each rank's `count` elements, its own number, are when gathered along `axis`."""
    wire = comm.wire_of(mesh)
    out = torch.empty(mesh.shape[mesh.mesh_dim_names.index(axis)] * count)
    wire.run_collective(
        out,
        torch.full((count,), float(mesh.get_rank())),
        (axis,),
        Request("all_gather", None, "test"),
    )
    return out.tolist()


def test_groups_of_one_mesh_may_gather_different_amounts():
    """As where the pieces of another dimension are uneven."""
    found = comm.ranks(dp=2, tp=2).run(lambda mesh: gather_of(mesh, "dp", 1 + mesh.get_rank() % 2))
    assert found == [[0, 2], [1, 1, 3, 3]] * 2


@pytest.mark.parametrize("other", [1, 2, 3])
def test_ranks_of_one_group_that_gather_different_amounts_are_told_both(other):
    def body(mesh):
        return error_of(gather_of, mesh, "dp", 2 if mesh.get_rank() == other else 1)

    for message in comm.ranks(dp=2, tp=2).run(body):
        assert message.startswith("ranks ask for different things")
        assert f"rank {other}  all_gather" in message and "(float32, numel 2)" in message
        assert f"rank {(other + 2) % 4}  all_gather" in message and "(float32, numel 1)" in message


def test_a_rank_that_returns_early_leaves_an_error_and_no_hang():
    def body(mesh):
        if mesh.get_rank() == 2:
            return "done"
        return error_of(carry, mesh, REDUCE_DP)

    results = comm.ranks(dp=3).run(body)
    assert results[2] == "done"
    for message in results[:2]:
        assert "rank 0 waits for rank 2, which has ended" in message
        assert "rank 2  returned from its function" in message
        assert "test_ranks_world.py:" in message


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_that_raises_alone_stops_the_others_and_its_error_is_raised(who):
    told = {}

    def body(mesh):
        carry(mesh, REDUCE_DP)
        if mesh.get_rank() == who:
            raise ZeroDivisionError("by nothing")
        try:
            carry(mesh, REDUCE_DP)
        except LayoutError as error:
            told[mesh.get_rank()] = str(error)
            raise

    with pytest.raises(ZeroDivisionError, match="by nothing") as caught:
        comm.ranks(dp=3).run(body)
    assert f"on rank {who} of ranks(dp=3)" in caught.value.__notes__
    assert set(told) == {0, 1, 2} - {who}
    for message in told.values():
        assert f"rank {who} raised ZeroDivisionError: by nothing" in message


def test_when_every_rank_raises_the_first_ones_error_is_raised():
    def body(mesh):
        raise ValueError(f"on {mesh.get_rank()}")

    with pytest.raises(ValueError, match="on 0"):
        comm.ranks(dp=3).run(body)


def test_ranks_may_catch_a_mismatch_and_go_on_together():
    def body(mesh):
        first = error_of(differ, mesh, REDUCE_DP, GATHER_DP)
        return first is not None, carry(mesh, REDUCE_DP).tolist()

    assert comm.ranks(dp=2).run(body) == [(True, [2, 2])] * 2


def test_ranks_on_different_meshes_wait_for_each_other_in_vain_and_are_told():
    part = move("all_reduce", "tp", "[2] {sum tp}", "[2]")

    def body(mesh):
        return error_of(carry, mesh["tp"] if mesh.get_rank() == 0 else mesh, part)

    for message in comm.ranks(tp=2, dp=2).run(body):
        assert "ranks wait for each other on different meshes" in message


def test_a_rank_cannot_start_ranks_and_a_mesh_works_in_its_world_only():
    world = comm.ranks(dp=2)

    def body(mesh):
        return error_of(world.run, body), error_of(comm.ranks(dp=2).run, body)

    for messages in world.run(body):
        assert all("a rank cannot start ranks" in m for m in messages)
    with pytest.raises(LayoutError, match=r"rank 0 of ranks\(dp=2\) is not running here"):
        carry(world.handle(0), REDUCE_DP)


# -- the mesh handle -----------------------------------------------------------------------------


def test_the_mesh_answers_what_a_device_mesh_answers():
    def body(mesh):
        assert mesh.mesh_dim_names == ("dp", "tp") and mesh.ndim == 2 and mesh.shape == (2, 3)
        assert mesh.size() == 6 and mesh.size(1) == 3 and mesh.size("dp") == 2
        assert mesh.device_type == "cpu" and mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert mesh["dp", "tp"] is mesh and mesh["tp"] is mesh["tp"]
        tp, turned = mesh["tp"], mesh["tp", "dp"]
        assert copy.deepcopy(mesh) is mesh and pickle.loads(pickle.dumps(tp)) is tp
        assert len({mesh, mesh, tp}) == 2 and turned.shape == (3, 2)
        assert turned.get_rank() == tp.get_rank() == mesh.get_rank()
        return mesh.get_coordinate(), mesh.get_local_rank("tp"), tp.mesh.tolist(), tp.get_rank()

    results = comm.ranks(dp=2, tp=3).run(body)
    assert results[4] == ([1, 1], 1, [3, 4, 5], 4)


def test_parts_of_a_mesh_carry_among_their_own_ranks():
    def body(mesh):
        if mesh.get_coordinate()[0] == 1:  # only the second row does anything at all
            return comm.wire_of(mesh["tp"]).gather_ints((mesh.get_rank(),))
        return None

    assert comm.ranks(dp=2, tp=2).run(body)[2:] == [[(2,), (3,)]] * 2


# -- ledger and strict ---------------------------------------------------------------------------


def test_a_ledger_around_the_world_sees_all_ranks_and_one_inside_sees_its_own():
    def body(mesh):
        with comm.ledger() as outer:
            carry(mesh, GATHER_DP)
            with comm.ledger() as inner:
                carry(mesh, REDUCE_TP)
        carry(mesh, REDUCE_DP)
        return outer, inner

    with comm.ledger() as log:
        results = comm.ranks(dp=2, tp=2).run(body)
    for outer, inner in results:
        assert outer.count() == 2 and outer.count("all_gather") == 1 and inner.count() == 1
        assert outer.bytes == 8 + 8 and inner.bytes == 8
    assert log.count() == 12 and log.count("all_reduce") == 8
    assert {m.rank for m in log.moves} == {0, 1, 2, 3}
    text = str(log)
    assert text.splitlines()[0].split() == [
        *("rank", "kind", "axes", "bytes", "op", "reason", "source")
    ]
    assert "test_ranks_world.py:" in text and "12 moves, 96 B sent by all ranks together" in text


def test_strict_refuses_an_implicit_move_that_sends_and_no_other():
    keep = move("slice", "dp", "[2]", "[2@dp]")

    def body(mesh):
        wire = comm.wire_of(mesh)
        with comm.strict():
            wire.carry(REDUCE_DP, torch.ones(2), op="add", reason="explicit")
            wire.carry(REDUCE_DP, torch.ones(2), op="add", reason="gradient")
            wire.carry(keep, torch.ones(2), op="add", reason="implicit")
            with comm.strict(False):
                wire.carry(REDUCE_DP, torch.ones(2), op="add", reason="implicit")
            with pytest.raises(LayoutError) as caught:
                wire.carry(REDUCE_DP, torch.ones(2), op="add", reason="implicit")
        wire.carry(REDUCE_DP, torch.ones(2), op="add", reason="implicit")
        return str(caught.value)

    for message in comm.ranks(dp=2).run(body):
        assert "add needs an implicit all_reduce over dp, and strict() forbids it" in message
        assert "test_ranks_world.py:" in message and "either  redistribute(R on dp)" in message
    with comm.strict(), pytest.raises(LayoutError, match="forbids"):  # around the world too
        comm.ranks(dp=2).run(
            lambda mesh: comm.wire_of(mesh).carry(
                REDUCE_DP, torch.ones(2), op="add", reason="implicit"
            )
        )


def test_a_program_that_makes_its_own_mesh_gets_that_of_the_world():
    def body(mesh):
        again = comm.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        assert again is mesh
        with pytest.raises(LayoutError, match="have the mesh dp=2 tp=3") as error:
            comm.init_device_mesh("cpu", (3, 2), mesh_dim_names=("a", "b"))
        return error.value.fixes[0].write

    with comm.ranks(dp=2, tp=3) as world:
        assert world.run(body) == ["pt.ranks(a=3, b=2)"] * 6
