"""Is a compiled part of an eager model that part, to its caller, to autograd and to its parameters?

Ground truth is the same program without `pt.compile`, and one device.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from dataclasses import make_dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.parallel import flat_buffer
from tests.programs.region_models import (
    BATCH,
    COLUMNS,
    ROWS,
    WHOLE,
    Block,
    Layer,
    close,
    gpt_like,
    one_device,
    train,
)
from tests.programs.steps import squares


def compiled(fn):
    return pt.compile(fn, backend="graph")


def made(kind, *args):
    torch.manual_seed(0)
    return kind(*args)


def both(use, kind=Block):
    """What `use(module)` gives, of a module and of a compiled one."""
    found = []
    for wrap in (lambda m: m, compiled):
        module = wrap(made(kind))
        torch.manual_seed(3)
        found.append(use(module))
    return found


def state_of(module):
    return [*[p.grad for p in module.parameters()], *module.buffers()]


# -- one process -----------------------------------------------------------------------------------


def test_gradients_flow_through_a_region_to_its_parameters_and_inputs():
    def use(block):
        x = torch.randn(5, 8, requires_grad=True)
        y = block(block(x.sin()).cos(), scale=0.5)  # twice in one forward
        y.square().sum().backward()
        return [x.grad, y.detach(), *state_of(block)]

    plain, ours = both(use)
    for found, wanted in zip(ours, plain, strict=True):
        close(found, wanted)


def test_modes_are_those_of_the_caller():
    def use(block):
        x = torch.randn(5, 8)
        found = [block(x).detach()]
        with torch.no_grad():
            found.append(block(x))
            assert not found[-1].requires_grad
        block.eval()
        found.append(block(x).detach())
        with torch.inference_mode():
            found.append(block(x))
        with torch.autocast("cpu", torch.bfloat16):
            y = block(x)
        assert y.requires_grad
        y.float().sum().backward()
        return [*[f.clone() for f in found], y.detach(), *state_of(block)]

    plain, ours = both(use)
    for found, wanted in zip(ours, plain, strict=True):
        close(found, wanted)


def test_gradients_that_are_there_already_need_no_capture_of_their_own():
    block = compiled(made(Layer))
    for rows in (4, 4, 4, 6):
        block(torch.randn(rows, 8)).sum().backward()
    assert len(block.forward.reasons) == 2


def test_a_module_stays_what_it_was_to_all_but_its_caller():
    plain = made(Layer)
    block = compiled(copy.deepcopy(plain))
    assert isinstance(block, Layer)
    assert list(block.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in block.named_modules()] == [n for n, _ in plain.named_modules()]
    model = nn.Sequential(block, nn.Linear(8, 8))
    heard = []
    block.register_forward_hook(lambda m, args, out: heard.append("after"))
    block.register_forward_pre_hook(lambda m, args: heard.append("before"))
    block.register_full_backward_hook(lambda m, a, b: heard.append("back"))
    x = torch.randn(3, 8, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    assert heard == ["before", "after", "back"] * 2
    assert compiled(block) is block and not hasattr(block.forward.step, "program")


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_compiled_module_compiles_for_itself(how):
    block = compiled(made(Layer))
    x = torch.randn(3, 8)
    y = block(x)
    if how == "deepcopy":
        other = copy.deepcopy(block)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(block))
    else:
        held = io.BytesIO()
        torch.save(block, held)
        held.seek(0)
        other = torch.load(held, weights_only=False)
    with torch.no_grad():
        other.up.weight.zero_()
    close(block(x), y)
    assert not torch.equal(other(x), y)
    assert other.forward is not block.forward


def several(x, w, *, flip=False, names=("a", "b")):
    y = torch.tanh(x @ w)
    z = -y if flip else y
    return {names[0]: y, names[1]: [z.exp(), (y > 0).int(), x, y]}, len(names), None


def test_a_function_may_give_several_results_of_any_kind_and_take_keywords():
    region = compiled(several)
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(5, 4, requires_grad=True) * 1
    for flip in (False, True, False):
        grads = []
        for fn in (several, region):
            out, count, nothing = fn(x, w, flip=flip)
            z, sign, same, again = out["b"]
            assert (count, nothing) == (2, None)
            assert same is x and again is out["a"] and not sign.requires_grad
            loss = (out["a"] * z.detach() * sign).sum() + same.sum()
            grads.append(torch.autograd.grad(loss, [x, w]))
        for found, wanted in zip(grads[1], grads[0], strict=True):
            close(found, wanted)
    assert len(region.reasons) == 2


def test_gradients_of_some_results_only_and_of_none():
    w = torch.randn(4, 4, requires_grad=True)
    unused = torch.randn(4, requires_grad=True)

    def two(x, unused):
        return torch.tanh(x @ w), (x * 2).exp()

    region = compiled(two)
    x = torch.randn(5, 4, requires_grad=True)
    for which in (0, 1):
        wanted = torch.autograd.grad(two(x, unused)[which].sum(), [x, w], allow_unused=True)
        found = torch.autograd.grad(region(x, unused)[which].sum(), [x, w], allow_unused=True)
        close(found[0], wanted[0])
        assert (found[1] is None) == (wanted[1] is None)
        if wanted[1] is not None:
            close(found[1], wanted[1])
    both_of = region(x, unused)
    assert torch.autograd.grad(both_of[0].sum(), unused, allow_unused=True) == (None,)


def test_backward_twice_is_an_error_unless_the_graph_is_retained():
    region = compiled(made(Layer))
    x = torch.randn(3, 8, requires_grad=True)
    y = region(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def test_a_gradient_of_a_gradient_is_refused():
    region = compiled(made(Layer))
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(region(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_what_was_saved_and_then_written_is_an_error_as_in_eager():
    region = compiled(torch.tanh)
    x = torch.randn(3, 8, requires_grad=True)
    y = region(x)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    h = x * 1
    y = compiled(lambda h: h * h)(h)
    h.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_of_any_strides_are_taken():
    region = compiled(lambda x: (x * x).T)
    x = torch.randn(3, 4, requires_grad=True)
    for loss in (lambda y: y.sum(), lambda y: (y.T @ torch.ones(4, 2)).sum(), torch.Tensor.mean):
        (found,) = torch.autograd.grad(loss(region(x)), x)
        (wanted,) = torch.autograd.grad(loss((x * x).T), x)
        close(found, wanted)
    (found,) = torch.autograd.grad(region((x * 1).T).sum(), x)  # and arguments
    close(found, 2 * x.detach())


def test_a_gradient_penalty_within_a_region_is_differentiated():
    def penalized(x, w):
        y = torch.tanh(x @ w).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    wanted = torch.autograd.grad(penalized(x, w), [x, w])
    for found, want in zip(
        torch.autograd.grad(compiled(penalized)(x, w), [x, w]), wanted, strict=True
    ):
        close(found, want)


def test_a_backward_that_would_leave_the_region_through_its_inputs_is_an_error():
    w = torch.randn(4, 4, requires_grad=True)

    def step(x):
        torch.tanh(x @ w).sum().backward()

    h = torch.randn(3, 4, requires_grad=True) * 2
    with pytest.raises(pt.CaptureError, match=r"argument.* was computed from other tensors"):
        compiled(step)(h)


def test_forward_saves_what_backward_reads_and_nothing_else():
    region = compiled(made(Layer))
    x = torch.randn(3, 8, requires_grad=True)
    ours, plain = [], []
    for held, module in ((ours, region), (plain, made(Layer))):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, h=held: h.append(t) or t, lambda t: t
        ):
            module(x).sum().backward()
    parameters = {p.data_ptr() for p in region.parameters()}

    def own(held, not_ours):
        held = {t.data_ptr(): t.untyped_storage().nbytes() for t in held}
        return sum(n for at, n in held.items() if at not in not_ours)

    assert own(ours, parameters) <= own(plain, {p.data_ptr() for p in plain if p.ndim == 9})


@pytest.mark.slow
def test_a_region_holds_nothing_of_a_call_that_is_over():
    region = compiled(made(Layer))
    x = torch.randn(3, 8, requires_grad=True)
    h = x * 2
    y = region(h)
    gone = weakref.ref(h), weakref.ref(y)
    del h, y
    gc.collect()
    assert [r() for r in gone] == [None, None]


def test_a_region_within_a_captured_step_is_part_of_its_graph():
    def train(wrap_block, wrap_step):
        model = nn.Sequential(wrap_block(made(Layer)), made(nn.Linear, 8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        step = wrap_step(squares(model, optimizer))
        torch.manual_seed(1)
        return [step(torch.randn(3, 8)).item() for _ in range(3)], model[0]

    wanted, _ = train(lambda m: m, lambda s: s)
    found, block = train(compiled, compiled)
    close(torch.tensor(found), torch.tensor(wanted))
    assert block.forward.reasons == []


class Keeps(nn.Module):
    """A loss of its own, in an attribute; and a list of all, where asked."""

    def __init__(self):
        super().__init__()
        self.layer, self.own, self.all = nn.Linear(4, 4), None, []

    def forward(self, x, listed=False):
        y = torch.tanh(self.layer(x))
        self.own = y.square().mean()
        if listed:
            self.all.append(y)
        return y


def test_what_a_module_keeps_in_an_attribute_is_there_with_its_history():
    grads = []
    for wrap in (lambda m: m, compiled):
        module = wrap(made(Keeps))
        for rows in (3, 5, 3):
            y = module(torch.ones(rows, 4))
            (y.sum() + module.own).backward()
        grads.append([p.grad for p in module.parameters()])
    for found, wanted in zip(*grads, strict=True):
        close(found, wanted)


def test_what_would_be_there_once_only_is_an_error_and_leaves_nothing():
    module = compiled(made(Keeps))
    with pytest.raises(pt.CaptureError, match=r"leaves a tensor in keeps\.all"):
        module(torch.ones(3, 4), listed=True)
    assert module.all == [] and module.own is None
    with pytest.raises(pt.CaptureError, match="returns a set that holds tensors"):
        compiled(lambda x: {x * 2})(torch.ones(3))


def test_an_object_that_holds_a_result_is_made_anew_by_each_call():
    Result = make_dataclass("Result", ["y"])
    double = compiled(lambda x: Result(x * 2))
    first, second = double(torch.ones(3)), double(torch.ones(3) * 2)
    assert type(first) is type(second) is Result
    assert first.y.tolist() == [2.0] * 3 and second.y.tolist() == [4.0] * 3


def test_an_object_that_holds_an_argument_holds_that_of_the_call():
    Result = make_dataclass("Result", ["y"])
    wrap = compiled(lambda x: Result(x))
    for x in (torch.ones(3), torch.zeros(3)):
        assert wrap(x).y is x


def test_an_object_that_was_there_before_is_returned_as_itself():
    class Counter:
        def __init__(self):
            self.total = torch.zeros(2)

        def add(self, x):
            self.total.add_(x)
            return self

    counter = Counter()
    add = compiled(counter.add)
    assert add(torch.ones(2)) is counter and add(torch.ones(2)) is counter
    assert counter.total.tolist() == [2.0, 2.0]


def test_an_object_that_cannot_be_made_anew_holds_no_tensor_of_a_step():
    class Holder:
        pass

    def step(x):
        holder = Holder()
        holder.y, holder.f = x, print
        return holder

    with pytest.raises(pt.CaptureError, match="returns a Holder that holds tensors"):
        compiled(step)(torch.ones(2))


def test_writing_an_argument_in_place_is_done_or_an_error_where_it_has_a_history():
    x = torch.ones(3)
    assert compiled(lambda x: x.mul_(2))(x) is x
    assert torch.equal(x, torch.full((3,), 2.0))
    h = torch.ones(3, requires_grad=True) * 1
    with pytest.raises(pt.CaptureError, match="writes in place into a tensor with a history"):
        compiled(lambda x: x.mul_(2))(h)


class Decorated(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    @compiled
    def forward(self, x):
        return self.factor * x


def test_a_method_compiles_for_each_instance():
    one, two = Decorated(2.0), Decorated(3.0)
    for _ in range(2):
        assert one(torch.ones(())).item() == 2
        assert two(torch.ones(())).item() == 3
    assert [len(m.forward.reasons) for m in (one, two)] == [1, 1]


def test_modules_may_be_arguments():
    call = compiled(lambda module, x: module(x))
    modules = [nn.Linear(2, 2) for _ in range(2)]
    x = torch.ones(1, 2)
    for module in modules * 3:
        close(call(module, x), module(x))
    assert len(call.reasons) == 2


def test_torchs_own_checkpoint_recomputes_a_region():
    plain = made(Layer)
    block = compiled(copy.deepcopy(plain))
    for module in (plain, block):
        x = torch.ones(3, 8, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(module, x * 2, use_reentrant=False)
        y.square().sum().backward()
    for found, wanted in zip(block.parameters(), plain.parameters(), strict=True):
        close(found.grad, wanted.grad)


# -- ranks -----------------------------------------------------------------------------------------


def run_layer(mesh, wrap, placements, spread_out=None):
    layer = made(Layer)
    layer = pt.parallelize(layer, mesh) if spread_out is None else spread_out(layer)
    layer = wrap(layer)
    torch.manual_seed(2)
    x = pt.distribute_tensor(torch.randn(6, 8), mesh, placements).requires_grad_()
    with pt.ledger() as log:
        y = layer(layer(x.sin()).cos())
        loss = y.square().sum()
        loss.backward()
    grads = [x.grad, *[p.grad for p in layer.parameters()]]
    return [loss, y, *grads], log, layer


def one_layer():
    layer = made(Layer)
    torch.manual_seed(2)
    x = torch.randn(6, 8).requires_grad_()
    y = layer(layer(x.sin()).cos())
    loss = y.square().sum()
    loss.backward()
    return [loss, y, x.grad, *[p.grad for p in layer.parameters()]]


def split_up(mesh):
    def spread_out(layer):
        for p, placements in ((layer.up, [pt.Shard(0)]), (layer.down, [pt.Shard(1)])):
            p.weight = nn.Parameter(pt.distribute_tensor(p.weight.detach(), mesh, placements))
        return pt.parallelize(layer, mesh)

    return spread_out


@pytest.mark.slow
@pytest.mark.parametrize("placements", [ROWS, WHOLE, COLUMNS], ids=["rows", "whole", "columns"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_have_the_layouts_of_eager_and_the_values_of_one_device(placements, ranks):
    def rank(mesh):
        found, _, layer = run_layer(mesh, compiled, placements)
        eager, _, _ = run_layer(mesh, lambda m: m, placements)
        assert [f.placements for f in found] == [e.placements for e in eager]
        assert len(layer.forward.reasons) == 1
        return [f.full_tensor().detach() for f in found], layer.forward.key

    with pt.ranks(dp=ranks) as world:
        per_rank = world.run(rank)
    assert len({key for _, key in per_rank}) == 1
    for found, _ in per_rank:
        for one, wanted in zip(found, one_layer(), strict=True):
            close(one, wanted.detach())


@pytest.mark.slow
def test_a_region_under_tensor_parallelism():
    def rank(mesh):
        found, _, _ = run_layer(mesh, compiled, [pt.Replicate()], split_up(mesh))
        return [f.full_tensor().detach() for f in found]

    with pt.ranks(tp=2) as world:
        for found in world.run(rank):
            for one, wanted in zip(found, one_layer(), strict=True):
                close(one, wanted.detach())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["blocks", "the model"])
def test_a_model_under_zero_trains_with_compiled_parts_as_without(stage, what):
    def rank(mesh):
        model = gpt_like()
        model = pt.zero(model, mesh, stage=stage) if stage else pt.parallelize(model, mesh)
        if what == "the model":
            compiled(model)
        else:
            for block in model:
                compiled(block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = pt.distribute_tensor(BATCH, mesh, ROWS)
        return train(model, optimizer, x), str(model[0].up.weight.placements)

    with pt.ranks(dp=2) as world:
        for losses, _ in world.run(rank):
            close(torch.tensor(losses), torch.tensor(one_device()))


def start_of(t):
    """Where this rank's piece begins in memory."""
    return (t.to_local() if isinstance(t, pt.DTensor) else t).untyped_storage().data_ptr()


