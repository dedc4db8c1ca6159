"""An update of blocks one by one is the update of all, also where equal ones are one program."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn, optim
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pt
from partita.graph.graph_nodes import call_subgraph, written_operands
from partita.graph.graph_text import canonical_lines
from tests.programs import stacks
from tests.programs.steps import squares

WIDTH, BLOCKS = 4, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(stacks.Stack):
    def __init__(self, kind=Block, count=BLOCKS):
        super().__init__((kind() for _ in range(count)), WIDTH)


def adamw(model):
    return optim.AdamW(model.parameters(), 1e-2)


def trained(
    mesh, blocks, optimize=adamw, build=Stack, step_of=squares, place="zero", calls=3, sections=None
):
    """Losses, parameters and state after some steps, and the captured step."""
    torch.manual_seed(0)
    model = build()
    if mesh is not None and place == "dp":
        pt.parallelize(model, mesh, {})
    elif mesh is not None:
        pt.zero(model, mesh, stage={"zero": 3, "zero 1": 1}[place])
    optimizer = optimize(model)
    step = pt.compile(step_of(model, optimizer), backend="graph", blocks=blocks, sections=sections)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    if mesh is not None:
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    found = [step(x).detach() for _ in range(calls)]
    found += [p.detach() for p in model.parameters()]
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for one in optimizers:
        for state in one.state.values():
            found += [v for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
    found = [v.full_tensor() if isinstance(v, pt.DTensor) else v.clone() for v in found]
    return found, step


def lines(step):
    """What the graph computes, in any order; but for where a rank is, which it may ask anywhere."""
    called = (re.sub(r"%\d+", "%", line) for line in canonical_lines(step.program))
    return Counter(line for line in called if not re.search(r": i64\[\] |aten\.view\.", line))


def check(mesh=None, **how):
    """The step with blocks is the one without: in values, bit by bit, and in what it computes; so
    is that in which they stay calls."""
    wanted, flat = trained(mesh, False, **how)
    found, step = trained(mesh, True, **how)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    as_calls, calling = trained(mesh, True, sections=True, **how)
    assert len(as_calls) == len(wanted)
    for one, other in zip(as_calls, wanted, strict=True):
        assert torch.equal(one, other)
    called, blocks = calling.program.blocks, step.program.blocks
    assert called.structures == blocks.structures
    assert counts(called) == counts(blocks)
    assert lines(step) == lines(flat)
    assert not flat.program.blocks.updates
    return called


def counts(blocks):
    """The updates of blocks that have equals, by name, and how many are equal."""
    return tuple((equal.kind, equal.count) for equal in blocks.updates if equal.count > 1)


def folded(blocks):
    return tuple((u.kind, u.count) for u in blocks.updates if not u.reason)


def check_on_ranks(**how):
    with pt.ranks(dp=2) as world:
        return world.run(lambda mesh: check(mesh, **how))[1]


ONCE = (("AdamW of Block", BLOCKS),)


OPTIMIZERS = {
    "adamw": (optim.AdamW, {}),
    "adam with amsgrad": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adam maximizing": (optim.Adam, {"maximize": True, "weight_decay": 0.1}),
    "adam one by one": (optim.Adam, {"foreach": False}),
    "adamw fused": (optim.AdamW, {"fused": True}),
    "adamw capturable": (optim.AdamW, {"capturable": True}),
    "sgd": (optim.SGD, {}),
    "sgd with momentum": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "sgd with dampening": (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "sgd with nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd maximizing": (optim.SGD, {"momentum": 0.9, "maximize": True}),
    "rmsprop": (optim.RMSprop, {}),
    "rmsprop centered": (optim.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    "nadam": (optim.NAdam, {}),
    "nadam decoupled": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {"weight_decay": 0.1}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "adamax": (optim.Adamax, {}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {"weight_decay": 0.1}),
}


ONE_OF_EACH = {kind: name for name, (kind, _) in OPTIMIZERS.items()}.values()
"""Where a parameter lies changes nothing that depends on an optimizer's options."""


def of_three_blocks():
    return Stack(count=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [(name, "zero") for name in OPTIMIZERS]
    + [(name, place) for name in ONE_OF_EACH for place in ("dp", "zero 1")],
)
def test_an_update_is_the_same_with_that_of_a_block_traced_once(name, place):
    kind, options = OPTIMIZERS[name]
    blocks = check_on_ranks(
        optimize=lambda model: kind(model.parameters(), lr=1e-2, **options),
        place=place,
        build=of_three_blocks,
    )
    assert counts(blocks) == ((f"{kind.__name__} of Block", 3),)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_plain_tensors_is_the_same_with_that_of_a_block_traced_once(name):
    kind, options = OPTIMIZERS[name]
    blocks = check(
        optimize=lambda model: kind(model.parameters(), lr=1e-2, **options), build=of_three_blocks
    )
    assert counts(blocks) == ((f"{kind.__name__} of Block", 3),)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["zero", "dp", "zero 1"])
