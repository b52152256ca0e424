"""Histories of calls, and whether an order of them explains their results."""

import asyncio
import random
from collections import OrderedDict, deque
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import aioreplica.testing as art
from aioreplica.testing import History, linearizable
from aioreplica.testing._linearizable import RecordedCall


class Counter:
    """Right for one caller; `add` loses updates where others come in between."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, number: int = 1) -> int:
        self.value += number
        return self.value


class LosingCounter:
    def __init__(self) -> None:
        self.value = 0

    async def add(self, number: int = 1) -> int:
        seen = self.value
        await asyncio.sleep(0)
        self.value = seen + number
        return self.value


class Queue:
    def __init__(self) -> None:
        self.items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self.items.append(item)

    def get(self) -> Any:
        return self.items.popleft()


class Lock:
    def __init__(self) -> None:
        self.is_held = False

    def acquire(self) -> bool:
        if self.is_held:
            raise RuntimeError("it would wait")
        self.is_held = True
        return True

    def release(self) -> None:
        self.is_held = False


class Cache:
    def __init__(self) -> None:
        self.loaded: dict[str, int] = {}

    def get(self, key: str) -> int:
        return self.loaded.setdefault(key, len(self.loaded))


class Log(dict[str, int]):
    """Items say nothing of what a dictionary of a class of its own remembers besides."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def read(self) -> list[str]:
        return list(self.lines)


class SlottedLog(dict[str, int]):
    __slots__ = ("lines",)

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    add, read = Log.add, Log.read


class LogInOrder(OrderedDict[str, int]):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    add, read = Log.add, Log.read


def history_of(*calls: tuple[str, tuple[Any, ...], Any, int, int | None]) -> History:
    """Return a history as if recorded: name, arguments, result, begin, end."""
    history = History()
    for number, (name, args, result, began, ended) in enumerate(calls):
        call = RecordedCall(f"task-{number}", name, args, {}, began, ended)
        if isinstance(result, BaseException):
            call.error = result
        else:
            call.result = result
        history._calls.append(call)
    history._calls.sort(key=lambda call: call.began)
    return history


async def add_twice(counter: Any) -> None:
    history = History()
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(history.call(counter.add))
    linearizable(history, Counter)


def test_a_counter_that_loses_an_update_is_found_and_pictured() -> None:
    report = art.explore(lambda: add_twice(LosingCounter()), schedules=50)

    assert report.failure is not None
    text = str(report.failure.error)
    assert isinstance(report.failure.error, AssertionError)
    assert "No order of these 2 calls, one after the other, gives their results" in text
    assert "|---" in text
    assert "because the model gives 2" in text


def test_a_counter_that_loses_nothing_passes() -> None:
    art.explore(lambda: add_twice(Counter()), schedules=50).check()


async def use_a_queue() -> None:
    queue: asyncio.Queue[object] = asyncio.Queue()
    history = History()
    things = [object(), object(), object()]  # equal to themselves only

    async def put() -> None:
        for thing in things:
            await history.call(queue.put, thing)

    async def get(count: int) -> None:
        for _ in range(count):
            await history.call(queue.get)

    async with asyncio.TaskGroup() as group:
        group.create_task(get(2))
        group.create_task(get(1))
        group.create_task(put())
    assert len(linearizable(history, Queue)) == 6


def test_the_queue_of_asyncio_is_linearizable() -> None:
    art.explore(use_a_queue, schedules=100).check()


async def use_a_lock() -> None:
    lock, history = asyncio.Lock(), History()

    async def hold() -> None:
        await history.call(lock.acquire)
        try:
            await asyncio.sleep(0)
        finally:
            await history.call(lock.release)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(hold()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
    linearizable(history, Lock)


def test_the_lock_of_asyncio_is_linearizable_under_cancellation() -> None:
    art.explore(use_a_lock, schedules=100).check()


def test_an_order_in_time_is_kept() -> None:
    history = history_of(("put", (1,), None, 0, 1), ("put", (2,), None, 2, 3), ("get", (), 2, 4, 5))

    with pytest.raises(AssertionError, match=r"#3 get\(\) -> 2, because the model gives 1"):
        linearizable(history, Queue)


def test_calls_that_overlap_may_be_swapped() -> None:
    history = history_of(("put", (1,), None, 0, 3), ("put", (2,), None, 1, 2), ("get", (), 2, 4, 5))

    order = linearizable(history, Queue)

    assert [call.args for call in order] == [(2,), (1,), ()]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), TimeoutError()])
@pytest.mark.parametrize("left", [[1], [2]])
def test_a_call_that_was_given_up_may_have_taken_effect(
    error: BaseException, left: list[int]
) -> None:
    history = history_of(
        ("put", (1,), None, 0, 1), ("put", (2,), None, 2, 3), ("get", (), error, 4, 5),
        ("get", (), left[0], 6, 7),
    )  # fmt: skip

    assert len(linearizable(history, Queue)) == (4 if left == [2] else 3)


