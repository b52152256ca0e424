"""Runs a program through the library's public doors, and notes everything that came of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio

import aioreplica as ar
import aioreplica.testing as art
from tests.fuzz import model
from tests.fuzz.program import CALLS, Plant, Program, Statement

LONG_S = 1e6
LATE = 400  # a nap longer than all others of a program together
REAL_LIMIT_S = 30
GRACE_CYCLES = 20  # a child task that was woken needs some to end
UNIT_S = {False: 0.05, True: 0.001}  # simulated, real

Way = Callable[[Callable[[], Any]], Awaitable[Any]]


class PlantedError(Exception):
    """What programs raise; every one is told apart."""


class HostileError(PlantedError):
    """One that refuses notes and whose texts raise."""

    def add_note(self, note: str, /) -> None:
        raise RuntimeError(f"no notes here: {note}")

    def __str__(self) -> str:
        raise RuntimeError("no text here")

    __repr__ = __str__


@dataclass
class Outcome:
    """How a program ended.

    Attributes:
        error: What its run raised.
        results: What every replica got, by statement.
        booms: The exceptions that were raised, by replica (-1 for a merge) and statement.
        sent: Whether the cancellation or the timeout from outside struck.
        left: What was left behind.
        snapshots: What readers saw of the variables meanwhile, and at the end.
        probe: What a small run on the same strategy gave afterwards.
        alarms: Warnings, logged errors and exceptions that nobody could see.
        warned: How often a lost handle was warned of.
    """

    error: BaseException | None = None
    results: list[dict[int, Any]] = field(default_factory=list)
    booms: dict[tuple[int, int], BaseException] = field(default_factory=dict)
    sent: bool = False
    left: list[str] = field(default_factory=list)
    snapshots: list[tuple[float, float, float]] = field(default_factory=list)
    probe: Any = None
    alarms: list[str] = field(default_factory=list)
    warned: int = 0


def play(program: Program) -> Outcome:
    """Run a program to its end.

    Raises:
        Exception: A deadlock, a leak or the like, which the simulated loop finds; TimeoutError if
            a program on a real loop hangs.
    """
    world = World(program)
    with _alarms(world.outcome):
        if program.real:
            asyncio.run(asyncio.wait_for(world.main(), REAL_LIMIT_S))
        else:
            art.run(world.main, seed=program.schedule)
        outcome = world.outcome
        del world
        gc.collect()
    return outcome


@contextmanager
def _alarms(outcome: Outcome) -> Iterator[None]:
    """Collect what Python and asyncio complain of."""
    handler = logging.Handler()
    handler.emit = lambda record: outcome.alarms.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("asyncio")
    before, propagates = sys.unraisablehook, logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    sys.unraisablehook = lambda args: outcome.alarms.append(f"unraisable: {args.exc_value!r}")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        sys.unraisablehook = before
    for warning in caught:
        text = str(warning.message)
        if text.startswith("The handle of") and "was never awaited" in text:
            outcome.warned += 1
        else:
            outcome.alarms.append(text)


class World:
    """One run of one program, begun anew for every play."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.begin()

    def begin(self) -> None:
        """Forget an earlier attempt: the simulated loop may start a program over."""
        if not hasattr(self, "outcome"):
            self.outcome = Outcome()
        fresh = Outcome(alarms=self.outcome.alarms)
        self.outcome.__dict__.update(fresh.__dict__)
        self.outcome.results = [{} for _ in range(self.program.size)]
        self.merges = {
            "total": self.total, "turned": self.turned, "async turned": self.async_turned,
            "raise": self.raising, "async raise": self.async_raising, "reduced": self.reduced,
        }  # fmt: skip

    # ---- around the run ------------------------------------------------------------------

    async def main(self) -> None:
        self.begin()
        program, outcome = self.program, self.outcome
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(program.size)]) as strategy:
            if {s.kind for s in program.statements} & {"write", "assign"}:
                with strategy.scope():
                    self.pair = ar.Variable(0.0, name="u"), ar.Variable(0.0, name="v")
                    self.lone = ar.Variable(0.0, name="w", aggregation="sum")
                    self.sgd = ar.optimizers.SGD(1.0)
            watcher = asyncio.create_task(self.watch(strategy)) if program.watched else None
            before = asyncio.all_tasks()
            try:
                await self.run(strategy)
            except BaseException as error:
                outcome.error = error
            await self.settle(before)
            if watcher is not None:
                watcher.cancel()
                await asyncio.wait([watcher])
            if hasattr(self, "pair"):
                self.look(strategy)
            probe = await strategy.run(_probe)
            outcome.probe = strategy.local_results(probe)

    async def run(self, strategy: ar.Strategy) -> None:
        program, outcome = self.program, self.outcome
        step = self.step if program.flavour == "async" else self.plain_step
        if program.outside == "timeout":
            limit = asyncio.timeout(self.seconds(program.moment) or 0.001)
            try:
                async with limit:
                    await strategy.run(step)
            finally:
                outcome.sent = limit.expired()
        elif program.outside == "cancel":
            task = asyncio.ensure_future(strategy.run(step))
            await self.nap(program.moment)
            outcome.sent = task.cancel()
            await task
        else:
            await strategy.run(step)

    async def settle(self, before: set[asyncio.Task[Any]]) -> None:
        for _ in range(GRACE_CYCLES):
            left = asyncio.all_tasks() - before
            if not left:
                break
            await asyncio.sleep(0)
        self.outcome.left = [repr(task) for task in asyncio.all_tasks() - before]

    async def watch(self, strategy: ar.Strategy) -> None:
        while True:
            self.look(strategy)
            await asyncio.sleep(UNIT_S[self.program.real])

    def look(self, strategy: ar.Strategy) -> None:
        u, v = self.pair
        seen = strategy.snapshot(u, v, self.lone)
        found = float(seen[u]), float(seen[v]), float(seen[self.lone])
        if not self.outcome.snapshots or self.outcome.snapshots[-1] != found:
            self.outcome.snapshots.append(found)

    # ---- naps ----------------------------------------------------------------------------

    def seconds(self, nap: int) -> float:
        return max(nap - 9, 0) * UNIT_S[self.program.real]

    async def nap(self, nap: int) -> None:
        if nap >= 10:
            await asyncio.sleep(self.seconds(nap))
        for _ in range(nap if nap < 10 else 0):
            await asyncio.sleep(0)

    # ---- a replica -----------------------------------------------------------------------

    async def step(self) -> int:
        me = _context().replica_id_in_sync_group
        cleanup = self.program.cleanups[me] if self.program.cleanups else ""
        try:
            await self.take_part(me)
        except asyncio.CancelledError:
            if cleanup == "swallow":
                return me
            await self.clean_up(cleanup, me)
            raise
        return me

    async def clean_up(self, cleanup: str, me: int) -> None:
        match cleanup:
            case "nap":
                await self.nap(12)
            case "device":
                await _context().run_on_device(int)
            case "collective":
                await _context().barrier()
            case "raise":
                raise PlantedError(f"replica {me} while it was cancelled")

    async def take_part(self, me: int) -> None:
        handles: dict[int, Any] = {}
        for statement in self.program.part_of(me):
            plant = self.program.plant_of(me, statement.uid)
            await self.nap(statement.nap_of(me))
            if self.program.is_late(me, statement.uid):
                await self.nap(LATE)
            if plant is None:
                await self.do(statement, me, handles)
            elif plant.kind == "return":
                return
            elif plant.kind != "skip":
                await self.misbehave(plant, statement, me, handles)
                if plant.kind == "withdraw":
                    return

    async def do(self, statement: Statement, me: int, handles: dict[int, Any]) -> None:
        match statement.kind:
            case "start":
                handles[statement.uid] = await self.start(statement, me)
                return
            case "finish":
                handed = [handles[h] for h in statement.handles if h in handles]
                result: Any = await self.finish(statement.way_of(me), handed)
                if len(handed) < len(statement.handles):
                    return
            case "give_up":
                for handle in statement.handles:
                    if handle in handles:
                        give_up(handles[handle])
                result = None
            case "device":
                result = None if await _context().run_on_device(int) == 0 else "?"
            case _:
                way = statement.way_of(me)
                if self.program.plant_of(-1, statement.uid) and way in {"group", "shield"}:
                    way = "task"  # a group would wrap the exception, a shield may lose it
                if way == "op":
                    result = await self.in_op(statement, me)
                    result = None if statement.kind == "assign" else result
                else:
                    result = await self.ways[way](self, lambda: self.call(statement, me))
        self.outcome.results[me][statement.uid] = result

    async def start(self, statement: Statement, me: int) -> Any:
        members = self.members(statement, _context())
        value = model.argument(self.program, statement, me)
        if statement.way_of(me) == "op":
            return await _context().run_on_device(members.start_all_reduce, statement.op, value)
        return members.start_all_reduce(statement.op, value)

    async def in_op(self, statement: Statement, me: int) -> Any:
        """Meet from within an op of this replica."""
        own = _context()
        return await own.run_on_device(lambda: self.call_blocking(statement, me, own))

    # ---- ways to wait --------------------------------------------------------------------

    async def plainly(self, make: Callable[[], Any]) -> Any:
        return await make()

    async def in_task(self, make: Callable[[], Any]) -> Any:
        return await asyncio.create_task(self.plainly(make))

    async def in_wait_for(self, make: Callable[[], Any]) -> Any:
        return await asyncio.wait_for(make(), LONG_S)

    async def in_timeout(self, make: Callable[[], Any]) -> Any:
        async with asyncio.timeout(LONG_S):
            return await make()

    async def in_scope(self, make: Callable[[], Any]) -> Any:
        with anyio.fail_after(LONG_S):
            return await make()

    async def in_gather(self, make: Callable[[], Any]) -> Any:
        return (await asyncio.gather(make(), self.nap(2)))[0]

    async def in_shield(self, make: Callable[[], Any]) -> Any:
        return await asyncio.shield(self.plainly(make))

    async def in_group(self, make: Callable[[], Any]) -> Any:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.plainly(make))
            group.create_task(self.prefetch())
        return task.result()

    async def prefetch(self) -> None:
        await _context().run_on_device(int)
        await self.nap(11)

    ways: dict[str, Callable[[World, Callable[[], Any]], Awaitable[Any]]] = {  # noqa: RUF012
        "await": plainly, "task": in_task, "wait_for": in_wait_for, "timeout": in_timeout,
        "scope": in_scope, "gather": in_gather, "shield": in_shield, "group": in_group,
    }  # fmt: skip

    async def finish(self, way: str, handles: list[Any]) -> list[Any]:
        if way == "gather":
            return list(await asyncio.gather(*handles))
        if way == "wait":
            await asyncio.wait(handles)
            return [handle.result() for handle in handles]
        results = []
        for handle in handles:
            if way == "impatient":
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.seconds(10)):
                        await handle
            if way == "twice":
                await handle
            if way == "callback":
                called: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                handle.add_done_callback(called.set_result)
                results.append((await called).result())
            else:
                wait = self.ways.get(way, World.plainly)
                results.append(await wait(self, lambda handle=handle: handle))  # type: ignore[misc]
        return results

    # ---- calls ---------------------------------------------------------------------------

    def members(self, statement: Statement, own: Any) -> Any:
        """Return the context of everyone or of a group."""
        return own if len(statement.members) == self.program.size else own.group(statement.members)

    def call(self, statement: Statement, me: int, kind: str = "", differs: bool = False) -> Any:
        """Make the statement's call; return what to await."""
        made = self.call_on(_context(), statement, me, kind, differs)
        if statement.kind == "merge_call" and statement.op.endswith("raise"):
            return self.expecting(made, statement)
        return self.nothing(made) if statement.kind == "assign" and not kind else made

    async def expecting(self, made: Awaitable[Any], statement: Statement) -> Any:
        try:
            return await made
        except PlantedError as error:
            return self.seen(error, statement)

    def seen(self, error: PlantedError, statement: Statement) -> str:
        """Look at what a merge raised; that everyone catches it is part of the program."""
        if self.program.plant_of(-1, statement.uid):
            raise error
        return "raised" if error is self.outcome.booms.get((-1, statement.uid)) else "otherwise"

    def call_blocking(
        self, statement: Statement, me: int, own: Any, kind: str = "", differs: bool = False
    ) -> Any:
        """Make the statement's call on the device thread."""
        try:
            return self.call_on(own.blocking, statement, me, kind, differs)
        except PlantedError as error:
            if statement.kind == "merge_call" and statement.op.endswith("raise"):
                return self.seen(error, statement)
            raise

    def call_on(
        self, own: Any, statement: Statement, me: int, kind: str = "", differs: bool = False
    ) -> Any:
        """Make the statement's call, or one of another kind, or one that differs in a detail."""
        members, op = self.members(statement, own), statement.op
        is_blocking = not isinstance(own, ar.ReplicaContext)
        value: Any = None
        if statement.kind not in {"barrier", "any", "all", "write", "assign"}:
            giver = statement.members[0] if statement.kind == "agree" else me
            value = model.argument(self.program, statement, giver)
            value = [value] if differs else value
        match kind or statement.kind:
            case "barrier":
                return members.barrier()
            case "any" | "all" as name:
                return getattr(members, name)(model.flag(self.program, statement, me))
            case "agree":
                return members.agree(value)
            case "all_reduce" | "reduce_scatter" | "start" as name:
                name = "start_all_reduce" if name == "start" else name
                return getattr(members, name)(op, value)
            case "all_gather" | "all_to_all" as name:
                return getattr(members, name)(value, statement.number)
            case "broadcast":
                source = (statement.number + differs) % len(statement.members)
                return members.broadcast(value, source)
            case "merge_call":
                other = "turned" if op == "total" else "total"
                merge = self.merges[other if differs else op]
                return members.merge_call(merge, (str(statement.uid), value))
            case "write":
                x = model.step_of(self.program, statement, me)
                pairs = [(-x, self.pair[0]), (-2 * x, self.pair[1])]
                sgd: Any = self.sgd.blocking if is_blocking else self.sgd
                return sgd.apply_gradients(pairs)
        lone: Any = self.lone.blocking if is_blocking else self.lone
        return lone.assign_add(model.step_of(self.program, statement, me))

    async def nothing(self, made: Awaitable[Any]) -> None:
        await made

    # ---- merge functions -----------------------------------------------------------------

    def check_plant(self, uid: str) -> None:
        if self.program.plant_of(-1, int(uid)):
            raise self.boom(-1, int(uid))

    def total(self, strategy: Any, uid: str, values: Any) -> Any:
        self.check_plant(uid)
        statement = self.program.statement(int(uid))
        columns = zip(*map(model.leaves_of, _parts(values, len(statement.members))), strict=True)
        sums = [model.reduced("sum", list(column)) for column in columns]
        return model.tree(statement.value, sums)

    def turned(self, strategy: Any, uid: str, values: Any) -> Any:
        self.check_plant(uid)
        parts = _parts(values, len(self.program.statement(int(uid)).members))
        return ar.PerReplica(parts[::-1])

    async def async_turned(self, strategy: Any, uid: str, values: Any) -> Any:
        await self.nap(11)
        return self.turned(strategy, uid, values)

    def raising(self, strategy: Any, uid: str, values: Any) -> Any:
        raise self.boom(-1, int(uid))

    async def async_raising(self, strategy: Any, uid: str, values: Any) -> Any:
        await self.nap(11)
        raise self.boom(-1, int(uid))

    async def reduced(self, strategy: Any, uid: str, values: Any) -> Any:
        self.check_plant(uid)
        return await strategy.reduce("sum", values)

    # ---- misbehaviour --------------------------------------------------------------------

    def boom(
        self, replica: int, uid: int, kind: type[PlantedError] = PlantedError
    ) -> BaseException:
        """Return the exception of a plant; made once, so that it can be known again."""
        if (replica, uid) in self.outcome.booms:
            raise AssertionError(f"what only one may raise was raised twice: {replica}, {uid}")
        made = kind(f"planted in replica {replica} at {uid}")
        self.outcome.booms[replica, uid] = made
        return made

    async def misbehave(
        self, plant: Plant, statement: Statement, me: int, handles: dict[int, Any]
    ) -> None:
        match plant.kind:
            case "raise":
                raise self.boom(me, statement.uid)
            case "raise hostile":
                raise self.boom(me, statement.uid, HostileError)
            case "other" | "differs":
                made = self.otherwise(plant, statement, me, _context())
                if isinstance(made, ar.Handle):
                    handles[statement.uid] = made
                else:
                    await made
            case "never awaited":
                made = self.call_on(_context(), statement, me)
                if statement.kind == "start":
                    handles[statement.uid] = made
            case "two at once":
                await asyncio.gather(self.call(statement, me), self.call(statement, me, "barrier"))
            case "withdraw" | "withdraw on":
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.seconds(10)):
                        await self.call(statement, me)
            case "timeout strikes":
                async with asyncio.timeout(self.seconds(10)):
                    await self.call(statement, me)
            case "cancel child":
                child = asyncio.create_task(self.plainly(lambda: self.call(statement, me)))
                await self.nap(10)
                child.cancel()
                with suppress(asyncio.CancelledError):
                    await child
            case "sibling raises":
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.plainly(lambda: self.call(statement, me)))
                    await self.nap(10)
                    raise self.boom(me, statement.uid)
            case "bare cancel":
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                future.cancel()
                await future

    def otherwise(self, plant: Plant, statement: Statement, me: int, own: Any) -> Any:
        """Make another call than the others do, or the same with another argument."""
        plain = {"any", "all", "barrier", "write", "assign"}
        if plant.kind == "other" or statement.kind in plain:
            return self.call_on(
                own, statement, me, "any" if statement.kind == "barrier" else "barrier"
            )
        return self.call_on(own, statement, me, differs=True)

    # ---- plain step functions ------------------------------------------------------------

    def plain_step(self) -> int:
        own = _context()
        me = own.replica_id_in_sync_group
        for statement in self.program.part_of(me):
            plant = self.program.plant_of(me, statement.uid)
            time.sleep(self.seconds(statement.nap_of(me)))
            if plant is not None and plant.kind == "return":
                return me
            if plant is not None and plant.kind == "raise":
                raise self.boom(me, statement.uid)
            if plant is not None and plant.kind in {"other", "differs"}:
                self.otherwise(plant, statement, me, own.blocking)
            if plant is None and statement.kind in CALLS:
                result = self.call_blocking(statement, me, own)
                if statement.kind == "assign":
                    result = None
                self.outcome.results[me][statement.uid] = result
        return me


async def _probe() -> Any:
    return await _context().all_reduce("sum", 1)


def _context() -> ar.ReplicaContext:
    found = ar.get_replica_context()
    assert found is not None
    return found


def give_up(handle: ar.Handle) -> None:
    """Say that a handle's result is not wanted."""
    handle.cancel()


def _parts(values: Any, count: int) -> list[Any]:
    """Take a tree of PerReplica values apart, replica by replica."""

    def part(value: Any, i: int) -> Any:
        if isinstance(value, ar.PerReplica):
            return value.values[i]
        if isinstance(value, dict):
            return {key: part(one, i) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(part(one, i) for one in value)
        return value

    return [part(values, i) for i in range(count)]


def num_threads() -> int:
    """Return how many threads there are."""
    return threading.active_count()
