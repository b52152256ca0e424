"""Ctrl-C in the middle of a loop: the process ends soon, and says only what it was told to say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT"),
]

PROGRAM = """
import asyncio, os, signal, threading, time
import numpy as np
import aioreplica as ar

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have turned it off
ar.set_logical_devices("cpu", 2)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def plain():
    yield np.ones(2)
    # In the loop's thread: a signal that reaches it just before it waits for events is seen late.
    loop.call_soon_threadsafe(interrupt)
    threading.Event().wait(30)

async def asynchronous():
    try:
        yield np.ones(2)
        interrupt()
        await asyncio.Event().wait()
    finally:
        print("source closed")

async def main():
    global loop
    loop = asyncio.get_running_loop()
    options = ar.InputOptions(per_replica_buffer_size={buffer})
    async with ar.MirroredStrategy() as strategy:
        async with strategy.distribute_dataset({source}, options) as batches:
            async for _ in batches:
                pass

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("source", "buffer"),
    [
        ("plain", 1),
        ("asynchronous", 0),
        pytest.param("plain", 0, marks=pytest.mark.xslow),
        pytest.param("asynchronous", 1, marks=pytest.mark.xslow),
    ],
)
def test_an_interrupt_ends_the_loop_and_the_process(source: str, buffer: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(source=source, buffer=buffer)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,  # the blocking source would take 30
        check=False,
    )

    said = [] if source == "plain" else ["source closed"]
    assert (done.stdout.split("\n")[:-1], done.stderr) == ([*said, "interrupted"], "")
