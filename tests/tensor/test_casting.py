"""How autocast is set is told as a value, and set by it."""

import torch

import partita as pt
from partita.comm import enabled_autocast_dtypes, read_autocast_state, use_autocast_state


def test_casting_is_set_for_a_while_and_is_as_it_was_afterwards():
    off = read_autocast_state()
    assert enabled_autocast_dtypes(off) == ()
    with torch.autocast("cpu", torch.float16):
        on = read_autocast_state()
        with use_autocast_state(off):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert read_autocast_state() == on
    with use_autocast_state(on):
        assert enabled_autocast_dtypes(read_autocast_state()) == (torch.float16,)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16
    assert read_autocast_state() == off


def test_a_rank_casts_as_its_caller_does():
    with torch.autocast("cpu", torch.float16), pt.ranks(dp=2) as world:
        assert (
            world.run(lambda mesh: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            == [torch.float16] * 2
        )


def test_a_step_is_another_program_where_it_casts_to_another_dtype():
    step = pt.compile(lambda x: x @ x, backend="graph")
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            assert step(torch.ones(2, 2)).dtype is dtype
    assert step(torch.ones(2, 2)).dtype is torch.float32