def test_a_call_that_has_not_ended_may_have_taken_effect() -> None:
    history = history_of(("put", (1,), None, 0, None), ("get", (), 1, 2, 3))

    assert [call.name for call in linearizable(history, Queue)] == ["put", "get"]


def test_errors_have_to_be_those_of_the_model() -> None:
    empty = history_of(("get", (), IndexError("other words"), 0, 1))
    assert len(linearizable(empty, Queue)) == 1

    with pytest.raises(AssertionError, match="because the model raises IndexError"):
        linearizable(history_of(("get", (), KeyError(), 0, 1)), Queue)


def test_a_cache_that_loads_twice_is_found() -> None:
    fine = history_of(("get", ("a",), 0, 0, 1), ("get", ("a",), 0, 2, 3), ("get", ("b",), 1, 4, 5))
    linearizable(fine, Cache)

    twice = history_of(("get", ("a",), 0, 0, 2), ("get", ("a",), 1, 1, 3))
    with pytest.raises(AssertionError):
        linearizable(twice, Cache)


@pytest.mark.parametrize("model", [Log, SlottedLog, LogInOrder])
def test_a_dictionary_of_another_class_has_more_state_than_its_items(model: Any) -> None:
    history = history_of(
        ("add", ("a",), None, 0, 2), ("add", ("b",), None, 1, 3), ("read", (), ["b", "a"], 4, 5)
    )

    assert [call.args for call in linearizable(history, model)] == [("b",), ("a",), ()]


class Snapshots:
    def take(self) -> Any:
        return np.arange(2)


def test_results_that_cannot_be_compared_as_a_whole_are_refused() -> None:
    history = history_of(("take", (), np.arange(2), 0, 1))

    with pytest.raises(TypeError, match=r"Cannot tell whether array\(\[0, 1\]\).*such as a list"):
        linearizable(history, Snapshots)


def test_an_empty_history_is_linearizable() -> None:
    assert list(linearizable(History(), Queue)) == []


def by_brute_force(history: History, model: Any) -> bool:
    """Try every order of calls that have all ended."""
    calls = history.calls
    for order in permutations(calls):
        if any(
            later.ended is not None and later.ended < earlier.began
            for at, earlier in enumerate(order)
            for later in order[at:]
        ):
            continue
        own = model()
        try:
            if all(getattr(own, call.name)(*call.args) == call.result for call in order):
                return True
        except IndexError:
            continue
    return False


@pytest.mark.slow
def test_random_histories_get_the_answer_of_brute_force() -> None:
    answers = []
    for seed in range(400):
        rng = random.Random(seed)
        events = list(range(10))
        rng.shuffle(events)
        calls: list[Any] = []
        for number in range(5):
            began, ended = sorted(events[2 * number : 2 * number + 2])
            if rng.random() < 0.5:
                calls.append(("put", (rng.randrange(2),), None, began, ended))
            else:
                calls.append(("get", (), rng.randrange(2), began, ended))
        history = history_of(*calls)
        expected = by_brute_force(history, Queue)
        answers.append(expected)
        if expected:
            linearizable(history, Queue)
        else:
            with pytest.raises(AssertionError):
                linearizable(history, Queue)
    assert 40 < sum(answers) < 360


def test_the_memo_keeps_long_histories_short() -> None:
    """Eight calls overlap all the time: without the memo there are 8! orders per wave."""
    calls: list[Any] = [
        ("add", (0,), 0, 20 * wave + each, 20 * wave + 10 + each)
        for wave in range(6)
        for each in range(8)
    ]
    wrong = ("add", (1,), 7, 1000, 1001)

    with pytest.raises(AssertionError, match="calls before") as caught:
        linearizable(history_of(*calls, wrong), Counter)
    assert "#49 add(1) -> 7, because the model gives 1" in str(caught.value)


def test_a_model_without_the_method_is_refused() -> None:
    with pytest.raises(AttributeError, match="The model Counter has no method 'get'"):
        linearizable(history_of(("get", (), 1, 0, 1)), Counter)


@pytest.mark.parametrize("history", [None, [1]])
def test_something_else_is_no_history(history: Any) -> None:
    with pytest.raises(TypeError, match="Pass a History"):
        linearizable(history, Counter)


def test_results_and_errors_are_passed_on() -> None:
    async def main() -> None:
        history, items = History(), [3, 1, 2]
        assert await history.call(sorted, items, reverse=True) == [3, 2, 1]
        with pytest.raises(ValueError, match="5 is not in list"):
            await history.call(items.index, 5)
        assert repr(history) == "<History | 2 calls, 2 ended>"
        assert repr(history.calls[0]) == "sorted([3, 1, 2], reverse=True) -> [3, 2, 1]"
        assert history.calls[1].error is not None
        with pytest.raises(TypeError, match="needs a function"):
            await history.call(3)  # type: ignore[arg-type]

    art.run(main)
