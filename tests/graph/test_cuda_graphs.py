"""Is a step whose kernels are recorded the step that it was?

There is no GPU here. What a recording is to a step is played on the processor: every operator that
the step's device part calls is noted with its tensors, and a replay calls those operators again,
over the same memory, with the numbers that they had. Values of no dimension stand for the host's.
"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import partita as pt
from partita.comm.backends import backend_of
from partita.comm.device import Device, KernelRecording
from partita.graph.backend import cuda_graphs
from partita.graph.errors import CaptureError
from partita.layout import LayoutError


class PlayedRecording(TorchDispatchMode):
    """The operators of one call; what they wrote is as it was before."""

    made = 0

    def __init__(self, call):
        super().__init__()
        self.calls, self._new, self._before = [], {}, {}
        drawn = torch.get_rng_state()
        with self:
            self.value = call()
        torch.set_rng_state(drawn)
        for x, before in self._before.values():
            x.copy_(before)
        PlayedRecording.made += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and id(x) not in self._new:
                self._before.setdefault(id(x), (x, x.clone()))
        found = func(*args, **kwargs)
        self._new |= {id(x): x for x in tree_leaves(found) if isinstance(x, torch.Tensor)}
        self.calls.append((func, args, kwargs, found))
        return found

    def replay(self):
        for func, args, kwargs, found in self.calls:
            # Memory is taken once, and holds anything when a recording begins.
            again = func(*args, **kwargs)
            tree_map(lambda to, x: to.copy_(x) if to is not x else to, found, again)


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """Has the processor record kernels."""
    monkeypatch.setattr(Device, "records_kernels", True)
    monkeypatch.setattr(Device, "make_recording_pool", lambda self: None)
    monkeypatch.setattr(Device, "record", lambda self, call, device, pool: PlayedRecording(call))
    monkeypatch.setattr(cuda_graphs, "is_of_host", lambda x: x.ndim == 0)
    monkeypatch.setattr(PlayedRecording, "made", 0)


def recorded(step, **options):
    return pt.compile(step, backend="graph", cuda_graphs=True, **options)


def model_of(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout)
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 4))


def training(model, **options):
    """A step whose loss has two dimensions, and its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)

    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean((0, 1), keepdim=True)
        loss.backward(torch.ones(1, 1))
        optimizer.step()
        return loss

    return step, optimizer


def batches(count):
    torch.manual_seed(1)
    return [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(count)]


