"""What a failure says: wait-for graph, starvation, leaks, nondeterminism, and its story."""

import asyncio
import pickle
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from weakref import WeakSet

import anyio
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.testing._execute import Main, Outcome
from aioreplica.testing._runner import Runner
from aioreplica.testing._sandbox import Sandbox
from aioreplica.testing._schedule import Hold
from aioreplica.testing._shrink import holds_of, shrink, stronger
from aioreplica.testing._strategies import RANDOM
from aioreplica.testing._token import decode
from aioreplica.testing._trace import Trace
from tests.testing import programs
from tests.testing.programs import step


def failure_of(program: object, **options: object) -> art.Failure:
    report = art.explore(program, **{"schedules": 600, **options})  # type: ignore[arg-type]
    assert report.failed
    assert report.failure is not None
    return report.failure


# --- deadlock ---------------------------------------------------------------------------------


def test_deadlock_names_locks_owners_and_the_cycle() -> None:
    error = failure_of(programs.crossed_locks).error

    assert isinstance(error, art.DeadlockError)
    assert set(error.cycle) == {"take (Task-1)", "take (Task-2)"}
    waits = {wait.who: wait for wait in error.waits}
    assert waits["take (Task-1)"].owner == "take (Task-2)"
    assert waits["take (Task-1)"].awaits.startswith("asyncio.Lock")
    assert "programs.py" in waits["take (Task-1)"].site


def test_deadlock_names_who_is_missing_at_a_barrier() -> None:
    async def main() -> None:
        barrier, gone = asyncio.Barrier(3), asyncio.Event()

        async def party(i: int) -> None:
            if i == 2:
                await gone.wait()
            await barrier.wait()

        await asyncio.gather(*[asyncio.create_task(party(i), name=f"p{i}") for i in range(3)])

    with pytest.raises(art.DeadlockError) as caught:
        art.run(main)

    waits = {wait.who: wait for wait in caught.value.waits}
    assert waits["task 'p0'"].awaits == "asyncio.Barrier 'barrier' (2 of 3 arrived)"
    assert "task 'p2'" in waits["task 'p0'"].missing
    assert waits["task 'p2'"].awaits == "asyncio.Event 'gone'"


def test_tasks_that_await_each_other_are_a_cycle() -> None:
    error = failure_of(programs.awaiting_each_other).error

    assert isinstance(error, art.DeadlockError)
    assert len(error.cycle) == 2


def test_anyio_primitives_are_named_with_their_owner() -> None:
    async def main() -> None:
        lock = anyio.Lock()
        async with lock, anyio.create_task_group() as group:
            group.start_soon(lock.acquire, name="waiter")

    with pytest.raises(art.DeadlockError) as caught:
        art.run(main)

    waits = {wait.who: wait for wait in caught.value.waits}
    assert waits["task 'waiter'"].awaits == "anyio.Lock 'lock'"
    assert waits["task 'waiter'"].owner == "main"
    assert waits["main"].awaits.startswith("anyio.TaskGroup")


def test_replicas_are_named_with_those_who_are_missing() -> None:
    async def step() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        if ctx.replica_id_in_sync_group == 1:
            await asyncio.Event().wait()
        await ctx.barrier()

    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            await strategy.run(step)

    with pytest.raises(art.DeadlockError) as caught:
        art.run(main)

    waits = {wait.who: wait for wait in caught.value.waits}
    assert waits["replica 0"].awaits == "barrier #1"
    assert waits["replica 0"].missing == ("replica 1",)
    assert waits["main"].awaits == "the run of replica 0, replica 1"


# --- starvation -------------------------------------------------------------------------------


def test_a_program_that_never_ends_has_a_story() -> None:
    async def main() -> None:
        stuck = asyncio.create_task(asyncio.Event().wait(), name="stuck")
        while not stuck.done():
            await asyncio.sleep(0.1)

    error = failure_of(main, max_steps=2000).error

    assert isinstance(error, art.StarvationError)
    assert error.running[0] == "main"
    assert [wait.who for wait in error.waits] == ["task 'stuck'"]
    assert error.steps >= 2000


# --- leaks ------------------------------------------------------------------------------------


def test_a_task_left_behind_is_a_leak() -> None:
    async def main() -> None:
        asyncio.create_task(asyncio.sleep(9), name="left")  # noqa: RUF006 - that is the point

    with pytest.raises(art.LeakError) as caught:
        art.run(main)

    assert caught.value.tasks == ("left (sleep)",)


def test_a_cancelled_task_is_not_an_unretrieved_exception() -> None:
    async def main() -> None:
        asyncio.create_task(asyncio.sleep(9)).cancel()

    art.run(main)


