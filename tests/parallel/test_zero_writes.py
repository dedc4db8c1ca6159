"""Does a ZeRO model compute with what was last written into its parameters?"""

from __future__ import annotations

import ctypes

import numpy
import pytest
import torch
from torch import nn

import partita as pt
from tests.programs.zero_stages import STAGES, X, Y, gradients_of, loss_of, mlp, whole

WEIGHT_WRITTEN = "modified by an inplace operation"


def run(program, stage, make, ranks=3, error=None, **options):
    """Run `program(model, spread)` in one process and under ZeRO; both give the same, or there is
    one error on all ranks."""
    truth = program(make(), lambda t: t)

    def body(mesh):
        model = pt.zero(make(), mesh, stage=stage, **options)
        try:
            return program(model, lambda t: pt.distribute_tensor(t, mesh, [pt.Shard(0)]))
        except RuntimeError as raised:
            return str(raised)

    with pt.ranks(dp=ranks) as world:
        for found in world.run(body):
            if error is not None:
                assert error in found
            else:
                torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


def train(model, spread, steps=(X, Y, X)):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x in steps:
        optimizer.zero_grad()
        loss = model(spread(x))
        loss.backward()
        optimizer.step()
        losses.append(whole(loss))
    return losses, [whole(p) for p in model.parameters()]


# -- through `.data`, to what is gathered ahead ----------------------------------------------------


def average(a, b):
    a.data.mul_(0.5).add_(b.data, alpha=0.5)


def set_data(a, b):
    a.data = b.data * 0.9


def write_a_view(a, b):
    a.data[:1].mul_(0.9)


def write_a_list(a, b):
    torch._foreach_mul_([a.data], 0.9)


def write_what_was_kept(a, b):
    if not hasattr(a, "kept"):
        a.kept = a.data
    a.kept.mul_(0.9)


def write_as_autograd_counts(a, b):
    a.lerp_(b, 0.5)


WRITES = (
    average,
    set_data,
    write_a_view,
    write_a_list,
    write_what_was_kept,
    write_as_autograd_counts,
)


class Distilled(nn.Module):
    """A block whose forward is followed by that of another, which is written in between."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.teacher = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.write = write

    def forward(self, x):
        y = self.first(x)
        with torch.no_grad():
            for a, b in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                self.write(a, b)
        return (y - self.teacher(x)).square().mean()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_the_block_that_is_next_is_read_by_its_forward(write, stage):
    run(train, stage, lambda: Distilled(write))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_hook_writes_a_later_block_from_a_vector(persistent):
    def program(model, spread):
        def write(*_):
            vector = nn.utils.parameters_to_vector(model[2].parameters())
            nn.utils.vector_to_parameters(vector * 0.9, model[2].parameters())

        model[1].register_forward_hook(write)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for x in (X, Y, X):
            optimizer.zero_grad()
            loss = loss_of(model, spread(x))
            loss.backward()
            optimizer.step()
            losses.append(whole(loss))
        return losses

    run(program, 3, lambda: mlp(4), persistent=persistent)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("persistent", [False, True])
def test_averages_that_are_swapped_in_through_data_are_what_is_evaluated(persistent, stage):
    def program(model, spread):
        found = []
        averages = [p.detach() * 0.5 for p in model.parameters()]
        for x in (X, Y):
            old = [p.data.clone() for p in model.parameters()]
            for a, p in zip(averages, model.parameters(), strict=True):
                p.data.copy_(a)
            with torch.no_grad():
                found.append(whole(loss_of(model, spread(x))))
            for b, p in zip(old, model.parameters(), strict=True):
                p.data.copy_(b)
            loss = loss_of(model, spread(x))
            for a, p in zip(averages, model.parameters(), strict=True):
                p.data.copy_(a)  # backward reads it, as autograd does not count it
            loss.backward()
            for b, p in zip(old, model.parameters(), strict=True):
                p.data = b
            found += [whole(loss_of(model, spread(x))), *gradients_of(model)]
        return found

    options = {"persistent": persistent} if stage == 3 else {}
    run(program, stage, mlp, **options)


class ByAddress(torch.optim.Optimizer):
    """SGD as a kernel of another library: it writes by address, and counts no versions."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch._C.DisableTorchFunctionSubclass():
            for p in params:
                if p.numel():
                    numbers = ctypes.POINTER(ctypes.c_double)
                    held = numpy.ctypeslib.as_array(
                        ctypes.cast(p.data_ptr(), numbers), (p.numel(),)
                    )
                    held -= 0.1 * p.grad.detach().reshape(-1).numpy()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_whose_kernels_count_no_versions_trains(persistent, stage):
    def program(model, spread):
        optimizer, losses = ByAddress(model.parameters()), []
        for x in (X, Y, X):
            optimizer.zero_grad()
            loss = loss_of(model, spread(x))
            loss.backward()
            optimizer.step()
            losses.append(whole(loss))
        return losses

    run(program, stage, mlp, **({"persistent": persistent} if stage == 3 else {}))


