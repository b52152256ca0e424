"""Writes from several threads: none is lost, and none is built on a value that is gone."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.values import VariableStore

NUM_THREADS = 4
NUM_WRITES = 200


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    """Let threads take turns every microsecond instead of every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[], Any]) -> None:
    start = threading.Barrier(NUM_THREADS)
    errors: list[BaseException] = []

    def run() -> None:
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def add_one(variable: Any) -> None:
    """What awaiting `assign_add(1)` does outside the replicas, on any thread."""
    with pytest.raises(StopIteration):
        variable.assign_add(np.ones(3)).send(None)


@pytest.mark.parametrize("kind", ["mirrored", "on_read", "plain"])
def test_additions_of_several_threads_all_count(kind: str) -> None:
    with ar.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        options = {"synchronization": "on_read", "aggregation": "mean"} if kind == "on_read" else {}
        variable = ar.Variable(np.zeros(3), **options)
    if kind == "plain":
        variable = ar.Variable(np.zeros(3))

    in_threads(lambda: [add_one(variable) for _ in range(NUM_WRITES)])

    assert variable.value.tolist() == [NUM_THREADS * NUM_WRITES] * 3
    assert variable.version == NUM_THREADS * NUM_WRITES


def test_a_write_overtaken_by_another_one_returns_false() -> None:
    """The base is compared and the write is published under one lock."""
    variable = ar.Variable(0.0)
    store: VariableStore = variable.store
    won: list[int] = []

    def work() -> None:
        for _ in range(NUM_WRITES):
            while True:
                old = variable.components
                new = (np.array(float(old[0]) + 1.0),)
                if store.write({variable: new}, {variable: old}):
                    won.append(1)
                    break

    in_threads(work)

    assert variable.value == len(won) == NUM_THREADS * NUM_WRITES