@pytest.mark.slow
def test_no_gathered_parameter_waits_for_backward():
    def rank(mesh):
        model = compiled(pt.zero(gpt_like(), mesh, stage=3))
        x = pt.distribute_tensor(BATCH, mesh, ROWS)
        shards = {start_of(p) for p in model.parameters()}
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            y = model(x)
        y.sum().backward()
        own = [t for t in held if start_of(t) not in shards]
        shapes = {tuple(t.to_local().shape if isinstance(t, pt.DTensor) else t.shape) for t in own}
        assert shapes <= {(4, 8), (4, 1), (4, 32)}  # activations: of this rank's rows
        gathered = [n for n in model.forward.graph.moves if "gather" in n.name]
        assert len(gathered) > 3, model.forward.graph

    with pt.ranks(dp=2) as world:
        world.run(rank)


def sends(log):
    return sorted((m.kind, m.axes, m.nbytes) for m in log.moves if m.nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tp", "zero"])
def test_compiled_blocks_send_what_eager_ones_do_and_when(how):
    def rank(mesh):
        told = []
        for wrap in (lambda m: m, compiled):
            torch.manual_seed(0)
            if how == "tp":
                model = nn.Sequential(*[split_up(mesh)(made(Layer)) for _ in range(2)])
            else:
                model = pt.zero(gpt_like(2), mesh, stage=3)
            for block in model:
                wrap(block)
            x = pt.distribute_tensor(BATCH, mesh, WHOLE if how == "tp" else ROWS)
            for _ in range(2):
                with pt.ledger() as forward:
                    loss = model(x).square().sum()
                with pt.ledger() as backward:
                    loss.backward()
            told.append((sends(forward), sends(backward)))
        assert told[0] == told[1] and told[0][0] and told[0][1]

    with pt.ranks(**{"tp" if how == "tp" else "dp": 2}) as world:
        world.run(rank)


def test_ranks_that_compile_other_regions_are_told_so():
    def rank(mesh):
        factor = 2 if mesh.get_rank() else 3
        region = compiled(lambda x: x * factor)
        with pytest.raises(pt.LayoutError, match="captured different programs"):
            region(pt.distribute_tensor(BATCH, mesh, ROWS).requires_grad_())

    with pt.ranks(dp=2) as world:
        world.run(rank)


def test_a_region_takes_plain_tensors_beside_dtensors_and_shards_over_two_axes():
    def program(x, w, mask):
        return torch.tanh((x * mask) @ w).sum(0), (x > 0).int()

    w, mask = torch.randn(8, 8), (torch.arange(8) % 2).float()
    leaves = [t.clone().requires_grad_() for t in (BATCH, w)]
    wanted, sign = program(*leaves, mask)
    wanted.square().sum().backward()

    def rank(mesh):
        region = compiled(program)
        x = pt.distribute_tensor(BATCH, mesh, [pt.Shard(0), pt.Replicate()]).requires_grad_()
        v = pt.distribute_tensor(w, mesh, [pt.Replicate(), pt.Shard(1)]).requires_grad_()
        out, ints = region(x, v, mask)
        out.square().sum().backward()
        assert not ints.requires_grad
        return [t.full_tensor().detach() for t in (out, ints, x.grad, v.grad)]

    with pt.ranks(dp=2, tp=2) as world:
        for found in world.run(rank):
            for one, other in zip(
                found, (wanted.detach(), sign, *(t.grad for t in leaves)), strict=True
            ):
                close(one, other)


def test_a_region_holds_no_gathered_weight_from_one_step_to_the_next(monkeypatch):
    searched = []
    views_of = flat_buffer.find_views_of_memory
    monkeypatch.setattr(
        flat_buffer, "find_views_of_memory", lambda *args: searched.append(1) or views_of(*args)
    )

    def body(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)))
        pt.zero(model, mesh, stage=3)
        for block in model:
            compiled(block)
        for _ in range(3):
            x = pt.distribute_tensor(torch.randn(4, 4), mesh, [pt.Shard(0)])
            model(x).square().sum().backward()

    with pt.ranks(dp=2) as world:
        world.run(body)
    assert not searched  # what holds one has to be looked for among all objects


