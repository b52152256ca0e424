"""Runs a program through the library's public doors, and notes everything that came of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import anyio

import aioreplica as ar
import aioreplica.testing as art
from tests.fuzz.calls import UNIT_S, Calls, HostileError, Outcome, PlantedError, context
from tests.fuzz.program import TALKS, Plant, Program, Statement, may_stall

LONG_S = 1e6
LATE = 400  # a nap longer than all others of a program together
REAL_LIMIT_S = 30
GRACE_CYCLES = 20  # a child task that was woken needs some to end
STALL_S = {False: 1e4, True: 2.0}  # simulated, real

Way = Callable[[Callable[[], Any]], Awaitable[Any]]


def play(program: Program) -> Outcome:
    """Run a program to its end.

    Raises:
        Exception: A deadlock, a leak or the like, which the simulated loop finds; TimeoutError if
            a program on a real loop hangs.
    """
    world = World(program)
    with _alarms(world.outcome):
        if program.real:
            with _devices(program):
                asyncio.run(asyncio.wait_for(world.main(), REAL_LIMIT_S))
        else:
            art.run(world.main, seed=program.schedule)
        outcome = world.outcome
        del world
        gc.collect()
    return outcome


def play_beside_others(program: Program) -> Outcome:
    """Run a real program to its end, without looking at what belongs to the whole process."""
    world = World(program)
    asyncio.run(asyncio.wait_for(world.main(), REAL_LIMIT_S))
    return world.outcome


def _devices(program: Program) -> AbstractContextManager[object]:
    """Put devices with streams in the place of the machine's, if the program is for these."""
    if not program.streams:
        return nullcontext()
    from tests.devices import streams

    return streams.installed(program.streams)


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
        elif "seem to wait for each other" in text:
            outcome.circles += 1
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
        self.calls = Calls(self.program, self.outcome)

    # ---- around the run ------------------------------------------------------------------

    async def main(self) -> None:
        self.begin()
        program, outcome = self.program, self.outcome
        kind = "cuda" if program.streams else "cpu"
        async with ar.MirroredStrategy([f"{kind}:{i}" for i in range(program.size)]) as strategy:
            if {s.kind for s in program.statements} & {"write", "assign"}:
                self.calls.make_variables(strategy)
            watcher = asyncio.create_task(self.watch(strategy)) if program.watched else None
            before = asyncio.all_tasks()
            try:
                await self.run(strategy)
            except BaseException as error:
                outcome.error = error
            await self.settle(before)
            self.calls.read_the_rest()
            if watcher is not None:
                watcher.cancel()
                await asyncio.wait([watcher])
            if hasattr(self.calls, "pair"):
                self.look(strategy)
            probe = await strategy.run(_probe)
            outcome.probe = strategy.local_results(probe)

    async def run(self, strategy: ar.Strategy) -> None:
        program, outcome = self.program, self.outcome
        stall_s = STALL_S[program.real] if may_stall(program) else None
        options = ar.RunOptions(stall_timeout=stall_s)
        step = self.step if program.flavour == "async" else self.plain_step
        if program.outside == "timeout":
            limit = asyncio.timeout(self.calls.seconds(program.moment) or 0.001)
            try:
                async with limit:
                    await strategy.run(step, options=options)
            finally:
                outcome.sent = limit.expired()
        elif program.outside == "cancel":
            task = asyncio.ensure_future(strategy.run(step, options=options))
            await self.calls.nap(program.moment)
            outcome.sent = task.cancel()
            await task
        else:
            await strategy.run(step, options=options)

    async def settle(self, before: set[asyncio.Task[Any]]) -> None:
        for _ in range(GRACE_CYCLES):
            left = asyncio.all_tasks() - before
            if not left:
                break
            await asyncio.sleep(0)
        self.outcome.left = [repr(task) for task in asyncio.all_tasks() - before]

    async def watch(self, strategy: ar.Strategy) -> None:
        real = self.program.real
        pause_s = STALL_S[real] / 50 if may_stall(self.program) else UNIT_S[real]
        while True:  # seldom where a timeout is waited for: a simulated run has a budget of steps
            self.look(strategy)
            await asyncio.sleep(pause_s)

    def look(self, strategy: ar.Strategy) -> None:
        u, v = self.calls.pair
        seen = strategy.snapshot(u, v, self.calls.lone)
        found = float(seen[u]), float(seen[v]), float(seen[self.calls.lone])
        if not self.outcome.snapshots or self.outcome.snapshots[-1] != found:
            self.outcome.snapshots.append(found)

    # ---- a replica -----------------------------------------------------------------------

    async def step(self) -> int:
        me = context().replica_id_in_sync_group
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
                await self.calls.nap(12)
            case "device":
                await context().run_on_device(int)
            case "collective":
                await context().barrier()
            case "raise":
                raise PlantedError(f"replica {me} while it was cancelled")

    async def take_part(self, me: int) -> None:
        handles: dict[int, Any] = {}
        for statement in self.program.part_of(me):
            plant = self.program.plant_of(me, statement.uid)
            await self.calls.nap(statement.nap_of(me))
            if self.program.is_late(me, statement.uid):
                await self.calls.nap(LATE)
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
                result = None if await context().run_on_device(int) == 0 else "?"
            case _:
                way = statement.way_of(me)
                if self.program.plant_of(-1, statement.uid) and way in {"group", "shield"}:
                    way = "task"  # a group would wrap the exception, a shield may lose it
                if way == "op":
                    result = await self.in_op(statement, me)
                    result = None if statement.kind == "assign" else result
                else:
                    result = await self.ways[way](self, lambda: self.calls.call(statement, me))
        results = [result]
        del result
        self.calls.keep(results, me, statement.uid)

    async def start(self, statement: Statement, me: int) -> Any:
        members = self.calls.members(statement, context())
        value = self.calls.argument(statement, me)
        if statement.way_of(me) == "op":
            return await context().run_on_device(members.start_all_reduce, statement.op, value)
        return members.start_all_reduce(statement.op, value)

    async def in_op(self, statement: Statement, me: int) -> Any:
        """Meet from within an op of this replica."""
        own = context()
        return await own.run_on_device(lambda: self.calls.call_blocking(statement, me, own))

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
        return (await asyncio.gather(make(), self.calls.nap(2)))[0]

    async def in_shield(self, make: Callable[[], Any]) -> Any:
        return await asyncio.shield(self.plainly(make))

    async def in_group(self, make: Callable[[], Any]) -> Any:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.plainly(make))
            group.create_task(self.prefetch())
        return task.result()

    async def prefetch(self) -> None:
        await context().run_on_device(int)
        await self.calls.nap(11)

    ways: dict[str, Callable[[World, Callable[[], Any]], Awaitable[Any]]] = {  # noqa: RUF012
        "await": plainly, "task": in_task, "wait_for": in_wait_for, "timeout": in_timeout,
        "scope": in_scope, "gather": in_gather, "shield": in_shield, "group": in_group,
    }  # fmt: skip

    async def finish(self, way: str, handles: list[Any]) -> list[Any]:
        if way == "gather":
            return list(await asyncio.gather(*handles))
        if way == "wait" and handles:
            await asyncio.wait(handles)
            return [handle.result() for handle in handles]
        results = []
        for handle in handles:
            if way == "impatient":
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.calls.seconds(10)):
                        await handle
            if way == "twice":
                await handle
            if way == "callback":
                called = asyncio.Event()
                handle.add_done_callback(lambda _ended, called=called: called.set())
                await called.wait()
                results.append(handle.result())
            else:
                wait = self.ways.get(way, World.plainly)
                results.append(await wait(self, lambda handle=handle: handle))  # type: ignore[misc]
        return results

    # ---- misbehaviour --------------------------------------------------------------------

    async def misbehave(
        self, plant: Plant, statement: Statement, me: int, handles: dict[int, Any]
    ) -> None:
        match plant.kind:
            case "raise":
                raise self.calls.boom(me, statement.uid)
            case "raise hostile":
                raise self.calls.boom(me, statement.uid, HostileError)
            case "other" | "differs":
                made = self.calls.otherwise(plant, statement, me, context())
                if isinstance(made, ar.Handle):
                    handles[statement.uid] = made
                else:
                    await made
            case "never awaited":
                made = self.calls.call_on(context(), statement, me)
                if statement.kind == "start":
                    handles[statement.uid] = made
            case "two at once":
                await asyncio.gather(
                    self.calls.call(statement, me), self.calls.call(statement, me, "barrier")
                )
            case "withdraw" | "withdraw on":
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.calls.seconds(10)):
                        await self.calls.call(statement, me)
            case "timeout strikes":
                async with asyncio.timeout(self.calls.seconds(10)):
                    await self.calls.call(statement, me)
            case "cancel child":
                child = asyncio.create_task(self.plainly(lambda: self.calls.call(statement, me)))
                await self.calls.nap(10)
                child.cancel()
                with suppress(asyncio.CancelledError):
                    await child
            case "sibling raises":
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.plainly(lambda: self.calls.call(statement, me)))
                    await self.calls.nap(10)
                    raise self.calls.boom(me, statement.uid)
            case "bare cancel":
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                future.cancel()
                await future

    # ---- plain step functions ------------------------------------------------------------

    def plain_step(self) -> int:
        own = context()
        me = own.replica_id_in_sync_group
        for statement in self.program.part_of(me):
            plant = self.program.plant_of(me, statement.uid)
            threading.Event().wait(self.calls.seconds(statement.nap_of(me)))
            if plant is not None and plant.kind == "return":
                return me
            if plant is not None and plant.kind == "raise":
                raise self.calls.boom(me, statement.uid)
            if plant is not None and plant.kind == "raise hostile":
                raise self.calls.boom(me, statement.uid, HostileError)
            if plant is not None and plant.kind in {"other", "differs"}:
                self.calls.otherwise(plant, statement, me, own.blocking)
            if plant is None and statement.kind in TALKS:
                result = self.calls.call_blocking(statement, me, own)
                if statement.kind == "assign":
                    result = None
                results = [result]
                del result
                self.calls.keep(results, me, statement.uid)
        return me


async def _probe() -> Any:
    return await context().all_reduce("sum", 1)


def give_up(handle: ar.Handle) -> None:
    """Say that a handle's result is not wanted."""
    handle.cancel()


def num_threads() -> int:
    """Return how many threads there are."""
    return threading.active_count()
