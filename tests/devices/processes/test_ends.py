"""How programs with device processes end: by themselves, by Ctrl-C, by SIGKILL, in a fork."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("cloudpickle")

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 300
END_S = 60

PROGRAM = """
import asyncio, multiprocessing, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it leaves
import numpy as np
import aioreplica as ar

def tell(*words):
    print(*words, flush=True)

def long_op(array):
    tell("running", os.getpid())
    end = time.monotonic() + 600
    while time.monotonic() < end:
        pass

async def with_devices(step):
    ar.set_logical_devices("cpu", 2, processes=[True, False])
    async with ar.OneDeviceStrategy("cpu:0") as strategy:
        return await strategy.run(step)

async def start_long_op():
    await ar.get_replica_context().run_on_device(long_op, np.ones(1_000_000))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a program of the text above and more; whatever is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str) -> subprocess.Popen[str]:
        path = tmp_path / f"program{len(started)}.py"
        path.write_text(PROGRAM + textwrap.dedent(source))
        process = subprocess.Popen(
            [sys.executable, "-W", "error", str(path)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes that a program has started."""
    return psutil.Process(process.pid).children(recursive=True)


def line_of(process: subprocess.Popen[str]) -> list[str]:
    """Return the next line that a program prints."""
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line, process.communicate()[1]
    return line


def assert_all_ended(processes: list[psutil.Process]) -> None:
    """Wait until processes have ended; they must not need help."""
    _, alive = psutil.wait_procs(processes, END_S)
    alive = [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    assert not alive


def segments_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return what processes have mapped of shared memory that has a name."""
    return {
        Path(mapped.path)
        for process in processes
        for mapped in process.memory_maps()
        if mapped.path.startswith("/dev/shm/") and not mapped.path.endswith(" (deleted)")
    }


pytestmark = [pytest.mark.xslow, pytest.mark.skipif(sys.platform != "linux", reason="/proc")]


def test_a_program_that_ends_leaves_nothing(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = start(
        """
        async def step():
            return await ar.get_replica_context().run_on_device(os.getpid)

        if __name__ == "__main__":
            tell(asyncio.run(with_devices(step)))
        """
    )

    out, err = program.communicate(timeout=LIMIT_S)

    assert (program.returncode, err) == (0, "")
    assert not psutil.pid_exists(int("".join(filter(str.isdigit, out.rpartition(":")[2]))))


def test_the_program_of_the_page_runs(start: Callable[[str], subprocess.Popen[str]]) -> None:
    page = (ROOT / "docs" / "process_devices.md").read_text(encoding="utf-8")
    program = start(page.partition("```python\n")[2].partition("```")[0])

    out, err = program.communicate(timeout=LIMIT_S)

    assert (program.returncode, out, err) == (0, "(2, 1)\n", "")


def test_a_program_ends_although_an_op_runs_and_nothing_was_closed(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = start(
        """
        if __name__ == "__main__":
            ar.set_logical_devices("cpu", 2, processes=True)
            strategy = ar.OneDeviceStrategy("cpu:0")
            loop = asyncio.new_event_loop()
            task = loop.create_task(strategy.run(start_long_op))
            loop.add_signal_handler(signal.SIGUSR1, loop.stop)
            loop.run_forever()
            tell("ending", time.monotonic())
            sys.exit(3)
        """
    )
    assert line_of(program)[0] == "running"
    left = family(program)
    program.send_signal(signal.SIGUSR1)
    began_s = float(line_of(program)[1])

    program.wait(LIMIT_S)

    assert program.returncode == 3
    assert time.monotonic() - began_s < END_S
    assert_all_ended(left)


def test_ctrl_c_ends_the_op_and_the_device_process(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = start(
        """
        if __name__ == "__main__":
            try:
                asyncio.run(with_devices(start_long_op))
            except KeyboardInterrupt:
                tell("interrupted")
        """
    )
    assert line_of(program)[0] == "running"
    left = family(program)
    began_s = time.monotonic()

    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all of them
    out, err = program.communicate(timeout=LIMIT_S)

    assert (program.returncode, out, err) == (0, "interrupted\n", "")
    assert time.monotonic() - began_s < END_S
    assert_all_ended(left)


@pytest.mark.parametrize("has_fork", [False, True])
def test_device_processes_end_when_their_program_is_killed(
    start: Callable[[str], subprocess.Popen[str]], has_fork: bool
) -> None:
    program = start(
        f"""
        async def step():
            await ar.get_replica_context().run_on_device(os.getpid)
            if {has_fork} and os.fork() == 0:  # it holds all pipes of its parent open
                os.setsid()
                time.sleep(60)
                os._exit(0)
            await start_long_op()

        if __name__ == "__main__":
            asyncio.run(with_devices(step))
        """
    )
    assert line_of(program)[0] == "running"
    left = family(program)
    forked = [each for each in left if each.cmdline() == psutil.Process(program.pid).cmdline()]
    processes = [each for each in left if "spawn_main" in " ".join(each.cmdline())]
    assert len(processes) == 1
    named = segments_of([psutil.Process(program.pid), *left])
    assert named

    program.kill()
    program.wait()

    try:
        assert_all_ended(processes)
    finally:
        for each in forked:
            each.kill()
    assert_all_ended(left)
    assert not any(each.exists() for each in named)  # what tracks them was one of those that ended


def test_a_fork_leaves_its_parents_device_processes_alone_and_makes_its_own(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = start(
        """
        async def step(w):
            ctx = ar.get_replica_context()
            pid = await ctx.run_on_device(os.getpid)
            return pid, await ctx.run_on_device(lambda: w.value.copy())

        async def main(strategy, w):
            async with strategy:
                pid, array = await strategy.run(step, args=(w,))
                return pid.values[0], array.values[0]

        if __name__ == "__main__":
            ar.set_logical_devices("cpu", 2, processes=[True, False])
            strategy = ar.OneDeviceStrategy("cpu:0")
            with strategy.scope():
                w = ar.Variable(np.arange(100_000.0))
            first, kept = asyncio.run(main(strategy, w))
            pid = os.fork()
            if pid == 0:
                twin = ar.OneDeviceStrategy("cpu:0")
                with twin.scope():
                    v = ar.Variable(np.arange(100_000.0) + 1)
                second, array = asyncio.run(main(twin, v))
                assert second != first and array[5] == 6 and kept[5] == 5
                tell("child")
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            third, array = asyncio.run(main(strategy, w))
            assert (array == kept).all()
            tell("parent")
        """
    )

    out, err = program.communicate(timeout=LIMIT_S)

    assert (program.returncode, out, err) == (0, "child\nparent\n", "")


def test_a_script_without_a_guard_is_told_so(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = start(
        """
        async def step():
            await ar.get_replica_context().run_on_device(os.getpid)

        asyncio.run(with_devices(step))
        """
    )

    _, err = program.communicate(timeout=LIMIT_S)

    assert program.returncode == 1
    last = err.strip().splitlines()
    assert "Op 'getpid' was not run" in err
    assert "if __name__ == '__main__':" in err, last


def test_threads_that_an_op_leaves_behind_do_not_keep_the_device_process(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = start(
        """
        def leave_thread():
            threading.Thread(target=time.sleep, args=(600,)).start()

        async def step():
            await ar.get_replica_context().run_on_device(leave_thread)
            tell("left")

        if __name__ == "__main__":
            ar.set_logical_devices("cpu", 2, processes=True)
            asyncio.run(ar.OneDeviceStrategy("cpu:0").run(step))
        """
    )
    assert line_of(program) == ["left"]
    left = family(program)

    program.wait(LIMIT_S)

    assert program.returncode == 0
    assert_all_ended(left)