def test_a_result_that_is_a_view_within_may_be_written_by_who_gets_it():
    def run(compiled):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        if compiled:
            pt.compile(layer, backend="graph")
        x = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
        y = F.relu(layer(x), inplace=True)
        y.square().sum().backward()
        return y, x.grad, layer.weight.grad

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


def test_backward_of_a_region_under_autocast_computes_as_it_was_captured():
    def run(compiled):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        if compiled:
            pt.compile(layer, backend="graph")
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        loss = layer(x).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return x.grad.dtype, layer.weight.grad.dtype

    assert run(True) == run(False)


def chain(x, w):
    """Results of which each is made of others, and one that is not."""
    h = w * x
    a, b = h.chunk(2)
    y = a * b + h[:2]
    return y.square(), h, (a, b), y, x.sin()


WATCHES = {
    "nothing": lambda results: [],
    "retain_grad": lambda results: [r.retain_grad() for r in results],
    "hook": lambda results: [r.register_hook(lambda g: g / 2) for r in results],
}


def differentiated(run, watch, x, w):
    y2, h, (a, b), y, sine = run(x, w)
    results = (y2, h, a, b, y, sine)
    WATCHES[watch](results)
    loss = sum((i + 1) * r.square().sum() for i, r in enumerate(results))
    of_results = torch.autograd.grad(loss, results, retain_graph=True)
    loss.backward()
    watched = [r.grad for r in results] if watch == "retain_grad" else []
    return [*of_results, x.grad, w.grad, *watched]


