"""Stopping a training by signals, and comparing it after each stop with one that was not stopped.

States are compared entry by entry as they were saved. A digest of the objects of the program would
not do: what was restored after its last step has not made the slots of its optimizer yet.
"""

from __future__ import annotations

import asyncio
import os
import reprlib
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from random import Random
from time import sleep
from typing import Any, final

import numpy as np

import aioreplica as ar
from aioreplica.checkpoint import EXIT_CODE

from ._checkpoint_kills import LIMIT_S, MAX_DELAY_S, program
from ._checkpoint_program import DONE

NUM_STEPS = 60
SIZE = 20_000

CODES = {
    signal.SIGKILL: -signal.SIGKILL,
    signal.SIGTERM: EXIT_CODE,
    signal.SIGINT: -signal.SIGINT,
}


@final
@dataclass(slots=True)
class Stops:
    """Ends of programs that were told to stop, or killed, until they had trained all steps.

    Attributes:
        sent: How often each signal was sent.
        num_runs: How many trainings were stopped, gone on with, and brought to their end.
        wrong_codes: Exit statuses that are not the documented ones, with the signal: must be none.
        num_wrong: How many trainings ended in other bits than an uninterrupted one: must be 0.
        differences: Where a training first was in another state than an uninterrupted one at that
            step, with what had stopped it: must be none.
    """

    sent: dict[str, int] = field(default_factory=dict)
    num_runs: int = 0
    wrong_codes: list[str] = field(default_factory=list)
    num_wrong: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether every end was as documented, and every training the same in every bit."""
        return not (self.wrong_codes or self.num_wrong or self.differences)

    def __str__(self) -> str:
        sent = ", ".join(f"{count} x {name}" for name, count in sorted(self.sent.items()))
        wrong = "; ".join(self.wrong_codes) or "none"
        different = "; ".join(self.differences) or "none"
        return (
            f"stopped by {sent}, calls that read failing now and then: {self.num_runs} trainings, "
            f"other bits at the end = {self.num_wrong}, other exit statuses: {wrong}, other states "
            f"behind a stop: {different}"
        )


def stop_at_random(num_signals: int, seed: int = 2) -> Stops:
    """Stop trainings by signals of all kinds at random times, and go on, until all have ended."""
    rng, stops = Random(seed), Stops()
    with tempfile.TemporaryDirectory() as whole:
        options = ["--stoppable", "--steps", str(NUM_STEPS), "--size", str(SIZE)]
        command = program(whole, *options, "--keep-all")
        subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=True)
        while sum(stops.sent.values()) < num_signals:
            with tempfile.TemporaryDirectory() as directory:
                _stop_until_done(directory, whole, options, num_signals, rng, stops)
    return stops


def _stop_until_done(
    directory: str, whole: str, options: list[str], num_signals: int, rng: Random, stops: Stops
) -> None:
    is_done = is_different = False
    found: list[str] = []
    while not is_done:
        may_stop = sum(stops.sent.values()) < num_signals
        number = rng.choice([*CODES]) if may_stop else None
        faults = ["--faults", str(rng.randrange(10**6))]
        is_done = _run_until_stopped(directory, [*options, *faults], number, rng, stops)
        step, found = differences(directory, whole)
        if is_done and step != NUM_STEPS:
            found.append(f"the newest step is {step}")
        if found and not is_different:
            is_different = True
            cause = "the end" if is_done or number is None else number.name
            stops.differences.append(f"step {step} behind {cause}: {', '.join(found)}")
    stops.num_runs += 1
    stops.num_wrong += bool(found)


def _run_until_stopped(
    directory: str, options: list[str], number: signal.Signals | None, rng: Random, stops: Stops
) -> bool:
    """Run a training and send it a signal; return whether it came to its end."""
    with subprocess.Popen(
        program(directory, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if number is not None:
            sleep(rng.random() * MAX_DELAY_S)
            process.send_signal(number)
        output, errors = process.communicate(timeout=LIMIT_S)
    if process.returncode == 0 and DONE in output.splitlines():
        return True
    if number is None:
        raise RuntimeError(f"A training ended with {process.returncode}: {errors}")
    stops.sent[number.name] = stops.sent.get(number.name, 0) + 1
    if process.returncode != CODES[number]:
        last = errors.strip().splitlines()[-1:]
        stops.wrong_codes.append(f"{number.name} gave {process.returncode} {last}")
    return False


def differences(
    directory: str | os.PathLike[str], whole: str | os.PathLike[str]
) -> tuple[int | None, list[str]]:
    """Compare the newest step of a folder, bit by bit, with the same step of another one.

    Returns:
        The step, None if there is none; and each entry that is another one, with both values.
    """
    return asyncio.run(_differences(ar.CheckpointManager(directory), ar.CheckpointManager(whole)))


async def _differences(
    ours: ar.CheckpointManager, whole: ar.CheckpointManager
) -> tuple[int | None, list[str]]:
    step = ours.latest()
    if step is None:
        return None, []
    keys, expected = ({each.key for each in m.describe(step).entries} for m in (ours, whole))
    found = [f"{key} is in one of them only" for key in sorted(keys ^ expected)]
    for key in sorted(keys & expected):
        one, other = await ours.read(step, key), await whole.read(step, key)
        if _bits(one) != _bits(other):
            found.append(f"{key} is {reprlib.repr(one)} and not {reprlib.repr(other)}")
    return step, found


def _bits(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return repr(value)
