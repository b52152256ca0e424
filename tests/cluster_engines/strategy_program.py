"""What each worker of a strategy does: `python strategy_program.py SCENARIO [ARGUMENT]`.

As `program.py`, one line of JSON. Workers kill themselves, in the middle of a step.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
import aioreplica as ar
from aioreplica.checkpoint import LocalStorage, Savepoint
from aioreplica.cluster import _torch_resize
from aioreplica.cluster._torch_store import Store
from aioreplica.errors import MergeMismatchError, StallError, WorkerLostError
from tests.checkpoint.simulated_files import FaultyStorage
from tests.cluster_engines.program import row_of, say, until_said

warnings.simplefilter("error")
TIMEOUT_S = 20.0
NUM_STEPS, BATCH = 12, 6


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def rank_of(strategy: ar.MultiWorkerMirroredStrategy) -> int:
    assert strategy._runtime.workers is not None
    return strategy._runtime.workers.rank


class Training:
    """A model whose weights show which examples it has seen, how often, and in which step."""

    def __init__(
        self,
        strategy: ar.MultiWorkerMirroredStrategy,
        victims: dict[int, int],
        num_steps: int = NUM_STEPS,
    ) -> None:
        self.strategy = strategy
        self.num_examples = BATCH * num_steps
        self.victims = victims  # by the step in which each dies
        self.first_rank = rank_of(strategy)
        self.began = time.monotonic()
        with strategy.scope():
            self.seen = ar.Variable(np.zeros(self.num_examples), name="seen")
            self.sgd = ar.optimizers.SGD(1.0, momentum=0.5)
        self.settings = {"steps": 0}
        data = ar.ArrayDataset(np.arange(self.num_examples), batch_size=BATCH)
        self.batches = strategy.distribute_dataset(data, ar.InputOptions(sharding="data"))
        self.state = {
            "seen": self.seen, "sgd": self.sgd, "batches": self.batches, "settings": self.settings,
        }  # fmt: skip
        self.kept = Savepoint(self.state)

    async def step(self, batch: Any) -> None:
        gradient = np.zeros(self.num_examples)
        gradient[batch] = -1.0
        large = me().start_all_reduce("sum", np.ones(200_000))
        self.may_end(self.settings["steps"])
        await self.sgd.apply_gradients([(gradient, self.seen)])
        await large

    def may_end(self, step: int) -> None:
        """Kill this worker, if it is its turn."""
        if self.victims.get(step) == self.first_rank:
            kill_me()

    async def to_the_end(self, until: int | None = None) -> None:
        async for batch in self.batches:
            self.began = time.monotonic()
            await self.strategy.run(self.step, (batch,))
            self.settings["steps"] += 1
            self.kept = Savepoint(self.state)
            if self.settings["steps"] == until:
                break

    async def in_spite_of_losses(self, size: int | None = None) -> list[list[int]]:
        """Go on with those who are left, or become so many again; return who was lost."""
        lost = []
        while True:
            try:
                await self.to_the_end()
                return lost
            except WorkerLostError as error:
                lost.append(list(error.ranks))
                await self.strategy.shrink(self.kept)
                if size is not None:
                    await self.strategy.grow(size, self.kept)

    def learned(self) -> Any:
        slots = [variable.value.tolist() for variable in self.sgd.variables]
        return [self.seen.value.tolist(), slots, self.settings["steps"]]


class Hunted(Training):
    """Training in which a worker of any rank is killed in some steps, once in each.

    One of five is frozen, two are killed at once, and two some milliseconds later, anywhere.
    """

    marks: Path  # files with the names of the steps in which one was killed
    seed: str

    def may_end(self, step: int) -> None:
        mark = self.marks / str(step)
        if rank_of(self.strategy) != self.victims.get(step) or mark.exists():
            return
        mark.touch()
        count = len(list(self.marks.iterdir()))
        if count % 5 == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            signal.pause()  # another thread may take the signal first
        if count % 2:
            kill_me()
        delay_s = random.Random(f"{self.seed} {step}").uniform(0, 0.02)
        threading.Timer(delay_s, kill_me).start()


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def alone(num_steps: int = NUM_STEPS) -> Any:
    """Return what a worker without others learns: the same numbers, since all are exact."""
    async with ar.MultiWorkerMirroredStrategy(ar.cluster.ClusterResolver()) as strategy:
        training = Training(strategy, {}, num_steps)
        async with training.batches:
            await training.to_the_end()
        return training.learned()


async def kill(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """A worker is killed in the middle of a step; say what the others are told, and how soon."""
    training = Training(strategy, {3: int(argument)})
    async with training.batches:
        try:
            await training.to_the_end()
        except WorkerLostError as error:
            told = {**row_of(error), "after": time.monotonic() - training.began}
        else:
            return "nobody died"
        try:
            await strategy.run(training.step, (np.arange(2),))
        except WorkerLostError as error:
            told["again"] = str(error)
    return told


async def shrink(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Workers are killed, "2" or "2,0" for one after the other; the others go on to the end."""
    victims = {3 * (i + 1): int(rank) for i, rank in enumerate(argument.split(","))}
    expected = await alone()
    training = Training(strategy, victims)
    async with training.batches:
        lost = await training.in_spite_of_losses()
    await strategy.check_in_sync(strategy.trainable_variables)
    return {
        "rank": rank_of(strategy),
        "replicas": strategy.num_replicas_in_sync,
        "lost": lost,
        "learned": training.learned() == expected,
        "chief": strategy.extended.should_checkpoint,
        "task": [strategy.cluster_resolver.task_id, strategy.cluster_resolver.num_workers],
        "copied": _copied(strategy),
    }