@pytest.mark.slow
@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("backend", ["graph", "inductor"])
def test_the_gradient_of_a_result_has_what_comes_by_way_of_others_made_of_it(watch, backend):
    found = []
    for run in (chain, pt.compile(chain, backend=backend)):
        leaves = (torch.arange(4.0) / 4, torch.linspace(-1, 1, 4))
        found.append(differentiated(run, watch, *(t.clone().requires_grad_() for t in leaves)))
    assert len(found[0]) == (14 if watch == "retain_grad" else 8)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("rows", [4, 5])
def test_gradients_of_split_results_go_through_what_is_made_of_them(rows):
    x = torch.linspace(-2, 2, rows * 3).view(rows, 3)
    w = torch.linspace(1, 2, 3)

    def run(x, w):
        h = x * w
        return (h.cumsum(0) * h).sum(1), h, h.mean()

    def grads(run, x, w):
        y, h, mean = run(x, w)
        return torch.autograd.grad(y.square().sum() + h.sum() + mean.exp(), (h, x, w, mean))

    def body(mesh):
        split = pt.distribute_tensor(x, mesh, [pt.Shard(0)]).requires_grad_()
        weight = pt.distribute_tensor(w, mesh, [pt.Replicate()]).requires_grad_()
        found = [grads(f, split, weight) for f in (run, pt.compile(run, backend="graph"))]
        assert [t.placements for t in found[0]] == [t.placements for t in found[1]]
        return [[t.full_tensor() for t in ts] for ts in found]

    expected = [*grads(run, x.clone().requires_grad_(), w.clone().requires_grad_())]
    with pt.ranks(dp=2) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, [expected, expected])


