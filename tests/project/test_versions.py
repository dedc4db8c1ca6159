"""Is each form found that a version of torch has, and is a version named that nobody tested?"""

from __future__ import annotations

import re
import tomllib
import types
from pathlib import Path

import pytest
import torch

import partita
from partita.versions import (
    INPUT_CHECK,
    base_of_scheduler_passes,
    describe_torch,
    frames_hold_inputs,
    name_of_checkpoint_generator,
)

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

CODE = """\
        arg0_1, arg1_1 = args
        assert_size_stride(arg0_1, (32, 32), (32, 1){input})
        del arg0_1
        assert_size_stride(arg1_1, (), (){input})
        buf0 = torch.ops.aten.sort.default(arg1_1)
        assert_size_stride(buf0, (32, 32), (32, 1), 'torch.ops.aten.sort.default')
        assert_size_stride(buf1, (32, 32), (32, 1))
"""


@pytest.mark.parametrize("form", ["", ", 'input'"], ids=["torch 2.12", "torch 2.13"])
def test_checks_of_inputs_are_told_from_those_of_results(form):
    left = INPUT_CHECK.sub("", CODE.replace("{input}", form))
    assert re.findall(r"assert_size_stride\((\w+)", left) == ["buf0", "buf1"]
    assert left.count("\n") == CODE.count("\n") - 2


def test_a_form_is_found_by_what_torch_has():
    older = types.SimpleNamespace(_checkpoint_without_reentrant_generator=None)
    newer = types.SimpleNamespace(**vars(older), _checkpoint_without_reentrant_generator_impl=None)
    names = [name_of_checkpoint_generator(home) for home in (older, newer)]
    assert names == [*vars(newer)]
    own, graphs = type("Own", (), {}), type("Graphs", (), {})
    both = types.SimpleNamespace(CustomGraphPass=graphs, CustomSchedulerPass=own)
    assert base_of_scheduler_passes(both) is own
    assert base_of_scheduler_passes(types.SimpleNamespace(CustomGraphPass=graphs)) is graphs
    methods = {"save_inputs": None, "get_inputs": None}
    assert frames_hold_inputs(type("Frame", (), methods)) and not frames_hold_inputs(own)


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("2.10.0", False), ("2.11.0", True), ("2.14.1+cu130", True), ("2.15.0a0+git1", False)],
)
def test_a_torch_that_was_not_tested_is_named_as_one(version, is_tested, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    said = describe_torch()
    assert (
        said == version
        if is_tested
        else said == f"{version}, which was not tested: 2.11 to 2.14 were"
    )


def test_what_may_be_installed_is_what_was_tested(monkeypatch):
    (bounds,) = [d for d in PROJECT["dependencies"] if d.startswith("torch")]
    least, above = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", bounds).groups()
    for minor in range(int(least) - 1, int(above) + 1):
        monkeypatch.setattr(torch, "__version__", f"2.{minor}.0")
        assert ("not tested" in describe_torch()) == (minor in (int(least) - 1, int(above)))


def test_the_version_is_said_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+", partita.__version__)
    assert "version" in PROJECT["dynamic"]
