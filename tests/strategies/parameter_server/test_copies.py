"""Servers and their copies: what both know, what is waited for, and who takes whose place."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalClosureEngine, StateHandle
from aioreplica.errors import ContextError, WorkerLostError
from aioreplica.optimizers import recipe_of
from aioreplica.strategies.parameter_server._copies import CopiedServer
from aioreplica.strategies.parameter_server._messages import (
    FROM_COORDINATOR,
    Count,
    Gradient,
    Key,
    NewShard,
    Pull,
    Stamp,
    Write,
)
from aioreplica.strategies.parameter_server._server import TERM
from tests.parameter_server.coordinating import Gate
from tests.strategies.parameter_server.test_strategy import OPTIMIZERS

W: Key = (1, 0)
ITERATIONS: Key = (9, 0)
LIMIT_S = 30.0


@final
class Way(StateHandle):
    """A handle of a copy, through which nothing comes while it is closed."""

    def __init__(self, copy: Any) -> None:
        self.server = 0
        self.is_open = threading.Event()
        self.is_open.set()
        self.has_come = threading.Event()
        self.error: Exception | None = None
        self._copy = copy

    @property
    def is_lost(self) -> bool:
        return False

    def when_lost(self, tell: Callable[[], object]) -> None:
        """It is not."""

    async def call(self, method: str, *args: Any, is_wait: bool = False) -> Any:
        raise AssertionError

    def begin(self, method: str, *args: Any, is_wait: bool = False) -> Callable[[], Any]:
        def finish() -> Any:
            self.has_come.set()
            assert self.is_open.wait(LIMIT_S)
            if self.error is not None:
                raise self.error
            return getattr(self._copy, method)(*pickle.loads(pickle.dumps(args)))

        return finish


def new_server() -> CopiedServer:
    server = CopiedServer(False, 0)
    server.create([
        NewShard(W, np.arange(8.0).reshape(4, 2), "w", True, None),
        NewShard(ITERATIONS, np.int64(0), "iterations", False, None),
    ])  # fmt: skip
    return server


def new_copy() -> CopiedServer:
    return CopiedServer(True, 0)


def learn(server: CopiedServer, rate: float, version: int) -> None:
    recipe = pickle.dumps(recipe_of(ar.optimizers.Adam(rate), []))
    server.learn(ITERATIONS[0], recipe, version, version)


def add(server: CopiedServer, closure: int, amount: float = 1.0) -> None:
    item = Write(W, 0, "assign_add", np.full((4, 2), amount))
    server.push(Stamp(0, closure, 0, "run"), [item])


def wait_for(server: CopiedServer) -> None:
    server.followed().result(LIMIT_S)


def image_of(server: CopiedServer) -> Any:
    """Return all that a server knows, in lists and numbers; reads are counted by each alone."""

    def plain(thing: Any) -> Any:
        if isinstance(thing, np.ndarray):
            return thing.tolist()
        if isinstance(thing, dict):
            return {key: plain(each) for key, each in thing.items()}
        if isinstance(thing, (tuple, list)):
            return [plain(each) for each in thing]
        if type(thing).__name__ == "Leases":
            return repr(thing), plain(thing._taken), plain(thing._learned)
        return replace(thing, pulls=0, bytes_pulled=0) if is_dataclass(thing) else thing

    return plain(server._state.image())


def something(server: CopiedServer, rng: Any, number: int) -> None:
    """Do one thing to a server."""
    closure = number // 2
    stamp = Stamp(0, closure, max(0, closure - 3), f"run {number}")
    kind = rng.integers(6)
    if kind == 0:
        server.push(stamp, [Write(W, number % 2, "assign_add", rng.normal(size=(4, 2)))])
    elif kind == 1:
        slices = ar.IndexedSlices(rng.normal(size=(1, 2)), [int(rng.integers(4))], (4, 2))
        gradient = Gradient(W, number % 2, ITERATIONS[0], slices, None, None, number % 3)
        server.push(stamp, [Count(ITERATIONS, number % 2), gradient])
    elif kind == 2:
        learn(server, float(rng.uniform(0.01, 0.1)), number)
    elif kind == 3:
        failed = (closure,) if number % 5 == 0 else ()
        server.report(max(0, closure - 3), failed, (), (closure - 1,) if number % 7 == 0 else ())
    elif kind == 4:
        server.take(stamp, 5, 2, 0, number % 2, 0, None)
    else:
        with pytest.raises(KeyError):
            server.push(stamp, [Write((77, 0), 0, "assign", np.zeros(1))])


@pytest.mark.parametrize("seed", range(6))
def test_a_copy_that_comes_at_any_time_knows_all_that_its_server_knows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    server, copies = new_server(), [new_copy(), new_copy()]
    learn(server, 0.1, 0)
    first, second = sorted(rng.integers(0, 60, 2))
    for number in range(60):
        if number == first:
            server.copy_to(Way(copies[0]))
        if number == second:
            wait_for(server)
            server.copy_to(Way(copies[1]))
        something(server, rng, number)
    wait_for(server)

    assert image_of(copies[1]) == image_of(server)
    copies[1].promote()
    for each in (server, copies[1]):  # and they go on alike
        again = np.random.default_rng(seed)
        each.stand_alone()
        for number in range(200, 220):
            something(each, again, number)
    (_, here), (_, there) = server.pull([Pull(W)])[0], copies[1].pull([Pull(W)])[0]
    assert here is not None
    assert there is not None
    assert here.tobytes() == there.tobytes()


def test_who_asks_waits_until_the_copy_has_followed() -> None:
    server, copy = new_server(), new_copy()
    way = Way(copy)
    way.is_open.clear()
    server.copy_to(way)
    add(server, 0)
    assert way.has_come.wait(LIMIT_S)
    asked = server.followed()
    assert server.pull([Pull(W)])[0][0] == 1  # others are not held up
    assert not asked.done()
    assert not asked.cancel()
    way.is_open.set()
    asked.result(LIMIT_S)
    assert image_of(copy) == image_of(server)


@pytest.mark.parametrize("what", ["another", "alone"])
def test_who_waits_for_a_lost_copy_is_served_by_the_next(what: str) -> None:
    server, lost, copy = new_server(), Way(new_copy()), new_copy()
    lost.is_open.clear()
    server.copy_to(lost)
    add(server, 0)
    assert lost.has_come.wait(LIMIT_S)
    asked = server.followed()
    if what == "another":
        server.copy_to(Way(copy))
    else:
        server.stand_alone()
    asked.result(LIMIT_S)
    lost.is_open.set()
    assert server.has_copy() is (what == "another")
    if what == "another":
        assert image_of(copy) == image_of(server)


def test_a_copy_that_cannot_be_reached_is_told_to_who_waits() -> None:
    server, way = new_server(), Way(new_copy())
    server.copy_to(way)
    wait_for(server)
    assert server.has_copy()
    way.error = ConnectionError("no route")
    add(server, 0)
    with pytest.raises(WorkerLostError, match=r"copy of parameter server 0 .* no route") as caught:
        wait_for(server)
    assert caught.value.ranks == (0,)
    assert not server.has_copy()
    add(server, 1)  # nothing is kept for it
    with pytest.raises(WorkerLostError, match="no route"):
        wait_for(server)


def test_a_server_that_is_thought_dead_learns_it() -> None:
    server, copy = new_server(), new_copy()
    server.copy_to(Way(copy))
    wait_for(server)
    copy.promote()
    copy.promote()
    add(server, 0, 100.0)
    with pytest.raises(WorkerLostError, match="taken the place"):
        wait_for(server)
    add(copy, 0)
    assert copy.pull([Pull(W)])[0][1] is not None
    np.testing.assert_array_equal(
        copy.pull([Pull(W)])[0][1],
        np.arange(8.0).reshape(4, 2) + 1,  # type: ignore[arg-type]
    )


def test_an_empty_copy_takes_nobodys_place() -> None:
    with pytest.raises(ContextError, match="not complete"):
        new_copy().promote()


def test_a_copy_that_ends_otherwise_follows_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    server, copy = new_server(), new_copy()
    server.copy_to(Way(copy))
    wait_for(server)
    monkeypatch.delitem(copy._state._shards, W)
    add(server, 0)
    with pytest.raises(WorkerLostError, match="otherwise"):
        wait_for(server)


def test_versions_of_a_new_term_are_like_none_before() -> None:
    """A value that a lost server has given out is not taken for one of its successor."""
    server, copy, next_copy = new_server(), new_copy(), new_copy()
    learn(server, 0.1, 0)
    server.copy_to(Way(copy))
    for closure in range(3):
        add(server, closure)
    wait_for(server)
    copy.promote()
    [(version, _)] = copy.pull([Pull(W)])
    assert version == TERM + 3
    gradient = Gradient(W, 0, ITERATIONS[0], np.ones((4, 2)), 0, 1)  # read two versions before
    copy.push(Stamp(0, 5, 0), [gradient])
    assert copy.report(0).max_staleness == 2
    copy.copy_to(Way(next_copy))
    wait_for(copy)
    next_copy.promote()
    assert next_copy.pull([Pull(W)])[0][0] == 2 * TERM + 4


def test_a_write_of_the_program_that_comes_again_counts_once() -> None:
    server = new_server()
    one = [Write(W, 0, "assign_add", np.ones((4, 2)))]
    for attempt in ("a", "b", "a", ""):
        server.push(Stamp(0, FROM_COORDINATOR, 0, attempt), one)
    assert server.pull([Pull(W)])[0][0] == 3


@pytest.mark.parametrize("kind", ["write", "gradient", "weighted", "slices"])
def test_a_closure_may_write_its_arrays_again_once_they_are_pushed(kind: str) -> None:
    server, copy = new_server(), new_copy()
    way = Way(copy)
    way.is_open.clear()
    server.copy_to(way)
    learn(server, 0.1, 0)
    array, rows = np.full((4, 2), 2.0), np.arange(4)
    slices = ar.IndexedSlices(array, rows, (4, 2))
    pushed = {"write": array, "gradient": array, "weighted": ar.Weighted(array, 4)}
    value = pushed.get(kind, slices)
    server.push(
        Stamp(0, 0, 0, "run"),
        [
            Write(W, 0, "assign_add", value)
            if kind == "write"
            else Gradient(W, 0, ITERATIONS[0], value, 0, None)
        ],
    )
    array[...] = 1e9
    rows[...] = 0
    way.is_open.set()
    wait_for(server)

    assert image_of(copy) == image_of(server)
    assert server.pull([Pull(W)])[0][1] is not None
    assert np.max(np.abs(server.pull([Pull(W)])[0][1])) < 10.0  # type: ignore[arg-type]


def test_the_thread_of_a_link_ends_with_its_server() -> None:
    server = new_server()
    before = set(threading.enumerate())
    server.copy_to(Way(new_copy()))
    wait_for(server)
    (thread,) = [each for each in threading.enumerate() if each not in before]
    del server
    thread.join(LIMIT_S)
    assert not thread.is_alive()


# ---- a strategy ------------------------------------------------------------------------------


@asynccontextmanager
async def opened(num_workers: int = 1, **options: Any) -> AsyncIterator[Any]:
    engine = LocalClosureEngine(num_workers)
    async with (
        asyncio.timeout(LIMIT_S),
        ar.ParameterServerStrategy(engine, replicate=True, **options) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        yield strategy, coordinator


async def lose(strategy: Any, place: int) -> None:
    """Lose the process of a server, and wait until all has a copy again."""
    strategy.engine.lose_server(place)
    for server in range(strategy.num_ps):
        assert await strategy.servers.copies.repair(server)


def descend(w: Any, optimizer: Any, target: Any) -> None:
    optimizer.apply_gradients([(w.value - target, w)])


@pytest.mark.asyncio
@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_training_goes_on_with_the_same_bits(name: str) -> None:
    async def trained(losses: Sequence[int], num_ps: int) -> tuple[bytes, int]:
        partitioner = ar.FixedShardsPartitioner(2)
        async with opened(num_ps=num_ps, variable_partitioner=partitioner) as both:
            strategy, coordinator = both
            with strategy.scope():
                w, optimizer = ar.Variable(np.arange(10.0).reshape(5, 2)), OPTIMIZERS[name]()
            for step, target in enumerate(np.linspace(-1, 1, 8)):
                await coordinator.schedule(descend, (w, optimizer, target))
                await coordinator.join()
                if step in losses:
                    await lose(strategy, step % 2)
            return (await w.read()).tobytes(), int(await optimizer.iterations.read())

    expected = await trained((), 2)
    assert expected[1] == 8
    assert await trained(range(8), 2) == expected
    assert await trained((2, 3, 6), 1) == expected


REACHED, MAY_GO_ON = threading.Event(), threading.Event()


def push_twice(counters: Sequence[Any], stop_before: int) -> None:
    """Push to two servers, and to both again; stop once where a test wants."""
    for turn, counter in enumerate([*counters, *counters]):
        if turn == stop_before and not REACHED.is_set():
            REACHED.set()
            assert MAY_GO_ON.wait(LIMIT_S)
        counter.assign_add(1)
    if stop_before == 4 and not REACHED.is_set():
        REACHED.set()
        assert MAY_GO_ON.wait(LIMIT_S)


@pytest.mark.asyncio
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("stop_before", range(5))
async def test_a_server_is_lost_in_the_middle_of_a_closure(place: int, stop_before: int) -> None:
    REACHED.clear()
    MAY_GO_ON.clear()
    async with opened(num_ps=2) as (strategy, coordinator):
        with strategy.scope():
            counters = [ar.Variable(0, name=f"c{i}") for i in range(2)]
        others = [await coordinator.schedule(push_twice, (counters, 9)) for _ in range(3)]
        await coordinator.join()
        await coordinator.schedule(push_twice, (counters, stop_before))
        late = [await coordinator.schedule(push_twice, (counters, 9)) for _ in range(8)]
        assert await asyncio.to_thread(REACHED.wait, LIMIT_S)
        await lose(strategy, place)
        MAY_GO_ON.set()
        await coordinator.join()
        await coordinator.fetch([*others, *late])

        assert [int(await each.read()) for each in counters] == [24, 24]
        assert strategy.lost_variables == ()
        assert coordinator.statistics().num_failed == 0


def read_and_push(w: Any, optimizer: Any, gate: Gate | None = None) -> None:
    np.asarray(w.value)
    if gate is not None:
        gate.pass_through()
    optimizer.apply_gradients([(-np.ones(2), w)])


@pytest.mark.asyncio
async def test_a_copy_drops_the_gradients_that_its_server_drops_as_too_old() -> None:
    async with opened(2, num_ps=2, max_staleness=0) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros(2)), ar.optimizers.SGD(1.0)
        for turn in range(3):  # with the server, with its copy, and with the copy of that
            gate = Gate()
            late = await coordinator.schedule(read_and_push, (w, optimizer, gate))
            await gate.reached()
            await (await coordinator.schedule(read_and_push, (w, optimizer))).fetch()
            gate.open()
            await late.fetch()
            await lose(strategy, turn % 2)
            assert (await w.read()).tolist() == [turn + 1.0] * 2
        await coordinator.join()
        assert coordinator.statistics().pushes_stale == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_write_of_the_program_counts_once(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(num_ps=2) as (strategy, _):
        with strategy.scope():
            counter = ar.Variable(0, name="counter")
        await counter.read()
        done, losses = CopiedServer.followed, [0]

        def followed(server: CopiedServer) -> Any:
            if when == "after":
                done(server).result(LIMIT_S)
            if losses:
                strategy.engine.lose_server(losses.pop())
            return done(server)

        monkeypatch.setattr(CopiedServer, "followed", followed)
        assert await counter.assign_add(1) == 1
        assert losses == []
        assert await counter.assign_add(1) == 2


def part_of_twenty(context: Any) -> Any:
    return range(context.input_pipeline_id, 20, context.num_input_pipelines)


def next_of(iterator: Any) -> Any:
    return next(iterator)


@pytest.mark.asyncio
async def test_what_was_taken_from_iterators_is_known_by_the_copy() -> None:
    async with opened(2, num_ps=2) as (strategy, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(part_of_twenty))
        found = []
        for turn in range(4):
            remotes = [await coordinator.schedule(next_of, (iterator,)) for _ in range(5)]
            found += await coordinator.fetch(remotes)
            await lose(strategy, turn % 2)
        assert sorted(found) == [*range(20)]


@pytest.mark.asyncio
async def test_both_copies_lost_at_once_go_back_to_the_checkpoint(tmp_path: Path) -> None:
    async with (
        ar.CheckpointManager(tmp_path) as manager,
        opened(num_ps=2) as (strategy, coordinator),
    ):
        with strategy.scope():
            w, optimizer = ar.Variable(np.ones(3), name="w"), ar.optimizers.Adam(0.1)
        state = {"w": w, "optimizer": optimizer}
        await coordinator.schedule(descend, (w, optimizer, 0.0))
        await coordinator.join()
        await manager.save(1, state)
        saved = await w.read()
        strategy.engine.lose_server(0)
        strategy.engine.lose_server(1)
        with pytest.raises(WorkerLostError, match="'w'"):
            await w.read()
        assert "w" in strategy.lost_variables

        await manager.restore(state)
        np.testing.assert_array_equal(await w.read(), saved)
        await coordinator.schedule(descend, (w, optimizer, 0.0))
        await coordinator.join()
        trained = await w.read()
        await lose(strategy, 0)
        await lose(strategy, 1)
        np.testing.assert_array_equal(await w.read(), trained)


@pytest.mark.asyncio
async def test_without_copies_nothing_is_different() -> None:
    async with ar.ParameterServerStrategy(LocalClosureEngine(1)) as strategy:
        assert strategy.servers.copies is None
        assert strategy.unreplicated_servers == ()