def train(is_recorded, steps=6, dropout=0.0):
    model = model_of(dropout=dropout)
    step, optimizer = training(model)
    fast = pt.compile(step, backend="graph", cuda_graphs=is_recorded)
    found = []
    for i, batch in enumerate(batches(steps)):
        optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
        found.append(fast(*batch))
    return [loss.item() for loss in found], [p.detach().clone() for p in model.parameters()], fast


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_recorded_step_trains_as_it_did_with_other_batches_rates_and_draws(dropout):
    losses, parameters, _ = train(False, dropout=dropout)
    found, values, fast = train(True, dropout=dropout)
    torch.testing.assert_close(found, losses)  # of all calls: none is written over by the next
    torch.testing.assert_close(values, parameters)
    assert fast.is_recorded and PlayedRecording.made == 1 and len(fast.reasons) == 1


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(map(self.make_block, range(6)))

    def make_block(self, _):
        layers = torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)
        return torch.nn.Sequential(*layers)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    "options", [{"blocks": True}, {"sections": True}, {"blocks": True, "sections": True}], ids=str
)
def test_a_recorded_step_of_alike_blocks_trains_as_eager_does(options, remat):
    found = []
    for is_recorded in (False, True):
        model = Blocks()
        if remat and is_recorded:
            pt.remat(model, blocks=list(model.blocks))
        step, _ = training(model)
        fast = recorded(step, **options) if is_recorded else step
        losses = [fast(*batch).item() for batch in batches(4)]
        found.append((losses, [p.detach().clone() for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0])
    assert fast.is_recorded and PlayedRecording.made == 1
    assert bool(fast.program.blocks.folded) == ("sections" in options)


def test_a_step_is_recorded_in_its_second_call_and_runs_no_python_from_the_third_on():
    step, _ = training(model_of())
    fast = recorded(step)
    first, *others = batches(4)
    fast(*first)
    assert not fast.is_recorded
    call, ran = fast.program.call, []
    run_kernels = call.device_call
    call.device_call = lambda *given: (ran.append(1), run_kernels(*given))[1]
    for batch in others:
        fast(*batch)
        assert fast.is_recorded
    assert len(ran) == 1  # the recording


@pytest.mark.slow
def test_another_shape_is_another_recording():
    step, _ = training(model_of())
    fast = recorded(step)
    for rows in (3, 5, 3, 5, 3, 5):
        fast(torch.randn(rows, 4), torch.randn(rows, 4))
    assert len(fast.programs) == 2 and PlayedRecording.made == 2


def test_state_that_moves_is_recorded_anew_and_then_copied():
    plain, moved = model_of(), model_of()
    fast, reference = recorded(training(moved)[0]), training(plain)[0]
    for i, batch in enumerate(batches(8)):
        if i in (3, 5, 7):  # the weights lie elsewhere, as after load_state_dict(assign=True)
            for p in moved.parameters():
                p.data = p.data.clone()
        torch.testing.assert_close(fast(*batch), reference(*batch))
    torch.testing.assert_close([*moved.parameters()], [*plain.parameters()])
    assert PlayedRecording.made == 3  # in the second call, and at the first two moves


@pytest.mark.slow
def test_a_recording_keeps_no_state_alive():
    import gc
    import weakref

    model = model_of()
    fast = recorded(training(model)[0])
    for batch in batches(3):
        fast(*batch)
    old = weakref.ref(model[0].weight.data.untyped_storage())
    for p in model.parameters():
        p.data = p.data.clone()
    fast(*batches(1)[0])
    gc.collect()
    assert old() is None


# -- results ---------------------------------------------------------------------------------------


def test_results_share_memory_with_each_other_and_with_arguments_as_in_eager():
    w = torch.ones(10)[4:].view(2, 3)  # a piece of a buffer

    def step(x):
        made = x * 2
        return made, made[0], x[:, 1:], x, w.t(), made

    fast = recorded(step)
    for _ in range(3):
        x = torch.randn(3, 4)[1:, 1:]  # which begins within its memory
        whole, first, rest, same, state, again = fast(x)
        torch.testing.assert_close(whole, x * 2)
        first.fill_(5)
        assert whole[0].tolist() == [5, 5, 5] and again is whole
        rest.fill_(7)
        assert x[:, 1:].eq(7).all() and same is x
        assert state.data_ptr() == w.data_ptr()
    assert fast.is_recorded


def test_a_result_of_an_earlier_call_stays():
    fast = recorded(lambda x: (x + 1, (x + 2).t()))
    kept = [fast(torch.full((2, 3), float(i))) for i in range(5)]
    for i, (one, two) in enumerate(kept):
        assert one.eq(i + 1).all() and two.eq(i + 2).all() and two.stride() == (1, 3)
    addresses = {t.data_ptr() for pair in kept for t in pair}
    assert len(addresses) == 10


def test_an_argument_that_is_written_holds_what_the_step_wrote():
    def step(x, y):
        x.mul_(y)
        return x.sum((0, 1), keepdim=True)

    fast = recorded(step)
    for i in range(4):
        x = torch.full((2, 2), float(i))
        fast(x, torch.full((2, 2), 3.0))
        assert x.eq(3 * i).all()
    assert fast.is_recorded


def test_a_gradient_that_stays_is_each_calls_own():
    w = torch.nn.Parameter(torch.ones(2, 2))

    def step(x):
        w.grad = None
        (w * x).backward(torch.ones(2, 2))

    fast = recorded(step)
    kept = []
    for i in range(4):
        fast(torch.full((2, 2), float(i)))
        kept.append(w.grad)
    assert [g[0, 0].item() for g in kept] == [0, 1, 2, 3]


# -- numbers ---------------------------------------------------------------------------------------


def test_a_number_is_not_rounded_to_half_precision_before_it_is_used():
    w = torch.randn(64, 2).bfloat16()

    def step(rate):
        return w * rate, w > rate

    fast = recorded(step)
    for rate in (0.5, 1.001e-3, 2.003e-3):
        expected = (w.float() * rate).bfloat16()
        product, is_more = fast(rate)
        assert product.equal(expected) and is_more.equal(w.float() > rate)
    assert not (w * torch.tensor(2.003e-3).bfloat16()).equal(expected)
    assert fast.is_recorded and len(fast.reasons) == 1
    # On a GPU a number in memory is rounded to the dtype of what it meets; here it is not.
    nodes = fast.program.call.split.device.graph.graph.nodes
    crossing = [n for n in nodes if n.op == "placeholder" and n.meta["val"].ndim == 0]
    meets = [r.meta["val"].dtype for n in crossing for u in n.users for r in u.all_input_nodes]
    assert meets and torch.bfloat16 not in meets


def test_what_the_host_computes_is_not_in_the_recording():
    step, _ = training(model_of())
    fast = recorded(step)
    for batch in batches(3):
        fast(*batch)
    split = fast.program.call.split
    of_host = [n for n in split.host.graph.nodes if n.op == "call_function"]
    assert any("pow" in str(n.target) for n in of_host)  # bias corrections
    of_device = split.device.graph.graph.nodes
    crossing = [n for n in of_device if n.op == "placeholder" and n.meta["val"].ndim == 0]
    assert len(crossing) == split.crossing > 0
    values = [n.meta["val"] for n in of_device if n.op == "call_function"]
    assert all(value.ndim > 0 for value in values)


@pytest.mark.slow
def test_kernels_that_inductor_makes_take_what_crosses_from_memory():
    losses, parameters, _ = train(False, steps=1)
    model = model_of()
    step, optimizer = training(model)
    fast = pt.compile(step, backend="inductor", cuda_graphs=True)
    found = fast(*batches(1)[0])  # of later calls the processor cannot play the kernels
    torch.testing.assert_close(found.item(), losses[0])
    torch.testing.assert_close([*model.parameters()], parameters)
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}
    assert fast.artifact.key.startswith(fast.program.call.split.device.key)
    assert fast.memory.peak > 0


