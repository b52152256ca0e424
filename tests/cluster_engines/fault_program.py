"""Programs of two workers in which one does something wrong: where it does, times what it does.

`python fault_program.py FOLDER WHERE/WHAT...` runs programs one after the other, each with an event
loop and a strategy of its own; under `mpirun`, say.

A worker leaves what it was told in a file of FOLDER. The last worker is the victim, or worker 0
with `WHERE/WHAT@0`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
import aioreplica as ar
from aioreplica.checkpoint import LocalStorage
from tests.checkpoint.simulated_files import FaultyStorage
from tests.cluster_engines.program import row_of
from tests.cluster_engines.strategy_program import me, rank_of

warnings.simplefilter("error")
TIMEOUT_S = 60.0  # of a wait for other workers, but of those that have to stall
STALL_S = 1.0
LOOP_STEPS = 50
DIFFERENT: dict[str, dict[str, Any]] = {
    "another op": {"op": "max"},
    "another shape": {"value": np.ones(4)},
    "another dtype": {"value": np.ones(3, np.int32)},
    "another tree": {"value": {"x": np.ones(3)}},
    "another collective": {"collective": "barrier"},
}


@dataclass
class Part:
    """One worker's part in a program.

    Attributes:
        strategy: Of this program.
        what: Goes wrong on the victim.
        is_victim: Whether this worker is the victim.
        folder: Where the workers of this program leave their files.
        op: Of the reduction that meets the fault.
        value: What this worker brings to it.
        collective: Its name.
        task: What runs the program.
        has_struck: Whether it went wrong already.
    """

    strategy: ar.MultiWorkerMirroredStrategy
    what: str
    is_victim: bool
    folder: Path
    op: str = "sum"
    value: Any = field(default_factory=lambda: np.ones(3))
    collective: str = "all_reduce"
    task: asyncio.Task[Any] | None = None
    has_struck: bool = False

    @property
    def returns(self) -> bool:
        """Whether this worker leaves its step too early."""
        return self.is_victim and self.what == "return"

    def arm(self, timeout_s: float) -> None:
        """Let the other worker wait so long, from here on: where nothing but the fault is next."""
        workers = self.strategy._runtime.workers
        if self.what in ("hang", "SIGSTOP") and not self.is_victim and workers is not None:
            assert workers.connected is not None
            workers.connected._timeout = timeout_s

    def strike(self) -> None:
        """Do what goes wrong, once, on the victim."""
        if not self.is_victim:
            self.arm(STALL_S)
        if not self.is_victim or self.has_struck:
            return
        self.has_struck = True
        own = os.getpid()
        if self.what == "exception":
            raise ValueError("bad batch")
        if self.what == "full disk":
            raise OSError(28, "No space left on device")
        if self.what == "SystemExit":
            raise SystemExit(3)
        if self.what == "os._exit":
            os._exit(5)
        if self.what in ("SIGKILL", "SIGSTOP", "Ctrl-C"):
            os.kill(own, {"Ctrl-C": signal.SIGINT}.get(self.what) or signal.Signals[self.what])
        if self.what == "SIGSTOP":
            time.sleep(TIMEOUT_S)  # another thread may take the signal first
        if self.what == "cancellation":
            assert self.task is not None
            self.task.get_loop().call_soon_threadsafe(self.task.cancel)

    def strike_here(self) -> None:
        """The same in a thread, which may wait."""
        self.strike()
        while self.is_victim and self.what == "hang" and not self.is_told:
            time.sleep(0.01)

    async def strikes(self) -> None:
        """The same on the event loop, where a cancellation comes."""
        self.strike()
        if self.is_victim and self.what in ("Ctrl-C", "cancellation"):
            await asyncio.sleep(TIMEOUT_S)
        while self.is_victim and self.what == "hang" and not self.is_told:
            await asyncio.sleep(0.01)

    @property
    def is_told(self) -> bool:
        return (self.folder / "told").exists()

    async def reduce(self) -> Any:
        if self.collective == "barrier":
            return await me().barrier()
        return await me().all_reduce(self.op, self.value)

    async def begin(self) -> None:
        """Do a good step; then the victim waits until the other one has left it, too."""
        await good_step(self.strategy)
        if not self.is_victim:
            (self.folder / "ready").touch()
        while not (self.folder / "ready").exists():
            await asyncio.sleep(0.01)


async def good_step(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
    async def good() -> Any:
        return await me().all_reduce("sum", 1)

    return strategy.local_results(await strategy.run(good))[0]


# ---- where it goes wrong -----------------------------------------------------------------


async def at_first(part: Part) -> None:
    """In a step, before the first collective of the strategy."""
    kept = []  # without a variable, workers meet in the collective
    if part.what == "another variable":
        with part.strategy.scope():
            kept.append(ar.Variable(np.ones(4 if part.is_victim else 3), name="table"))
    await in_step(part)
    kept.clear()


async def in_all_reduce(part: Part) -> None:
    """Where the others wait in an all_reduce."""
    await part.begin()
    await in_step(part)


async def in_step(part: Part) -> None:
    async def faulty() -> Any:
        if me().replica_id_in_sync_group % 2 == 0:  # the other replica of the victim waits, too
            await part.strikes()
        return None if part.returns else await part.reduce()

    await part.strategy.run(faulty)
    if part.returns:
        await good_step(part.strategy)


async def in_a_handle(part: Part) -> None:
    """Between the start of reductions and their end, in a step that has more of them."""
    await part.begin()

    async def faulty() -> None:
        ctx = me()
        large = ctx.start_all_reduce("sum", np.ones(200_000))
        if ctx.replica_id_in_sync_group % 2 == 0:
            await part.strikes()
        if not part.returns:
            await ctx.start_all_reduce(part.op, part.value)
        await large

    await part.strategy.run(faulty)
    if part.returns:
        await good_step(part.strategy)


async def in_a_merge(part: Part) -> None:
    """In a function of merge_call, which meets the other workers."""
    await part.begin()

    async def merged(strategy: ar.MultiWorkerMirroredStrategy, value: Any) -> Any:
        await part.strikes()
        return None if part.returns else await strategy.reduce(part.op, value)

    async def faulty() -> Any:
        return await me().merge_call(merged, (part.value,))

    await part.strategy.run(faulty)
    if part.returns:
        await good_step(part.strategy)


async def in_run_steps(part: Part) -> None:
    """In the third step of a device loop."""
    await part.begin()

    def faulty(ctx: ar.device_loop.MultiStepContext, x: float) -> None:
        blocking = me().blocking
        blocking.all_reduce("sum", x)
        if x >= 2.0:
            if me().replica_id_in_sync_group % 2 == 0 and x == 2.0:
                part.strike_here()
            if part.returns:
                return
            blocking.all_reduce(part.op, part.value)

    iterations = LOOP_STEPS + (part.is_victim and part.what == "another number")
    await part.strategy.run_steps(faulty, iter(map(float, range(100))), iterations)


async def between_steps(part: Part) -> None:
    """Where the others read a variable that all workers have a part of."""
    strategy = part.strategy
    with strategy.scope():
        counts = ar.Variable(0.0, name="counts", synchronization="on_read", aggregation="sum")
        others = ar.Variable(0.0, name="others", synchronization="on_read", aggregation="sum")
    await part.begin()
    await part.strikes()
    own = part.what if part.is_victim else ""
    if own == "close":
        await strategy.aclose()
    elif own == "another operation":
        await in_step(part)
    else:
        await strategy.extended.read_var(others if own == "another variable" else counts)


async def in_a_save(part: Part) -> None:
    """In a checkpoint that all workers write, while the victim writes its own part."""
    strategy = part.strategy
    with strategy.scope():
        table = ar.Variable(np.ones((300, 3)), name="table", sharding=ar.Shard())
    await part.begin()

    def struck() -> OSError:
        part.strike_here()
        return OSError(28, "No space left on device")

    storage: Any = LocalStorage(str(part.folder / "saved"))
    is_other = part.is_victim and part.what == "another tree"
    if part.is_victim:
        storage = FaultyStorage(storage, struck, None)
    async with ar.CheckpointManager(storage) as manager:
        if part.is_victim and not is_other:
            storage.at = len(storage.calls) + 4  # a claim is read, a file created
        part.arm(5 * STALL_S)  # for some meetings before that, too
        await manager.save(1, {"other" if is_other else "table": table})


async def in_an_agreement(part: Part) -> None:
    """Where the others ask whether all agree."""
    await part.begin()

    async def faulty() -> Any:
        ctx = me()
        if ctx.replica_id_in_sync_group % 2 == 0:
            await part.strikes()
        if part.returns:
            return None
        if part.is_victim and part.what == "another collective":
            return await ctx.any(True)
        if part.what in ("another value", "another tree"):
            value = {"another value": 2, "another tree": [1]}[part.what] if part.is_victim else 1
            return await ctx.agree(value)
        return await ctx.all(True)

    await part.strategy.run(faulty)
    if part.returns:
        await good_step(part.strategy)


async def while_closing(part: Part) -> None:
    """Behind the last step, while the others close."""
    await part.begin()
    await part.strikes()


async def in_a_dataset(part: Part) -> None:
    """In what makes the third batch, while the others want theirs."""
    await part.begin()

    async def batches(_context: Any) -> AsyncIterator[Any]:
        for number in range(6):
            if number == 2 and part.is_victim:
                await part.strikes()
                if part.returns:
                    return
            yield np.full(2, float(number))

    dataset = part.strategy.distribute_datasets_from_function(batches)
    seen = 0
    async with dataset:
        async for batch in dataset:
            await part.strategy.run(summed, (batch,))
            part.arm(STALL_S)
            seen += 1
    assert seen == 1, seen  # of two batches, one for each replica


async def summed(batch: Any) -> Any:
    return await me().all_reduce("sum", float(np.sum(batch)))


PLACES: dict[str, Callable[[Part], Awaitable[None]]] = {
    "first": at_first,
    "all_reduce": in_all_reduce,
    "handle": in_a_handle,
    "merge": in_a_merge,
    "run_steps": in_run_steps,
    "between": between_steps,
    "save": in_a_save,
    "agreement": in_an_agreement,
    "closing": while_closing,
    "dataset": in_a_dataset,
}
LEFT = ("between", "closing", "dataset")  # where the victim's errors leave the strategy's block
NEVER_COME = ("SIGKILL", "os._exit")  # to a first collective


# ---- running -----------------------------------------------------------------------------


async def perform(
    where: str, what: str, victim: int, folder: Path, row: dict[str, Any], *, is_caught: bool
) -> None:
    """Run a program; put what it was told into a row, if that is to be caught."""
    is_late = where == "first" and what in NEVER_COME
    options = ar.CommunicationOptions(timeout_seconds=4 * STALL_S if is_late else TIMEOUT_S)
    async with ar.MultiWorkerMirroredStrategy(options=options) as strategy:
        part = Part(strategy, what, rank_of(strategy) == victim, folder)
        if part.is_victim:
            vars(part).update(DIFFERENT.get(what, {}))
        working: Awaitable[None] = PLACES[where](part)
        if what == "cancellation":
            working = part.task = asyncio.ensure_future(working)
        leaves = where in LEFT and part.is_victim and not what.startswith("another")
        try:
            await working
        except (Exception, asyncio.CancelledError) as error:
            is_ended = isinstance(error, asyncio.CancelledError) and what != "cancellation"
            if leaves or is_ended or not is_caught:
                raise
            row.update(row_of(error))
        if not part.is_victim and where != "closing":
            (folder / "told").touch()
        if where == "closing" or (part.is_victim and what == "close"):
            return
        try:
            row["again"] = int(await good_step(strategy))
        except Exception as error:
            row["again"] = str(error)


def run(folder: Path, name: str, rank: int, *, is_caught: bool) -> BaseException | None:
    """Run a program and leave its row in a file; return what left it."""
    where, what = name.split("/")
    what, _, victim = what.partition("@")
    own = folder / name.replace("/", " ")
    own.mkdir(exist_ok=True)
    (own / f"{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
    row: dict[str, Any] = {"error": "", "text": "", "ranks": [], "left": "", "again": None}
    left: BaseException | None = None
    start = time.monotonic()
    try:
        asyncio.run(perform(where, what, int(victim or 1), own, row, is_caught=is_caught))
    except BaseException as error:
        left = error
        row["left"] = type(error).__name__
        if not row["error"]:
            row.update(row_of(error))
    row["seconds"] = time.monotonic() - start
    (own / "told").touch()
    (own / f"{rank}.new").write_text(json.dumps(row), encoding="utf-8")
    (own / f"{rank}.new").rename(own / f"{rank}.json")
    return left


def main(folder: str, *names: str) -> None:
    """Run programs; a single one ends the process as it would end a user's, by what left it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have turned it off
    ar.set_logical_devices("cpu", 2)
    rank = ar.cluster.resolve().rank
    assert rank is not None
    left = [run(Path(folder), name, rank, is_caught=len(names) > 1) for name in names]
    if len(left) == 1 and left[0] is not None:
        raise left[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
