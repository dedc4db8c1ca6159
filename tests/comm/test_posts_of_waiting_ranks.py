"""What do others see of a rank of which several threads wait, and of one that has ended?"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch.distributed as dist

from partita.comm import waiting
from partita.comm.waiting import Need, collect_posts, make_post, put_post, withdraw_post


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(waiting, "LEAVING", threading.Event())
    return dist.HashStore()


def text_that_is_seen(store: dist.Store) -> Any:
    """What rank 0 is seen to wait for by rank 1, which waits for it."""
    mine = make_post(Need("asks", [0, 1]))
    post = collect_posts(store, 1, mine)[0]
    return None if post is None else post["text"]


def test_a_thread_that_goes_on_leaves_what_another_waits_for(store):
    first, second = make_post(Need("reads a value", [0, 1])), make_post(Need("gathers", [0, 1]))
    put_post(store, 0, first)
    put_post(store, 0, second)
    assert text_that_is_seen(store) == "gathers"
    withdraw_post(store, 0, second)
    assert text_that_is_seen(store) == "reads a value"
    withdraw_post(store, 0, first)
    assert text_that_is_seen(store) is None


def test_the_first_to_go_on_leaves_the_second(store):
    first, second = make_post(Need("reads a value", [0, 1])), make_post(Need("gathers", [0, 1]))
    put_post(store, 0, first)
    put_post(store, 0, second)
    withdraw_post(store, 0, first)
    assert text_that_is_seen(store) == "gathers"
    withdraw_post(store, 0, second)
    assert text_that_is_seen(store) is None


def test_that_a_rank_has_ended_is_the_last_that_it_says(store):
    post = make_post(Need("runs a graph", [0, 1]))
    put_post(store, 0, post)
    waiting.LEAVING.set()
    store.set("partita/waits/0", json.dumps({"text": "has ended", "ended": True, "ranks": []}))
    withdraw_post(store, 0, post)
    assert text_that_is_seen(store) == "has ended"
    put_post(store, 0, post)
    assert text_that_is_seen(store) == "has ended"
    withdraw_post(store, 0, post)


def test_what_waits_nowhere_is_nothing(store):
    withdraw_post(store, 0, make_post(Need("gathers", [0, 1])))
    assert text_that_is_seen(store) is None
