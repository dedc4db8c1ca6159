"""Does a recomputed region give the gradients of one that is not, and keep what it was told to?

The truth is the same program without remat. Compiled regions have their own module, fault 5.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.comm import Wire
from partita.remat import Call, is_recomputing
from tests.programs.gloo_ranks import run_ranks

Function = Callable[..., Any]


class Block(nn.Module):
    """A feed-forward block whose calls are countable: 2 products and an activation."""

    def __init__(self, width: int = 8, p: float = 0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.p = nn.LayerNorm(width), p

    def forward(self, x: Tensor) -> Tensor:
        y = pt.checkpoint_name(F.gelu(self.up(self.norm(x))), "active")
        return x + F.dropout(self.down(y), self.p, self.training)


class Stack(nn.Module):
    def __init__(self, layers: int = 4, width: int = 8, p: float = 0.0):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(width, p) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counted(nn.Module):
    """Counts what forward and its second run make, and not the gradients."""

    def __init__(self, fn: nn.Module, count: list[Any]):
        super().__init__()
        self.fn, self.count = fn, count

    def forward(self, x: Tensor) -> Tensor:
        with self.count[0].label("activations"):
            return self.fn(x)


def rows(n: int = 6, width: int = 8) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(7))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


def equal(mine: list[Any], truth: list[Any]) -> None:
    for g, h in zip(mine, truth, strict=True):
        assert torch.equal(g, h)


def down_projections(call: Call) -> bool:
    return call.op == "linear" and call.inputs[0][0][-1] == 32


# -- what is kept ----------------------------------------------------------------------------------

POLICIES = {
    "nothing": (None, 0),
    "an op": ([F.linear], 2),
    "two ops": ([F.linear, F.gelu], 3),
    "a name": (["active"], 1),
    "an op and a name": ([F.layer_norm, "active"], 2),
    "a function": (down_projections, 1),
    "all by a function": (lambda call: True, None),
    "a function of names": (lambda call: call.name == "active", 1),
}


@pytest.mark.parametrize("which", POLICIES)
def test_gradients_are_those_without_remat_and_what_a_policy_names_is_kept(which: str) -> None:
    policy, kept = POLICIES[which]
    model, x = Stack(), rows()
    truth = gradients(model, x)
    pt.remat(model, policy, blocks=["blocks.*"])
    for _ in range(2):  # names are known from the first step on
        with pt.remat_report() as report:
            equal(gradients(model, x), truth)
    assert len(report.regions) == 4
    if kept is not None:
        assert [r.kept for r in report.regions] == [kept] * 4
    products = 2 * 6 * 8 * 32  # operations of each of a block's two
    again = {"nothing": 2, "a name": 2, "two ops": 0, "an op": 0, "a function": 1}.get(which)
    if again is not None:
        # What is kept and what backward does not read is not computed.
        assert report.flops <= 4 * again * products
        assert (report.flops > 0) == (again > 0)


def test_a_pattern_of_blocks_means_the_outermost_modules_that_it_matches() -> None:
    model = pt.remat(Stack(layers=3), blocks=["blocks.*"])
    with pt.remat_report() as report:
        gradients(model, rows())
    assert [r.region for r in report.regions] == ["Block"] * 3


def test_any_module_is_a_pattern_for_each_child_and_not_for_the_model_itself() -> None:
    model = pt.remat(nn.Sequential(*Stack(layers=3).blocks), blocks=["*"])
    with pt.remat_report() as report:
        gradients(model, rows())
    assert [r.region for r in report.regions] == ["Block"] * 3
    model = pt.remat(Stack(layers=3), blocks=["*"])  # its children: a ModuleList and others
    with pt.remat_report() as report:
        gradients(model, rows())
    assert [r.region for r in report.regions].count("Block") == 3
    with pytest.raises(ValueError, match=r"'blocks' has no forward.*'blocks\.\*'"):
        pt.remat(Stack(), blocks=["blocks"])


def test_a_module_that_a_policy_names_is_not_run_again() -> None:
    model, x = Stack(layers=2), rows()
    truth = gradients(model, x)
    for block in model.blocks:
        pt.remat(block, policy=[block.up, block.down])
    with pt.remat_report() as report:
        equal(gradients(model, x), truth)
    assert report.flops == 0 and [r.kept for r in report.regions] == [2, 2]


def test_names_of_parameters_are_as_without_it_and_a_copy_trains() -> None:
    model, x = Stack(), rows()
    names, truth = list(model.state_dict()), gradients(model, x)
    pt.remat(model, policy=[F.linear], blocks=["blocks.*"])
    assert list(model.state_dict()) == names
    equal(gradients(copy.deepcopy(model), x), truth)


def test_a_policy_is_asked_once_about_a_call_that_is_marked() -> None:
    """Its second answer might be another."""
    marked = pt.one_call(F.gelu)
    asked: list[Any] = []

    def keep_first(call: Call) -> bool:
        asked.append(call.function)
        return asked.count(marked) == 1 and call.function is marked

    x = torch.randn(4, requires_grad=True)
    with pt.remat_report() as report:
        pt.remat(lambda x: marked(x) * 2, policy=keep_first)(x).sum().backward()
    assert asked.count(marked) == 1
    assert report.regions[0].kept == 1


@pytest.mark.parametrize("policy", [[torch.ops.aten.mm], [lambda x: x], -1, 2.5, [3]])
def test_a_policy_that_names_what_nobody_sees_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match="policy"):
        pt.remat(Stack(), policy)


# -- regions within regions ------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [None, [F.linear]])
@pytest.mark.parametrize("outer", [None, ["active"], [F.gelu]])
def test_a_region_within_a_region_is_right(inner: Any, outer: Any) -> None:
    model, x = Stack(), rows()
    truth = gradients(model, x)
    pt.remat(model, inner, blocks=["blocks.*"])
    pt.remat(model, outer)
    for _ in range(2):
        equal(gradients(model, x), truth)


# -- the world around ------------------------------------------------------------------------------


def test_random_numbers_are_drawn_again_and_the_generator_goes_on() -> None:
    model, x = Stack(p=0.5), rows()
    torch.manual_seed(3)
    truth, after = gradients(model, x), torch.rand(3)
    pt.remat(model, blocks=["blocks.*"])
    torch.manual_seed(3)
    equal(gradients(model, x), truth)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_is_as_it_was_in_forward(cache: bool) -> None:
    model, x = Stack(), rows()

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            out = model(x)
        out.float().square().mean().backward()  # outside
        return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    truth = run()
    pt.remat(model, [F.gelu], blocks=["blocks.*"])
    equal(run(), truth)


def test_running_statistics_are_counted_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU())
    other = copy.deepcopy(model)
    pt.remat(other)
    for step in range(2):
        x = rows() + step
        equal(gradients(other, x), gradients(model, x))
    equal(list(other.buffers()), list(model.buffers()))


def test_without_gradients_nothing_is_noted() -> None:
    model, x = pt.remat(Stack(), blocks=["blocks.*"]), rows()
    with pt.remat_report() as report, torch.no_grad():
        assert not model(x).requires_grad
    assert not report.regions
    with torch.inference_mode():
        model(x)


def test_a_region_may_be_used_twice_in_one_step_and_backward_twice() -> None:
    block, x = Block(), rows().requires_grad_()
    regions = [pt.remat(copy.deepcopy(block), policy) for policy in (None, [F.linear])]
    for module in (block, *regions):
        loss = module(module(x)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for region in regions:
        equal([p.grad for p in region.parameters()], [p.grad for p in block.parameters()])


def test_a_gradient_of_a_gradient_goes_through_a_region() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).pow(3).sum()

    def penalty(f: Function) -> list[Tensor]:
        x, w = rows().requires_grad_(), torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
        (g,) = torch.autograd.grad(f(x, w), x, create_graph=True)
        return list(torch.autograd.grad(g.square().sum(), (x, w)))

    truth = penalty(fn)
    for policy in (None, [torch.matmul]):
        for g, h in zip(penalty(pt.remat(fn, policy)), truth, strict=True):
            torch.testing.assert_close(g, h)


class Summing(nn.Module):
    """Adds tensors in a function of the interpreter's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return sum([self.linear(x).sin(), x.cos()]).exp()


