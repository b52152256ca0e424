"""Processes for copies of servers: which are tried, when again, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, WorkerLostError
from aioreplica.strategies.parameter_server import _copies
from aioreplica.strategies.parameter_server._copies import CopiedServer, _Search

from .opening import until
from .test_copies import lose, opened


@pytest.mark.asyncio
async def test_a_server_stands_alone_until_there_is_another_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_copies, "RETRY_S", 0.0)
    async with opened() as (strategy, _):
        with strategy.scope():
            counter = ar.Variable(0, name="counter")
        create, asked = strategy.engine.create_state, asyncio.Event()
        is_there = False

        async def create_state(*args: Any, apart_from: Any = ()) -> Any:
            if apart_from and not is_there:
                asked.set()
                raise WorkerLostError("There is no process.", ranks=(0,))
            return await create(*args, apart_from=apart_from)

        await counter.read()
        assert strategy.unreplicated_servers == ()
        monkeypatch.setattr(strategy.engine, "create_state", create_state)
        await lose(strategy, 0)
        assert strategy.unreplicated_servers == (0,)
        assert "has no copy" in caplog.text
        await counter.assign_add(1)
        asked.clear()
        await asked.wait()  # it is looked for again and again
        is_there = True
        await until(lambda: not strategy.unreplicated_servers)
        await lose(strategy, 1)
        assert await counter.read() == 1


class Tries:
    """Copies as they are tried: the turn of each look for a process, and the process.

    Args:
        fails: Called with the process of a copy, and the number of the try from 1, before it
            follows for the first time.
        third_at: At which turn a third process comes.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, strategy: Any, fails: Callable[..., object],
        third_at: int = -1,
    ) -> None:  # fmt: skip
        self.found: list[tuple[int, int]] = []
        self.turn = 0
        places: dict[int, int] = {}
        alone, follow = _copies.Copies.alone, CopiedServer.follow
        create = strategy.engine.create_state

        def counted(copies: Any) -> Any:
            self.turn += 1
            return alone.fget(copies)  # type: ignore[attr-defined]

        async def create_and_note(*args: Any, apart_from: Any = ()) -> Any:
            if self.turn == third_at:
                await strategy.engine.reopen(3)
            state = await create(*args, apart_from=apart_from)
            places[id(state._state)] = state.place
            return state

        def follow_or_fail(server: CopiedServer, calls: Any) -> None:
            place = places.pop(id(server), None)
            if place is not None:
                self.found.append((self.turn, place))
                fails(place, len(self.found))
            follow(server, calls)

        patch.setattr(_copies, "RETRY_S", 0.0)
        patch.setattr(_copies.Copies, "alone", property(counted))
        patch.setattr(CopiedServer, "follow", follow_or_fail)
        patch.setattr(strategy.engine, "create_state", create_and_note)


def fail_six_times(_place: int, number: int) -> None:
    if number <= 6:
        raise ContextError(f"No room on disk {number}.")


def fail_in_process_1(place: int, _number: int) -> None:
    if place == 1:
        raise ContextError("No room on disk.")


@pytest.mark.asyncio
async def test_copies_that_fail_are_told_and_tried_again_ever_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_copies, "MAX_DOUBLINGS", 3)
    async with opened() as (strategy, _):
        with strategy.scope():
            counter = ar.Variable(0, name="counter")
        await counter.assign_add(1)
        tries = Tries(monkeypatch, strategy, fail_six_times)
        strategy.engine.lose_server(1)
        copies = strategy.servers.copies
        await until(lambda: len(tries.found) == 7 and not copies._alone)
        assert tries.found == [(turn, 1) for turn in (0, 2, 6, 14, 22, 30, 38)]
        for number in range(1, 7):
            assert f"No room on disk {number}." in caplog.text
            assert f"({number} have failed)" in caplog.text
        await lose(strategy, 0)
        assert await counter.read() == 1


@pytest.mark.asyncio
async def test_another_process_is_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (strategy, _):
        with strategy.scope():
            counter = ar.Variable(0, name="counter")
        await counter.assign_add(1)
        tries = Tries(monkeypatch, strategy, fail_in_process_1, third_at=17)
        strategy.engine.lose_server(1)
        copies = strategy.servers.copies
        await until(lambda: 2 in dict(tries.found).values() and not copies._alone)
        assert tries.found == [(0, 1), (2, 1), (6, 1), (14, 1), (17, 2)]  # within a pause of 16
        await lose(strategy, 0)
        assert await counter.read() == 1


@pytest.mark.asyncio
async def test_copies_whose_processes_are_lost_are_tried_ever_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as (strategy, _):
        with strategy.scope():
            counter = ar.Variable(0, name="counter")
        await counter.assign_add(1)

        def lose_process(place: int, number: int) -> None:
            if number <= 4:
                strategy.engine.lose_server(place)

        tries = Tries(monkeypatch, strategy, lose_process)
        strategy.engine.lose_server(1)
        await until(lambda: len(tries.found) == 5 and not strategy.servers.copies._alone)
        assert tries.found == [(turn, 1) for turn in (0, 1, 3, 7, 15)]
        assert caplog.text.count("Its process was lost.") == 4
        assert "(4 have failed, 4 of them with their processes)" in caplog.text
        await lose(strategy, 0)
        assert await counter.read() == 1


def test_a_loss_that_is_told_later_makes_pauses_longer_too() -> None:
    search, turns = _Search(), []
    for turn in range(16):
        if search.begin(turn):
            turns.append(turn)
            copy: Any = SimpleNamespace(is_lost=False)
            search.has_failed(copy, turn)
            copy.is_lost = True
    assert turns == [0, 1, 3, 7, 15]


def copy(*, is_lost: bool) -> Any:
    return SimpleNamespace(is_lost=is_lost)


def test_losses_make_no_pause_after_another_failure() -> None:
    """Another process is tried with the next look, and the next loss is the first one again."""
    search = _Search()

    def lose(turn: int) -> None:
        assert search.begin(turn)
        search.has_failed(copy(is_lost=True), turn)

    for turn in (0, 1, 3, 7, 15):
        lose(turn)
    living = copy(is_lost=False)
    assert not search.begin(30)
    assert search.begin(31)
    search.has_failed(living, 31)
    assert search.begin(32)
    assert search.failed == [living]  # another process than this one
    assert search.begin(33)
    assert search.failed == []
    lose(33)
    lose(34)
    assert not search.begin(35)
    assert search.begin(36)
    assert str(search) == "(8 have failed, 7 of them with their processes)"


def test_a_failure_beside_losses_does_not_make_their_pauses_shorter() -> None:
    search = _Search()
    living = copy(is_lost=False)
    assert search.begin(0)
    search.has_failed(living, 0)
    for turn in (1, 2, 4, 8):  # another process; the first one may be tried from the turn 2 on
        assert not any(search.begin(each) for each in range(turn - turn // 2 + 1, turn))
        assert search.begin(turn)
        search.has_failed(copy(is_lost=True), turn)
    assert not search.begin(15)
    assert search.begin(16)