async def grow(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Become "4" workers after three steps; with "4,1" worker 1 is killed later, and replaced."""
    size, *killed = map(int, argument.split(","))
    expected = await alone()
    workers = strategy._runtime.workers
    assert workers is not None
    was_new = workers.is_new
    training = Training(strategy, dict.fromkeys([6], killed[0]) if killed else {})
    async with training.batches:
        if not was_new:
            await training.to_the_end(3)
        await strategy.grow(size, training.kept)
        lost = await training.in_spite_of_losses(size)
    await strategy.check_in_sync(strategy.trainable_variables)
    return {
        "rank": rank_of(strategy),
        "replicas": strategy.num_replicas_in_sync,
        "was new": was_new,
        "lost": lost,
        "learned": training.learned() == expected,
    }


async def shrink_again(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """The last worker is killed in a step, and another one once it has written: "0@1/members"."""
    expected = await alone()
    training = Training(strategy, {3: 3})
    victim, _, last = argument.partition("@")
    set_value, decide = Store.set, _torch_resize.decide

    def set_and_die(store: Store, key: str, value: str | bytes) -> None:
        set_value(store, key, value)
        if key == last:
            kill_me()

    def decide_and_die(store: Store, value: str) -> bool:
        is_on = decide(store, value)
        if last == "decided":
            kill_me()
        return is_on

    if rank_of(strategy) == int(victim):
        Store.set = set_and_die  # type: ignore[method-assign]
        _torch_resize.decide = decide_and_die
    told: list[str] = []
    async with training.batches:
        while True:
            try:
                if told:
                    await strategy.shrink(training.kept)
                await training.to_the_end()
                break
            except (StallError, WorkerLostError) as error:
                told.append(f"{type(error).__name__} {list(error.ranks)}")
    return {"told": told, "learned": training.learned() == expected}


async def grow_in_vain(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """A worker that is added ends before it comes; the others go on without."""
    expected = await alone()
    training = Training(strategy, {})
    told = ""
    async with training.batches:
        await training.to_the_end(3)
        try:
            await strategy.grow(int(argument), training.kept)
        except (StallError, WorkerLostError) as error:
            told = f"{type(error).__name__} {list(error.ranks)}: {error}"
            if error.__cause__ is error:
                raise RuntimeError("an error has itself as its cause") from None
            await strategy.shrink(training.kept)
        await training.to_the_end()
    size = strategy.num_replicas_in_sync
    return {"told": told, "replicas": size, "learned": training.learned() == expected}


async def again(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Workers 0 and 1 add a third one, close, and do it all again with another strategy."""

    async def grown(strategy: ar.MultiWorkerMirroredStrategy) -> int:
        training = Training(strategy, {})
        async with training.batches:
            await strategy.grow(3, training.kept)
            await training.to_the_end()
        return strategy.num_replicas_in_sync

    workers = strategy._runtime.workers
    assert workers is not None
    was_new = workers.is_new
    sizes = [await grown(strategy)]
    await strategy.aclose()
    if not was_new:
        async with ar.MultiWorkerMirroredStrategy() as other:
            sizes.append(await grown(other))
    return sizes


async def replace(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """End workers at random and replace them: "3,20,SEED,FOLDER" for 20 of 3 at any time."""
    size, kills, seed, folder = argument.split(",", 3)
    num_steps, drawn = 10 * int(kills) + 5, random.Random(seed)
    steps = drawn.sample(range(num_steps - 5), int(kills))
    training = Hunted(strategy, {step: drawn.randrange(int(size)) for step in steps}, num_steps)
    training.marks, training.seed = Path(folder), seed
    began, waits, replaced = 0.0, [], []
    async with training.batches:
        while True:
            try:
                if began:
                    await strategy.shrink(training.kept)
                    waits.append(round(time.monotonic() - began, 2))
                await strategy.grow(int(size), training.kept)
                if began:
                    replaced.append(round(time.monotonic() - began, 2))
                await training.to_the_end()
                break
            except (StallError, WorkerLostError):
                began = time.monotonic()
    await strategy.check_in_sync(strategy.trainable_variables)
    return {
        "rank": rank_of(strategy),
        "learned": training.learned() == await alone(num_steps),
        "waits": waits,
        "replaced": replaced,
    }


async def evict(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Worker 1 stops; the other one goes on without it, to the end."""
    expected = await alone()
    training = Training(strategy, {})
    workers = strategy._runtime.workers
    assert workers is not None
    told: list[list[int]] = []
    async with training.batches:
        await strategy.run(training.step, (np.arange(0),))
        communicator = await workers.connect()
        if training.first_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            await asyncio.Event().wait()  # another thread may take the signal first
        communicator._timeout = 1.0  # worker 1 does not come
        try:
            await training.to_the_end()
        except StallError as error:
            told.append(list(error.ranks))
            communicator._timeout = TIMEOUT_S
            await strategy.shrink(training.kept)
        await training.to_the_end()
    size = strategy.num_replicas_in_sync
    return {"told": told, "replicas": size, "learned": training.learned() == expected}


async def parts(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Train variables and state in parts; say whether the bits are those of whole ones."""
    rng = np.random.default_rng(0)
    values = [
        rng.normal(size=shape).astype("float32") for shape in ((701, 300), (7, 3), (300_001,))
    ]
    bits = []
    for sharding in (None, ar.Shard()):
        with strategy.scope():
            made: list[Any] = [ar.Variable(each, sharding=sharding) for each in values]
            made += [ar.Variable(values[0]), ar.Variable(values[1])]
            adam = ar.optimizers.Adam(0.01, shard_state=sharding is not None)

        async def step(number: int, made: Any = made, adam: Any = adam) -> None:
            replica = me().replica_id_in_sync_group
            draw = np.random.default_rng([number, replica]).normal
            await adam.apply_gradients([(draw(size=v.shape).astype("float32"), v) for v in made])

        for number in range(3):
            await strategy.run(step, (number,))
        wholes = [v.value if sharding is None else await v.read() for v in made[:3]]
        bits.append([each.tobytes() for each in [*wholes, *(v.value for v in made[3:])]])
    table = made[0]
    part = await table.read(np.s_[600:2:-7, :5])
    same = (
        part.tobytes() == np.frombuffer(bits[1][0], "f4").reshape(701, 300)[600:2:-7, :5].tobytes()
    )
    return {"same": bits[0] == bits[1], "read": same, "rows": table.local.shape[0]}


async def restart(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Train divided state for 100 steps, from a checkpoint if there is one; or die on the way.

    With `in=60` worker 1 dies while it writes its part of step 60.
    """
    folder, kill_at = argument.split("@")
    storage: Any = LocalStorage(folder)
    dies_in = int(kill_at[3:]) if kill_at.startswith("in=") else 0
    if dies_in and rank_of(strategy) == 1:
        storage = FaultyStorage(storage, lambda: os.kill(os.getpid(), signal.SIGKILL), None)
    first = np.random.default_rng(0).normal(size=(701, 300)).astype("float32")
    with strategy.scope():
        table: Any = ar.Variable(
            lambda begin, end: first[begin:end], shape=first.shape, sharding=ar.Shard()
        )
        whole = ar.Variable(first[:50])
        adam = ar.optimizers.Adam(0.01, shard_state=True)
    settings = {"steps": 0}
    state = {"table": table, "whole": whole, "adam": adam, "settings": settings}

    async def step(number: int) -> None:
        draw = np.random.default_rng(number).normal
        share = me().replica_id_in_sync_group == 0  # so that sums are exact for any number
        pairs = [
            (draw(size=v.shape).astype("float32") * np.float32(share), v) for v in (table, whole)
        ]
        await adam.apply_gradients(pairs)

    async with ar.CheckpointManager(storage) as manager:
        if manager.latest() is not None:
            await manager.restore(state)
        began = settings["steps"]
        while settings["steps"] < 100:
            await strategy.run(step, (settings["steps"],))
            settings["steps"] += 1
            if settings["steps"] % 20 == 0:
                if settings["steps"] == dies_in and rank_of(strategy) == 1:
                    storage.at = len(storage.calls) + 4  # a claim is read, a file created
                await manager.save(settings["steps"], state)
            if f"{settings['steps']}" == kill_at and rank_of(strategy) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    parts = [table, *(adam.get_slot(v, name) for v in (table, whole) for name in ("m", "v"))]
    values = [whole.value, *[p.value if p.is_mirrored else await p.read() for p in parts]]
    return {"began": began, "digest": blake2b(b"".join(map(bytes, values))).hexdigest()}


async def sums(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Numbers of two kinds, half precision, and a form that does not fit."""
    number = (1.5, np.float64(2.0))[rank_of(strategy) % 2]
    halves = np.float16([2048, 1, 1, 2])

    async def step(value: Any) -> Any:
        return await me().all_reduce("sum", value)

    async def half() -> Any:
        ctx = me()
        return await ctx.all_reduce("sum", np.full(1000, halves[ctx.replica_id_in_sync_group]))

    tree = {"loss": number, "other": np.arange(1000.0), "mean": ar.Weighted(number, number)}
    found = strategy.local_results(await strategy.run(step, (tree,)))[0]
    rounded = strategy.local_results(await strategy.run(half))[0]
    value = number if rank_of(strategy) else np.ones(())
    try:
        told = str(await strategy.run(step, (value,)))
    except MergeMismatchError as error:
        told = error.reason
    return {
        "loss": float(found["loss"]),
        "weight": float(found["mean"].weight),
        "other": bool((found["other"] == 4 * np.arange(1000.0)).all()),
        "half": [str(rounded.dtype), *np.unique(rounded).tolist()],
        "told": told,
        "groups": await in_groups(strategy, argument),
    }


async def in_groups(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Meet in columns of replicas; worker 0 fails while others wait for it there, and all go on."""

    async def step(number: int) -> Any:
        ctx = me()
        i, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
        column = ctx.group(range(i % 2, n, 2))
        handle = column.start_all_reduce("sum", np.full(200_000, i + number))
        joined = await column.all_gather(np.full(i + 1, i), 0)
        if number == 1:
            if i == 0:
                raise ValueError("bad batch")
            await column.barrier()
        total = await handle
        return [joined.tolist(), int(total[0]), int(total[-1]), await ctx.all_reduce("sum", i)]

    found: list[Any] = []
    for number in range(3):
        try:
            found.append(strategy.local_results(await strategy.run(step, (number,))))
        except (ValueError, WorkerLostError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


async def handles(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Start reductions in turns that differ between workers; compare them with one by one."""
    rank = rank_of(strategy)

    async def step() -> bool:
        ctx = me()
        values = [
            np.linspace(0.1 + ctx.replica_id_in_sync_group, i + 1 / 3, 40 * i + 1, dtype=dtype)
            for i in range(40)
            for dtype in (np.float32, np.float64)
        ]
        alone = [await ctx.all_reduce("sum", value) for value in values]
        is_same = True
        for turn in range(20):
            started = []
            for i, value in enumerate(values):
                started.append(ctx.start_all_reduce("sum", value))
                if i % 11 == (7 * rank + turn) % 11:
                    await ctx.run_on_device(int)
            together = [await handle for handle in started]
            for one, other in zip(alone, together, strict=True):
                is_same = is_same and one.tobytes() == other.tobytes()
        return is_same

    found = strategy.local_results(await strategy.run(step))
    communicator = strategy._runtime.workers.connected  # type: ignore[union-attr]
    assert communicator is not None
    return {"same": all(found), "calls": communicator.statistics().calls}


async def steps(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Run device loops: workers have other numbers of elements, one fails, and all go on."""
    rank = rank_of(strategy)
    with strategy.scope():
        total = ar.Variable(0.0, aggregation="mean")

    def step(ctx: ar.device_loop.MultiStepContext, x: float) -> None:
        total.blocking.assign_add(me().blocking.all_reduce("sum", x))
        ctx.set_last_step_output("x", x + rank, "max")

    def given(count: int, *, fails: bool = False) -> Iterator[float]:
        yield from map(float, range(count))
        if fails:
            raise OSError("disk")

    told = ""
    first = await strategy.run_steps(step, given(150 + 10 * rank), 1000)
    try:
        await strategy.run_steps(step, given(5, fails=rank == 1), 1000)
    except (OSError, WorkerLostError) as error:
        told = f"{type(error).__name__}: {error}"
    last = await strategy.run_steps(step, iter([1.0, 2.0]), 2)
    await strategy.check_in_sync([total])
    return {
        "steps": [first.steps_run, last.steps_run], "outputs": first.last_step_outputs,
        "total": float(total.value), "told": told,
    }  # fmt: skip


def note_in(folder: str, name: str) -> None:
    Path(folder, name).touch()


async def leaving(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Worker 1 leaves between two steps; say what the others are told in the next one."""

    async def step() -> Any:
        return await me().all_reduce("sum", 1)

    await strategy.run(step)
    how, folder = argument.split(":", 1)
    if rank_of(strategy) != 1:
        note_in(folder, "went on")
    else:
        await until_said(folder, 1)  # an end may overtake the last of a step
        if how == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(TIMEOUT_S)
        raise SystemExit(3) if how == "exit" else ValueError("bad batch")
    try:
        await strategy.run(step)
    except WorkerLostError as error:
        return row_of(error)
    return "nobody left"


async def path(strategy: ar.MultiWorkerMirroredStrategy, argument: str) -> Any:
    """Files and classes that an all_reduce passes, on the event loop and the engine's thread."""
    from tests.repo.test_paths import PACKAGE, properties

    passed: set[tuple[str, str]] = set()
    watched: list[bool] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        is_named = code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<"
        if watched and event == "call" and is_named:
            passed.add((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    async def step() -> None:
        ctx, value = me(), np.ones(512)
        for _ in range(10):  # makes what is made once
            await ctx.all_reduce("sum", value)
        is_last = ctx.replica_id_in_sync_group % 2 == 0
        if is_last:
            await asyncio.sleep(0)  # the other replica of this worker waits by now
            watched.append(True)
            sys.setprofile(note)
        await ctx.all_reduce("sum", value)
        if is_last:
            sys.setprofile(None)
            watched.clear()

    threading.setprofile(note)  # before the engine's thread is started
    await strategy.run(step)
    threading.setprofile(None)
    skipped = properties()
    named = {(file, name) for file, name in passed if name not in skipped}
    classes = {(file, name.split(".")[0]) for file, name in named if "." in name}
    return {
        "files": sorted({file for file, _ in named}),
        "classes": sorted(name for _, name in classes if name.lstrip("_")[0].isupper()),
    }


def _copied(strategy: ar.MultiWorkerMirroredStrategy) -> str:
    try:
        copy.deepcopy(strategy)
    except TypeError as error:
        return str(error)[:65]
    return "copied"


async def main(scenario: str, argument: str) -> None:
    if scenario == "grow_in_vain" and "AIOREPLICA_WORKERS_BEFORE" in os.environ:
        sys.exit(3)
    ar.set_logical_devices("cpu", 2)
    timeout_s = float(os.environ.get("TEST_TIMEOUT_S", TIMEOUT_S))
    options = ar.CommunicationOptions(timeout_seconds=timeout_s or None)
    strategy = ar.MultiWorkerMirroredStrategy(options=options)
    rank = rank_of(strategy)
    async with strategy:
        result = await globals()[scenario](strategy, argument)
    say(rank, result)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
