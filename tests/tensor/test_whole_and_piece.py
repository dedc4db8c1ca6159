"""Nothing that reads a tensor's memory takes this rank's piece for the whole."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch.overrides import TorchFunctionMode

import partita as pt

old = pytest.mark.filterwarnings("ignore:.*torch.jit")
WHOLE = torch.arange(48.0).view(6, 8)


def on_ranks(body, **axes):
    with pt.ranks(**(axes or {"a": 2})) as world:
        return world.run(body)


LAYOUTS = {
    "rows": [pt.Shard(0)],
    "columns": [pt.Shard(1)],
    "pending": [pt.Partial()],
}
READERS = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage": lambda x: x.storage(),
    "storage_offset": lambda x: x.storage_offset(),
    "is_set_to": lambda x: torch.zeros(6, 8).is_set_to(x),
    "__cuda_array_interface__": lambda x: x.__cuda_array_interface__,
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "torch.Tensor": lambda x: torch.Tensor(x),
    "torch.FloatTensor": lambda x: torch.FloatTensor(x),
    "torch.DoubleTensor": lambda x: torch.DoubleTensor(x.double()),
    "new": lambda x: torch.zeros(2).new(x),
    "safetensors": lambda x: save({"x": x}),
    "torch.jit.trace": lambda x: torch.jit.trace(torch.sin, (x,)),
    "nn.Parameter": lambda x: torch.Tensor(torch.nn.Parameter(x)),
}


@old
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reader", READERS)
def test_who_asks_for_the_memory_of_a_piece_is_refused_on_all_ranks(reader, layout):
    def body(mesh):
        x = pt.distribute_tensor(WHOLE, mesh, LAYOUTS[layout])
        with pytest.raises(pt.LayoutError) as caught:
            READERS[reader](x)
        return str(caught.value)

    for error in on_ranks(body):
        assert "x.full_tensor()" in error


def test_the_memory_of_a_whole_value_and_of_a_local_tensor_may_be_read():
    def body(mesh):
        x = pt.distribute_tensor(WHOLE, mesh)
        assert x.data_ptr() == x.to_local().data_ptr() != 0
        assert torch.equal(torch.Tensor(x), WHOLE)
        assert x.untyped_storage().nbytes() == WHOLE.nbytes
        piece = pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)])
        with torch._C.DisableTorchFunctionSubclass():
            address = piece.data_ptr()
        assert piece.to_local().data_ptr() == address

    on_ranks(body)


def test_a_piece_that_is_the_whole_on_one_rank_is_refused_there_too():
    def body(mesh):
        x = pt.distribute_tensor(WHOLE[:1], mesh, [pt.Shard(0)])
        with pytest.raises(pt.LayoutError):
            x.data_ptr()

    on_ranks(body)


def test_what_reads_values_reads_all_of_them():
    def body(mesh):
        x = pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)])
        assert np.array_equal(np.asarray(x), WHOLE.numpy()) and x.tolist() == WHOLE.tolist()
        assert type(x.data) is pt.DTensor and torch.equal(x.data.full_tensor(), WHOLE)

    on_ranks(body)


OLD_CONSTRUCTORS = {
    "of a whole value": lambda x: torch.FloatTensor(
        x.sum().redistribute(placements=[pt.Replicate()])
    ),
    "of a size": lambda x: torch.FloatTensor(x.sum().long(), 2),
    "of a list": lambda x: torch.FloatTensor([x[5, 0], 2]),
    "new, of a list": lambda x: torch.zeros(1).new([x[5, 0], 2]),
}


@pytest.mark.parametrize("call", OLD_CONSTRUCTORS)
def test_old_constructors_refuse_dtensors_wherever_they_are(call):
    def body(mesh):
        x = pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)])
        with pytest.raises(pt.LayoutError, match=r"cannot take a DTensor(?s:.*)x\.full_tensor\(\)"):
            OLD_CONSTRUCTORS[call](x)

    on_ranks(body)


def test_plain_tensors_are_made_of_the_values_of_dtensors():
    def body(mesh):
        x = pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)])
        assert (
            torch.FloatTensor([1, 2]).tolist() == [1, 2] and torch.zeros(1).new(2, 3).numel() == 6
        )
        assert torch.equal(torch.zeros(1).new_tensor(x), WHOLE)
        assert torch.zeros(1).new_tensor([x[5, 0], 2]).tolist() == [40, 2]

    on_ranks(body)


def test_old_types_are_used_as_ever_by_programs_without_dtensors():
    x = torch.ones(2)
    assert isinstance(x, torch.FloatTensor) and not isinstance(x, torch.LongTensor)
    assert x.type(torch.DoubleTensor).dtype == torch.float64
    assert torch.FloatTensor(x).data_ptr() == x.data_ptr()
    assert pickle.loads(pickle.dumps(torch.FloatTensor)) is torch.FloatTensor
    convert = torch.compile(lambda x: x.type(torch.DoubleTensor), backend="eager", fullgraph=True)
    assert convert(x).dtype == torch.float64
    assert torch.FloatTensor.__name__ == "FloatTensor" and torch.FloatTensor.dtype == torch.float32
    with torch.device("meta"):
        assert torch.arange(3).is_meta and torch.full((2,), 1.0).is_meta


# -- numbers ---------------------------------------------------------------------------------------

NUMBERS = {  # of x, a float that is the sum 1128 and an integer that is 4
    "topk": lambda x, s, n: x.topk(n).values,
    "narrow": lambda x, s, n: x.narrow(0, 0, n),
    "slice": lambda x, s, n: x[:n],
    "slice of a dimension": lambda x, s, n: x[1:, n:],
    "view": lambda x, s, n: x.view(n, -1),
    "reshape": lambda x, s, n: x.reshape((n, -1)),
    "expand": lambda x, s, n: x[None].expand(n, 6, 8),
    "split": lambda x, s, n: x.split(n)[1],
    "roll": lambda x, s, n: x.roll(n, 1),
    "softmax": lambda x, s, n: x.softmax(dim=n - 4),
    "pad": lambda x, s, n: F.pad(x, (n, 0), value=s),
    "alpha": lambda x, s, n: torch.add(x, x, alpha=s),
    "new_zeros": lambda x, s, n: x.new_zeros(n, 2),
    "new_full": lambda x, s, n: x.new_full((n,), s),
    "one_hot": lambda x, s, n: F.one_hot(x.long() % 3, n),
    "arange": lambda x, s, n: torch.arange(n),
    "full": lambda x, s, n: torch.full((n,), s),
    "eye": lambda x, s, n: torch.eye(n),
    "randperm": lambda x, s, n: torch.randperm(n).sort().values,
    "randint": lambda x, s, n: torch.randint(n, n + 1, (n,)),
    "scalar_tensor": lambda x, s, n: torch.scalar_tensor(s),
    "zeros": lambda x, s, n: torch.zeros((n, 2)),
    "new_zeros of a plain tensor": lambda x, s, n: WHOLE.new_zeros(n),
    "tensor_split": lambda x, s, n: x.tensor_split([n])[0],
    "polygamma": lambda x, s, n: torch.polygamma(n - 3, x + 1),
    "a list of indices": lambda x, s, n: x[[n, slice(1, n)]],
    "interpolate": lambda x, s, n: F.interpolate(x[None, None], size=(n, n)),
    "max_pool": lambda x, s, n: F.adaptive_max_pool1d(x[None], n),
    "padding": lambda x, s, n: F.conv1d(x[None], x[:, :6, None], padding=n),
    "norm": lambda x, s, n: torch.norm(x, "fro", (n - 4, 1)),
    "dropout": lambda x, s, n: F.dropout(F.dropout(x, p=0.0), p=s / 1128),
    "sym_int": lambda x, s, n: torch.tensor(torch.sym_int(s / 2)),
    "alpha of plain tensors": lambda x, s, n: torch.add(WHOLE, WHOLE, alpha=s),
    "full_like a plain tensor": lambda x, s, n: torch.full_like(WHOLE, s),
    "new_full of a plain tensor": lambda x, s, n: WHOLE.new_full(size=(n,), fill_value=s),
    "topk of a plain tensor": lambda x, s, n: WHOLE.topk(n).values,
    "tril of a plain tensor": lambda x, s, n: WHOLE.tril(n),
    "std of a plain tensor": lambda x, s, n: WHOLE.std(0, correction=n),
    "fft of a plain tensor": lambda x, s, n: torch.fft.rfft(WHOLE, n=n).abs(),
    "as_strided of a plain tensor": lambda x, s, n: WHOLE.as_strided((n, 2), (1, n)),
    "scale_factor": lambda x, s, n: F.interpolate(
        WHOLE[None], scale_factor=s / 564, recompute_scale_factor=True
    ),
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("program", NUMBERS)
def test_a_pending_number_is_read_before_an_op_takes_it(program):
    wanted = NUMBERS[program](WHOLE, WHOLE.sum(), torch.tensor(4))
    ones = torch.ones(4, dtype=torch.int64)

    def body(mesh):
        for layout in ([pt.Shard(0)], [pt.Replicate()]):
            x = pt.distribute_tensor(WHOLE, mesh, layout)
            n = pt.distribute_tensor(ones, mesh, [pt.Shard(0)]).sum()
            s = pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)]).sum()
            found = NUMBERS[program](x, s, n)
            if isinstance(found, pt.DTensor):
                found = found.full_tensor()
            torch.testing.assert_close(found, wanted)

    on_ranks(body)


def test_a_plain_tensor_is_made_of_the_whole_value_however_that_is_given():
    def body(mesh):
        x = pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)])
        assert torch.equal(torch.zeros(1).new_tensor(data=x), WHOLE)

    on_ranks(body)


def test_a_plan_of_the_same_key_takes_no_pending_number_for_a_number():
    def body(mesh):
        x = pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)])
        one = pt.distribute_tensor(torch.full((4,), 0.25), mesh, [pt.Shard(0)]).sum()
        for p in (0.0, one, 0.0):
            found = F.dropout(x, p=p).full_tensor()
            assert torch.equal(found, torch.zeros(6, 8) if p is one else WHOLE)
        for n in (4, one.long() * 4):
            assert torch.equal(x.roll((n, 0), (0, 1)).full_tensor(), WHOLE.roll(4, 0))

    on_ranks(body)


CAPTURED = {
    "alpha": lambda s: torch.add(WHOLE, WHOLE, alpha=s),
    "full": lambda s: torch.full((2,), s),
    "full_like": lambda s: torch.full_like(WHOLE, s),
    "linspace": lambda s: torch.linspace(0, s, 3),
}


def test_a_captured_step_reads_a_pending_number_as_eager_does():
    def body(mesh):
        x = pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)])

        def step(x):
            return [program(x.sum()) for program in CAPTURED.values()]

        for found, wanted in zip(pt.compile(step)(x), step(WHOLE), strict=True):
            torch.testing.assert_close(found, wanted)

    on_ranks(body)


def test_a_mode_hears_a_number_read_once():
    heard = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def body(mesh):
        pt.distribute_tensor(torch.ones(4), mesh, [pt.Shard(0)]).sum()

    on_ranks(body)
    with Mode():
        assert torch.arange(torch.tensor(3)).numel() == torch.tensor(3).item()
    assert heard == ["tensor", "arange", "numel", "tensor", "item"]


@pytest.mark.slow
def test_a_program_without_pending_numbers_keeps_torchs_own_operator():
    program = """
