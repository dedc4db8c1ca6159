"""What do others see of a rank of which several threads wait, and of one that has ended?"""

from __future__ import annotations

import json
import sys
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


@pytest.fixture
def reader_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `read` in two other threads while `write` runs in this one."""

    def run(read: Any, write: Any) -> list[BaseException]:
        ended, failed = threading.Event(), []

        def go() -> None:
            while not ended.is_set():
                try:
                    read()
                except BaseException as error:
                    failed.append(error)

        threads = [threading.Thread(target=go) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            write()
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        return failed

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield run
    sys.setswitchinterval(before)


def test_a_history_that_other_threads_read_is_the_same(reader_threads):
    requests = [Request("all_gather", None, f"op{i % 7}") for i in range(20_000)]
    read, alone = MoveHistory(), MoveHistory()
    alone.new.extend(requests)

    def write() -> None:
        for i, request in enumerate(requests):
            read.new.append(request)
            if not i % 256:
                read.add_new()

    assert not reader_threads(lambda: read.add_new().describe(), write)
    assert read.add_new().count == alone.add_new().count == len(requests)
    assert read.digest == alone.digest
    assert read.describe() == alone.describe()


def test_another_thread_makes_posts_while_collectives_begin(reader_threads, monkeypatch):
    class Group:
        def __init__(self, i: int):
            self.group_name = f"group {i}"

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [97, 98])
    request, groups = Request("all_gather", None, "op"), [Group(i) for i in range(40)]

    def write() -> None:
        for group in groups:
            for _ in range(1000):
                WatchedWork(None, group, request)

    try:
        assert not reader_threads(lambda: make_post(Need("computes", [97, 98])), write)
        assert history_of([97, 98]).count == 40 * 1000
    finally:
        forget_histories()


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
