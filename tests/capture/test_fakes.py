"""Fakes of a step's inputs are what torch makes of the same tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from partita.capture.fakes import FakeMaker
from partita.graph import fake_values
from partita.graph.fake_values import call_without_memory, make_fake


def _attributes(fake: FakeTensor) -> dict[str, object]:
    """All but its mode, and the number that it holds: from torch 2.14 on torch's has it, if the
    tensor is one, and a graph would take it for a constant."""
    held = fake.__dict__.items()
    return {k: v for k, v in held if k != "fake_mode" and "item_memo" not in k}


def test_a_fake_has_the_attributes_and_dispatch_keys_that_torchs_constructor_gives():
    mode, meta = FakeTensorMode(), torch.empty(2, 3, device="meta")
    ours, torchs = (make(mode, meta, torch.device("cpu")) for make in (make_fake, FakeTensor))
    assert ours.__dict__ == torchs.__dict__
    assert type(ours) is type(torchs)
    assert torch._C._dispatch_keys(ours) == torch._C._dispatch_keys(torchs)
    assert ours.untyped_storage()._cdata == torchs.untyped_storage()._cdata
    mode.allow_meta = False
    with pytest.raises(AssertionError, match="allow_meta"):
        make_fake(mode, meta, torch.device("meta"))


def _whole() -> torch.Tensor:
    return torch.arange(24.0).view(4, 6)


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize(
    "make",
    [
        _whole,
        lambda: _whole().t(),
        lambda: _whole()[1:, 2:4],
        lambda: _whole()[:2],
        lambda: _whole()[:, :2],
        lambda: torch.ones((), dtype=torch.int64),
        lambda: torch.ones(0, 3),
        lambda: torch.ones(3, 1).expand(3, 4),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.eye(3).to_sparse(),
        _inference,
    ],
)
def test_a_fake_has_the_metadata_that_torch_gives_it(make):
    t = make()
    mode = FakeTensorMode()
    expected = FakeTensorMode().from_tensor(t, static_shapes=True)
    for fake in FakeMaker(mode, [t]).make(t):
        assert fake.fake_mode is mode
        assert (fake.shape, fake.dtype, fake.device) == (t.shape, t.dtype, t.device)
        assert fake.layout is t.layout
        assert (fake.is_conj(), fake.is_inference()) == (t.is_conj(), t.is_inference())
        assert torch._C._dispatch_keys(fake) == torch._C._dispatch_keys(expected)
        assert _attributes(fake) == _attributes(expected)
        assert fake.item_memo is None
        if t.layout is torch.strided:
            assert fake.stride() == t.stride()
            assert fake.storage_offset() == t.storage_offset()
            memory = fake.untyped_storage().nbytes()
            assert memory == expected.untyped_storage().nbytes()


@pytest.mark.parametrize("other", [lambda x: x[1:, 2:4], lambda x: x[:2], lambda x: x.view(24)])
@pytest.mark.parametrize("first", [False, True])
def test_fakes_share_memory_where_their_tensors_do(other, first):
    whole = _whole()
    both = [other(whole), whole] if first else [whole, other(whole)]
    makes = FakeMaker(FakeTensorMode(), [*both, torch.ones(2)])
    memories = {f.untyped_storage()._cdata for t in both for f in makes.make(t)}
    assert len(memories) == 1
    (apart, _) = makes.make(torch.ones(2))
    assert apart.untyped_storage()._cdata not in memories


def test_fakes_share_memory_with_one_of_another_kind():
    z = torch.ones(3, dtype=torch.complex64)
    makes = FakeMaker(FakeTensorMode(), [z, z.conj()])
    one, other = makes.make(z)[0], makes.make(z.conj())[0]
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata


def test_an_empty_fake_has_memory_of_its_own_and_may_have_another_shape():
    t = _whole().t()
    makes = FakeMaker(FakeTensorMode(), [t])
    like, padded = makes.make(t)[0], makes.make_empty(t, (8, 6))[0]
    assert (padded.shape, padded.dtype) == ((8, 6), t.dtype)
    alike = makes.make_empty(t)[0]
    assert alike.stride() == t.stride()
    memories = [f.untyped_storage()._cdata for f in (like, padded, alike)]
    assert len({*memories}) == 3


def call_in_new_mode(target, *args, **kwargs):
    """The result of a call on fakes of a mode of its own, as a capture has."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    made = call_without_memory(target, fakes, kwargs)
    for t in fake_values.tensors_in(made.value):
        assert t.fake_mode is mode
    return made


def describe(made):
    values = fake_values.tensors_in(made.value)
    facts = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device) for t in values]
    sizes = [t.untyped_storage().nbytes() for t in values]
    return type(made.value), facts, sizes, made.storages, made.nbytes


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (torch.ops.aten.t.default, (torch.ones(3, 5),)),
        (torch.ops.aten.slice.Tensor, (torch.ones(7, 5), 0, 2, 4)),
        (torch.ops.aten.split.Tensor, (torch.ones(11, 5), 4)),
        (torch.ops.aten.native_layer_norm.default, (torch.ones(3, 7), [7], None, None, 1e-5)),
        (torch.ops.aten.div.Tensor, (torch.ones(13, dtype=torch.int64), 2)),
    ],
)
def test_a_call_of_torch_runs_once_for_all_captures(target, args, monkeypatch):
    first = call_in_new_mode(target, *args)
    run = fake_values.call_and_describe
    monkeypatch.setattr(fake_values, "call_and_describe", None)
    again = call_in_new_mode(target, *args)
    assert describe(again) == describe(first)
    monkeypatch.setattr(fake_values, "call_and_describe", run)
    monkeypatch.setattr(fake_values, "results_of_calls", {})
    assert describe(call_in_new_mode(target, *args)) == describe(first)


def test_a_call_of_captures_with_another_default_dtype_runs_again():
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            made = call_in_new_mode(torch.ops.aten.div.Tensor, torch.ones(17, dtype=torch.int64), 2)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(made.value.dtype)
    assert found == [torch.float32, torch.float64]


def test_a_call_of_captures_under_another_setting_of_torch_runs_again(monkeypatch):
    """Kernels of convolution and attention, and thus strides, depend on such settings."""
    x, ran = torch.ones(19, 5), []
    run = fake_values.call_and_describe
    monkeypatch.setattr(fake_values, "results_of_calls", {})
    monkeypatch.setattr(
        fake_values, "call_and_describe", lambda *args: ran.append(args) or run(*args)
    )
    for enabled in (True, False, True):
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(enabled)
        try:
            call_in_new_mode(torch.ops.aten.exp.default, x)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
    assert len(ran) == 2


def test_an_operator_of_the_user_runs_in_each_capture():
    """It may have been defined again."""
    with torch.library._scoped_library("fakes_of_a_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        widths = iter((2, 3))
        library.impl("double", lambda x: x.new_empty(len(x), next(widths)), "Meta")
        target = torch.ops.fakes_of_a_test.double.default
        found = [call_in_new_mode(target, torch.ones(4)).value.shape[1] for _ in range(2)]
    assert found == [2, 3]