import torch, partita as pt
from partita.tensor.tensor_overrides import installed_libraries
def body(mesh):
    pt.distribute_tensor(torch.ones(4), mesh, [pt.Shard(0)]).sum().item()
with pt.ranks(a=1) as world:
    world.run(body)
assert not installed_libraries
with pt.ranks(a=2) as world:
    world.run(body)
assert installed_libraries
for x in (torch.tensor(2.5), torch.tensor([[2.5]]), torch.tensor(2.5, dtype=torch.bfloat16)):
    assert x.item() == float(x) == 2.5 and type(x.item()) is float
assert torch.tensor([2]).item() == 2 and torch.tensor([True]).item() is True
assert torch.tensor([1j]).item() == 1j and torch.tensor([2])[0:1] and [1, 2][torch.tensor([1])] == 2
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


# -- strides ---------------------------------------------------------------------------------------

VIEWS = {
    "itself": lambda x: x,
    "transposed": lambda x: x.t(),
    "three dimensions": lambda x: x.view(6, 2, 4).permute(1, 2, 0),
    "one more": lambda x: x.unsqueeze(1),
    "expanded": lambda x: x.unsqueeze(0).expand(3, 6, 8),
    "contiguous": lambda x: x.t().contiguous(),
    "a sum": lambda x: x.t() + 1,
    "like": lambda x: torch.empty_like(x.t()),
    "some columns": lambda x: x[:, 2:5],
}
SPREAD = {"rows": [pt.Shard(0)], "columns": [pt.Shard(1)], "whole": [pt.Replicate()]}


