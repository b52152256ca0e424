"""What no simulation has: a real disk that is full, memory, a process that is told to stop."""

import asyncio
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import EXIT_CODE, LocalStorage
from benchmarks import _checkpoint_program
from benchmarks._full_disk import fill_up

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
NUM_EXAMPLES = 64  # of the program's data set


@pytest.mark.slow
def test_a_disk_that_is_full_leaves_the_old_state_and_says_so() -> None:
    """With any number of pages left, from none on, until a save finds enough of them."""
    found = fill_up(2)

    if found.why_not:
        pytest.skip(f"A small file system could not be mounted: {found.why_not}")
    assert found.num_wrong == 0
    assert found.num_refused == found.num_saves - 1 >= 5


@pytest.mark.slow
def test_a_save_takes_little_memory_of_its_own(tmp_path: Path) -> None:
    """At most 64 MiB are promised; a copy of any of these arrays would be more."""
    plain, strided = np.zeros((9 * MIB, 1)), np.zeros((128, 9 * MIB // 128)).T
    state = [ar.Variable(plain), ar.Variable(strided)]
    assert [v.components[0].flags.c_contiguous for v in state] == [True, False]

    async def save() -> None:
        await ar.CheckpointManager(tmp_path).save(1, state)

    tracemalloc.start()
    try:
        asyncio.run(save())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 64 * MIB


@pytest.mark.xslow
def test_a_process_that_gets_sigterm_saves_a_whole_step_and_says_start_me_again(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", _checkpoint_program.__name__, str(tmp_path), "--on-sigterm"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it trains
        assert list(tmp_path.glob("step-*")) == []
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (EXIT_CODE, "")

    async def restore() -> tuple[int, dict[str, Any]]:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            state = _checkpoint_program.build(strategy, 100)
            manager = ar.CheckpointManager(tmp_path)
            [step] = manager.steps()
            await manager.verify(step)
            assert await manager.restore(state) == step
            return step, state

    step, state = asyncio.run(restore())
    place = state["data"].state_dict()
    assert step > 0
    assert state["adam"].iterations.value == step
    assert place["epoch"] * NUM_EXAMPLES + place["position"] == step * _checkpoint_program.BATCH


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is per thread on Linux only")
def test_a_save_in_the_background_leaves_the_cores_to_the_devices(tmp_path: Path) -> None:
    """And one that is waited for does not; nor do threads that a store may start beside its own."""

    class Calls:
        """The functions of `os`; notes the niceness of threads that sync."""

        def __init__(self) -> None:
            self.found: set[int] = set()

        def __getattr__(self, name: str) -> Any:
            if name == "fsync":
                self.found.add(os.getpriority(os.PRIO_PROCESS, 0))
            return getattr(os, name)

    class Store(LocalStorage):
        """What is no folder of this machine, for all that is known."""

    async def save(storage: LocalStorage, *, wait: bool) -> None:
        async with ar.CheckpointManager(storage) as manager:
            await manager.save(1, [1.0], wait=wait)

    def niceness(kind: type[LocalStorage], *, wait: bool) -> int:
        calls = Calls()
        asyncio.run(save(kind(tmp_path, calls=calls), wait=wait))
        [found] = calls.found
        return found

    own = niceness(LocalStorage, wait=True)
    assert niceness(LocalStorage, wait=False) == min(19, own + 10)
    assert niceness(Store, wait=False) == own