class Decaying(ByAddress):
    """It writes all parameters by address, also those without a gradient."""

    def step(self):
        with torch._C.DisableTorchFunctionSubclass():
            for p in self.param_groups[0]["params"]:
                held = p.detach().numpy()
                held *= 0.9


@pytest.mark.parametrize("persistent", [False, True])
def test_an_optimizer_that_writes_frozen_parameters_by_address_trains(persistent):
    def program(model, spread):
        next(iter(model.children())).requires_grad_(False)
        optimizer, losses = Decaying(model.parameters()), []
        for x in (X, Y, X):
            loss = loss_of(model, spread(x))
            loss.backward()
            optimizer.step()
            losses.append(whole(loss))
        return losses

    run(program, 3, mlp, persistent=persistent)


class ByOps(ByAddress):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-0.1)


class Skipping(ByAddress):
    """It leaves out all steps, as others leave out those whose gradients are not finite."""

    def step(self):
        pass


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("make", [ByAddress, ByOps, Skipping])
def test_a_step_of_ones_own_counts_the_writes_that_torch_counts(make, stage):
    def program(model, spread):
        optimizer, found = make(model.parameters()), []
        for x in (X, Y):
            optimizer.zero_grad()
            loss_of(model, spread(x)).backward()
            before = [p._version for p in model.parameters()]
            optimizer.step()
            found += [p._version - v for p, v in zip(model.parameters(), before, strict=True)]
        return [torch.tensor(found)]

    run(program, stage, mlp)


