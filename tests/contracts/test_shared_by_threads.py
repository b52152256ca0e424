"""What threads share can be walked through while another thread changes it.

With a GIL CPython copies a dict or a deque in one go. Without one, a copy of most kinds ends with
an error if another thread adds or drops something meanwhile: `.ci/free_threaded` runs these there.
"""

import gc
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.context import Living
from aioreplica.telemetry import (
    EventLog,
    MemorySink,
    Observer,
    Recorder,
    Ring,
    observe_everywhere,
)
from aioreplica.telemetry._trace import TraceRecorder
from aioreplica.values import WeakVariableDict

LIMIT_S = 60
TIMES = 3000
KEPT = 50

Change = Callable[[int], object]
Walk = Callable[[], object]


class Thing:
    """Something that can be referred to weakly."""


def ring() -> tuple[Change, Walk]:
    made: Ring[int] = Ring(KEPT)
    return made.add, made.copied


def records() -> tuple[Change, Walk]:
    recorder, code = Recorder(KEPT), ring.__code__

    def record(number: int) -> None:
        recorder.record(0.5, 0, number, "barrier", "", (0,), (0,), [(code, 0, 0.5)])

    return record, recorder.history


def events() -> tuple[Change, Walk]:
    log = EventLog(KEPT)
    return lambda number: log.add_scalar(number, 0, "loss", 0.5), log.events


def sink() -> tuple[Change, Walk]:
    made = MemorySink(capacity=KEPT)
    tell = made.observer.write_published
    assert tell is not None
    return tell, made.events


def timeline() -> tuple[Change, Walk]:
    recorder = TraceRecorder(["cpu:0"], capacity=KEPT)
    tell = recorder.observer.write_published
    assert tell is not None
    return tell, recorder.timeline


def living() -> tuple[Change, Walk]:
    things: Living[Thing] = Living()
    kept: deque[Thing] = deque(maxlen=KEPT)

    def change(_number: int) -> None:
        thing = Thing()
        things.add(thing)
        kept.append(thing)  # and an older one dies

    return change, lambda: list(things)


def variables() -> tuple[Change, Walk]:
    strategy = ar.MirroredStrategy(["cpu:0"])
    kept: deque[Any] = deque(maxlen=KEPT)

    def change(number: int) -> None:
        if number % 10 == 0:
            with strategy.scope():
                kept.append(ar.Variable(np.zeros(1)))

    return change, strategy.snapshot


def weak_dict() -> tuple[Change, Walk]:
    table: WeakVariableDict[int] = WeakVariableDict()
    kept: deque[Any] = deque(maxlen=KEPT)

    def change(number: int) -> None:
        if number % 10 == 0:
            variable = ar.Variable(np.zeros(1))
            table[variable] = number
            kept.append(variable)

    return change, lambda: (table.items(), table.values(), list(table))


def strategies() -> tuple[Change, Walk]:
    def change(number: int) -> None:
        if number % 10 == 0:
            ar.DefaultStrategy()

    return change, lambda: observe_everywhere(Observer(write_published=lambda _number: None))()


SHARED = [ring, records, events, sink, timeline, living, variables, weak_dict, strategies]


@pytest.mark.parametrize("new", SHARED, ids=[each.__name__ for each in SHARED])
def test_it_is_walked_while_another_thread_changes_it(
    new: Callable[[], tuple[Change, Walk]],
) -> None:
    change, walk = new()
    errors: list[BaseException] = []
    both_there, is_over = threading.Barrier(2), threading.Event()

    def change_often() -> None:
        try:
            both_there.wait(LIMIT_S)
            for number in range(TIMES):
                change(number)
        except BaseException as error:
            errors.append(error)
        finally:
            is_over.set()

    thread = threading.Thread(target=change_often)
    thread.start()
    num_walks = 0
    try:
        both_there.wait(LIMIT_S)
        while not is_over.is_set() or num_walks == 0:
            walk()
            num_walks += 1
    finally:
        thread.join(LIMIT_S)
    assert errors == []


def test_a_strategy_made_while_an_observer_is_added_tells_it_once() -> None:
    for _ in range(100):
        told: list[int] = []
        both_there = threading.Barrier(2)
        made: list[Any] = []

        def make(both_there: threading.Barrier = both_there, made: list[Any] = made) -> None:
            both_there.wait(LIMIT_S)
            made.append(ar.DefaultStrategy())

        thread = threading.Thread(target=make)
        thread.start()
        both_there.wait(LIMIT_S)
        remove = observe_everywhere(Observer(write_published=told.append))
        thread.join(LIMIT_S)
        [strategy] = made
        tell = strategy.observers.write_published
        assert tell is not None
        tell(1)
        remove()
        assert told == [1]
    gc.collect()