def test_the_update_of_alike_blocks_is_traced_once(place):
    assert counts(check_on_ranks(place=place)) == ONCE


@pytest.mark.slow
def test_explain_lists_the_updates_of_blocks():
    _, step = trained(None, True)
    assert f"AdamW of Block: {BLOCKS} equal calls, left flat" in step.explain()
    _, step = trained(None, True, sections=True)
    assert f"AdamW of Block: {BLOCKS} equal calls, folded into one program" in step.explain()


class WithUnused(Block):
    """Every second one does not use some of its parameters, which are never updated."""

    made = 0

    def __init__(self):
        super().__init__()
        WithUnused.made += 1
        self.number = WithUnused.made
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = super().forward(x)
        return self.spare(x) if self.number % 2 else x


@pytest.mark.slow
def test_blocks_with_gradients_of_other_parameters_have_other_updates():
    updates = counts(check_on_ranks(build=lambda: Stack(WithUnused)))
    assert updates == (("AdamW of WithUnused", 3), ("AdamW of WithUnused", 3))


def in_two_groups(model):
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.05}]
    return optim.AdamW(groups, 1e-2)


@pytest.mark.slow
def test_parameter_groups_may_cut_through_blocks():
    assert counts(check_on_ranks(optimize=in_two_groups)) == ONCE