# `contiguous` leaves a piece of one row as it is, in whatever order: one row has none.
@pytest.mark.parametrize(
    "view, ranks",
    [(v, n) for v in VIEWS for n in ((2, 3) if v == "contiguous" else (2, 4, 8))],
)
def test_strides_are_those_of_one_device(view, ranks):
    one = VIEWS[view](WHOLE)

    def body(mesh):
        for layout in SPREAD.values():
            x = VIEWS[view](pt.distribute_tensor(WHOLE, mesh, layout))
            if view == "some columns" and not layout[0].is_replicate() and layout[0].dim == 1:
                continue  # moved into memory of its own
            assert x.stride() == one.stride() and x.stride(0) == one.stride(0), layout
            assert x.is_contiguous() == one.is_contiguous()
            assert x.dim_order() == one.dim_order()

    on_ranks(body, a=ranks)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_stride_of_no_dimension_is_torchs_error(dim):
    with pytest.raises(IndexError) as one:
        WHOLE.stride(dim)

    def body(mesh):
        with pytest.raises(IndexError) as error:
            pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)]).stride(dim)
        assert str(error.value) == str(one.value)

    on_ranks(body)


def test_images_may_be_channels_last_as_on_one_device():
    one = torch.rand(2, 4, 6, 3).to(memory_format=torch.channels_last)

    def body(mesh):
        for dim in range(4):
            x = pt.distribute_tensor(one.contiguous(), mesh, [pt.Shard(dim)])
            y = x.to(memory_format=torch.channels_last)
            assert x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)
            assert y.stride() == one.stride()
            assert y.is_contiguous(memory_format=torch.channels_last)

    on_ranks(body)


