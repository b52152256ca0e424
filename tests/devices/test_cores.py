"""Cores: how many there are, and moving threads between them."""

import os
import threading

import pytest

from aioreplica.devices._cores import find_getcpu, move_away, num_cores

has_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system places threads by itself"
)


@has_affinity
def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})

    assert num_cores() == 3


@pytest.mark.parametrize(("counted", "expected"), [(6, 6), (None, 1)])
def test_systems_that_do_not_say_have_the_cores_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, counted: int | None, expected: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)

    assert num_cores() == expected


@has_affinity
def test_the_core_of_a_thread_is_one_that_it_may_use() -> None:
    getcpu = find_getcpu()

    assert getcpu is None or getcpu() in os.sched_getaffinity(0)


def test_systems_without_affinity_have_no_way_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)

    assert find_getcpu() is None


@has_affinity
def test_a_thread_is_moved_once_and_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: calls.append(args))

    move_away(77, 1)

    assert calls == [(77, {0, 2}), (77, {0, 1, 2})]


@has_affinity
def test_a_thread_that_has_one_core_only_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: calls.append(args))

    move_away(77, 3)

    assert calls == []


@has_affinity
def test_a_thread_that_has_ended_is_passed_over() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.native_id is not None

    move_away(thread.native_id, 0)
