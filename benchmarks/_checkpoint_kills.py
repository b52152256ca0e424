"""Killing a training process: at random during saves, and once behind every step."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any, final

import aioreplica as ar
from aioreplica.checkpoint import EXIT_CODE

from ._checkpoint_program import NUM_STEPS, build

SIZE = 200_000
ENDLESS = 1_000_000
MAX_DELAY_S = 0.25
LIMIT_S = 120
STOPPED_STEPS = 60
STOPPED_SIZE = 20_000


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


def _program(directory: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks._checkpoint_program", directory, *options]


def _run_until_killed(directory: str, delay_s: float) -> int:
    """Run the program until it has saved once, and for some time more; return what it promised."""
    options = ["--steps", str(ENDLESS), "--size", str(SIZE), "--kill-at", str(ENDLESS)]
    with subprocess.Popen(
        _program(directory, *options), stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
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
                _program(directory, *options, "--kill-at", str(step)),
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
        _program(directory, *options), capture_output=True, timeout=LIMIT_S, check=True, text=True
    )
    return done.stdout.split()[-1]


def stop_with_sigterm() -> int:
    """Send SIGTERM to a program that saves when it is told to stop; return its exit status."""
    with tempfile.TemporaryDirectory() as directory:
        with subprocess.Popen(
            _program(directory, "--steps", str(ENDLESS), "--on-sigterm"),
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


@final
@dataclass(slots=True)
class Stops:
    """Ends of programs that were told to stop, or killed, until they had trained all steps.

    Attributes:
        sent: How often each signal was sent.
        num_runs: How many trainings were stopped, gone on with, and brought to their end.
        wrong_codes: Exit statuses that are not the documented ones, with the signal: must be none.
        num_wrong: How many trainings ended in other bits than an uninterrupted one: must be 0.
    """

    sent: dict[str, int] = field(default_factory=dict)
    num_runs: int = 0
    wrong_codes: list[str] = field(default_factory=list)
    num_wrong: int = 0

    @property
    def is_good(self) -> bool:
        """Whether every end was as documented, and every training the same in every bit."""
        return not self.wrong_codes and not self.num_wrong

    def __str__(self) -> str:
        sent = ", ".join(f"{count} x {name}" for name, count in sorted(self.sent.items()))
        wrong = "; ".join(self.wrong_codes) or "none"
        return (
            f"stopped by {sent}, calls that read failing now and then: {self.num_runs} trainings, "
            f"other bits at the end = {self.num_wrong}, other exit statuses: {wrong}"
        )


CODES = {
    signal.SIGKILL: -signal.SIGKILL,
    signal.SIGTERM: EXIT_CODE,
    signal.SIGINT: -signal.SIGINT,
}


def stop_at_random(num_signals: int, seed: int = 2) -> Stops:
    """Stop trainings by signals of all kinds at random times, and go on, until all have ended."""
    rng, stops = Random(seed), Stops()
    options = ["--stoppable", "--steps", str(STOPPED_STEPS), "--size", str(STOPPED_SIZE)]
    whole = _digest(options)
    while sum(stops.sent.values()) < num_signals:
        with tempfile.TemporaryDirectory() as directory:
            found = ""
            while not found:
                may_stop = sum(stops.sent.values()) < num_signals
                number = rng.choice([*CODES]) if may_stop else None
                faults = ["--faults", str(rng.randrange(10**6))]
                found = _run_until_stopped(directory, [*options, *faults], number, rng, stops)
            stops.num_runs += 1
            stops.num_wrong += found != whole
    return stops


def _run_until_stopped(
    directory: str, options: list[str], number: signal.Signals | None, rng: Random, stops: Stops
) -> str:
    """Run a training and send it a signal; return its digest if it came to its end, else ""."""
    with subprocess.Popen(
        _program(directory, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        if number is not None:
            sleep(rng.random() * MAX_DELAY_S)
            process.send_signal(number)
        output, errors = process.communicate(timeout=LIMIT_S)
    lines = [first, *output.splitlines()]
    digests = [line.split()[1] for line in lines if line.startswith("digest ")]
    if number is not None and not (digests and process.returncode == 0):
        stops.sent[number.name] = stops.sent.get(number.name, 0) + 1
        if process.returncode != CODES[number]:
            last = errors.strip().splitlines()[-1:]
            stops.wrong_codes.append(f"{number.name} gave {process.returncode} {last}")
        return ""
    if not digests:
        raise RuntimeError(f"A training ended with {process.returncode}: {errors}")
    return digests[-1]
