"""The registry: made once per name, from any thread, also while something else is made."""

import threading

import pytest

from aioreplica.context import Registry


def test_an_entry_is_made_once() -> None:
    registry = Registry()
    made: list[object] = []

    def factory() -> object:
        made.append(object())
        return made[-1]

    assert registry.once("a", factory) is registry.once("a", factory)
    assert len(made) == 1
    assert registry.once("b", factory) is made[1]


def test_none_counts_as_made() -> None:
    registry = Registry()

    assert registry.once("a", lambda: None) is None
    assert registry.once("a", lambda: 1) is None


def test_a_failed_factory_is_tried_again() -> None:
    registry = Registry()

    with pytest.raises(ZeroDivisionError):
        registry.once("a", lambda: 1 // 0)
    assert registry.once("a", lambda: 1) == 1


def test_a_factory_may_use_the_registry() -> None:
    registry = Registry()

    assert registry.once("outer", lambda: registry.once("inner", lambda: 5) + 1) == 6
    assert registry.once("inner", lambda: 0) == 5


def test_threads_get_one_object() -> None:
    registry = Registry()
    together = threading.Barrier(8)
    got: list[object] = []

    def ask() -> None:
        together.wait()
        got.append(registry.once("a", object))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(got) == 8
    assert len(set(map(id, got))) == 1


def test_a_fork_frees_a_lock_that_a_lost_thread_held() -> None:
    registry = Registry()
    inside, leave = threading.Event(), threading.Event()

    def slow() -> str:
        inside.set()
        leave.wait()
        return "slow"

    holder = threading.Thread(target=registry.once, args=("slow", slow))
    holder.start()
    inside.wait()

    registry.reset_after_fork()

    assert registry.once("quick", lambda: "quick") == "quick"
    leave.set()
    holder.join()


def test_an_entry_can_be_replaced_and_put_back() -> None:
    registry = Registry()
    real = registry.once("a", object)
    stand_in = object()

    assert registry.replace("a", stand_in) is real
    assert registry.once("a", object) is stand_in
    assert registry.replace("a", None, make=lambda: 1) is stand_in
    assert registry.once("a", object) == 1
    assert registry.replace("a", None) == 1
    assert registry.once("a", lambda: 2) == 2
