"""Hooks on parameters run when one process runs them, also where a checkpoint runs a backward pass
of its own within another (`use_reentrant=True`)."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partita as pt
from partita.parallel.fsdp_group import FsdpGroup

# Where a checkpoint runs within another one's forward, which records nothing.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


def reentrant(f, x):
    return checkpoint(f, x, use_reentrant=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class CallsWithin(nn.Module):
    """Calls one layer directly (d) and through checkpoints (c), within one block."""

    def __init__(self, ways):
        super().__init__()
        self.layer, self.out, self.ways = nn.Linear(4, 4), nn.Linear(4, 4), ways

    def forward(self, x):
        for way in self.ways:
            x = torch.tanh(reentrant(self.layer, x) if way == "c" else self.layer(x))
        return self.out(x)


def each(call):
    def forward(blocks, x):
        for block in blocks:
            x = call(block, x)
        return x

    return forward


def first_all_then_all(one, other):
    return lambda blocks, x: each(other)(blocks, each(one)(blocks, x))


def direct(b, x):
    return b(x)


def around_two(blocks, x):
    x = reentrant(lambda t: blocks[2](blocks[1](blocks[0](t))), x)
    return blocks[1](x)


def tied(blocks, x):
    return blocks[2](blocks[1](reentrant(blocks[0], x)))


def tied_other_way(blocks, x):
    return blocks[2](reentrant(blocks[1], blocks[0](x)))


def part_alone(blocks, x):
    x = reentrant(blocks[1], blocks[0](x))
    return x + blocks[1].up(x).sum(1, keepdim=True) * 0.1


CALLS = {
    "direct": each(direct),
    "checkpoint, direct": each(lambda b, x: b(reentrant(b, x))),
    "direct, checkpoint": each(lambda b, x: reentrant(b, b(x))),
    "checkpoint, checkpoint": each(lambda b, x: reentrant(b, reentrant(b, x))),
    "direct, checkpoint, direct": each(lambda b, x: b(reentrant(b, b(x)))),
    "checkpoints, then direct": first_all_then_all(reentrant, direct),
    "direct, then checkpoints": first_all_then_all(direct, reentrant),
    "nested": each(lambda b, x: reentrant(lambda t: b(reentrant(b, t)), x)),
    "nested, direct": each(lambda b, x: b(reentrant(lambda t: reentrant(b, b(t)), x))),
    "twice in one": each(lambda b, x: reentrant(lambda t: b(b(t)), x)),
    "twice in one, direct": each(lambda b, x: b(reentrant(lambda t: b(b(t)), x))),
    "around several": around_two,
    "tied": tied,
    "tied, the other way": tied_other_way,
    "a part of a block": part_alone,
    "within: c": each(direct),
    "within: dc": each(direct),
    "within: cc": each(direct),
}
REFUSED = {"within: cd": each(direct), "within: ccd": each(direct)}


class Model(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        ways = calls.removeprefix("within: ")
        make = Block if ways == calls else lambda: CallsWithin(ways)
        self.blocks = nn.ModuleList(make() for _ in range(3))
        if calls.startswith("tied"):
            self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x):
        return self.head({**CALLS, **REFUSED}[self.calls](self.blocks, self.first(x)))


def whole(t):
    if t is None:
        return None
    return (t.full_tensor() if isinstance(t, pt.DTensor) else t).detach().clone()


class Hooks:
    """Hooks of one kind on a model's parameters, and the gradients that they have got."""

    def __init__(self, kind, model):
        self.kind, self.seen, self.handles = kind, defaultdict(list), []
        self.within = False
        self.names = {p: name for name, p in model.named_parameters()}
        self.optimizers = {p: torch.optim.AdamW([p], lr=0.05, eps=1e-3) for p in self.names}
        self.nodes = {p: p.view_as(p).grad_fn.next_functions[0][0] for p in self.names}

    def set(self, model, x):
        params = [p for p in self.names if p.requires_grad]
        for p in params[::2] if self.kind == "step on some" else params:
            if self.kind == "node":
                handle = self.nodes[p].register_hook(lambda *_, p=p: self.step(p))
            elif self.kind == "write":
                handle = p.register_hook(lambda grad, p=p: self.write(p, grad))
            elif self.kind == "other pass":
                handle = p.register_post_accumulate_grad_hook(lambda p: self.run_pass(p, model, x))
            else:
                handle = p.register_post_accumulate_grad_hook(self.step)
            self.handles.append(handle)

    def step(self, p):
        self.seen[self.names[p]].append(whole(p.grad))
        if self.kind == "clip and step":
            pt.clip_grad_norm_([p], 0.05)
        if self.kind == "halve":
            p.grad.mul_(0.5)
        else:
            self.optimizers[p].step()
            self.optimizers[p].zero_grad()

    def write(self, p, grad):
        self.seen[self.names[p]].append(whole(grad))
        with torch.no_grad():
            p.data.mul_(0.9)

    def run_pass(self, p, model, x):
        if self.names[p] == "head.bias" and not self.within:
            self.within = True
            with torch.enable_grad():
                model(x.detach().requires_grad_()).square().mean().backward()
            self.within = False

    def remove(self):
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


KINDS = "step, clip and step, step on some, halve, write, other pass, node".split(", ")