def test_an_exception_that_nobody_retrieved_is_a_leak() -> None:
    async def fail() -> None:
        raise ValueError("unseen")

    async def main() -> None:
        task = asyncio.create_task(fail())
        await asyncio.wait([task])

    with pytest.raises(art.LeakError, match="unseen"):
        art.run(main)


def test_a_generator_that_is_kept_open_is_a_leak() -> None:
    async def count() -> AsyncIterator[int]:
        yield 1
        yield 2

    kept = []

    async def main() -> None:
        kept.append(count())
        await anext(kept[-1])

    with pytest.raises(art.LeakError) as caught:
        art.run(main)

    assert caught.value.generators[0].endswith("count")


# --- nondeterminism ---------------------------------------------------------------------------


def test_state_between_runs_is_named_with_its_step() -> None:
    runs: list[int] = []

    async def main() -> None:
        runs.append(1)
        await step(2)
        await step(len(runs))

    error = failure_of(main).error

    assert isinstance(error, art.NondeterminismError)
    assert error.step > 0
    assert error.first != error.second


def test_state_that_shows_only_in_the_end_is_noticed() -> None:
    runs: list[int] = []

    async def main() -> None:
        runs.append(1)
        await step(2)
        assert len(runs) < 5

    assert isinstance(failure_of(main).error, art.NondeterminismError)


def test_a_registry_keyed_by_uuids_is_as_empty_in_every_run() -> None:
    servers: dict[uuid.UUID, list[str]] = {}  # of the process, as in packages that fake a server

    async def main() -> None:
        data = servers.setdefault(uuid.uuid4(), [])
        assert not data, "another program's"
        data.append("mine")
        await asyncio.gather(step(2), step(2))
        assert not fails

    fails = False
    for explored in (art.explore(main, schedules=50), art.exhaustive(main)):
        explored.check()
        assert explored.warnings == ()
    art.cancel_everywhere(main).check()

    fails = True
    failure = failure_of(main)
    for _ in range(3):
        with pytest.raises(AssertionError) as caught:
            art.replay(main, failure.token)
        assert str(caught.value) == str(failure.error)
    assert decode(failure.token, main).own_uuids

    fails = False
    for _ in range(3):
        art.replay(main, failure.token)  # as it was mended


def test_uuids_that_behaviour_follows_are_those_of_the_schedule() -> None:
    async def main() -> None:
        ids = [uuid.uuid4() for _ in range(30)]
        for smaller in map(uuid.UUID.__lt__, ids, ids[1:]):  # not their number alone decides
            await asyncio.gather(*[step() for _ in range(1 + smaller)])
        assert not fails, f"{ids[0]}"

    fails = False
    report = art.explore(main, schedules=50)
    report.check()
    assert len(report.warnings) == 1
    assert report.warnings[0].startswith("Behaviour follows uuids, or state that outlives")

    fails = True
    failure = failure_of(main)
    with pytest.raises(AssertionError) as caught:
        art.replay(main, failure.token)
    assert str(caught.value) == str(failure.error)
    assert not decode(failure.token, main).own_uuids


def test_state_that_outlives_schedules_beside_uuids_is_still_named() -> None:
    runs: list[int] = []

    async def main() -> None:
        uuid.uuid4()
        runs.append(1)
        await step(len(runs))

    failure = failure_of(main)

    assert isinstance(failure.error, art.NondeterminismError)


class Job:
    """Hashes by its address."""

    def __init__(self) -> None:
        self.result = 0


@pytest.mark.parametrize("fidelity", ["reorder", "asyncio"])
def test_a_set_of_plain_objects_has_one_order_in_every_schedule(fidelity: str) -> None:
    runs: list[int] = []
    kept: list[list[Job]] = []

    async def work(jobs: set[Job]) -> list[str]:
        await step()
        tasks = [asyncio.create_task(step(), name=f"{job.result}") for job in jobs]
        await asyncio.gather(*tasks)
        return [task.get_name() for task in tasks]

    async def main() -> None:
        runs.append(1)
        spare = [Job.__new__(Job) for _ in range(64)]
        while spare:  # what is freed last is used first, so addresses go up and down in turns
            spare.pop(-(len(runs) % 2))
        jobs = [Job() for _ in range(8)]
        kept.append(jobs)
        for number, job in enumerate(jobs):
            job.result = number
        order = await work(set(jobs))
        await step(8 * int(order[0]) + int(order[1]))
        if fails:
            raise KeyError(*order)

    fails = False
    report = art.explore(main, schedules=30, fidelity=fidelity)
    assert not report.failed
    assert any("jobs, a set of Job," in warning for warning in report.warnings)

    fails = True
    failure = failure_of(main, fidelity=fidelity)
    with pytest.raises(KeyError) as caught:
        art.replay(main, failure.token)
    assert caught.value.args == failure.error.args


