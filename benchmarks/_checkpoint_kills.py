"""Killing a training process: at random during saves, and once behind every step."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any, final

import aioreplica as ar

from ._checkpoint_program import NUM_STEPS, build

SIZE = 200_000
ENDLESS = 1_000_000
MAX_DELAY_S = 0.25
LIMIT_S = 120


@final
@dataclass(slots=True)
class Kills:
    """What became of a process that was killed again and again.

    Attributes:
        num_kills: How often it was.
        num_restored: How often the newest step could be restored.
        num_torn: How often that was not one save: must be 0.
        num_lost: How often a step that was said to be saved was gone: must be 0.
        newest: The newest step at the end.
    """

    num_kills: int = 0
    num_restored: int = 0
    num_torn: int = 0
    num_lost: int = 0
    newest: int = 0

    @property
    def is_good(self) -> bool:
        """Whether every restore gave one whole save, and no older one than was promised."""
        return self.num_restored == self.num_kills and not self.num_torn and not self.num_lost


def kill_at_random(num_kills: int) -> Kills:
    """Kill a process that trains and saves, at random times; restore after each kill."""
    rng, kills = Random(1), Kills()
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(num_kills):
            promised = _run_until_killed(directory, rng.random() * MAX_DELAY_S)
            kills.num_kills += 1
            step, is_whole = asyncio.run(_restore(directory))
            kills.num_restored += step is not None
            kills.newest = step or 0
            kills.num_torn += not is_whole
            kills.num_lost += kills.newest < promised
    return kills


def program(directory: str, *options: str) -> list[str]:
    """Return the command line of a training that may be killed."""
    return [sys.executable, "-m", "benchmarks._checkpoint_program", directory, *options]


def _run_until_killed(directory: str, delay_s: float) -> int:
    """Run the program until it has saved once, and for some time more; return what it promised."""
    options = ["--steps", str(ENDLESS), "--size", str(SIZE), "--kill-at", str(ENDLESS)]
    with subprocess.Popen(
        program(directory, *options), stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        lines = [first, *process.stdout.read().splitlines()]
        process.wait(LIMIT_S)
    numbers = [int(line.split()[1]) for line in lines if line.startswith("saved ")]
    if not numbers:
        raise RuntimeError("The training process ended before its first save.")
    return max(numbers)


async def _restore(directory: str) -> tuple[int | None, bool]:
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        state: dict[str, Any] = build(strategy, SIZE)
        manager = ar.CheckpointManager(directory)
        step = manager.latest()
        found = await manager.restore(state)
        counts = {found, int(state["adam"].iterations.value), len(state["history"])}
        return step, len(counts) == 1 and step == found


def kill_at_every_step(*, is_looped: bool, every: int = 1) -> tuple[int, int]:
    """Kill a run behind its steps, resume it; return how many ended in other bits, and of what."""
    options = ["--looped"] if is_looped else []
    whole = _digest(options)
    steps = range(1, NUM_STEPS, every)
    wrong = 0
    for step in steps:
        with tempfile.TemporaryDirectory() as directory:
            first = subprocess.run(
                program(directory, *options, "--kill-at", str(step)),
                capture_output=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            if first.returncode != -signal.SIGKILL:
                raise RuntimeError(f"It was not killed: {first.stderr.decode()}")
            wrong += _digest(options, directory) != whole
    return wrong, len(steps)


def _digest(options: list[str], directory: str | None = None) -> str:
    if directory is None:
        with tempfile.TemporaryDirectory() as fresh:
            return _digest(options, fresh)
    done = subprocess.run(
        program(directory, *options), capture_output=True, timeout=LIMIT_S, check=True, text=True
    )
    return done.stdout.split()[-1]


def stop_with_sigterm() -> int:
    """Send SIGTERM to a program that saves when it is told to stop; return its exit status."""
    with tempfile.TemporaryDirectory() as directory:
        with subprocess.Popen(
            program(directory, "--steps", str(ENDLESS), "--on-sigterm"),
            stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            end = monotonic() + LIMIT_S
            while process.poll() is None and monotonic() < end:
                sleep(0.01)
        if process.returncode == 75 and ar.CheckpointManager(directory).latest() is None:
            return os.EX_SOFTWARE
        return process.returncode