def test_a_call_is_the_same_when_the_interpreter_has_met_it_often() -> None:
    model = nn.Sequential(*(Summing() for _ in range(20)))
    pt.remat(model, blocks=list(model))
    for _ in range(2):
        model(torch.randn(4, 4)).sum().backward()


def test_operators_of_python_are_calls_as_well() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x**2 + 2**x - 1 / (3 + x**2)) @ (1 - x).T

    x = rows().requires_grad_()
    equal(
        list(torch.autograd.grad(pt.remat(fn)(x).sum(), x)),
        list(torch.autograd.grad(fn(x).sum(), x)),
    )


def test_arguments_and_results_may_be_of_any_shape() -> None:
    def fn(pair: tuple[Tensor, dict[str, Tensor]], *, scale: float, mask: Tensor) -> Any:
        x, named = pair
        y = torch.tanh(x * named["w"]) * scale
        return {"out": y.masked_fill(mask, 0.0), "at": y.argmax(-1), "none": None}, [x.sum()]

    def run(f: Function) -> list[Tensor]:
        x, w = rows().requires_grad_(), torch.linspace(0, 1, 8).requires_grad_()
        found, (total,) = f((x, {"w": w}), scale=0.5, mask=x.detach() > 1)
        assert found["none"] is None and found["at"].dtype == torch.int64
        return list(torch.autograd.grad(found["out"].square().sum() + total, (x, w)))

    equal(run(pt.remat(fn)), run(fn))


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_recompute_that_takes_another_way_is_an_error_that_names_both_calls() -> None:
    turn = [0]

    def fn(x: Tensor) -> Tensor:
        turn[0] += 1
        if turn[0] == 1:
            return torch.tanh(x).square()
        return torch.sigmoid(x).square()

    loss = pt.remat(fn)(rows().requires_grad_()).sum()
    with pytest.raises(pt.RematError) as caught:
        loss.backward()
    said = str(caught.value)
    assert "tanh" in said and "sigmoid" in said and "test_remat.py:" in said


