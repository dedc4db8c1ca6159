"""The page for those who come from torch speaks of names that exist, and of all that matter."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
import torch.distributed.tensor.placement_types
import torch.utils.checkpoint

import partita as pt

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n\n".join(
    (DOCS / name).read_text() for name in ("coming_from_torch.md", "dtensor_from_torch.md")
)
HOMES = (
    torch.distributed.tensor,
    torch.distributed.tensor.placement_types,
    torch.distributed.tensor.parallel,
    torch.distributed.fsdp,
    torch.distributed.checkpoint.state_dict,
    torch.utils.checkpoint,
)
ROWS = [
    line.strip("|").split("|")
    for table in re.findall(r"^\| theirs \|.*?(?=\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    for line in table.splitlines()[2:]
]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([\w.]+)", row[0])})


def test_the_page_has_tables():
    assert len(ROWS) > 40


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_theirs_is_torchs(name):
    if name.startswith("torch."):
        assert operator.attrgetter(name.removeprefix("torch."))(torch) is not None
        return
    found = [home for home in HOMES if hasattr(home, name.partition(".")[0])]
    assert found and operator.attrgetter(name)(found[0]) is not None


def test_each_name_of_ours_is_there():
    ours = set(re.findall(r"\bpt\.([A-Za-z_.]+)", PAGE))
    for name in sorted(ours):
        assert operator.attrgetter(name.rstrip("."))(pt) is not None


@pytest.mark.parametrize(
    "names",
    [
        torch.distributed.tensor.__all__,
        torch.distributed.tensor.parallel.__all__,
        ["fully_shard", "MixedPrecisionPolicy", "FSDPModule", "CPUOffloadPolicy", "OffloadPolicy"],
        ["checkpoint", "CheckpointPolicy", "create_selective_checkpoint_contexts"],
        [n for n in torch.distributed.checkpoint.state_dict.__all__ if n[:4] in ("get_", "set_")],
    ],
    ids=["tensor", "parallel", "fsdp", "checkpoint", "state_dict"],
)
def test_no_name_that_programs_use_is_left_out(names):
    told = {part for name in NAMES for part in name.split(".")}
    assert set(names) - told - {"ParallelStyle"} == set()