# -- what is not recorded --------------------------------------------------------------------------


def run_with_warning(fast, text, *args):
    with pytest.warns(UserWarning, match=text):
        first = fast(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it says so once
        second = fast(*args)
    assert not fast.is_recorded
    return first, second


def test_a_step_on_the_processor_is_not_recorded(monkeypatch):
    monkeypatch.undo()
    fast = recorded(lambda x: x + 1)
    for found in run_with_warning(fast, "its tensors are on cpu", torch.ones(2)):
        assert found.tolist() == [2, 2]


def test_a_step_whose_host_reads_what_the_device_computed_is_not_recorded():
    fast = recorded(lambda x: x * x.sum())
    x = torch.ones(2, 2)
    run_with_warning(fast, "sum.default brings a value of the device to the host, from .*py", x)


def by_default(step, **options):
    return pt.compile(step, backend="graph", **options)


def test_by_default_a_step_is_recorded_where_kernels_can_be():
    step, _ = training(model_of())
    fast = by_default(step)
    for batch in batches(3):
        fast(*batch)
    assert fast.is_recorded and fast.why_not_recorded == ""
    never = by_default(step, cuda_graphs=False)
    never(*batches(1)[0])
    assert never.why_not_recorded == "cuda_graphs=False" and never.memory.recorded == 0


def test_by_default_a_step_on_the_processor_is_not_recorded(monkeypatch):
    monkeypatch.undo()
    fast = by_default(lambda x: x + 1)
    for _ in range(2):
        fast(torch.ones(2))
    assert fast.why_not_recorded == "its tensors are on cpu" and not fast.is_recorded


def test_by_default_the_reason_why_a_step_is_not_recorded_is_no_warning():
    fast = by_default(lambda x: x * x.sum())
    fast(torch.ones(2, 2)), fast(torch.ones(2, 2))
    assert not fast.is_recorded
    assert fast.why_not_recorded.startswith("aten.sum.default brings a value of the device")


def test_the_memory_of_a_recorded_step_says_what_stays_between_calls():
    fast = recorded(lambda x, rate: (x * rate + 1).tanh())
    for _ in range(2):
        fast(torch.ones(4, 8), 0.5)
    memory = fast.memory
    copies = 4 * 8 * 4  # of `x`; the rate is a number of 8 bytes at most
    assert 0 < memory.recorded - memory.peak - copies <= 8
    assert "a CUDA graph keeps" in str(memory)


def test_a_region_is_not_recorded():
    model = model_of()
    region = pt.compile(model, backend="graph", cuda_graphs=True)
    with pytest.warns(UserWarning, match="it is a region"):
        region(torch.ones(3, 4)).sum().backward()
    assert region.forward.why_not_recorded.startswith("it is a region")
    assert region.forward.memory.recorded == 0
    assert model[0].weight.grad is not None and not region.forward.is_recorded


def test_what_torch_does_not_record_is_not_recorded(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "UNSAFE_TAGS", frozenset((torch.Tag.reduction,)))
    fast = recorded(lambda x: x.sum(0, keepdim=True))
    run_with_warning(fast, "torch does not record aten.sum.dim_IntList, from", torch.ones(2, 2))


def test_ranks_that_meet_on_the_host_are_not_recorded():
    def body(mesh):
        x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)])
        fast = recorded(lambda x: x.sum(0, keepdim=True).redistribute(placements=[pt.Replicate()]))
        return fast(x).full_tensor().tolist(), fast.is_recorded

    with (
        pytest.warns(UserWarning, match="ranks meet on the host, in .*all_reduce"),
        pt.ranks(dp=2) as world,
    ):
        for found, is_recorded in world.run(body):
            assert found == [[4.0] * 4] and not is_recorded


