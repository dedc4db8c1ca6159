"""Are the bytes of a tensor those of its values, however torch holds them?"""

from __future__ import annotations

import gc

import pytest
import torch

from partita.comm.device import copy_bytes, view_bytes

COMPLEX = torch.tensor([1 + 2j, 3 - 4j])


@pytest.mark.parametrize("read", [copy_bytes, lambda x: bytes(view_bytes(x))])
@pytest.mark.parametrize(
    ("x", "values"),
    [
        (torch.arange(6)[2:], torch.arange(2, 6)),
        (torch.empty(0, 3), torch.empty(0)),
        (torch.tensor(2.5, dtype=torch.bfloat16), torch.tensor([2.5], dtype=torch.bfloat16)),
        (COMPLEX.conj(), torch.tensor([1 - 2j, 3 + 4j])),  # one bit says so, memory is the other's
        (COMPLEX.conj().imag, torch.tensor([-2.0, 4.0])),
    ],
    ids=["a part", "nothing", "a number", "conjugated", "negated"],
)
def test_bytes_are_those_of_the_values(x, values, read):
    assert read(x.contiguous()) == values.view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
def test_a_view_is_of_the_memory_and_keeps_it():
    x = torch.zeros(4, dtype=torch.uint8)
    view = view_bytes(x)
    x[1] = 7
    assert bytes(view) == b"\0\7\0\0"
    del x
    gc.collect()
    others = [torch.ones(4, dtype=torch.uint8) for _ in range(100)]
    assert bytes(view) == b"\0\7\0\0" and len(others) == 100