@pytest.mark.parametrize(("stage", "persistent"), [(0, False), (1, False), (3, False), (3, True)])
@pytest.mark.parametrize("make", [ByAddress, Skipping])
def test_an_older_graph_is_differentiated_after_a_step_that_counts_no_writes(
    make, stage, persistent
):
    def program(model, spread):
        optimizer = make(model.parameters())
        loss, older = (loss_of(model, spread(x)) for x in (X, Y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        older.backward()
        return [*gradients_of(model), whole(loss_of(model, spread(X)))]

    run(program, stage, mlp, **({"persistent": persistent} if stage == 3 else {}))


def test_a_data_that_is_read_keeps_no_block_from_being_gathered_ahead():
    def body(mesh, read):
        model = pt.zero(mlp(3), mesh)
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        for _ in range(2):
            loss_of(model, x).backward()
            if read:
                [p.data.norm() for p in model.parameters()]
        with pt.ledger() as log:
            loss_of(model, x).backward()
        return [(r.kind, r.op, r.reason) for r in log.moves]

    with pt.ranks(dp=2) as world:
        assert world.run(lambda mesh: body(mesh, True)) == world.run(lambda mesh: body(mesh, False))


# -- what autograd saved ---------------------------------------------------------------------------


class Casting(nn.Module):
    def __init__(self, when):
        super().__init__()
        torch.manual_seed(0)
        self.when, self.weight = when, nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        w = self.weight
        if self.when == "clone":
            w = w.clone()
        cast = w.double()
        if self.when == "before":
            with torch.no_grad():
                self.weight.mul_(0.5)
        out = x @ cast
        with torch.no_grad():
            if self.when in ("after", "clone"):
                self.weight.mul_(0.5)
            if self.when == "data":
                self.weight.data.mul_(0.5)
            if self.when == "rows":  # those of one rank only
                self.weight[:1].mul_(0.5)
        return out


def casts(when):
    return lambda: nn.ModuleList([Casting(when), Casting(when)])


def backward_through_casts(model, spread):
    loss = model[1](model[0](spread(X))).square().mean()
    loss.backward()
    return whole(loss), gradients_of(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("when", ["never", "before", "clone"])
def test_backward_uses_the_cast_that_the_forward_made(when, stage):
    truth_of_float32 = {"rtol": 1e-5, "atol": 1e-6}

    def body(mesh):
        model = pt.zero(casts(when)(), mesh, stage=stage)
        return backward_through_casts(model, lambda t: pt.distribute_tensor(t, mesh, [pt.Shard(0)]))

    truth = backward_through_casts(casts(when)(), lambda t: t)
    with pt.ranks(dp=3) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, truth, **truth_of_float32)


def doubled(w, alias):
    cast = w.double()
    with torch.no_grad():
        alias(cast).mul_(2)
    return cast


CASTS = {
    "written": lambda w: doubled(w, lambda t: t),
    "a view is written": lambda w: doubled(w, torch.detach),
    "data is written": lambda w: doubled(w, lambda t: t.data),
    "channels_last": lambda w: w.to(torch.float64, memory_format=torch.channels_last),
    "permuted": lambda w: w.to(torch.float64, memory_format=torch.channels_last).transpose(0, 1),
    "transposed": lambda w: w.double().transpose(0, 1),
}


class OtherCast(nn.Module):
    """A convolution by a cast of its weight that is not a plain one."""

    def __init__(self, cast):
        super().__init__()
        torch.manual_seed(0)
        self.cast, self.weight = cast, nn.Parameter(torch.randn(2, 2, 3, 3))

    def forward(self, x):
        return nn.functional.conv2d(x, CASTS[self.cast](self.weight), padding=1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cast", CASTS)
def test_backward_uses_a_cast_that_was_written_or_lies_in_another_order(cast, stage):
    images = torch.randn(2, 2, 4, 4, dtype=torch.float64)

    def program(model, spread):
        x = spread(images).requires_grad_()
        model[1](model[0](x)).square().mean().backward()
        return whole(x.grad), [whole(p.grad.double()) for p in model.parameters()]

    def make():
        return nn.Sequential(OtherCast(cast), OtherCast(cast))

    truth = program(make(), lambda t: t)

    def body(mesh):
        model = pt.zero(make(), mesh, stage=stage)
        return program(model, lambda t: pt.distribute_tensor(t, mesh, [pt.Shard(0)]))

    with pt.ranks(dp=2) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-7)


class ImaginaryParts(nn.Module):
    """Reads views of complex weights as real numbers, whose offsets count other elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(4, dtype=torch.complex128) for _ in range(3))

    def forward(self, x):
        for w in self.weights:
            x = x * torch.view_as_real(w)[..., 1]
        return x


@pytest.mark.parametrize("written", range(3))
def test_a_complex_weight_that_is_written_before_backward_is_an_error(written):
    def program(model, spread):
        loss = loss_of(model, spread(X.clone()).requires_grad_())
        with torch.no_grad():
            model[0].weights[written].mul_(2)
        with pytest.raises(RuntimeError, match=WEIGHT_WRITTEN):
            loss.backward()

    for stage in STAGES:
        run(program, stage, lambda: nn.Sequential(ImaginaryParts()))


@pytest.mark.parametrize("when", ["after", "data", "rows"])
def test_a_weight_that_is_written_after_its_cast_is_an_error_on_all_ranks_in_backward(when):
    run(backward_through_casts, 3, casts(when), error="no rank keeps that cast")


@pytest.mark.parametrize("write", ["data", "set", "restored"])
def test_a_weight_that_is_written_between_cast_and_backward_is_an_error_on_all_ranks(write):
    def program(model, spread):
        loss = model[1](model[0](spread(X))).square().mean()
        for p in model.parameters():
            old = p.data.clone()
            if write == "set":
                p.data = p.data * 0.5
            else:
                p.data.mul_(0.5)
            if write == "restored":
                p.data.copy_(old)
        loss.backward()
        return gradients_of(model)

    run(program, 3, casts("never"), error="no rank keeps that cast")


def test_a_weight_that_is_given_other_memory_before_backward_is_an_error_on_all_ranks():
    def program(model, spread):
        loss = loss_of(model, spread(X))
        for p in model.parameters():
            p.data = p.data * 0.5
        loss.backward()
        return gradients_of(model)

    for stage in (0, 1, 2):
        run(program, stage, mlp)
    run(program, 3, mlp, error="given other memory")


class WritingRows(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        out = self.linear(x)
        with torch.no_grad():
            self.linear.weight[:1].mul_(0.5)
        return out


def test_a_forward_that_writes_the_rows_of_one_rank_is_an_error_on_all_ranks_in_backward():
    def program(model, spread):
        loss = model[1](model[0](spread(X)).requires_grad_()).square().mean()
        loss.backward()
        return None

    def make():
        return nn.ModuleList([WritingRows(), WritingRows()])

    with pytest.raises(RuntimeError, match=WEIGHT_WRITTEN):
        program(make(), lambda t: t)

    def body(mesh):
        with pytest.raises(RuntimeError, match=WEIGHT_WRITTEN):
            program(pt.zero(make(), mesh), lambda t: pt.distribute_tensor(t, mesh, [pt.Shard(0)]))

    with pt.ranks(dp=2) as world:
        world.run(body)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("set_", [False, True])
def test_a_frozen_parameter_that_is_given_other_data_keeps_its_layout(stage, set_):
    def program(model, spread):
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        vector = nn.utils.parameters_to_vector(model[0].parameters()).detach() * 0.5
        if set_:
            with torch.no_grad():
                at = 0
                for p in model[0].parameters():
                    p.set_(vector[at : (at := at + p.numel())].view_as(p))
        else:
            nn.utils.vector_to_parameters(vector, model[0].parameters())
        for is_trained in (False, True):
            model[0].requires_grad_(is_trained)
            loss_of(model, spread(X)).backward()
            optimizer.step()
        return [whole(p) for p in model.parameters()]

    def make():
        model = mlp()
        model[0].scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        return model

    run(program, stage, make)


# -- in a captured step ----------------------------------------------------------------------------


def scale_data(p):
    p.data.mul_(0.5)


def scale_a_list(p):
    torch._foreach_mul_([p.data], 0.5)


def copy_data(p):
    p.data.copy_(p.data * 0.5)


def replace_data(p):
    p.data = p.data * 0.5


def write_all(model, x, write):
    loss = loss_of(model, x)
    for p in model.parameters():
        write(p)
    return loss


def write_after_a_call_of_a_part(model, x, write):
    loss = model[1](model[1](x)).square().mean()
    write(model[1][0].weight)
    return loss


def write_after_each_call(model, x, write):
    for _ in range(3):
        x = torch.tanh(model[1](x))
        write(model[1][0].weight)
    return x.square().mean()


def write_in_backward(model, x, write):
    y = model(x)
    y.register_hook(lambda g: write(model[1][0].weight))
    return y.square().mean()


def write_and_restore(model, x, write):
    loss = loss_of(model, x)
    old = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        write(p)
    loss = loss + loss_of(model, x)
    for p, before in zip(model.parameters(), old, strict=True):
        p.data.copy_(before)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "write", "persistent"),
    [
        (write_all, scale_data, False),
        (write_all, copy_data, True),
        (write_after_a_call_of_a_part, scale_a_list, False),
        (write_after_each_call, scale_data, True),
        (write_in_backward, scale_data, False),
        (write_and_restore, copy_data, False),
    ],
)
def test_a_captured_backward_reads_what_was_written_since_its_forward(forward, write, persistent):
    def program(model, spread):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss = forward(model, x, write)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = pt.compile(step, backend="graph") if type(spread(X)) is pt.DTensor else step
        losses = [whole(step(spread(x))) for x in (X, Y, X)]
        return losses, [whole(p) for p in model.parameters()]

    run(program, 3, mlp, ranks=2, persistent=persistent)


@pytest.mark.slow
def test_a_captured_step_refuses_other_memory_of_a_weight_before_backward_as_eager_does():
    def program(model, spread):
        def step(x):
            write_after_a_call_of_a_part(model, x, replace_data).backward()

        (pt.compile(step, backend="graph") if type(spread(X)) is pt.DTensor else step)(spread(X))
        return gradients_of(model)

    with pytest.raises(pt.CaptureError, match="other memory between its forward and its backward"):
        run(program, 3, mlp, ranks=2)


class StepsOnAnOldLoss(torch.optim.Optimizer):
    """Writes the parameters through `.data`, and then runs backward of a loss made before."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, loss):
        params = self.param_groups[0]["params"]
        for p in params:
            p.data.mul_(0.5)
        loss.backward()
        for p in params:
            p.data.add_(p.grad, alpha=-0.1)


def step_by_a_closure(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        loss = loss_of(model, x)

        def closure():
            optimizer.zero_grad()
            for p in model.parameters():
                p.data.mul_(0.5)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step


def step_on_an_old_loss(model):
    optimizer = StepsOnAnOldLoss(model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        optimizer.step(loss)
        return loss.detach()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("make_step", [step_by_a_closure, step_on_an_old_loss])
def test_a_captured_backward_within_an_update_reads_what_was_written(make_step):
    def program(model, spread):
        step = make_step(model)
        step = pt.compile(step, backend="graph") if type(spread(X)) is pt.DTensor else step
        losses = [whole(step(spread(x))) for x in (X, Y, X)]
        return losses, [whole(p) for p in model.parameters()]

    run(program, 3, mlp, ranks=2)


class Halving(nn.Module):
    """A layer that gives its weight other memory in each forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6))

    def forward(self, x):
        y = torch.tanh(x @ self.weight[: x.shape[-1], : x.shape[-1]])
        self.weight.data = self.weight.detach() * 0.5
        return y


@pytest.mark.parametrize("persistent", [False, True])
def test_a_captured_block_keeps_the_data_that_its_forward_sets(persistent):
    def program(model, spread):
        step = torch.no_grad()(lambda x: loss_of(model, x))
        step = pt.compile(step, backend="graph") if type(spread(X)) is pt.DTensor else step
        return [whole(step(spread(X))) for _ in range(3)], [whole(p) for p in model.parameters()]

    run(program, 3, lambda: nn.Sequential(Halving(), Halving()), ranks=2, persistent=persistent)


@pytest.mark.slow
def test_a_captured_average_that_is_written_after_backward_gathers_nothing():
    def body(mesh, averages):
        model, other = pt.zero(mlp(), mesh), pt.zero(mlp(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss = (model(x) - other(x)).square().mean()
            loss.backward()
            optimizer.step()
            for a, p in zip(other.parameters(), model.parameters(), strict=True):
                if averages:
                    a.data.mul_(0.5).add_(p.data, alpha=0.5)
            return loss

        captured = pt.compile(step, backend="graph")
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        captured(x)
        with pt.ledger() as log:
            captured(x)
        return [(r.kind, r.op) for r in log.moves]

    with pt.ranks(dp=2) as world:
        assert world.run(lambda mesh: body(mesh, True)) == world.run(lambda mesh: body(mesh, False))