SHARED: set[Job] = set()


def jobs_at_other_addresses(runs: list[int], kept: list[list[Job]]) -> list[Job]:
    """Make jobs whose order in a set is another in every second run."""
    runs.append(1)
    spare = [Job.__new__(Job) for _ in range(64)]
    while spare:  # what is freed last is used first, so addresses go up and down in turns
        spare.pop(-(len(runs) % 2))
    jobs = [Job() for _ in range(8)]
    kept.append(jobs)
    for number, job in enumerate(jobs):
        job.result = number
    return jobs


async def walk(jobs: Iterable[Job]) -> None:
    """Let the order decide what happens; the set itself is gone when a task waits."""
    await asyncio.gather(*[step(job.result) for job in jobs])


@pytest.mark.parametrize("kind", ["global", "weak"])
def test_sets_that_are_global_or_weak_are_named(kind: str) -> None:
    runs: list[int] = []
    kept: list[list[Job]] = []

    async def main() -> None:
        jobs = jobs_at_other_addresses(runs, kept)
        weak = WeakSet(jobs if kind == "weak" else ())
        SHARED.clear()
        SHARED.update(jobs if kind == "global" else ())
        await walk([*SHARED, *weak])

    report = art.explore(main, schedules=20)

    report.check()
    [warning] = report.warnings
    assert ("SHARED" if kind == "global" else "WeakSet.data") in warning
    SHARED.clear()


def test_classes_are_named_whose_sets_are_gone_when_a_task_waits() -> None:
    runs: list[int] = []
    kept: list[list[Job]] = []

    async def main() -> None:
        await walk(sorted({*jobs_at_other_addresses(runs, kept)}, key=lambda job: 0))

    failure = art.explore(main, schedules=20).failure

    assert failure is not None
    assert isinstance(failure.error, art.NondeterminismError)
    [note] = failure.error.__notes__
    assert "objects of these classes are walked in one order: Job." in note


class Proxy:
    """Stands for an object of a context that is not set, as `werkzeug.local.LocalProxy`."""

    __slots__ = ("__dict__", "kept")

    @property
    def __class__(self) -> type:
        raise RuntimeError("outside of a context")

    @__class__.setter
    def __class__(self, value: object) -> None:
        raise RuntimeError("outside of a context")

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("outside of a context")

    __len__ = __iter__ = __bool__ = __getattribute__  # type: ignore[assignment]


class Greedy(set[object]):
    """Refuses to be walked."""

    def __iter__(self) -> Iterator[object]:
        raise RuntimeError("walked")


def test_a_replay_runs_no_code_of_what_the_program_holds() -> None:
    async def main() -> None:
        proxy, greedy, lock = Proxy(), Greedy([Job(), Job()]), asyncio.Lock()
        async with lock:
            await step()
        raise KeyError("the failure", *(proxy is greedy for _ in ()))

    failure = failure_of(main)
    with pytest.raises(KeyError, match="the failure"):
        art.replay(main, failure.token)


def test_a_set_that_cannot_be_ordered_is_named() -> None:
    runs: list[int] = []

    async def main() -> None:
        runs.append(1)
        waiting = {object() for _ in range(8)}
        await step()
        await step(len(runs) + len(waiting))

    error = failure_of(main).error

    assert isinstance(error, art.NondeterminismError)
    assert "waiting, a set of object: they hash by their addresses" in str(error)


def test_leaving_the_program_is_a_failure() -> None:
    async def main() -> None:
        await step()
        raise SystemExit(3)

    error = failure_of(main).error

    assert isinstance(error, SystemExit)
    assert error.code == 3


# --- the story --------------------------------------------------------------------------------


def test_check_raises_the_programs_error_with_its_story() -> None:
    report = art.explore(programs.lost_update, schedules=600)
    assert report.failure is not None

    with pytest.raises(AssertionError) as caught:
        report.check()

    [note] = caught.value.__notes__
    assert report.failure.token in note
    assert report.failure.constraints[0] in note
    assert "writer (Task-1)" in note


def test_check_of_a_passing_report_returns_it() -> None:
    report = art.explore(programs.locked_counter, schedules=10)

    assert report.check() is report
    assert repr(report) == "<Report portfolio | 10 schedules, no failure>"


def test_constraints_name_who_is_held_until_when() -> None:
    [constraint] = failure_of(programs.starved_check).constraints

    assert constraint.startswith("check (Task-1) is held at ")
    assert " until slow (Task-2) has " in constraint