def test_results_without_a_common_history_go_backward_one_at_a_time():
    w = torch.ones(3, requires_grad=True)
    region = pt.compile(lambda x, y: (x.square(), w * y * y), backend="graph")
    x, y = (torch.arange(3.0, requires_grad=True) for _ in range(2))
    a, b = region(x, y)
    a.sum().backward()
    assert (y.grad, w.grad) == (None, None)
    b.sum().backward()
    torch.testing.assert_close([x.grad, y.grad], [2 * x.detach()] * 2)
    torch.testing.assert_close(w.grad, y.detach().square())


def clamped(x, w):
    """A result and what is made of it, both of a value whose gradient is clamped."""
    h = x * w
    h.register_hook(lambda g: g.clamp(-1, 1))
    a = h * 3
    return a + h, a


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["graph", "inductor"])
def test_what_two_results_come_of_has_its_gradient_at_once(backend):
    found = []
    for run in (clamped, pt.compile(clamped, backend=backend)):
        x, w = (torch.full((3,), 2.0, requires_grad=True) for _ in range(2))
        both, a = run(x, w)
        (both.sum() + a.sum()).backward()
        found.append([x.grad, w.grad])
    assert found[0][0].tolist() == [2.0] * 3
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    "watch", [lambda a: a.retain_grad(), lambda a: a.register_hook(lambda g: g)]
)
def test_a_gradient_that_does_not_come_to_where_one_looks_is_refused(watch):
    x, w = (torch.full((3,), 2.0, requires_grad=True) for _ in range(2))
    both, a = pt.compile(clamped, backend="graph")(x, w)
    watch(a)
    with pytest.raises(pt.LayoutError, match="from which another result of the region is computed"):
        (both.sum() + a.sum()).backward()


