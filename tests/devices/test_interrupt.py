"""Ctrl-C while an op blocks: the process ends soon, and says nothing but KeyboardInterrupt."""

import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK_S = 600  # how long the op blocks, whatever happens
LIMIT_S = 60  # far below: who ends by then has not waited for the op, however busy the machine is

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT"),
]

PROGRAM = """
import asyncio, signal, sys, threading
import anyio
import aioreplica as ar

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have turned it off
ar.set_logical_devices("cpu", 2)

lock, blocked = threading.Lock(), []
expected = 2 if "{work}" == "plain_steps" else 1

def block():
    with lock:
        blocked.append(1)
        if len(blocked) == expected:  # said by the loop, which has nothing else to do
            loop.call_soon_threadsafe(lambda: print("started", flush=True))
    threading.Event().wait({seconds})

async def replica():
    if ar.get_replica_context().replica_id_in_sync_group == 0:
        await ar.get_replica_context().run_on_device(block)
    await ar.get_replica_context().barrier()

async def host():
    await ar.run_on_host(block)

async def steps():
    await ar.MirroredStrategy().run(replica)

async def plain_steps():
    await ar.MirroredStrategy().run(block)

async def closed_steps():
    async with ar.MirroredStrategy() as strategy:
        await strategy.run(replica)

async def foreground():
    global loop
    loop = asyncio.get_running_loop()
    await {work}()

async def background():
    global loop
    loop = asyncio.get_running_loop()
    task = asyncio.create_task({work}())
    await asyncio.Event().wait()

def bare_run(main):
    asyncio.new_event_loop().run_until_complete(main())

def asyncio_run(main):
    asyncio.run(main())

def uvloop_run(main):
    import uvloop
    uvloop.run(main())

{run}({main})
"""

RUNNERS = ["asyncio_run", "anyio.run", "uvloop_run", "bare_run"]
QUIET = {"KeyboardInterrupt", "asyncio.exceptions.CancelledError"}
NOISE = ["Exception ignored", "never retrieved", "never awaited", "Fatal Python error"]


def raised_in(stderr: str) -> set[str]:
    """Names of the exceptions that tracebacks in a program's output end with."""
    ends = re.findall(r"^([A-Za-z_][\w.]*)(?::.*)?$", stderr, re.MULTILINE)
    return {end for end in ends if re.search(r"(Error|Exception|Interrupt|Exit)$", end)}


def interrupt(work: str, main: str, run: str) -> tuple[int, str]:
    """Start a program, send Ctrl-C when its op has started; say how it ended."""
    source = PROGRAM.format(seconds=BLOCK_S, work=work, main=main, run=run)
    with subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            first_line = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()  # nothing, if it has ended
    assert first_line == "started\n", stderr
    return process.returncode, stderr


def ways() -> list[Any]:
    """Every way to run every work; of each work and of each runner one is in the usual suite."""
    usual = {
        ("host", "background", "bare_run"),
        ("steps", "foreground", "asyncio_run"),
        ("plain_steps", "background", "uvloop_run"),
        ("closed_steps", "foreground", "anyio.run"),
    }
    works = ["host", "steps", "plain_steps", "closed_steps"]
    every = itertools.product(works, ["foreground", "background"], RUNNERS)
    return [pytest.param(*way, marks=[pytest.mark.xslow] * (way not in usual)) for way in every]


@pytest.mark.parametrize(("work", "main", "run"), ways())
def test_ctrl_c_ends_a_program_whose_op_blocks(work: str, main: str, run: str) -> None:
    if run == "uvloop_run":
        pytest.importorskip("uvloop")

    status, stderr = interrupt(work, main, run)

    assert status in {-signal.SIGINT, 128 + signal.SIGINT}, stderr
    assert stderr.rstrip().endswith("KeyboardInterrupt"), stderr
    assert raised_in(stderr) <= QUIET, stderr
    assert [noise for noise in NOISE if noise in stderr] == [], stderr


RETURNS = """
import asyncio, threading
import aioreplica as ar

async def main():
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def block():
        loop.call_soon_threadsafe(started.set)
        threading.Event().wait({seconds})

    task = asyncio.create_task(ar.run_on_host(block))
    await started.wait()

asyncio.run(main())
"""


def test_a_main_that_returns_does_not_wait_for_an_op_of_a_background_task() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RETURNS.format(seconds=BLOCK_S)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
