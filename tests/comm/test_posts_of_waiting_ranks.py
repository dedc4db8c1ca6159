"""What do others see of a rank of which several threads wait, and of one that has ended?"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch.distributed as dist

from partita.comm import Request, waiting
from partita.comm.waiting import (
    MoveHistory,
    Need,
    WatchedWork,
    collect_posts,
    forget_histories,
    history_of,
    make_post,
    put_post,
    withdraw_post,
)


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


def test_a_history_is_the_same_whenever_it_is_read():
    requests = [Request("all_gather", None, f"op{i % 7}") for i in range(300)]
    often, once = MoveHistory(), MoveHistory()
    for i, request in enumerate(requests):
        often.new.append(request)
        once.new.append(request)
        if i % 11 == 0:
            often.add_new()
    for history in (often, once):
        assert history.add_new().count == 300
        assert history.describe()["300"] == "all_gather, for op5"
    assert often.digest == once.digest
    once.new.append(requests[0])
    assert often.digest != once.add_new().digest


def test_collectives_that_nobody_compares_are_not_kept(monkeypatch):
    class Group:
        group_name = "group of the test"

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [97, 98])
    request = Request("all_gather", None, "op")
    WatchedWork(None, Group(), request)
    history = history_of([97, 98])
    for _ in range(1000):
        WatchedWork(None, Group(), request)
    assert len(history.new) < 300 and history_of([98, 97]).count == 1001
    forget_histories()
    assert history_of([97, 98]).count == 0
