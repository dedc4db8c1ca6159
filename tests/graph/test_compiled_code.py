"""Compiled code is called by itself where what torch would put around it has nothing to do."""

from __future__ import annotations

import pickle
import zlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import partita as pt
from partita.graph.backend.inductor import add_triton_kernels, remove_input_checks
from partita.graph.backend.store import default_store


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))


def trained():
    w, momentum = nn.Parameter(torch.ones(4, 3)), torch.zeros(4, 3)

    def step(x):
        loss = (x @ w.t()).square().mean()
        (grad,) = torch.autograd.grad(loss, [w])
        with torch.no_grad():
            momentum.mul_(0.9).add_(grad)
            w.sub_(0.1 * momentum)
        return loss.detach()

    return step, [w, momentum]


def returns_views():
    table = torch.arange(6.0).reshape(2, 3)

    def step(x):
        table.add_(x)
        return table.view(3, 2), x.t(), x + 1

    return step, [table]


def parts_of(step):
    payload = default_store().get(step.artifact.key).payload
    _, result, _, whole = pickle.loads(zlib.decompress(payload))
    entry, *_ = pickle.loads(result)
    return entry.compiled_fw.result.source_code, whole


@pytest.mark.slow
@pytest.mark.parametrize("made, size", [(trained, (5, 3)), (returns_views, (2, 3))])
def test_what_compiled_code_gives_and_writes_is_as_in_eager(made, size):
    (plain, wanted), (captured, held) = made(), made()
    compiled, again = pt.compile(captured), pt.compile(captured)
    for i, step in enumerate([compiled, compiled, again, again]):  # `again` loads it
        x = torch.full(size, i + 1.0)
        want, got = plain(x), step(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(held, wanted)
    assert again.artifact.loaded
    code, whole = parts_of(compiled)
    assert whole is (made is trained)
    assert "'input')" not in code  # guards have looked at all of its inputs


def test_only_the_checks_of_inputs_are_left_away():
    ours, other = (
        f"    assert_size_stride({name}, (2, 3), (3, 1), {what!r})\n"
        for name, what in (("arg0_1", "input"), ("buf0", "torch.ops.aten.convolution.default"))
    )
    saved = pickle.dumps((SimpleNamespace(compiled_fw=_result(other + ours + other)), {}))
    entry, _ = pickle.loads(remove_input_checks(saved))
    assert entry.compiled_fw.result.source_code == other + other


def _result(code):
    return SimpleNamespace(result=SimpleNamespace(source_code=code))


def test_kernels_for_which_code_waits_late_are_saved_with_it_like_others(monkeypatch, tmp_path):
    """Inductor saves the Triton kernels that are complete when it has lowered a program."""
    from torch._inductor.triton_bundler import TritonBundle, TritonBundler

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in ("early", "late"):
        (tmp_path / kernel).mkdir()
        (tmp_path / kernel / "kernel.cubin").write_bytes(kernel.encode())

    def wait(kernel):
        return lambda: TritonBundler.put(kernel, 0)

    def kernels_of(saved):
        bundle = pickle.loads(saved)[0].compiled_fw.result._triton_bundle
        return bundle and [
            (kernel.kernel_hash, kernel.artifacts[0].payload) for kernel in bundle.kernel_artifacts
        ]

    code = SimpleNamespace(_triton_bundle=None)
    saved = pickle.dumps((SimpleNamespace(compiled_fw=SimpleNamespace(result=code)),))
    assert kernels_of(add_triton_kernels(saved, [lambda: None])) is None
    once = add_triton_kernels(saved, [wait("early")])
    assert kernels_of(once) == [("early", b"early")]
    twice = add_triton_kernels(once, [wait("late")])
    assert sorted(kernels_of(twice)) == [("early", b"early"), ("late", b"late")]
    assert isinstance(pickle.loads(twice)[0].compiled_fw.result._triton_bundle, TritonBundle)