def test_the_timeline_is_a_page_with_a_lane_for_each(tmp_path: Path) -> None:
    failure = failure_of(programs.op_reads_reused_buffer)

    page = failure.save_html(tmp_path / "timeline.html").read_text(encoding="utf-8")

    for lane in dict.fromkeys(each.lane for each in failure.steps):
        assert f">{lane}</text>" in page
    assert failure.token in page
    assert "op sum #1 on pool 0" in failure.timeline


@pytest.mark.parametrize(
    "error",
    [
        art.DeadlockError("a", waits=(art.Wait("x", "y", "z"),), cycle=("x",)),
        art.StarvationError("a", steps=3, running=("x",)),
        art.NondeterminismError("a", step=2, first="x", second="y"),
        art.LeakError("a", tasks=("x",)),
        art.RealIOError("a", site="x:1"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


# --- cancellation -----------------------------------------------------------------------------


async def tidy() -> None:
    lock = asyncio.Lock()
    for _ in range(4):
        async with lock:
            await step()


def test_a_tidy_program_can_be_cancelled_everywhere() -> None:
    report = art.cancel_everywhere(tidy)

    assert report.complete
    assert report.schedules_run > 4


def test_a_program_that_hangs_when_cancelled_is_found_and_replayed() -> None:
    async def main() -> None:
        lock = asyncio.Lock()
        await lock.acquire()
        try:
            await step(2)
            lock.release()
        finally:
            await lock.acquire()

    report = art.cancel_everywhere(main)

    assert report.failure is not None
    assert isinstance(report.failure.error, art.DeadlockError)
    assert report.failure.constraints[0].startswith("main is cancelled at ")
    with pytest.raises(art.DeadlockError):
        art.replay(main, report.failure.token)


# --- what counts as the same failure ----------------------------------------------------------


async def raises_a_class_of_its_own() -> None:
    class OrderError(Exception):
        pass

    order: list[int] = []

    async def add(number: int) -> None:
        await step(3 * number)
        order.append(number)

    await asyncio.gather(add(0), add(1))
    if order != [0, 1]:
        raise OrderError(order)


def test_an_exception_class_that_the_program_defines_is_the_same_in_each_run() -> None:
    failure = failure_of(raises_a_class_of_its_own)

    assert type(failure.error).__name__ == "OrderError"
    assert len(failure.constraints) == 1
    with pytest.raises(Exception, match=r"\[1, 0\]") as caught:
        art.replay(raises_a_class_of_its_own, failure.token)
    assert type(caught.value).__name__ == "OrderError"


async def spins_if_late() -> None:
    flag = False

    async def set_flag() -> None:
        nonlocal flag
        flag = True

    async def check() -> None:
        await step(10)
        seen = flag
        while not seen:
            await step()

    await asyncio.gather(step(3000), set_flag(), check())


@pytest.mark.xslow
def test_a_long_program_is_not_taken_for_an_endless_one() -> None:
    failure = failure_of(spins_if_late, schedules=100, max_steps=20_000)

    assert isinstance(failure.error, art.StarvationError)
    assert failure.error.running == ("check (Task-3)",)
    assert failure.constraints, "asyncio's own order ends, so something has to be held"


def test_only_tasks_are_said_to_go_round() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    failure = failure_of(main, max_steps=500)

    assert isinstance(failure.error, art.StarvationError)
    assert failure.error.running == ("main",)
    assert failure.error.steps == 500


def test_constraints_that_were_not_seen_to_fail_are_left_out() -> None:
    _, story = told(programs.lost_update)

    holds, _ = shrink(story, lambda holds: False)

    assert holds is None


@pytest.mark.parametrize("has_longer", [False, True])
def test_several_constraints_are_told_as_one_that_holds_longer_if_there_is_one(
    has_longer: bool,
) -> None:
    _, story = told(programs.locked_counter)
    two = set(holds_of(story.steps, story.pending)[:2])
    longer = stronger([*two], story.steps)[-1]

    def fails(holds: Sequence[Hold]) -> bool:
        return two <= {*holds} or (has_longer and longer in holds)

    found, _ = shrink(story, fails)

    assert found is not None
    assert len(two) == 2
    if has_longer:
        [hold] = found
        assert (hold.key, hold.nth, hold.until_key) == (longer.key, longer.nth, longer.until_key)
    else:
        assert {*found} == two


def told(program: Main) -> tuple[Outcome, Trace]:
    """Run one schedule that is not asyncio's own, with its story."""
    with Sandbox() as sandbox:
        return Runner(program, sandbox).trace(art.Schedule(RANDOM, 5))
