"""Are predicted times, bytes and memory those that the formulas, ledgers and schedules give?"""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.predict.collective_time import collective_bytes, collective_seconds
from partita.predict.machine import Link, MachineError, load_machine, shipped_machines

MACHINES = Path(__file__).parents[2] / "partita/predict/machines"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1024])
@pytest.mark.parametrize(
    ("kind", "messages", "share"),
    [
        ("all_gather", lambda n: n - 1, lambda n: (n - 1) / n),
        ("reduce_scatter", lambda n: n - 1, lambda n: (n - 1) / n),
        ("all_reduce", lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
        ("all_to_all", lambda n: n - 1, lambda n: (n - 1) / n),
        ("send", lambda n: int(n > 1), lambda n: int(n > 1)),
    ],
)
def test_with_unit_latency_and_bandwidth_a_time_is_the_ring_formula(kind, messages, share, ranks):
    sent = collective_bytes(kind, ranks, 840.0)
    assert sent == pytest.approx(share(ranks) * 840, rel=1e-12)
    assert collective_seconds(kind, ranks, sent, Link(1.0, 1.0)) == messages(ranks) + sent


def test_a_kind_of_collective_that_is_not_is_refused():
    with pytest.raises(ValueError, match="no collective 'gossip'"):
        collective_seconds("gossip", 4, 1.0, Link(1.0, 1.0))


# -- machines --------------------------------------------------------------------------------------


def test_the_shipped_machines_are_read_and_name_their_sources():
    assert shipped_machines() == ["a100", "h100", "h200"]
    for name in shipped_machines():
        assert "nvidia.com" in load_machine(name).source
    assert load_machine("h100").flops["bfloat16"] == 989e12
    assert load_machine("h100").host == Link(2e-6, 450e9)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("fuses = true\n", "", "fuses is missing"),
        ("fuses = true", "fuses = true\ncolour = 1", "colour is not known"),
        ('"450 GB/s"', '"450 GB"', "host.bandwidth is '450 GB', no amount of bytes per second"),
        ('seconds = "2 us"', 'seconds = "-2 us"', "kernel_seconds is '-2 us': seconds are above 0"),
        ("matmul = 0.65", "matmul = 65", "efficiency.matmul is 65, no part of a peak"),
        ("ranks_per_host = 8", "ranks_per_host = 0", "ranks_per_host is 0"),
        ('"80 GB"', "true", "memory_bytes is True, no amount of bytes"),
        ("[host]", "[hosts]", "host is missing"),
        ("fuses = true", "fuses = ", "Invalid"),
    ],
)
def test_a_wrong_machine_file_is_one_error_that_names_the_key(old, new, says, tmp_path):
    text = (MACHINES / "h100.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(MachineError, match=says) as caught:
        load_machine(path)
    assert str(path) in str(caught.value)


def test_a_machine_that_is_not_there_is_an_error_that_names_those_that_are():
    with pytest.raises(MachineError, match="a100, h100, h200"):
        load_machine("h1000")


def test_a_ring_goes_over_the_slowest_link_that_it_crosses():
    machine = load_machine("h100")
    assert machine.link_of(("tp",), {"dp": 4, "tp": 8}) is machine.host
    assert machine.link_of(("dp",), {"dp": 4, "tp": 8}) is machine.network
    assert machine.link_of(("dp",), {"dp": 4, "tp": 2}) is machine.host
    assert machine.link_of(("dp", "tp"), {"dp": 4, "tp": 4}) is machine.network
