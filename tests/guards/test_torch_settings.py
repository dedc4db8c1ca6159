"""Is a step captured again where a setting of torch's, of all kernels, has changed since?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import partita as pt
from partita.graph.torch_settings import OF_C, SETTINGS, read_settings

Change = tuple[Callable[[], Any], Callable[[Any], None], Any]
"""How a setting is read, and set, and a value other than its default."""

NOT_HERE = {
    "torch.backends.cudnn.benchmark_limit",
    "torch.backends.mkldnn.allow_tf32",
    "torch.backends.python_native.available_dsls",
}
"""Settings that torch does not change on every machine: of cuDNN, of Intel's GPUs, of others."""


@pytest.fixture(autouse=True)
def settable(monkeypatch):
    """Lets settings be changed: torch's own test utilities, which other tests import, forbid it."""
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)


def others_than(value: Any) -> list[Any]:
    """Values that a setting may take, where it has this one now."""
    if isinstance(value, bool) or value is None:
        return [not value]
    return [v for v in ("ieee", "tf32", "bf16", "none", "cudnn", "native", "legacy") if v != value]


def walk_backends() -> Iterator[tuple[str, Change]]:
    """Every setting below torch.backends, found by what torch gives a setter."""
    for path, module in sorted(sys.modules.items()):
        if path.partition(".backends")[:2] != ("torch", ".backends"):
            continue
        parts = {path: module}
        kinds = ("_FP32Precision", "cuBLASModule")
        for name in dir(module):
            if type(getattr(module, name, None)).__name__ in kinds:
                parts[f"{path}.{name}"] = getattr(module, name)
        for at, part in parts.items():
            for name, kind in vars(type(part)).items():
                if type(kind).__name__ == "ContextProp":
                    yield f"{at}.{name}", change_of_attribute(part, name)
            if type(part).__name__ == "_FP32Precision":
                yield f"{at}.fp32_precision", change_of_attribute(part, "fp32_precision")
            if type(part).__name__ == "cuBLASModule":
                for name in ("allow_fp16_reduced_precision_reduction", "fp32_precision"):
                    yield f"{at}.{name}", change_of_attribute(part, name)
                for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation"):
                    yield f"{at}.{name}", change_of_attribute(part, name)
        for name, function in vars(module).items():
            if name.startswith("enable_"):
                read = getattr(module, f"{name.removeprefix('enable_')}_enabled")
                yield f"{path}.{name}", (read, function, others_than(read()))
    yield (
        "torch.backends.mha",
        (
            torch.backends.mha.get_fastpath_enabled,
            torch.backends.mha.set_fastpath_enabled,
            [False],
        ),
    )
    yield (
        "torch.backends.nnpack",
        (
            torch._C._get_nnpack_enabled,
            lambda on: torch.backends.nnpack.set_flags(on),
            [False],
        ),
    )
    sdp = torch.backends.cuda
    yield (
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        (
            sdp.fp16_bf16_reduction_math_sdp_allowed,
            sdp.allow_fp16_bf16_reduction_math_sdp,
            [True],
        ),
    )


def change_of_attribute(part: Any, name: str) -> Change:
    return (
        lambda: getattr(part, name),
        lambda value: setattr(part, name, value),
        others_than(getattr(part, name)),
    )


OTHERS: dict[str, Change] = {
    "torch.set_num_threads": (
        torch.get_num_threads,
        torch.set_num_threads,
        [1, 2],
    ),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        ["medium", "high"],
    ),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        [True],
    ),
    "torch.set_default_dtype": (
        torch.get_default_dtype,
        torch.set_default_dtype,
        [torch.float64, torch.float32],
    ),
    "torch.autograd.set_detect_anomaly": (
        torch.is_anomaly_enabled,
        torch.autograd.set_detect_anomaly,
        [True],
    ),
    "torch.set_autocast_cache_enabled": (
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
        [False],
    ),
    "torch.autograd.set_multithreading_enabled": (
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
        [False],
    ),
    "torch.distributions.Distribution.set_default_validate_args": (
        lambda: torch.distributions.Distribution._validate_args,
        torch.distributions.Distribution.set_default_validate_args,
        [not torch.distributions.Distribution._validate_args],
    ),
    "torch.__future__.set_swap_module_params_on_conversion": (
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
        [True],
    ),
}
CHANGES = {**dict(walk_backends()), **OTHERS}


@contextmanager
def changed(change: Change) -> Iterator[bool]:
    """Within, a setting has another value; gives whether it takes one here."""
    read, put, others = change
    before = read()
    if isinstance(before, bool):  # another test may have left it otherwise than at import
        others = [*others, not before]
    for value in others:
        try:
            put(value)
        except (RuntimeError, AssertionError, ValueError):  # not one of its values
            continue
        if read() != before:
            break
    try:
        yield read() != before
    finally:
        put(False if before is None else before)  # oneDNN's has no value at first


@pytest.mark.filterwarnings("ignore:.*TF32", "ignore:.*anomaly.*", "ignore:Anomaly")
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_another_capture_whose_reason_names_it(name: str) -> None:
    fast, x, before = pt.compile(lambda x: x * 2, backend="graph"), torch.ones(2), read_settings()
    fast(x)
    fast(x)
    with changed(CHANGES[name]) as is_other:
        if not is_other:
            assert name in NOT_HERE
            return
        fast(x)
        reasons = fast.reasons
        assert len(reasons) == 2, name
        assert any(f"{setting} " in reasons[-1] for setting in SETTINGS), reasons
    fast(x)  # torch.set_float32_matmul_precision leaves other precisions of backends behind
    assert len(fast.reasons) == (2 if read_settings() == before else 3)


def test_the_walk_finds_the_settings_of_every_backend() -> None:
    found = {name.removeprefix("torch.backends.").split(".")[0] for name in CHANGES}
    assert {"cuda", "cudnn", "mkldnn", "miopen", "mha", "nnpack", "fp32_precision"} <= found
    assert len(CHANGES) >= 30


def test_torch_has_the_functions_that_read_its_settings() -> None:
    assert [name for name in OF_C.values() if not hasattr(torch._C, name)] == []


@pytest.mark.slow
def test_a_recurrent_layer_without_onednn_is_captured_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3)
    fast = pt.compile(lambda: model(x)[0].sum(), backend="graph")
    fast()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    torch.testing.assert_close(fast(), model(x)[0].sum())
    assert "torch.backends.mkldnn.enabled True became False" in fast.reasons[-1]


def test_a_precision_that_was_set_for_one_backend_alone_is_no_error_of_torchs() -> None:
    fast, x = pt.compile(lambda x: x * 2, backend="graph"), torch.ones(2)
    fast(x)
    with changed(CHANGES["torch.backends.cuda.matmul.fp32_precision"]):
        with pytest.raises(RuntimeError, match="precision"):
            torch.get_float32_matmul_precision()
        assert torch.equal(fast(x), x * 2)
    assert "fp32_precision" in fast.reasons[-1] or "matmul" in fast.reasons[-1]
