"""A device with a process of its own: what it cannot do, what it leaves behind, and its end."""

import asyncio
import os
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.context import REGISTRY
from aioreplica.devices import lane_table
from aioreplica.devices.processes._context_variables import VarName, VarNames
from aioreplica.devices.processes._link import ProcessLink
from aioreplica.errors import ContextError, DeviceError, WorkerLostError
from tests.growth import assert_nothing_grows

MiB = 1024 * 1024
kept: list[Any] = []


async def run_op(strategy: ar.OneDeviceStrategy, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one op in a step of its own."""
    results = []

    async def step() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        results.append(await ctx.run_on_device(fn, *args, **kwargs))

    async with strategy:
        await strategy.run(step)
    return results[0]


def die(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


def wait_for_nothing() -> None:
    threading.Event().wait(60)


def keep(array: Any) -> float:
    kept.append(array)
    return float(array.sum())


def hold(thing: Any) -> None:
    kept.append(thing)


def let_go() -> Any:
    return kept.pop()


def what_is_kept() -> list[float]:
    return [float(array.sum()) for array in kept]


class Locked:
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Torn:
    """Reads a file when it is pickled."""

    def __reduce__(self) -> Any:
        raise OSError("image file is truncated")


class Unloadable:
    """Can be pickled, but its pickle cannot be built again."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


class StubbornError(Exception):
    """Can be pickled, but its pickle cannot be built again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)
        self.first, self.lock = first, threading.Lock()


class HopelessError(StubbornError):
    """Cannot be built of its arguments either."""

    def __new__(cls, first: str, second: str) -> Self:
        return super().__new__(cls, first, second)


# ---- what cannot be sent ---------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_op_that_cannot_be_sent_names_what_it_captured(
    on_process: ar.OneDeviceStrategy,
) -> None:
    guard, settings = threading.Lock(), {"inner": [1, Locked()]}

    with pytest.raises(TypeError, match=r"Op .*<lambda>.*captured variable 'guard'.*_thread.lock"):
        await run_op(on_process, lambda: guard)
    with pytest.raises(TypeError, match=r"'settings'\['inner'\]\[1\].lock"):
        await run_op(on_process, lambda: settings)
    with pytest.raises(TypeError, match=r"argument 1 \(a _thread.lock\)"):
        await run_op(on_process, max, np.ones(MiB), guard)
    assert await run_op(on_process, pow, 2, 5) == 32


@pytest.mark.asyncio
async def test_a_result_that_cannot_be_sent_back_is_named(
    on_process: ar.OneDeviceStrategy,
) -> None:
    with pytest.raises(TypeError, match=r"Op 'Locked'.*its result.lock \(a _thread.lock\)"):
        await run_op(on_process, Locked)


@pytest.mark.asyncio
async def test_an_os_error_of_pickling_is_not_taken_for_lack_of_memory(
    on_process: ar.OneDeviceStrategy,
) -> None:
    with pytest.raises(TypeError, match=r"argument 0 \(a .*Torn\) cannot be pickled: .*truncated"):
        await run_op(on_process, id, Torn())
    with pytest.raises(TypeError, match=r"Op 'Torn'.*its result .*truncated"):
        await run_op(on_process, Torn)


@pytest.mark.asyncio
async def test_what_comes_back_by_name_must_have_been_given(
    on_process: ar.OneDeviceStrategy,
) -> None:
    with on_process.scope():
        v = ar.Variable(1.0)

    await run_op(on_process, hold, v)
    with pytest.raises(TypeError, match=r"'let_go'.*has a variable .*was not given"):
        await run_op(on_process, let_go)
    with pytest.raises(TypeError, match=r"has the replica context, .*was not given"):
        await run_op(on_process, lambda: ar.get_replica_context())


@pytest.mark.asyncio
async def test_an_error_that_cannot_be_built_again_is_told_in_words(
    on_process: ar.OneDeviceStrategy,
) -> None:
    def op() -> None:
        raise HopelessError("no ", "way")

    with pytest.raises(DeviceError, match=r"raised .*HopelessError: no way") as caught:
        await run_op(on_process, op)

    assert "in op" in str(caught.value.__cause__)


@pytest.mark.asyncio
async def test_an_error_is_the_users_own_although_its_init_takes_other_arguments(
    on_process: ar.OneDeviceStrategy,
) -> None:
    def op() -> None:
        error = StubbornError("no ", "way")
        error.add_note("a note")
        raise error

    def several() -> None:
        raise ExceptionGroup("two", [StubbornError("no ", "way"), KeyError(threading.Lock(), 3)])

    with pytest.raises(StubbornError, match=r"^no way\n") as caught:
        await run_op(on_process, op)
    assert (caught.value.first, caught.value.__notes__[0]) == ("no ", "a note")
    assert not hasattr(caught.value, "lock")  # cannot be sent, and is left out
    assert "in op" in str(caught.value.__cause__)
    with pytest.raises(ExceptionGroup, match="two") as caught_group:
        await run_op(on_process, several)
    stubborn, missing = caught_group.value.exceptions
    assert isinstance(stubborn, StubbornError)
    assert isinstance(missing, KeyError)
    assert "lock" in missing.args[0]
    assert missing.args[1] == 3


@pytest.mark.asyncio
async def test_context_variables_that_cannot_travel_are_named_once(
    on_process: ar.OneDeviceStrategy,
) -> None:
    import contextvars

    request: contextvars.ContextVar[Any] = contextvars.ContextVar("request", default=None)
    token = request.set(threading.Lock())
    try:
        with pytest.warns(RuntimeWarning, match=r"'request'.*a lock.*cpu:0|cpu:0.*"):
            assert await run_op(on_process, lambda: request.get()) is None
        assert await run_op(on_process, lambda: request.get()) is None
    finally:
        request.reset(token)


@pytest.mark.asyncio
async def test_a_context_variable_that_cannot_be_built_there_is_named_and_fails_no_op(
    on_process: ar.OneDeviceStrategy,
) -> None:
    request: ContextVar[Any] = ContextVar("unloadable", default=None)
    token = request.set(Unloadable())
    try:
        with pytest.warns(RuntimeWarning, match=r"'unloadable'.*built there: ValueError: invalid"):
            assert await run_op(on_process, lambda: request.get()) is None
        assert await run_op(on_process, pow, 2, 3) == 8
    finally:
        request.reset(token)


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_plain_steps_and_device_loops_are_refused(on_process: ar.OneDeviceStrategy) -> None:
    def plain() -> None:
        raise AssertionError

    async with on_process:
        with pytest.raises(DeviceError, match=r"plain.*cannot run on cpu:0.*async def"):
            await on_process.run(plain)
        with pytest.raises(DeviceError, match=r"device loop.*cannot run on cpu:0"):
            await on_process.run_steps(lambda _ctx, _x: None, iter([1, 2]), 2)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "call",
    [
        lambda ctx: ctx.blocking.all_reduce("sum", 1.0),
        lambda ctx: ctx.all_reduce("sum", 1.0),
        lambda ctx: ctx.start_all_reduce("sum", 1.0),
        lambda ctx: ctx.run_on_device(len),
        lambda ctx: ctx.send(1.0, to=0),
        lambda ctx: ctx.receive(from_=0),
        lambda ctx: ctx.blocking.send(1.0, to=0),
        lambda _ctx: ar.autodiff.all_reduce("sum", 1.0),
    ],
)
async def test_whatever_meets_other_replicas_is_refused(
    on_process: ar.OneDeviceStrategy, call: Callable[[Any], Any]
) -> None:
    with pytest.raises(ContextError, match=r"cpu:0, which runs in a device process"):
        await run_op(on_process, lambda: call(ar.get_replica_context()))


@pytest.mark.asyncio
async def test_steps_send_between_devices_of_both_kinds(devices: tuple[str, str]) -> None:
    """The step runs in the program, and so do its sends; ops get what came as any argument."""

    async def step() -> float:
        ctx = ar.get_replica_context()
        assert ctx is not None
        mine = ctx.replica_id_in_sync_group
        await ctx.send(np.full(3, 1.0 + mine), to=1 - mine)
        total: float = await ctx.run_on_device(np.sum, await ctx.receive(from_=1 - mine))
        return float(total)

    async with ar.MirroredStrategy(list(devices)) as strategy:
        assert strategy.local_results(await strategy.run(step)) == (6.0, 3.0)


@pytest.mark.asyncio
async def test_writes_of_variables_and_optimizers_are_refused(
    on_process: ar.OneDeviceStrategy,
) -> None:
    with on_process.scope():
        v = ar.Variable(np.ones(3), name="v")
        optimizer = ar.optimizers.SGD(0.1)

    with pytest.raises(ContextError, match=r"'v'.*device process"):
        await run_op(on_process, lambda: v.assign(np.zeros(3)))
    with pytest.raises(ContextError, match=r"'v'.*device process"):
        await run_op(on_process, lambda: v.blocking.assign_add(1.0))
    with pytest.raises(TypeError, match=r"captured variable 'optimizer'"):
        await run_op(on_process, lambda: optimizer.blocking.minimize(lambda: v.value.sum()))
    np.testing.assert_array_equal(v.value, np.ones(3))


@pytest.mark.parametrize(
    ("processes", "error"),
    [([True], ValueError), ("ab", TypeError), (1, TypeError), ([1, 0], TypeError)],
)
def test_processes_must_be_one_bool_per_device(processes: Any, error: type[Exception]) -> None:
    before = REGISTRY.replace("logical_devices", None)
    try:
        with pytest.raises(error, match="processes"):
            ar.set_logical_devices("cpu", 2, processes=processes)
    finally:
        REGISTRY.replace("logical_devices", before)


# ---- memory ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_arrays_that_an_op_keeps_are_not_overwritten(
    on_process: ar.OneDeviceStrategy,
) -> None:
    sizes = [1.0, 2.0, 3.0]

    sums = [await run_op(on_process, keep, np.full(MiB, size)) for size in sizes]

    assert sums == [MiB * size for size in sizes]
    assert await run_op(on_process, what_is_kept) == sums
    assert await run_op(on_process, kept_is_cleared) == 0


def kept_is_cleared() -> int:
    kept.clear()
    return len(kept)


@pytest.mark.asyncio
async def test_results_that_are_kept_here_are_not_written_again(
    on_process: ar.OneDeviceStrategy,
) -> None:
    results = [await run_op(on_process, np.full, MiB, float(i)) for i in range(5)]

    del results[1], results[2]
    more = [await run_op(on_process, np.full, MiB, 9.0) for _ in range(4)]

    assert [float(array.mean()) for array in results] == [0.0, 2.0, 4.0]
    assert [float(array.mean()) for array in more] == [9.0] * 4


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_ops_and_versions_of_variables_use_the_same_memory_again(
    on_process: ar.OneDeviceStrategy, tmp_path: Path
) -> None:
    with on_process.scope():
        v = ar.Variable(np.zeros(MiB), name="large")

    async def send(number: int) -> None:
        await v.assign(np.full(MiB, float(number)))
        array = np.full(2 * MiB, float(number))
        result = await run_op(on_process, lambda array: array + v.value[0], array)
        assert result[0] == 2 * number

    await assert_nothing_grows(send, tmp_path, times=20)


@pytest.mark.asyncio
async def test_a_value_is_published_once_for_each_version(
    on_process: ar.OneDeviceStrategy,
) -> None:
    with on_process.scope():
        v = ar.Variable(np.zeros(MiB), name="large")

    async def bytes_sent() -> int:
        before = process_statistics().bytes_sent
        await run_op(on_process, lambda: v.value[0])
        return int(process_statistics().bytes_sent - before)

    assert await bytes_sent() > 8 * MiB
    assert await bytes_sent() < MiB
    await v.assign(np.ones(MiB))
    assert await bytes_sent() > 8 * MiB
    assert await run_op(on_process, lambda: v.value[0]) == 1.0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_descriptors_of_an_op_that_was_not_sent_are_not_those_of_the_next(
    on_process: ar.OneDeviceStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_link: ProcessLink) -> None:
        raise OSError(109, "Too many references")

    pid = await run_op(on_process, os.getpid)
    with monkeypatch.context() as patch:
        patch.setattr(ProcessLink, "public_memory", refuse)
        with pytest.raises(DeviceError, match=r"'len' was not sent to cpu:0: .*Too many refer"):
            await run_op(on_process, len, np.ones(MiB))

    assert await run_op(on_process, np.mean, np.full(MiB, 2.0)) == 2.0
    assert await run_op(on_process, os.getpid) != pid


@pytest.mark.slow
@pytest.mark.asyncio
async def test_without_shared_memory_the_op_is_named_and_the_device_lives(
    on_process: ar.OneDeviceStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    v = ar.Variable(np.ones(8 * MiB))  # its process has never heard of it
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DeviceError, match=r"'len' was not sent to cpu:0.*No space"):
            await run_op(on_process, len, np.ones(8 * MiB))
        with pytest.raises(DeviceError, match=r"was not sent to cpu:0.*No space"):
            await run_op(on_process, lambda: v.value[0])
    assert await run_op(on_process, len, np.ones(3)) == 3
    assert await run_op(on_process, lambda: v.value[0]) == 1.0


def test_lanes_that_meet_a_context_variable_at_once_give_it_one_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, others = ContextVar("mine", default=1), ContextVar("others", default=2)
    names, pool = VarNames(), ThreadPoolExecutor(1)
    found: list[Future[VarName]] = []

    make_name = VarNames._new_name

    def overtaken(self: VarNames, var: ContextVar[int]) -> VarName:
        made = make_name(self, var)
        if not found:  # another lane's thread asks before this one has kept its name
            found.append(pool.submit(names.name_of, others))
            wait(found, 0.1)
        return made

    monkeypatch.setattr(VarNames, "_new_name", overtaken)
    with pool:
        assert {names.name_of(mine).number, found[0].result(30).number} == {1, 2}
        assert names.name_of(others) == found[0].result(30)


@pytest.mark.asyncio
async def test_a_device_process_without_memory_raises_and_lives(
    on_process: ar.OneDeviceStrategy,
) -> None:
    def op() -> None:
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, limits[1]))
        try:
            np.ones(1 << 30)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    with pytest.raises(MemoryError):
        await run_op(on_process, op)
    assert await run_op(on_process, pow, 2, 3) == 8


# ---- ends ------------------------------------------------------------------------------------


def process_statistics() -> Any:
    lane = lane_table().statistics()["cpu:0"]
    assert lane.process is not None
    assert lane.worker is lane.process
    return lane.process


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_device_process_that_dies_is_a_device_error_and_the_next_op_has_another(
    on_process: ar.OneDeviceStrategy,
) -> None:
    with on_process.scope():
        v = ar.Variable(np.arange(50_000.0), name="v")
    first = await run_op(on_process, lambda: (os.getpid(), v.value.sum())[0])

    with pytest.raises(DeviceError, match=r"ran op 'die': killed by SIGKILL") as caught:
        await run_op(on_process, die, "SIGKILL")

    assert caught.value.device == "cpu:0"
    assert await run_op(on_process, lambda: v.value.sum()) == v.value.sum()
    now = process_statistics()
    assert (now.pid != first, now.deaths >= 1) == (True, True)
    assert now.memory_bytes is None or now.memory_bytes > MiB


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_op_that_runs_when_the_program_ends_is_ended(
    on_process: ar.OneDeviceStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor of its process is waited for at exit, whether anyone awaits the op or not."""
    await run_op(on_process, os.getpid)
    program_exit = REGISTRY.once("program_exit", object)
    with monkeypatch.context() as patch:
        patch.setattr(program_exit, "has_begun", True)
        with pytest.raises(DeviceError, match="ran op 'wait_for_nothing': killed by SIGKILL"):
            await run_op(on_process, wait_for_nothing)


def test_ctrl_c_is_kept_from_a_device_process_until_it_ignores_it(
    devices: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process inherits the signals that are masked in the thread that starts it."""
    masks = []
    started: list[bool] = []

    def ensure_running() -> None:
        if not started:
            started.append(True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    class Executor:
        def __init__(self, *_args: Any, **_options: Any) -> None:
            resource_tracker.ensure_running()  # for its semaphores

        def submit(self, _fn: Any) -> Any:
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            raise OSError("no process for you")

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    num_open = len([*Path("/proc/self/fd").iterdir()])
    monkeypatch.setattr("aioreplica.devices.processes._link.ProcessPoolExecutor", Executor)
    monkeypatch.setattr(resource_tracker, "ensure_running", ensure_running)
    with pytest.raises(OSError, match="for you"):
        ProcessLink(devices[0])
    assert masks == [before | {signal.SIGINT}]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert len([*Path("/proc/self/fd").iterdir()]) == num_open


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_a_device_process_that_dies_between_ops_is_replaced(
    on_process: ar.OneDeviceStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    pid = await run_op(on_process, os.getpid)
    process = psutil.Process(pid)
    process.kill()
    await asyncio.to_thread(psutil.wait_procs, [process], 30)  # until its executor has seen it

    assert await run_op(on_process, os.getpid) != pid

    assert "ended between two ops" in caplog.text


@pytest.mark.asyncio
async def test_an_error_of_one_replica_waits_for_the_op_of_the_other(
    devices: tuple[str, str], tmp_path: Any
) -> None:
    path = tmp_path / "done"

    def write() -> None:
        path.write_text("done")

    async def step() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        await ctx.run_on_device(os.getpid)
        if ctx.replica_id_in_sync_group == 1:
            raise ZeroDivisionError
        await ctx.run_on_device(write)

    async with ar.MirroredStrategy(devices) as strategy:
        with pytest.raises(ZeroDivisionError):
            await strategy.run(step)
        was_written = path.exists()
        await asyncio.sleep(0)
    assert path.exists() == was_written


def test_the_kit_simulates_devices_with_processes(on_process: ar.OneDeviceStrategy) -> None:
    async def step() -> int:
        ctx = ar.get_replica_context()
        assert ctx is not None
        return await ctx.run_on_device(os.getpid)

    async def main() -> Any:
        async with ar.OneDeviceStrategy("cpu:0") as strategy:
            with pytest.raises(DeviceError, match="cannot run on cpu:0"):
                await strategy.run(os.getpid)
            return await strategy.run(step)

    assert art.run(main).values == (os.getpid(),)
    report = art.explore(main, schedules=5, faults=art.Faults().lose_worker("cpu:0", at=0))
    assert isinstance(report.failure and report.failure.error, WorkerLostError)