def test_what_residual_blocks_share_is_gone_through_once_in_backward():
    def run(x, w):
        inner = []
        for _ in range(depth):
            a = (x @ w).softmax(-1)
            x = x + a * (x @ w)
            inner.append(a)
        return x, *inner

    products = {}
    for depth in (2, 8):
        region = pt.compile(run, backend="graph")
        x, w = (torch.eye(4).requires_grad_() for _ in range(2))
        sum(r.sum() for r in region(x, w)).backward()
        nodes = [n for b in region.program.halves.backwards.values() for n in b.graph.graph.nodes]
        products[depth] = sum("mm" in str(n.target) for n in nodes)
    assert products[8] <= 4 * products[2]


def test_two_results_of_one_block_are_told_apart_in_a_region():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            h = self.linear(x)
            return h.relu(), h

    torch.manual_seed(0)
    model = nn.ModuleList(Pair() for _ in range(6))

    def run(x):
        results = []
        for block in model:
            x, h = block(x)
            results.append(h)
        return x, *results

    found = []
    for f in (run, pt.compile(run, backend="graph", blocks=True)):
        results = f(torch.linspace(-1, 1, 8).view(2, 4))
        loss = sum(r.square().sum() for r in results)
        found.append(torch.autograd.grad(loss, [*results, *model.parameters()]))
    torch.testing.assert_close(*found)