def with_rates_by_depth(model):
    groups = [
        {"params": list(block.parameters()), "lr": 0.01 * (1 + i // 3)}
        for i, block in enumerate(model.blocks)
    ]
    rest = [*model.first.parameters(), *model.last.parameters()]
    return optim.AdamW([{"params": rest}, *groups], 1e-2)


@pytest.mark.slow
def test_blocks_with_a_learning_rate_of_their_own_are_updated_with_it():
    assert folded(check_on_ranks(optimize=with_rates_by_depth)) == ONCE


def with_two_rates(model):
    halves = [list(model.blocks[:3].parameters()), list(model.blocks[3:].parameters())]
    return optim.AdamW([{"params": halves[0]}, {"params": halves[1], "lr": 0.05}], 1e-2)


@pytest.mark.slow
def test_a_rate_that_differs_between_blocks_is_an_operand_of_their_update():
    assert folded(check_on_ranks(optimize=with_two_rates)) == ONCE


def freezing(model):
    for block in list(model.blocks)[::3]:
        block.linear.weight.requires_grad_(False)
    return adamw(model)


@pytest.mark.slow
def test_frozen_parameters_stay():
    updates = counts(check_on_ranks(optimize=freezing))
    assert sorted(count for _, count in updates) == [2, 4]


@pytest.mark.slow
def test_a_schedule_changes_the_rate_of_all_blocks_in_the_same_program():
    def run(mesh, captured):
        torch.manual_seed(0)
        model = pt.zero(Stack(), mesh, stage=3)
        optimizer = adamw(model)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = squares(model, optimizer)
        step = pt.compile(step, backend="graph", blocks=True) if captured else step
        x = pt.distribute_tensor(torch.linspace(-1, 1, 16).view(4, WIDTH), mesh, [pt.Shard(0)])
        for _ in range(4):
            step(x)
            scheduler.step()
        if captured:
            assert len(step.reasons) == 1
        return [p.full_tensor().detach() for p in model.parameters()]

    with pt.ranks(dp=2) as world:
        wanted, found = world.run(run, False)[0], world.run(run, True)[0]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class TiedBetweenBlocks(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[4].linear.weight = self.blocks[1].linear.weight


class TiedToTheHead(Stack):
    def __init__(self):
        super().__init__()
        self.last.weight = self.blocks[2].linear.weight


@pytest.mark.slow
@pytest.mark.parametrize("build", [TiedBetweenBlocks, TiedToTheHead])
def test_a_tied_parameter_is_updated_once(build):
    ((_, count),) = counts(check_on_ranks(build=build))
    assert count == (5 if build is TiedBetweenBlocks else 6)


@pytest.mark.slow
def test_an_optimizer_may_hold_some_blocks_alone():
    updates = counts(check_on_ranks(optimize=lambda m: optim.AdamW(m.blocks[1:4].parameters())))
    assert updates == (("AdamW of Block", 3),)


def by_two(model, optimizers):
    def step(x):
        for one in optimizers:
            one.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for one in optimizers:
            one.step()
        return loss

    return step


@pytest.mark.slow
def test_two_optimizers_have_updates_of_their_own():
    def optimize(model):
        flat = [p for p in model.parameters() if p.ndim == 1]
        others = [p for p in model.parameters() if p.ndim == 2]
        return [optim.SGD(others, 0.1, momentum=0.9), optim.AdamW(flat, 1e-2)]

    updates = counts(check_on_ranks(optimize=optimize, step_of=by_two))
    assert updates == (("SGD of Block", BLOCKS), ("AdamW of Block", BLOCKS))


def repeated(model, optimizer):
    inner = squares(model, optimizer)

    def step(x):
        inner(x)
        return inner(x)

    return step


@pytest.mark.slow
def test_a_second_update_of_a_step_reads_what_the_first_has_written():
    assert counts(check_on_ranks(step_of=repeated)) == (("AdamW of Block", 2 * BLOCKS),)


def clipped(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        pt.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return step


@pytest.mark.slow
def test_clipped_gradients_are_what_blocks_are_updated_with():
    assert counts(check_on_ranks(step_of=clipped)) == ONCE


def of_sums(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        before = sum(p.detach().sum() for p in model.blocks.parameters())
        optimizer.step()
        after = sum(p.detach().sum() for p in model.blocks.parameters())
        counts = sum(s["step"].sum() for s in optimizer.state.values())
        return after - before + counts

    return step


@pytest.mark.slow
def test_what_reads_parameters_and_state_after_an_update_reads_what_it_wrote():
    assert counts(check_on_ranks(step_of=of_sums)) == ONCE


class Counting(Stack):
    """It counts, in tensors, how often the hooks of its optimizer ran."""

    def __init__(self):
        super().__init__()
        self.register_buffer("before", torch.zeros(()))
        self.register_buffer("after", torch.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize("on_ranks", [False, True])
def test_hooks_of_a_step_run_once(on_ranks):
    def run(mesh=None):
        models = []

        def optimize(model):
            models.append(model)
            optimizer = adamw(model)
            optimizer.register_step_pre_hook(lambda *_: (model.before.add_(1), None)[1])
            optimizer.register_step_post_hook(lambda *_: (model.after.add_(1), None)[1])
            return optimizer

        blocks = check(mesh, build=Counting, optimize=optimize)
        assert [(m.before.item(), m.after.item()) for m in models] == [(3, 3)] * 3
        return counts(blocks)

    if not on_ranks:
        assert run() == ONCE
        return
    with pt.ranks(dp=2) as world:
        assert world.run(run)[0] == ONCE


class Sharing(Stack):
    """The weights of two blocks are views of one memory."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(2, WIDTH, WIDTH)
        for i in range(2):
            self.blocks[i].linear.weight = nn.Parameter(memory[i])


@pytest.mark.slow
@pytest.mark.parametrize("sections", [None, True])
def test_blocks_that_lie_in_one_memory_are_updated_together(sections):
    wanted, _ = trained(None, False, build=Sharing)
    found, step = trained(None, True, build=Sharing, sections=sections)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    assert counts(step.program.blocks) == (("AdamW of Block", BLOCKS - 2),)


class OfItsOwn(optim.AdamW):
    """A user's optimizer may do what it likes with all parameters together."""


@pytest.mark.slow
def test_an_optimizer_of_the_users_is_traced_as_it_runs():
    blocks = check_on_ranks(optimize=lambda model: OfItsOwn(model.parameters(), 1e-2))
    assert not blocks.updates
    assert blocks.structures == (("Block", BLOCKS),)


def with_closure(model, optimizer):
    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return step


@pytest.mark.slow
def test_a_step_with_a_closure_is_traced_as_it_runs():
    assert not check_on_ranks(step_of=with_closure).updates


def accumulated(model, optimizer):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.slow
def test_gradients_that_stay_are_added_to():
    assert counts(check_on_ranks(step_of=accumulated)) == ONCE


@pytest.mark.slow
def test_an_update_that_stays_a_call_is_one_section_that_writes_what_it_takes():
    _, step = trained(None, True, sections=True)
    graph = step.program.graph.graph
    calls = [n for n in graph.nodes if n.target is call_subgraph and n.args[0].written]
    assert len(calls) == BLOCKS
    assert len({n.args[0] for n in calls}) == 1
    weights = sum(1 for _ in Block().parameters())
    assert len([*written_operands(calls[0])]) == 4 * weights  # each with two averages and a count


@pytest.mark.slow
def test_what_is_computed_from_step_counts_is_computed_once_beside_calls():
    def powers(step):
        return sum("pow" in line for line in canonical_lines(step.program))

    _, flat = trained(None, False)
    _, step = trained(None, True, sections=True)
    assert powers(step) == powers(flat) > 0


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.slow
def test_blocks_that_stay_calls_take_no_more_memory():
    """What was gathered is unpacked, and a parameter updated, as early as in one graph."""

    def peak(mesh, sections):
        model = nn.Sequential(*(Wide() for _ in range(8)))
        pt.zero(model, mesh, stage=3)
        step = pt.compile(
            squares(model, adamw(model)), backend="graph", blocks=True, sections=sections
        )
        x = pt.distribute_tensor(torch.randn(4, 64), mesh, [pt.Shard(0)])
        step(x)
        return step.memory.peak

    with pt.ranks(dp=2) as world:
        peaks = world.run(lambda mesh: (peak(mesh, True), peak(mesh, False)))[0]
    assert peaks[0] <= 1.01 * peaks[1]


@pytest.mark.slow
def test_parameters_with_names_are_updated_by_blocks():
    def optimize(model):
        return optim.AdamW(model.named_parameters(), 1e-2)

    assert counts(check(optimize=optimize)) == ONCE


class HearingCalls(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class HearingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [HearingCalls, HearingFunctions])
def test_an_update_within_a_mode_is_refused_since_the_mode_would_hear_other_calls(kind):
    def step_of(model, optimizer):
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            with kind():
                optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    for blocks in (False, True):
        with pytest.raises(pt.CaptureError, match="optimizer steps within a TorchFunctionMode"):
            trained(None, blocks, step_of=step_of)


def step_within(enter):
    """The step of a model that is updated within what `enter` gives."""

    def step_of(model, optimizer):
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            with enter():
                optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return step_of


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    "enter", [torch.inference_mode, lambda: torch.device("cpu"), torch.no_grad]
)
def test_an_update_within_a_setting_of_torch_counts_its_steps(enter, blocks):
    def train(compiled):
        torch.manual_seed(0)
        model = Stack().double()
        optimizer = adamw(model)
        step = step_within(enter)(model, optimizer)
        if compiled:
            step = pt.compile(step, backend="graph", blocks=blocks)
        losses = [step(torch.ones(4, WIDTH, dtype=torch.float64)) for _ in range(4)]
        return [*losses, *model.parameters()], {float(s["step"]) for s in optimizer.state.values()}

    (found, counts), (wanted, eager_counts) = train(True), train(False)
    assert counts == eager_counts == {4.0}
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [HearingCalls, HearingFunctions])
def test_a_mode_around_what_comes_before_an_update_is_captured(kind):
    def step_of(model, optimizer):
        def step(x):
            with kind():
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    wanted, _ = trained(None, False)
    found, _ = trained(None, True, step_of=step_of)
    assert all(map(torch.equal, found, wanted))


def step_with(optimizer_of, sections):
    """Losses of some steps of an optimizer that makes its state in the first, and its state."""
    torch.manual_seed(0)
    model = Stack().double()
    optimizer = optimizer_of(model)
    step = squares(model, optimizer)
    run = step if sections is None else pt.compile(step, backend="graph", sections=sections)
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    losses = torch.stack([run(x).detach() for _ in range(4)])
    state = {n: sorted(v) for n, v in optimizer.state_dict()["state"].items()}
    return losses, state, len(getattr(run, "reasons", ()))


class Renamed(optim.AdamW):
    pass


class Halving(optim.AdamW):
    """Halves gradients before it steps as torch's does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)


class KeepingState(optim.SGD):
    """Makes state of its own, under a name that torch's class has for something else."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.ones_like(p)
                state["momentum_buffer"].mul_(0.9).add_(p.grad)
                p.sub_(state["momentum_buffer"], alpha=group["lr"])


@pytest.mark.slow
def test_a_subclass_that_makes_state_in_its_own_way_does_so_when_captured():
    def optimizer_of(model):
        return KeepingState(model.parameters(), 0.1, momentum=0.9)

    wanted, state, _ = step_with(optimizer_of, None)
    found, its_state, _ = step_with(optimizer_of, False)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert its_state == state


@pytest.mark.slow
@pytest.mark.parametrize("sections", [False, True])
@pytest.mark.parametrize("kind", [Renamed, Halving])
def test_a_subclass_of_an_optimizer_of_torchs_reckons_as_it_does_in_eager(kind, sections):
    def optimizer_of(model):
        return kind(model.parameters(), 0.1)

    wanted, state, _ = step_with(optimizer_of, None)
    found, its_state, captures = step_with(optimizer_of, sections)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert its_state == state
    assert captures == 1


@pytest.mark.slow
def test_a_captured_step_leaves_no_state_of_parameters_without_gradient():
    unused = nn.Linear(2, 2).double()

    def optimizer_of(model):
        return optim.AdamW([*unused.parameters(), *model.parameters()], 0.1)

    wanted, state, _ = step_with(optimizer_of, None)
    found, its_state, _ = step_with(optimizer_of, False)
    assert its_state == state
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


class Complex(Block):
    """Its update goes through views that are traced again: of inputs whose values are alike."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return super().forward((x * self.factor).real)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [optim.AdamW, optim.RMSprop])
def test_complex_parameters_are_updated_by_blocks(kind):
    blocks = check(build=lambda: Stack(Complex), optimize=lambda m: kind(m.parameters(), 1e-2))
    assert counts(blocks) == ((f"{kind.__name__} of Complex", BLOCKS),)


SETTINGS = {
    "betas": lambda i: {"betas": (0.8 + 0.1 * i, 0.99)},
    "weight decay": lambda i: {"weight_decay": 0.1 * (i + 1)},
    "eps": lambda i: {"eps": 1e-3 * (i + 1)},
    "a rate in a tensor": lambda i: {"lr": torch.tensor(0.01 * (i + 1))},
    "amsgrad": lambda i: {"amsgrad": bool(i)},
    "an integer": lambda i: {"eps": i + 1},
}


def with_settings(name, kind=optim.AdamW):
    """Makes an optimizer whose blocks have one of two settings in turn."""

    def optimize(model):
        rest = [*model.first.parameters(), *model.last.parameters()]
        parts = [[*model.blocks[i::2].parameters()] for i in range(2)]
        groups = [{"params": p} | SETTINGS[name](i) for i, p in enumerate(parts)]
        return kind([{"params": rest}, *groups], 1e-2)

    return optimize


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_differ_between_blocks_are_each_block_s_own(name):
    many = 2 if name == "amsgrad" else 1
    blocks = check(optimize=with_settings(name))
    assert folded(blocks) == (("AdamW of Block", BLOCKS // many),) * many


@pytest.mark.slow
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad])
def test_numbers_in_the_program_are_each_block_s_own(kind):
    """Numbers stand in the graph as they are if one of them is an integer or is printed."""

    def printing(model, optimizer):
        step = squares(model, optimizer)

        def printed(x):
            float.hex(optimizer.param_groups[0]["lr"])
            return step(x)

        return printed

    check(optimize=with_settings("an integer", kind))
    check(optimize=with_settings("weight decay", kind), step_of=printing)


@pytest.mark.slow
@pytest.mark.parametrize(
    "write", [lambda lr: torch._foreach_mul_([lr], 0.5), lambda lr: lr.data.mul_(0.5)]
)
def test_a_rate_that_is_written_between_the_updates_of_blocks_is_read_anew(write):
    def step_of(model, optimizer):
        early, late = ([*model.blocks[part].parameters()] for part in (slice(3), slice(3, None)))

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            halves = [(params, [p.grad for p in params]) for params in (early, late)]
            for params, grads in halves:
                optimizer.zero_grad()
                for p, grad in zip(params, grads, strict=True):
                    p.grad = grad
                optimizer.step()
                with torch.no_grad():
                    write(optimizer.param_groups[0]["lr"])
            return loss

        return step

    check(optimize=lambda m: optim.AdamW(m.parameters(), torch.tensor(1e-2)), step_of=step_of)


class Seeing(Block):
    """Counts its calls, and keeps what it has seen, in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls.add_(1)
        self.seen.lerp_(x.mean(0), 0.5)
        return super().forward(x) + self.seen


@pytest.mark.parametrize("reads_later", [False, True])
def test_a_block_without_backward_may_write_what_nobody_reads_later(reads_later):
    def run(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(*(Seeing() for _ in range(BLOCKS)))

        def step(x):
            with torch.no_grad():
                y = model(x)
                return y + model[1].seen if reads_later else y

        if compiled:
            step = pt.compile(step, backend="graph", blocks=True, sections=True)
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        return [*(step(x) for _ in range(3)), *model.state_dict().values()], step

    wanted, _ = run(False)
    found, step = run(True)
    assert all(map(torch.equal, found, wanted))
    assert step.program.blocks.folded == (("Seeing", BLOCKS - reads_later),)