def train(calls, kind, spread, shard, late=False):
    """Two steps. Returns the values after each, and the gradients that each hook has got."""
    torch.manual_seed(0)
    model = shard(Model(calls).double())
    hooks, values = Hooks(kind, model), []
    batches = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for batch in batches:
        x = spread(batch).requires_grad_()
        if not late:
            hooks.set(model, x)
        loss = model(x).square().mean()
        if late:
            hooks.set(model, x)
        loss.backward()
        hooks.remove()
        values += [whole(loss), *map(whole, model.parameters())]
        values += [whole(p.grad) for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
    return values, dict(hooks.seen)


def train_in_one_process(calls, kind):
    """As `train`; None where torch refuses what the hooks write."""
    try:
        return train(calls, kind, lambda t: t, lambda m: m)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return None


def assert_hooks_run_as_in_one_process(calls, kind, stages, ranks, **options):
    wanted = train_in_one_process(calls, kind)
    for stage in stages:

        def program(mesh, stage=stage):
            return train(
                calls,
                kind,
                lambda t: pt.distribute_tensor(t, mesh, [pt.Shard(0)]),
                lambda model: pt.zero(model, mesh, stage=stage, **options),
            )

        with pt.ranks(dp=ranks) as world:
            if wanted is None:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    world.run(program)
            else:
                for found in world.run(program):
                    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("kind", ["step", "halve", "write"])
def test_hooks_run_as_in_one_process(calls, kind):
    assert_hooks_run_as_in_one_process(calls, kind, [3], 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_all_kinds_run_as_in_one_process(kind):
    """Runs each program in stage 3 on 2 ranks, in a stage of 0 to 2 on 3 ranks, and persistent."""
    for number, calls in enumerate(CALLS, KINDS.index(kind)):
        assert_hooks_run_as_in_one_process(calls, kind, [3], 2)
        assert_hooks_run_as_in_one_process(calls, kind, [number % 3], 3)
        assert_hooks_run_as_in_one_process(calls, kind, [3], 3 - number % 2, persistent=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["other pass", "node"])
def test_a_hook_may_run_a_pass_and_may_be_one_of_a_node(kind):
    for calls in ("direct", "checkpoint, direct", "around several", "within: cc"):
        assert_hooks_run_as_in_one_process(calls, kind, [3], 2)


@pytest.mark.parametrize("calls", REFUSED)
def test_a_layer_of_a_block_called_in_both_ways_is_refused_before_anything_changes(calls):
    def program(mesh):
        torch.manual_seed(0)
        model = pt.zero(Model(calls).double(), mesh)
        before = [whole(p) for p in model.blocks[2].layer.parameters()]
        hooks = Hooks("step", model)
        x = pt.distribute_tensor(torch.ones(6, 4).double(), mesh, [pt.Shard(0)])
        hooks.set(model, x)
        with pytest.raises(pt.LayoutError, match=r"a hook of (weight|bias) of a Linear in the"):
            model(x.requires_grad_()).square().mean().backward()
        torch.testing.assert_close([whole(p) for p in model.blocks[2].layer.parameters()], before)

    with pt.ranks(dp=2) as world:
        world.run(program)
    # The fix that the error gives.
    blocks = ["first", "head", "blocks.*.layer", "blocks.*.out"]
    assert_hooks_run_as_in_one_process(calls, "step", [3], 2, blocks=blocks)


@pytest.mark.slow
def test_a_hook_that_is_set_after_the_forward_is_refused_where_its_order_is_not_known():
    def program(calls):
        def body(mesh):
            return train(
                calls,
                "step",
                lambda t: pt.distribute_tensor(t, mesh, [pt.Shard(0)]),
                lambda model: pt.zero(model, mesh),
                late=True,
            )

        with pt.ranks(dp=2) as world:
            return world.run(body)[0]

    for calls in ("direct", "checkpoint, checkpoint", "twice in one"):
        torch.testing.assert_close(program(calls), train_in_one_process(calls, "step"))
    for calls in ("checkpoint, direct", "a part of a block"):
        with pytest.raises(pt.LayoutError, match="before the forward"):
            program(calls)


def test_blocks_are_gathered_again_in_the_order_of_the_pass_around(monkeypatch):
    """The ranks' sets differ in their order: collectives must not follow it."""

    class Call:
        def __init__(self, name, gathered):
            self.name, self.gathered = name, gathered

        def gather_again(self):
            self.gathered.append(self.name)

    def body(mesh):
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
        zero = pt.zero(model, mesh, blocks=list(model)).__dict__["_zero"]
        gathered, expected = [], []

        def enter_nested_pass(_):
            for group in reversed(zero.groups):
                zero.release_after_backward(group)
                expected.append((group.name, 0))
                for call in range(10):
                    group.calls_in_backward.update({Call((group.name, call), gathered): None})
            nested.backward()

        inner = torch.ones(1, requires_grad=True)
        inner.register_hook(lambda _: zero.current_pass() and None)
        nested = inner.sum()
        x = torch.ones(1, requires_grad=True)
        x.register_hook(enter_nested_pass)
        x.sum().backward()
        return gathered, expected

    monkeypatch.setattr(FsdpGroup, "is_current", False)  # hooks have written all
    with pt.ranks(dp=2) as world:
        for gathered, expected in world.run(body):
            assert gathered == expected