class Masked(nn.Module):
    """A block whose mask its model sets as an attribute before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.mask)


@pytest.mark.parametrize("keeps_first", [False, True])
def test_a_tensor_that_was_exchanged_since_forward_is_an_error(keeps_first: bool) -> None:
    block = pt.remat(Masked())
    x = torch.randn(3, 4)
    block.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    kept = block.mask if keeps_first else None
    first = block(x).sum()
    block.mask = torch.tensor([0.0, 1.0, 1.0, 1.0])  # of the next micro-batch
    second = block(x).sum()
    with pytest.raises(pt.RematError, match="reads another tensor than its forward read"):
        (first + second).backward()
    del kept


@pytest.mark.parametrize("rows", [2, 4, 5])
@pytest.mark.parametrize("new", [0.0, 5.0])
def test_a_tensor_that_was_exchanged_in_one_ranks_piece_is_an_error_on_all_ranks(
    rows: int, new: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []  # one entry for each comparison of a rank

    def gather_ints(*args: Any) -> Any:
        compared.append(get_ident())
        return gathered(*args)

    gathered = Wire.gather_ints
    monkeypatch.setattr(Wire, "gather_ints", gather_ints)

    def body(mesh: Any) -> tuple[int, str, int]:
        def make(last: float) -> Any:
            values = torch.arange(1.0, rows + 1)
            values[-1] += last
            return pt.distribute_tensor(values, mesh, [pt.Shard(0)])

        w, mask = make(0.0).requires_grad_(), make(0.0)
        region = pt.remat(lambda w: (w * mask).exp())
        region(w).sum().backward()
        before = compared.count(get_ident())
        loss, mask, error = region(w).sum(), make(new), ""
        try:
            loss.backward()
        except pt.RematError as raised:
            error = str(raised)
        return before, error, compared.count(get_ident())

    with pt.ranks(dp=2) as world:
        one, other = world.run(body)
    assert one == other
    assert (one[0], one[2]) == (0, 1)  # nothing is compared where nothing was exchanged
    assert ("reads another tensor than its forward read" in one[1]) == bool(new)


@pytest.mark.parametrize("nan", [False, True])
def test_a_tensor_of_equal_values_may_stand_in_the_place_of_another(nan: bool) -> None:
    def gradient(remat: bool) -> Tensor | None:
        torch.manual_seed(0)
        block = Masked()
        run = pt.remat(block) if remat else block
        outs = []
        for _ in range(2):
            block.mask = torch.tensor([1.0, float("nan") if nan else -torch.inf, 0.5, 1.0])
            outs.append(run(torch.ones(3, 4)).nan_to_num().sum())
        sum(outs).backward()  # type: ignore[union-attr]
        return block.linear.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False), equal_nan=True)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, m: Tensor) -> Tensor:
        ctx.save_for_backward(m)
        return x * m

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (m,) = ctx.saved_tensors
        return g * m, None


def test_a_function_may_read_a_new_tensor_of_equal_values_and_a_policy_gets_calls_of_the_program():
    seen: list[str] = []

    def region(x: Tensor) -> Tensor:
        return Times.apply(x.sin(), torch.from_numpy(numpy)).cos()

    def policy(call: Call) -> bool:
        seen.append(call.op)
        return False

    numpy = torch.arange(3.0).numpy()
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    pt.remat(region, policy=policy)(x).sum().backward()
    region(y).sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert seen == ["sin", "Times", "cos"]


@pytest.mark.slow
def test_a_policy_may_be_unhashable_and_is_freed() -> None:
    class Never:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, call: Call) -> bool:
            return False

    for make in (Never, lambda: lambda call: False):
        policy = make()
        x = torch.ones(3, requires_grad=True)
        pt.remat(torch.sin, policy=policy)(x).sum().backward()
        freed = weakref.ref(policy)
        del policy
        gc.collect()
        assert freed() is None


MAKERS: dict[str, Function] = {
    "distribute": lambda m, mesh: pt.distribute_tensor(m, mesh, [pt.Shard(0)]),
    "ones": lambda m, mesh: pt.ones(3, device_mesh=mesh, placements=[pt.Shard(0)]),
    "replicate": lambda m, mesh: pt.distribute_tensor(m, mesh),
    "batch": lambda m, mesh: pt.distribute_batch(m, mesh),
    "piece": lambda m, mesh: pt.distribute_batch(
        m[: 2 - mesh.get_local_rank()], mesh, each_rank_has="piece"
    ),
    "checked": lambda m, mesh: pt.DTensor.from_local(
        m[: 2 - mesh.get_local_rank()], mesh, [pt.Shard(0)], run_check=True, shape=(3,)
    ),
    "local_map": lambda m, mesh: pt.local_map(lambda t: t * 2, [pt.Shard(0)])(
        pt.distribute_tensor(m, mesh, [pt.Shard(0)])
    ),
}


def compare_makers(mesh: Any) -> None:
    x = pt.distribute_tensor(torch.arange(3.0), mesh, [pt.Shard(0)]).requires_grad_()
    m = torch.arange(1.0, 4.0)
    for name, make in MAKERS.items():
        region = lambda x, make=make: (x.sin() * make(m, mesh)).cos()  # noqa: E731
        found = [torch.autograd.grad(f(x).sum(), x)[0] for f in (region, pt.remat(region))]
        wanted, again = (g.full_tensor() for g in found)
        assert torch.equal(wanted, again), name


def compare_makers_on_gloo(rank: int) -> None:
    compare_makers(init_device_mesh("cpu", (2,), mesh_dim_names=("a",)))


def test_a_region_may_distribute_tensors_and_exchange_what_they_are() -> None:
    with pt.ranks(a=2) as world:
        world.run(compare_makers)


def test_messages_of_a_region_on_gloo_are_not_its_calls() -> None:
    run_ranks(compare_makers_on_gloo, 2)


@pytest.mark.slow
def test_a_mask_that_dies_after_its_forward_is_freed_with_the_graph() -> None:
    block = pt.remat(Masked())
    block.mask = torch.ones(4)
    gone = weakref.ref(block.mask.untyped_storage())
    loss = block(torch.ones(3, 4)).sum()
    block.mask = torch.ones(4)
    loss.backward()
    del loss
    gc.collect()
    assert gone() is None


def test_an_exception_in_either_run_leaves_the_region_usable() -> None:
    fails = [True, False]

    def fn(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        if fails[0] and is_recomputing() == fails[1]:
            raise KeyError("mine")
        return y * y

    region = pt.remat(fn)
    truth = torch.autograd.grad(torch.tanh(x := rows().requires_grad_()).square().sum(), x)
    for fails[1] in (False, True):
        fails[0] = True
        with pytest.raises(KeyError, match="mine"):
            region(x).sum().backward()
        fails[0] = False
        equal(list(torch.autograd.grad(region(x).sum(), x)), list(truth))
        assert torch.relu(x).requires_grad  # and no mode is left on


# -- a budget --------------------------------------------------------------------------------------


def stack_that_counts() -> tuple[Stack, list[Any]]:
    model, count = Stack(6, 32), [None]
    model.blocks = nn.ModuleList(Counted(block, count) for block in model.blocks)
    return model, count


def peak_of(model: nn.Module, count: list[Any], x: Tensor) -> int:
    """The most bytes of activations at once, in forward and backward; gradients are not counted."""
    model.zero_grad()
    with pt.count_memory() as count[0]:
        model(x).square().mean().backward()
    return count[0].peak_of("activations")


def test_a_budget_holds_and_more_of_it_recomputes_less() -> None:
    x = rows(256, 32)
    whole = peak_of(*stack_that_counts(), x)
    model, count = stack_that_counts()
    least = peak_of(pt.remat(model, blocks=list(model.blocks)), count, x)
    assert least < whole / 2
    peaks, recomputed = [], []
    for share in (0.3, 0.5, 0.7, 1.5):
        budget = int(least + share * (whole - least))
        model, count = stack_that_counts()
        pt.remat(model, budget)
        peak_of(model, count, x)
        with pt.remat_report() as report:
            peaks.append(peak_of(model, count, x))
        assert peaks[-1] <= budget
        recomputed.append(report.flops)
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] > recomputed[-1] == 0
    equal(gradients(model, x), gradients(Stack(6, 32), x))


def test_a_budget_below_the_least_is_an_error_that_says_the_least() -> None:
    x = rows(256, 32)
    model, count = stack_that_counts()
    with pytest.raises(pt.RematError, match="cannot be kept") as caught:
        peak_of(pt.remat(model, 1000), count, x)
    least = int(str(caught.value).split("policy=")[1].split()[0])
    model, count = stack_that_counts()
    pt.remat(model, least)
    peak_of(model, count, x)
    assert peak_of(model, count, x) <= least


# -- on a mesh -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 3}, {"dp": 2, "tp": 3}], ids=str)
@pytest.mark.parametrize(
    "policy",
    [None, [F.linear], [pt.keep_collectives], 1 << 20],
    ids=["nothing", "linear", "collectives", "budget"],
)
def test_on_a_mesh_gradients_are_one_devices_also_where_pieces_are_uneven(
    sizes: dict[str, int], policy: Any
) -> None:
    truth = gradients(Stack(2), rows(4))

    def ranks(mesh: Any) -> None:
        model = Stack(2)
        plan = {}
        if "tp" in mesh.mesh_dim_names:
            plan = pt.plans.column("blocks.*.up") | pt.plans.row("blocks.*.down")
        model = pt.remat(pt.parallelize(model, mesh, plan), policy, blocks=["blocks.*"])
        x = pt.distribute_batch(rows(4), mesh)
        for _ in range(2):
            found = gradients(model, x)
        for g, h in zip(found, truth, strict=True):
            torch.testing.assert_close(g.full_tensor(), h)

    with pt.ranks(**sizes) as world:
        world.run(ranks)


@pytest.mark.parametrize("outer", [None, ["active"]], ids=str)
@pytest.mark.parametrize("sizes", [{"dp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_a_region_within_a_region_finds_its_dtensors_again(sizes: dict[str, int], outer: Any):
    truth = gradients(Stack(2), rows(4))

    def ranks(mesh: Any) -> None:
        plan = pt.plans.column("blocks.*.up") | pt.plans.row("blocks.*.down")
        model = pt.parallelize(Stack(2), mesh, plan if "tp" in sizes else None)
        pt.remat(pt.remat(model, [F.gelu], blocks=["blocks.*"]), outer)
        for g, h in zip(gradients(model, pt.distribute_batch(rows(4), mesh)), truth, strict=True):
            torch.testing.assert_close(g.full_tensor(), h)

    with pt.ranks(**sizes) as world:
        world.run(ranks)


@pytest.mark.parametrize("policy", [[torch.sum], lambda call: call.op == "sum"], ids=["op", "fn"])
def test_a_kept_call_that_communicates_is_left_out_by_ranks_with_an_empty_piece_too(policy: Any):
    """4 rows over 3 ranks: the last has none."""

    def fn(x: Any) -> Tensor:
        total = torch.sum(torch.exp(x), 0, keepdim=True).redistribute(x.device_mesh, [pt.Shard(1)])
        return torch.sum(torch.exp(total * 0.01), 1)

    def ranks(mesh: Any) -> None:
        found = []
        for f in (fn, pt.remat(fn, policy)):
            x = pt.distribute_tensor(rows(4, 4), mesh, [pt.Shard(0)]).requires_grad_()
            f(x).full_tensor().sum().backward()
            found.append(x.grad.full_tensor())
        assert torch.equal(*found)

    with pt.ranks(dp=3) as world:
        world.run(ranks)


@pytest.mark.parametrize("policy", [None, 10**6, [F.scaled_dot_product_attention]], ids=str)
def test_a_rank_without_rows_runs_a_region_again_as_the_others_do(policy: Any) -> None:
    def body(mesh: Any) -> list[Tensor]:
        x = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(3))
        q = pt.distribute_tensor(x, mesh, [pt.Shard(0)]).requires_grad_()
        w = pt.distribute_tensor(x[0, 0], mesh, [pt.Shard(0)]).requires_grad_()

        def region(q: Tensor) -> Tensor:
            k = q + w.redistribute(placements=[pt.Replicate()])
            return F.scaled_dot_product_attention(q, k, q)

        run = pt.remat(region, policy=policy)
        found = []
        for f in (region, run, run):
            found += torch.autograd.grad(f(q).sin().sum(), (q, w))
        return [g.full_tensor() for g in found]

    with pt.ranks(a=2) as world:
        for found in world.run(body):
            equal(found[2:4], found[:2])
            equal(found[4:], found[:2])


def test_the_result_of_a_redistribution_is_freed_and_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[Any] = []
    gathered = Wire.gather_ints
    monkeypatch.setattr(Wire, "gather_ints", lambda *args: compared.append(args) or gathered(*args))

    def body(mesh: Any, written: bool) -> bool:
        x = pt.distribute_tensor(torch.ones(4, 2), mesh, [pt.Shard(0)]).requires_grad_()
        w = pt.distribute_tensor(torch.ones(4, 2), mesh, [pt.Shard(0)])
        results = []

        def region(x: Any) -> Any:
            both = [t.redistribute(placements=[pt.Replicate()]) for t in (x, w)]
            results.extend(weakref.ref(t) for t in both)
            return (both[0] * both[1]).sin()

        y = pt.remat(region)(x)
        assert not any(ref() is not None for ref in results)
        if written:
            w.mul_(2)
            with pytest.raises(pt.RematError, match="written in place"):
                y.sum().backward()
        else:
            y.sum().backward()
        return True

    with pt.ranks(a=2) as world:
        assert all(world.run(body, False)) and not compared
        assert all(world.run(body, True))


def test_what_redistributions_brought_is_kept_where_asked_and_else_carried_again() -> None:
    def ranks(mesh: Any) -> list[int]:
        sent = []
        for policy in ([pt.keep_collectives], None):
            plan = pt.plans.column("blocks.*.up") | pt.plans.row("blocks.*.down")
            model = pt.parallelize(Stack(2), mesh, plan)
            pt.remat(model, policy, blocks=["blocks.*"])
            x = pt.distribute_batch(rows(), mesh, {"tp": pt.Shard(0)})
            loss = model(x).square().mean()
            with pt.ledger() as log:
                loss.backward()
            sent.append(log.bytes)
        return sent

    with pt.ranks(tp=2) as world:
        for kept, again in world.run(ranks):
            assert kept < again


@pytest.mark.parametrize(
    "policy", [None, [F.linear], ["active"]], ids=["nothing", "linear", "active"]
)
def test_within_zero_3_no_block_is_gathered_a_third_time(policy: Any) -> None:
    truth = gradients(Stack(), rows())

    def ranks(mesh: Any) -> None:
        def gathers(model: nn.Module) -> int:
            model.zero_grad()
            with pt.ledger() as log:
                model(pt.distribute_batch(rows(), mesh)).square().mean().backward()
            return log.count("all_gather")

        alone = gathers(pt.zero(Stack(), mesh, "dp", stage=3, blocks=["blocks.*"]))
        model = pt.remat(Stack(), policy, blocks=["blocks.*"])
        model = pt.zero(model, mesh, "dp", stage=3, blocks=["blocks.*"])
        assert gathers(model) <= alone
        for p, h in zip(model.parameters(), truth, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), h)

    with pt.ranks(dp=2) as world:
        world.run(ranks)


def test_dropout_on_a_mesh_is_one_devices_in_both_runs() -> None:
    model = Stack(2, p=0.5)
    torch.manual_seed(5)
    truth = gradients(model, rows())

    def ranks(mesh: Any) -> None:
        mine = pt.remat(pt.parallelize(copy.deepcopy(model), mesh), blocks=["blocks.*"])
        x = pt.distribute_batch(rows(), mesh)
        torch.manual_seed(5)
        for g, h in zip(gradients(mine, x), truth, strict=True):
            torch.testing.assert_close(g.full_tensor(), h)

    with pt.ranks(dp=2) as world:
        world.run(ranks)


def test_a_rank_whose_recompute_goes_another_way_ends_all() -> None:
    def ranks(mesh: Any) -> None:
        turn = [0]

        def fn(x: Tensor) -> Tensor:
            turn[0] += 1
            if turn[0] == 2 and mesh.get_rank() == 1:
                x = torch.sin(x)
            return torch.tanh(x).square()

        x = pt.distribute_batch(rows(), mesh).requires_grad_()
        pt.remat(fn)(x).sum().backward()

    with pt.ranks(dp=2) as world, pytest.raises(pt.RematError, match="sin"):
        world.run(ranks)


# -- what is written between forward and backward --------------------------------------------------


def test_a_parameter_that_was_stepped_before_backward_is_an_error_that_names_it() -> None:
    def step_too_early(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        loss = model(rows()).square().mean()
        optimizer.step()
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_too_early(Block())
    for policy in (None, [F.linear], ["active"], [pt.one_call(F.gelu)]):
        with pytest.raises(pt.RematError) as caught:
            step_too_early(pt.remat(Block(), policy))
        text = str(caught.value)
        assert "norm.weight of layer_norm(" in text and "test_remat.py" in text
        assert "forward    read version 1" in text and "recompute  reads version 2" in text


def test_a_tensor_around_a_function_that_was_written_before_backward_is_an_error() -> None:
    w = torch.full((8,), 2.0)
    x = rows().requires_grad_()

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x * w)

    y = pt.remat(fn)(x)
    w.mul_(2)
    with pytest.raises(pt.RematError, match=r"tensor 1 of (__mul__|mul)\("):
        y.sum().backward()
    pt.remat(fn)(x).sum().backward()  # and the next time it is what it is
    assert x.grad is not None


@torch.library.custom_op("partita_test::count", mutates_args={"n"}, schema="(Tensor(a!) n) -> ()")
def count_op(n: Tensor) -> None:
    n += 1


def test_what_a_region_writes_itself_may_be_written_by_its_next_call_before_backward() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.counts = nn.Buffer(torch.zeros(2, 3))
            self.calls, self.scratch = nn.Buffer(torch.zeros(())), nn.Buffer(torch.zeros(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.calls += 1
                self.counts[1, 2:].add_(1)
                count_op(self.counts)
                torch.mul(x, 2, out=self.scratch)
                shift = self.scratch / self.calls
            return torch.tanh(self.linear(self.norm(x)) * shift)

    def run(model: nn.Module) -> list[Tensor]:
        first, second = model(rows()).sum(), model(rows() + 1).square().sum()
        first.backward()
        second.backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]  # type: ignore[list-item]

    equal(run(pt.remat(Counting())), run(Counting()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_within_zero_the_shards_tell_whether_a_parameter_was_stepped(stage: int) -> None:
    def program(mesh: Any) -> None:
        model = pt.remat(nn.Sequential(*Stack().blocks), blocks=["*"])
        if stage:
            pt.zero(model, mesh, "dp", stage=stage, blocks=["*"])
        else:
            pt.distribute_module(model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = pt.distribute_batch(rows(), mesh)
        for _ in range(2):  # forwards and backwards as they please, between steps
            optimizer.zero_grad()
            losses = [model(x).square().mean() for _ in range(2)]
            for loss in losses:
                loss.backward()
            optimizer.step()
        loss = model(x).square().mean()
        optimizer.step()
        with pytest.raises(pt.RematError, match=r"(?s)norm\.weight of layer_norm.*version"):
            loss.backward()

    with pt.ranks(dp=2) as world:
        world.run(program)


class Saving(nn.Module):
    """Calls an op that saves its own result, and another that reads it."""

    def __init__(self, op: Function) -> None:
        super().__init__()
        self.op, self.out = op, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.op(x))


def attention(x: Tensor) -> Tensor:
    one = x.view(1, 1, *x.shape)
    return F.scaled_dot_product_attention(one, one, one).view_as(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", [torch.tanh, torch.relu, torch.exp, F.gelu, lambda x: x.softmax(-1), attention]
)
@pytest.mark.parametrize("policy", [None, [F.linear]])
def test_a_step_leaves_no_memory_behind_though_python_collects_nothing(
    op: Function, policy: Any
) -> None:
    model = nn.Sequential(*(Saving(op) for _ in range(3)))
    pt.remat(model, policy, blocks=[*model])
    gc.collect()
    gc.disable()
    try:
        with pt.count_memory() as memory:
            model(rows()).sum().backward()
            gradients = sum(p.nbytes for p in model.parameters())
            assert memory.live == gradients
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", [None, [pt.keep_collectives], lambda call: True])
@pytest.mark.parametrize("on_pieces", [False, True], ids=["to_local", "local_map"])
@pytest.mark.parametrize("moved", [False, True])
def test_a_region_reads_pieces_before_and_behind_moves(moved, on_pieces, policy):
    def body(mesh):
        x = pt.distribute_tensor(torch.arange(12.0).view(4, 3) / 7, mesh, [pt.Shard(0)])
        x.requires_grad_()
        given = x.redistribute(placements=[pt.Shard(1)]) if moved else x * 1

        def compute(t):
            if on_pieces:
                return pt.local_map(torch.sin, out_placements=t.placements)(t)
            whole = {"shape": t.shape, "stride": (3, 1)}
            return pt.DTensor.from_local(t.to_local().sin(), mesh, t.placements, **whole)

        def region(t):
            other = [pt.Shard(0) if moved else pt.Shard(1)]
            return compute(compute(t).redistribute(placements=other))

        pt.remat(region, policy)(given).square().sum().backward()
        return x.grad.full_tensor()

    x = (torch.arange(12.0).view(4, 3) / 7).requires_grad_()
    x.sin().sin().square().sum().backward()
    with pt.ranks(a=2) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, x.grad)