def test_a_hook_within_a_region_hears_of_all_that_comes():
    w = torch.ones(3, requires_grad=True)

    def made(x):
        h = w * x
        h.register_hook(lambda g: g / 2)
        return h.square(), h

    found = []
    for run in (made, pt.compile(made, backend="graph")):
        y, h = run(torch.arange(3.0))
        (y.sum() + h.sum()).backward()
        found.append(w.grad)
        w.grad = None
    torch.testing.assert_close(*found)


def _write_a_view_of_new(x):
    t = torch.zeros_like(x.detach())
    t[:2].copy_(x[:2])
    return t * 2


def _write_a_view_without_gradient(x):
    t = x.detach() * 1
    t.narrow(0, 1, 3).mul_(x[1:4])
    t[4:] = x[4:]
    return t * 2


def _gradient_of_region(function, compiled, mesh=None):
    x = torch.arange(15.0, dtype=torch.float64).view(5, 3)
    x = x if mesh is None else pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    x.requires_grad_()
    (pt.compile(function, backend="graph") if compiled else function)(x).square().sum().backward()
    return x.grad if mesh is None else x.grad.full_tensor()


@pytest.mark.slow
@pytest.mark.parametrize("function", [_write_a_view_of_new, _write_a_view_without_gradient])
def test_a_region_writes_a_view_of_a_tensor_without_gradient(function):
    wanted = _gradient_of_region(function, False)
    with pt.ranks(dp=2) as world:
        for found in world.run(lambda mesh: _gradient_of_region(function, True, mesh)):
            torch.testing.assert_close(found, wanted)
