"""Tells programs that save to stop, in every way: `python -m tests.checkpoint.signals`.

Each program trains and is sent signals after a random number of steps. Some have a save that waits
until all were sent. Whatever comes when, the program saves what it promises, the step is whole, and
the exit status is the documented one. Prints a line for each way, and the seed of what goes wrong;
`--seed S --repeat 1` does the same again.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.checkpoint import EXIT_CODE

LIMIT_S = 120
INT, TERM = signal.SIGINT, signal.SIGTERM


@dataclass(frozen=True)
class Way:
    """One way to tell a program to stop.

    Attributes:
        saving: How the program saves: a function of this module.
        signals: What it is sent.
        is_held: Whether its first save waits until all were sent.
        code: The exit status.
        must_save: Whether a step has to be there.
    """

    saving: str
    signals: tuple[signal.Signals, ...]
    is_held: bool
    code: int
    must_save: bool = True

    def __str__(self) -> str:
        names = " then ".join(each.name for each in self.signals)
        return f"{self.saving}, {names}{' while it saves' if self.is_held else ''}"


WAYS = (
    Way("on_cancel", (INT,), False, -INT),
    Way("on_cancel", (TERM,), False, EXIT_CODE),
    Way("on_cancel", (INT,), True, -INT),
    Way("on_cancel", (TERM, INT), True, -INT),
    Way("on_cancel", (INT, TERM), True, -INT),
    Way("on_cancel", (INT, INT), True, -INT, must_save=False),  # the second one gives the save up
    Way("in_finally", (INT,), False, -INT),
    Way("in_finally", (INT,), True, -INT),
    Way("behind", (INT,), False, -INT),
    Way("behind", (INT,), True, -INT),
)


# ---- the program -------------------------------------------------------------------------


def say(line: str) -> None:
    """Write a line in one go: two threads do."""
    os.write(1, f"{line}\n".encode())


def wait_for_parent() -> None:
    say("saving")
    sys.stdin.readline()


class FirstSync:
    """The functions of `os` for a storage, whose first sync begins with something else."""

    def __init__(self, first: Callable[[], None]) -> None:
        self._first: Callable[[], None] | None = first
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, fd: int) -> None:
        with self._lock:
            first, self._first = self._first, None
        if first is not None:
            first()
        os.fsync(fd)


class Training:
    """Two variables that are written one after the other in each step, an op between them."""

    def __init__(self, manager: ar.CheckpointManager, strategy: ar.Strategy) -> None:
        self.manager = manager
        self._strategy = strategy
        with strategy.scope():
            self.a, self.b = (ar.Variable(0.0, aggregation="mean") for _ in range(2))
        self.state = {"a": self.a, "b": self.b, "large": ar.Variable(np.ones(100_000))}

    def number(self) -> int:
        return int(self.a.value)

    async def step(self) -> None:
        await self.a.assign_add(1.0)
        context = ar.get_replica_context()
        assert context is not None
        await context.run_on_device(np.ones(200_000).sum)
        await self.b.assign_add(1.0)

    async def steps(self) -> AsyncIterator[None]:
        say("started")
        while True:
            await self._strategy.run(self.step)
            say("step")
            yield

    async def on_cancel(self) -> None:
        async def train() -> None:
            async for _ in self.steps():
                pass

        await self.manager.save_on_cancel(train(), self.state, self.number, exit_on_sigterm=True)

    async def in_finally(self) -> None:
        try:
            async for _ in self.steps():
                pass
        finally:
            await self.manager.save(self.number(), self.state)

    async def behind(self) -> None:
        async for _ in self.steps():
            await self.manager.save(self.number(), self.state, wait=False)
            say(f"begun {self.number()}")


async def train(directory: str, saving: str, *, is_held: bool) -> None:
    calls: Any = FirstSync(wait_for_parent) if is_held else os
    storage = ar.checkpoint.LocalStorage(directory, calls=calls)
    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        ar.CheckpointManager(storage) as manager,
    ):
        await getattr(Training(manager, strategy), saving)()


# ---- who sends signals -------------------------------------------------------------------


def tell_to_stop(way: Way, directory: str, rng: Random) -> str:
    """Start a program and send it signals; return what is wrong, "" if nothing."""
    command = [sys.executable, "-W", "error", "-m", __spec__.name, "--train", directory]
    command += [way.saving, *(["--held"] if way.is_held else [])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        read = process.stdout.readline
        if not (way.is_held and way.saving == "behind"):  # which goes on once it has saved
            lines += [read() for _ in range(rng.randrange(40))]
            process.send_signal(way.signals[0])
        if way.is_held:
            while lines[-1] not in ("saving\n", ""):
                lines.append(read())
            for each in way.signals[0 if way.saving == "behind" else 1 :]:
                process.send_signal(each)
        output, errors = process.communicate("go\n")
    lines += output.splitlines(keepends=True)
    if process.returncode != way.code:
        return f"exit status {process.returncode}, not {way.code}:\n{errors}"
    begun = [int(line.split()[1]) for line in lines if line.startswith("begun")]
    return asyncio.run(what_is_wrong(way, directory, max(begun, default=0)))


async def what_is_wrong(way: Way, directory: str, begun: int) -> str:
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        manager = ar.CheckpointManager(directory)
        training = Training(manager, strategy)
        steps = manager.steps()
        if not steps:
            is_early = way.saving == "behind" and not begun  # no save had begun
            return "nothing was saved" if way.must_save and not is_early else ""
        for step in steps:
            await manager.verify(step)
        step = await manager.restore(training.state)
        a, b = float(training.a.value), float(training.b.value)
    if step != a or step < begun:
        return f"step {step} holds step {a:g}; that of {begun} had begun"
    if not (a - 1 <= b <= a) or (way.saving == "on_cancel" and a != b):
        return f"step {step} is a part of one: {a:g} and {b:g}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog=f"python -m {__spec__.name}")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=2, metavar=("DIRECTORY", "SAVING"), help=argparse.SUPPRESS)
    parser.add_argument("--held", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # if it does not end
        signal.signal(INT, signal.default_int_handler)  # a shell may have turned it off
        asyncio.run(train(*given.train, is_held=given.held))
        return
    num_wrong = 0
    for way in WAYS:
        found = []
        for seed in range(given.seed, given.seed + given.repeat):
            with tempfile.TemporaryDirectory() as directory:
                wrong = tell_to_stop(way, directory, Random(seed))
            if wrong:
                found.append(wrong)
                print(f"seed {seed}, {way}: {wrong}", flush=True)
        num_wrong += len(found)
        print(f"{way}: {given.repeat - len(found)} of {given.repeat} as documented", flush=True)
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
