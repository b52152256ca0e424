"""Tests of what the closures of a worker keep there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from aioreplica.cluster._closures import ClosureWorker


@pytest.mark.parametrize("keys", [["slow"], None])
def test_what_is_being_made_keeps_neither_others_waiting_nor_its_own_end(
    keys: list[str] | None,
) -> None:
    worker, has_begun, may_end = ClosureWorker("w"), threading.Event(), threading.Event()

    def make() -> str:
        has_begun.set()
        assert may_end.wait(60)
        assert worker.once("job", "other", lambda: "other") == "other"  # what is made may ask too
        return "first"

    with ThreadPoolExecutor(2) as threads:
        making = threads.submit(worker.once, "job", "slow", make)
        assert has_begun.wait(60)
        assert worker.once("another job", "quick", lambda: 1) == 1
        worker.release("job", keys)
        may_end.set()
        assert making.result(60) == "first"

    assert worker.once("job", "slow", lambda: "second") == "second"


def test_those_who_want_the_same_wait_for_one_to_make_it() -> None:
    worker, may_end = ClosureWorker("w"), threading.Event()
    made: list[int] = []

    def make() -> int:
        assert may_end.wait(60)
        made.append(len(made))
        return made[-1]

    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(worker.once, "job", "key", make) for _ in range(2)]
        may_end.set()
        assert [each.result(60) for each in results] == [0, 0]


def test_what_could_not_be_made_is_made_at_the_next_use() -> None:
    worker = ClosureWorker("w")

    def fail() -> int:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        worker.once("job", "key", fail)
    assert worker.once("job", "key", lambda: 1) == 1