def test_as_strided_counts_in_the_whole_tensor():
    def body(mesh):
        for layout in SPREAD.values():
            x = pt.distribute_tensor(WHOLE, mesh, layout)
            size, strides = (3, 4), (x.stride(0) * 2, 2)
            assert torch.equal(
                x.as_strided(size, strides).full_tensor(), WHOLE.as_strided(size, strides)
            )
            assert torch.equal(
                x.as_strided((2,), (3,), 5).full_tensor(), WHOLE.as_strided((2,), (3,), 5)
            )
        with pytest.raises(pt.LayoutError, match="as_strided"):
            pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)]).t().as_strided((2, 2), (1, 8))

    on_ranks(body)


# -- TorchScript -----------------------------------------------------------------------------------


def sums(x: torch.Tensor, y: torch.Tensor):
    return x.sum() * x.size(0) + y, x.softmax(0)


@old
def test_torchscript_refuses_dtensors():
    scripted, module = torch.jit.script(sums), torch.jit.script(torch.nn.Linear(8, 3))

    def body(mesh):
        x = pt.distribute_tensor(WHOLE, mesh, [pt.Shard(0)])
        for call in (lambda: scripted(x, WHOLE), lambda: scripted(WHOLE, y=x), lambda: module(x)):
            with pytest.raises(pt.LayoutError, match=r"TorchScript .* cannot take a DTensor"):
                call()
        assert module(WHOLE).shape == (6, 3)
        assert torch.equal(scripted(x.full_tensor(), WHOLE)[0], sums(WHOLE, WHOLE)[0])

    on_ranks(body)


@old
def test_torchscript_refuses_a_module_of_dtensors():
    def body(mesh):
        model = pt.distribute_module(torch.nn.Linear(4, 4), mesh)
        with pytest.raises(pt.LayoutError, match=r"torch\.jit of Linear"):
            torch.jit.script(model)
        with pytest.raises(pt.LayoutError, match=r"torch\.jit\.trace"):
            torch.jit.trace(model, torch.ones(1, 4))

    on_ranks(body)


@pytest.mark.filterwarnings("ignore:.*set_default_tensor_type.*deprecated")
def test_a_program_without_dtensors_meets_the_old_types_that_it_knows():
    now, before = torch.FloatTensor, torch.FloatTensor.plain
    assert now is not before  # as a program has it that imported it first
    assert now == before and before == now and now != torch.DoubleTensor
    assert {before: 1}[now] == 1 and now in torch._tensor_classes
    assert issubclass(before, now) and issubclass(now, now)
    assert dir(now) == dir(before)
    try:
        torch.set_default_tensor_type("torch.DoubleTensor")
        assert torch.get_default_dtype() is torch.float64
        torch.set_default_tensor_type(torch.FloatTensor)
        assert torch.get_default_dtype() is torch.float32
        with pytest.raises(TypeError):
            torch.set_default_tensor_type("torch.LongTensor")
    finally:
        torch.set_default_dtype(torch.float32)