@pytest.mark.parametrize(
    ("serving", "device", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cpu:gloo,cuda:gloo", "cuda", False),  # it copies to the host
    ],
)
def test_collectives_are_recorded_where_they_are_kernels(serving, device, expected, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: serving)
    assert backend_of(device).runs_in_streams == expected


def test_a_step_that_cannot_be_recorded_is_an_error_and_has_changed_nothing(monkeypatch):
    def refuse(self, call, device, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Device, "record", refuse)
    model = model_of()
    step, optimizer = training(model)
    fast = recorded(step)
    batch = batches(1)[0]
    fast(*batch)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CaptureError, match=r"cannot be recorded(.|\n)*cuda_graphs=False"):
        fast(*batch)
    torch.testing.assert_close([*model.parameters()], before)
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}
    assert issubclass(CaptureError, LayoutError)


def test_by_default_a_step_that_cuda_refuses_to_record_runs_without(monkeypatch):
    def refuse(self, call, device, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Device, "record", refuse)
    fast, reference = by_default(training(model_of())[0]), training(model_of())[0]
    first, second, third = batches(3)
    torch.testing.assert_close(fast(*first), reference(*first))
    with pytest.warns(UserWarning, match="without CUDA graphs: .*is capturing"):
        found = fast(*second)
    torch.testing.assert_close(found, reference(*second))
    torch.testing.assert_close(fast(*third), reference(*third))
    assert not fast.is_recorded and "is capturing" in fast.why_not_recorded
    assert fast.memory.recorded == 0


def test_ranks_have_one_key_whether_they_record_or_not():
    step = torch.nn.Linear(2, 2).requires_grad_(False).forward
    keys = {
        pt.compile(step, backend="graph", cuda_graphs=how).capture(torch.ones(2, 2)).key
        for how in (None, False, True)
    }
    assert len(keys) == 1


def test_after_a_recording_that_failed_the_generator_draws(monkeypatch):
    """CUDA is played: torch's generator leaves its mode when a recording has succeeded."""
    recording = []

    class Record:
        def __init__(self, graph, **options): ...

        def __enter__(self):
            recording[:] = [True]

        def __exit__(self, kind, error, trace):
            if kind is None:
                recording.clear()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Record)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    with pytest.raises(ZeroDivisionError):
        KernelRecording(lambda: 1 / 0, torch.device("cpu"), None)
    assert not recording


def test_a_pinned_tensor_of_the_caller_is_copied_before_the_call_returns(monkeypatch):
    """The caller may write it then, and a copy from pinned memory is made later."""
    copy_, later = torch.Tensor.copy_, []

    def note_copy(to, x, non_blocking=False):
        if x.ndim == 0:  # for the played device it is of the host
            later.append(non_blocking)
        return copy_(to, x, non_blocking)

    fast = recorded(lambda x, scale, rate: x * scale * rate)
    fast(torch.ones(2, 2), torch.tensor(1.0), 0.5), fast(torch.ones(2, 2), torch.tensor(2.0), 0.5)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "copy_", note_copy)
    assert fast(torch.ones(2, 2), torch.tensor(3.0), 0.5).eq(1.5).all()
    assert fast.is_recorded and later == [False, True]  # the rate is a new tensor in each call
